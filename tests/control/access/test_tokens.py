"""Tokens: made, found by their secret alone, revoked, expired; and never kept in a form that lets anybody in."""

from __future__ import annotations

from pathlib import Path

import pytest

from srtm.control.access.access import Access, secret_in
from srtm.control.access.rules import rule_of
from srtm.control.access.sessions import MAX_SESSIONS, SESSION_NS, Sessions, cookie
from srtm.control.access.token import Role, Token
from srtm.control.access.tokens import Tokens
from srtm.control.keeping.sqlite import SqliteKeeper
from srtm.control.options import ControllerOptions
from srtm.control.store import Store
from srtm.errors import InputError
from srtm.units import NS_PER_S

NOW_NS = 1_800_000_000 * NS_PER_S


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def made(tokens: Tokens, name: str = "root", role: Role = Role.ADMIN, lasts_ns: int | None = None) -> tuple[Token, str]:
    return tokens.create(name, role, NOW_NS, lasts_ns)


def test_a_secret_finds_its_token_also_after_a_restart(tmp_path: Path) -> None:
    first = Store(tmp_path)
    token, secret = made(Tokens(first))
    first.close()
    again = Tokens(Store(tmp_path))
    assert again.find(secret, NOW_NS) == token
    assert (token.name, token.role, token.expires_ns) == ("root", Role.ADMIN, None)


def test_the_store_cannot_let_anybody_in(store: Store, tmp_path: Path) -> None:
    token, secret = made(Tokens(store))
    store.close()
    kept = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert token.id.encode() in kept
    assert secret.encode() not in kept
    assert secret.rpartition("_")[2].encode() not in kept


@pytest.mark.parametrize("change", [lambda s: s[:-1], lambda s: s[:-1] + ("A" if s[-1] != "A" else "B"), str.upper])
def test_a_secret_that_is_almost_right_finds_nothing(store: Store, change: object) -> None:
    tokens = Tokens(store)
    _, secret = made(tokens)
    assert tokens.find(change(secret), NOW_NS) is None  # type: ignore[operator]
    assert tokens.find("", NOW_NS) is None
    assert tokens.find("srtm_" + "0" * 16 + "_" + "A" * 43, NOW_NS) is None


def test_a_name_that_is_made_again_is_another_token(store: Store) -> None:
    tokens = Tokens(store)
    made(tokens)
    old, old_secret = made(tokens, "ops", Role.OPERATOR)
    tokens.remove("ops")
    new, new_secret = made(tokens, "ops", Role.VIEWER)
    assert (old.name, old.id == new.id) == (new.name, False)
    assert tokens.find(old_secret, NOW_NS) is None
    assert tokens.find(new_secret, NOW_NS) == new


def test_a_token_expires(store: Store) -> None:
    tokens = Tokens(store)
    token, secret = made(tokens, lasts_ns=30 * NS_PER_S)
    assert tokens.find(secret, NOW_NS + 30 * NS_PER_S - 1) == token
    assert tokens.find(secret, NOW_NS + 30 * NS_PER_S) is None
    assert Access(ControllerOptions(), store).closed  # an expired token opens nothing


@pytest.mark.parametrize(
    ("name", "role", "words"),
    [
        ("", Role.ADMIN, "invalid token name"),
        ("a b", Role.ADMIN, "invalid token name"),
        ("a#b", Role.ADMIN, "invalid token name"),
        ("a*", Role.ADMIN, "invalid token name"),
        ("x" * 65, Role.ADMIN, "invalid token name"),
        ("ops", Role.OPERATOR, "first token must have the role admin"),
        ("broker-*", Role.BROKER, "first token must have the role admin"),
    ],
)
def test_what_no_token_can_be(store: Store, name: str, role: Role, words: str) -> None:
    with pytest.raises(InputError, match=words):
        made(Tokens(store), name, role)


def test_nobody_locks_themselves_out(store: Store) -> None:
    tokens = Tokens(store)
    made(tokens)
    made(tokens, "ops", Role.OPERATOR)
    with pytest.raises(InputError, match="exists; remove it first"):
        made(tokens, "ops", Role.OPERATOR)
    with pytest.raises(InputError, match="the last one of an admin"):
        tokens.remove("root")
    with pytest.raises(InputError, match="unknown token 'nobody'"):
        tokens.remove("nobody")
    tokens.remove("ops")
    tokens.remove("root")
    assert tokens.all() == []
    assert not Access(ControllerOptions(), store).closed


def test_tokens_need_a_store_that_lasts() -> None:
    """Otherwise a controller that crashes would come back open to everyone."""
    with pytest.raises(InputError, match="start it with --data-path"):
        made(Tokens(Store()))


def test_a_store_that_is_set_aside_leaves_its_tokens(tmp_path: Path) -> None:
    first = Store(tmp_path)
    token, secret = made(Tokens(first))
    first.close()
    keeper = SqliteKeeper(tmp_path, anew=True)
    again = Store(keeper=keeper)
    assert keeper.aside is not None
    assert Tokens(again).find(secret, NOW_NS) == token


