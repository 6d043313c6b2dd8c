from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from srtm.errors import TraceError
from srtm.pipeline.importing.foreign import find

if TYPE_CHECKING:
    from pathlib import Path


def test_files_of_this_machine_may_be_named_by_uri(tmp_path: Path) -> None:
    file = tmp_path / "a log.csv"
    file.write_text("topic\n")
    assert find([file.as_uri()]) == find([file]) == find([f"{tmp_path.as_uri()}/a*.csv"]) == {file: "csv"}
    assert find([tmp_path.as_uri()]) == {file: "csv"}


def test_other_uris_are_refused_with_a_remedy() -> None:
    with pytest.raises(
        TraceError, match=r"cannot import s3:.*log\.csv, which is not.*: copy it here, or pass a DataFrame"
    ):
        find(["s3://bucket/log.csv"])
