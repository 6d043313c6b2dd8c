from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from srtm.errors import TraceError
from srtm.workload.uris import absolute, files_of, footers_of, is_remote, only_spark_opens, parquet, partitions


def write(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"topic": ["t"]}), path)
    return path


@pytest.mark.parametrize("name", ["t.parquet", "a b.parquet", "50%25.parquet", "ü#?.parquet"])
@pytest.mark.parametrize("form", ["{path}", "{uri}", "{short}", "{host}"])
def test_a_file_has_many_names(form: str, name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "folder" / name)
    uri = path.as_uri()
    given = form.format(
        path=path, uri=uri, short=uri.replace("file:///", "file:/"), host=uri.replace("file://", "FILE://localhost")
    )
    assert absolute(given) == str(path)
    assert files_of(given) == [str(path)]
    assert files_of(given.rpartition("/")[0]) == [str(path)]
    assert not is_remote(given)
    assert [footer.num_rows for footer in footers_of(given).values()] == [1]
    with parquet(files_of(given)[0]) as file:
        assert file.read()["topic"].to_pylist() == ["t"]


def test_a_path_means_the_same_in_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "t.parquet")
    monkeypatch.chdir(tmp_path)
    assert absolute("t.parquet") == absolute(Path("t.parquet")) == str(path)
    assert files_of(".") == [str(path)]


def test_a_folder_has_the_files_below_it_but_none_of_a_writer(tmp_path: Path) -> None:
    mine = [write(tmp_path / name) for name in ("a/2.parquet", "a/10.parquet", "b.parquet", "_b.parquet")]
    for name in ("_temporary/0/t.parquet", ".sparkStaging/t.parquet", "a/.hidden/t.parquet"):
        write(tmp_path / name)
    (tmp_path / "_SUCCESS").touch()
    assert files_of(tmp_path) == sorted(map(str, mine), key=lambda path: path.split("/"))
    assert files_of(tmp_path / "_temporary") == [str(tmp_path / "_temporary/0/t.parquet")]


def test_folders_name_columns() -> None:
    assert partitions("/a/day=7/topic=a%2Fb%3D%25 ü/x=y.parquet") == {"day": "7", "topic": "a/b=% ü"}
    assert partitions("s3://b/topic=__HIVE_DEFAULT_PARTITION__/publisher=/t.parquet") == {
        "topic": None,
        "publisher": "",
    }
    assert partitions("/=x/t.parquet") == {}


def test_escapes_in_the_names_of_folders_may_be_escaped_or_not(tmp_path: Path) -> None:
    path = write(tmp_path / "topic=a%2Fb" / "t.parquet")
    assert files_of(path.as_uri()) == files_of(f"file://{path}") == [str(path)]


@pytest.mark.parametrize("name", ["_delta_log/1.checkpoint.parquet", "metadata/v1.metadata.json"])
def test_a_table_is_not_read_as_a_folder(name: str, tmp_path: Path) -> None:
    write(tmp_path / "data" / "part-0.parquet")
    write(tmp_path / name)
    with pytest.raises(TraceError, match=r"is an? (Iceberg|Delta) table.*pass the DataFrame"):
        files_of(tmp_path)
    assert len(files_of(tmp_path / "data")) == 1


@pytest.mark.parametrize(
    ("trace", "said"),
    [
        ("nowhere", "no trace at nowhere: check the path"),
        ("file:///nowhere", "no trace at file:///nowhere: check the URI"),
        ("file://elsewhere/t", "file://elsewhere/t names another host: write file:///path"),
        ("ftp://host/t", "cannot read ftp://host/t: unknown scheme 'ftp'; known schemes: file, s3, s3a, gs, hdfs"),
        ("s3://", "s3:// names no bucket: write s3://bucket/path"),
        ("viewfs://host/t", r"viewfs://host/t can only be read by Spark: pass spark.read.parquet\('viewfs://host/t'\)"),
    ],
)
def test_what_cannot_be_opened_is_one_line(trace: str, said: str) -> None:
    with pytest.raises(TraceError, match=said) as error:
        files_of(trace)
    assert "\n" not in str(error.value)


def test_a_file_without_permission_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet")
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read everything")
    with pytest.raises(TraceError, match=f"cannot read {path}: permission denied"):
        footers_of(path)


def test_a_server_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    said = "cannot read s3a://bucket/run: its server does not answer: check AWS_ENDPOINT_URL, AWS_REGION and the net"
    with pytest.raises(TraceError, match=said):
        files_of("s3a://bucket/run")


def test_schemes_of_hadoop_are_for_spark() -> None:
    assert only_spark_opens("viewfs://cluster/run")
    assert only_spark_opens("abfss://container@account/run")
    assert not any(map(only_spark_opens, ["run", "file:///run", "s3a://bucket/run", "gs://bucket/run", "ftp://x"]))
    assert [is_remote(trace) for trace in ("run", "file:/run", "s3://bucket", Path("s3://bucket"))] == [
        False,
        False,
        True,
        True,
    ]