def test_a_damaged_store_does_not_open_the_controller(tmp_path: Path) -> None:
    first = Store(tmp_path)
    made(Tokens(first))
    first.close()
    (tmp_path / "controller.sqlite").write_bytes(b"\0" * 4096)
    again = Store(keeper=SqliteKeeper(tmp_path, anew=True))
    assert Tokens(again).all() == []
    access = Access(ControllerOptions(), again)
    assert (access.closed, access.anonymous.role) == (True, None)
    spare = Access(ControllerOptions(token="s3cret"), again)
    found = spare.known("s3cret", NOW_NS)
    assert found is not None
    assert (found.role, spare.anonymous.role) == (Role.ADMIN, None)


@pytest.mark.parametrize(
    ("name", "broker", "covers"),
    [("b-1", "b-1", True), ("b-1", "b-11", False), ("b-*", "b-1", True), ("b-*", "c-1", False), ("b-1", "b-*", False)],
)
def test_a_broker_token_is_of_brokers_by_name(name: str, broker: str, covers: bool) -> None:
    token = Token(name, "1", Role.BROKER, b"", NOW_NS, None)
    assert token.covers(broker) is covers
    assert not Token(name, "1", Role.ADMIN, b"", NOW_NS, None).covers(broker)


@pytest.mark.parametrize(
    ("options", "role", "closed"),
    [
        ({}, Role.ADMIN, False),
        ({"token": "s3cret"}, Role.VIEWER, False),
        ({"auth_required": True, "token": "s3cret"}, None, True),
    ],
)
def test_what_a_request_without_a_credential_may(
    store: Store, options: object, role: Role | None, closed: bool
) -> None:
    access = Access(ControllerOptions(**options), store)  # type: ignore[arg-type]
    assert (access.anonymous.role, access.closed) == (role, closed)
    if "token" in options:  # type: ignore[operator]
        made(access.tokens)
        assert (access.anonymous.role, access.closed) == (None, True)


@pytest.mark.parametrize(
    ("header", "secret"),
    [
        ("Bearer abc", "abc"),
        ("bearer abc", "abc"),
        ("Basic YW55OmFiYw==", "abc"),
        ("Basic nonsense!", ""),
        ("Basic //8=", ""),
        ("Digest abc", ""),
        ("abc", ""),
    ],
)
def test_the_secret_in_a_header(header: str, secret: str) -> None:
    assert secret_in(header) == secret


def test_a_session_ends_with_time_its_token_and_its_person(store: Store) -> None:
    access = Access(ControllerOptions(), store)
    made(access.tokens)
    _, secret = made(access.tokens, "ops", Role.OPERATOR)
    begun = access.log_in(secret, NOW_NS)
    assert begun is not None
    value = begun[1]

    def role(at_ns: int = NOW_NS) -> Role | None:
        return access.identify("", value, at_ns).role

    assert role() is Role.OPERATOR
    assert access.identify("", value, NOW_NS).by_cookie
    assert role(NOW_NS + SESSION_NS) is None
    access.tokens.remove("ops")
    assert role() is None
    again, _ = made(access.tokens, "ops", Role.OPERATOR)  # of the same name
    assert role() is None
    other = access.sessions.begin(again.id, NOW_NS)
    access.sessions.end(other)
    assert access.identify("", other, NOW_NS).role is None


def test_a_broker_does_not_log_in(store: Store) -> None:
    access = Access(ControllerOptions(), store)
    made(access.tokens)
    _, secret = made(access.tokens, "b", Role.BROKER)
    assert access.log_in(secret, NOW_NS) is None
    assert access.log_in("wrong", NOW_NS) is None


def test_sessions_are_bounded() -> None:
    sessions = Sessions()
    first = sessions.begin("1", 0)
    for _ in range(MAX_SESSIONS):
        sessions.begin("1", 0)
    assert sessions.find(first, 0) is None


def test_the_cookie_is_for_no_script_and_no_other_site() -> None:
    assert cookie("v", secure=True) == ("srtm_session=v; Path=/; Max-Age=43200; HttpOnly; SameSite=Strict; Secure")
    assert "Secure" not in cookie("v", secure=False)
    assert "Max-Age=0" in cookie("", secure=True)


def test_the_token_of_all_brokers_asks_discovery_and_nothing_else() -> None:
    access = Access(ControllerOptions(broker_token="br0kers", auth_required=True), Store())
    found = access.known("br0kers", NOW_NS)
    assert found is not None
    assert (found.role, found.may(rule_of("GET", "/channels")), found.may(rule_of("GET", "/v1/topics"))) == (
        Role.BROKER,
        True,
        False,
    )
    assert access.log_in("br0kers", NOW_NS) is None
