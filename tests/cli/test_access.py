"""`srtm token` and `srtm certs`, and where verbs take their token from."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from srtm.cli.app import run
from tests.control.running import controller


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.delenv("SRTM_TOKEN", raising=False)
    with controller(data_path=str(tmp_path / "store")) as served:
        yield f"http://127.0.0.1:{served.http}"


def said(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run([*arguments])
    out, err = capfd.readouterr()
    return code, out, err


def test_tokens_are_made_listed_and_revoked(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    at = ("--controller", url)
    code, root, err = said(capfd, "token", "create", "root", "--role", "admin", *at)
    assert (code, root.count("\n"), root[:5]) == (0, 1, "srtm_")
    assert "token root (admin), valid until revoked" in err
    assert root.strip() not in err

    assert said(capfd, "topic", "ls", *at)[0] == 1  # without a token, nothing works any more
    code, _, err = said(capfd, "topic", "ls", *at)
    assert "the token is missing" in err
    file = tmp_path / "root.token"
    file.write_text(root)
    assert said(capfd, "topic", "ls", *at, "--token-file", str(file))[0] == 0
    monkeypatch.setenv("SRTM_TOKEN", root.strip())
    assert said(capfd, "topic", "ls", *at)[0] == 0

    code, out, _ = said(capfd, "token", "create", "dash", "--role", "viewer", "--expires", "30d", *at, "--json")
    made = json.loads(out)
    assert (code, made["role"], made["expires_ms"] - made["created_ms"]) == (0, "viewer", 30 * 86_400_000)
    code, out, _ = said(capfd, "token", "ls", *at)
    assert code == 0
    assert all(word in out for word in ("root", "admin", "dash", "viewer", made["id"], "valid until revoked"))
    assert made["secret"] not in out
    monkeypatch.setenv("SRTM_TOKEN", made["secret"])
    assert said(capfd, "topic", "ls", *at)[0] == 0
    code, _, err = said(capfd, "topic", "rm", "t", *at)
    assert code == 1
    assert "token 'dash' has the role viewer; this takes a token that an operator has" in err
    for verb in (["top", "--once"], ["check"], ["debug", "bundle", "--out", str(tmp_path / "b.tar.gz")]):
        assert said(capfd, *verb, *at)[2].count("role viewer") == (verb[0] == "debug")  # its options are an operator's

    monkeypatch.setenv("SRTM_TOKEN", root.strip())
    assert said(capfd, "token", "rm", "dash", *at)[1] == "token dash: revoked\n"
    monkeypatch.setenv("SRTM_TOKEN", made["secret"])
    assert "wrong, expired or revoked" in said(capfd, "topic", "ls", *at)[2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("token", "create", "x", "--role", "king"), "unknown role 'king'; choose viewer, operator, admin, broker"),
        (("token", "create", "x", "--role", "admin", "--expires", "soon"), "'soon' is not a duration"),
        (("token", "create", "a b", "--role", "admin"), "invalid token name 'a b'"),
        (("token", "rm", "nobody"), "unknown token 'nobody'"),
        (("token", "ls", "--token-file", "/nowhere"), "cannot read a secret from /nowhere"),
        (("token", "ls", "--token", "secret"), "No such option: --token"),
    ],
)
def test_bad_usage_is_named(
    url: str, capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    code, _, err = said(capfd, *arguments, "--controller", url)
    assert code in (1, 2)
    assert words in " ".join(err.split())


@pytest.mark.parametrize("content", ["", "two words", "two\nlines\n", "\x00"])
def test_a_file_holds_one_secret(tmp_path: Path, capfd: pytest.CaptureFixture[str], content: str) -> None:
    file = tmp_path / "secret"
    file.write_text(content)
    code, _, err = said(capfd, "topic", "ls", "--token-file", str(file))
    assert (code, "must hold one secret on one line" in " ".join(err.split())) == (2, True)


def test_certificates_for_hosts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "certs"
    code, listed, _ = said(capfd, "certs", "init", "--out", str(out), "--host", "host-1", "--host", "10.0.0.7")
    assert code == 0
    assert sorted(listed.split()) == sorted(str(path) for path in out.iterdir())
    assert {path.name for path in out.iterdir()} == {
        f"{name}.{kind}" for name in ("ca", "host-1", "10.0.0.7") for kind in ("pem", "key")
    }
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in out.glob("*.key"))
    before = {path: path.read_bytes() for path in out.iterdir()}
    code, _, err = said(capfd, "certs", "init", "--out", str(out), "--host", "host-2")
    assert (code, "ca.pem exists; remove it first" in " ".join(err.split())) == (2, True)
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    assert json.loads(said(capfd, "certs", "issue", "host-2", "--out", str(out), "--json")[1])["files"] == [
        str(out / "host-2.pem"),
        str(out / "host-2.key"),
    ]


def test_certificates_of_a_local_cluster(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert said(capfd, "certs", "init", "--out", str(tmp_path / "c"))[0] == 0
    names = {path.stem for path in (tmp_path / "c").glob("*.pem")}
    assert names == {"ca", "controller", "broker-1", "broker-2", "broker-3"}
