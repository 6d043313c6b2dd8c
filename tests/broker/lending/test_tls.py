"""Lending between brokers that serve TLS: with real certificates, right and wrong, required and not."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.broker.lending.running import NOBODY, Lending, in_memory_lending, links, running_lending
from tests.broker.running import Client, in_memory
from tests.broker.test_transport import Certificates

TLS_REQUIRED: dict[str, Any] = {"tls_required": True, "plain_http": True}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Of an authority that the first one does not know."""
    return Certificates(tmp_path_factory.mktemp("others"))


def trusting(certificates: Certificates, **options: Any) -> dict[str, Any]:
    return {**certificates.options, "tls_root_ca_file": certificates.ca, **options}


def pair(stack: ExitStack, here: dict[str, Any], there: dict[str, Any]) -> Lending:
    """Two brokers in memory with different options."""
    brokers: list[Any] = []
    for number, options in enumerate((here, there)):
        given = {"name": f"broker-{number}", "tcp_port": 5000 + 2 * number, "controller": NOBODY, **options}
        brokers.append(stack.enter_context(in_memory(brokers[0] if brokers else None, **given)))
    return Lending(brokers, 10, 10, "when_waiting")


def problem(lending: Lending, number: int = 0) -> str:
    """Why a broker cannot ask the other one."""
    here, other = lending.brokers[number], f"broker-{1 - number}"
    here.wait_until(lambda it: links(it)._links[other]._problem)
    assert not links(here.broker)._links[other].greeted
    return str(links(here.broker)._links[other]._problem)


def test_tokens_travel_by_tls_on_real_sockets(certificates: Certificates) -> None:
    with running_lending(2, r=10, b=10, **trusting(certificates)) as lending:
        here, there = lending.brokers
        assert links(here.broker)._links["broker-1"].pipe.secured
        assert links(there.broker).visitors["broker-0"].pipe.secured
        with Client(here.address) as client:
            client.publish("t", *[b"x"] * 14)
        books = here.broker.topics["t"].gate.books
        assert books is not None
        here.wait_until(lambda _: books.total.borrowed_ptok > 0)
        assert lending.lent(there).lent_ntok > 0


def test_brokers_that_require_tls_and_certificates_lend(certificates: Certificates) -> None:
    options = trusting(certificates, **TLS_REQUIRED, tls_client_auth_policy="require-verify")
    with in_memory_lending(**options) as lending:
        assert all(links(each.broker).visitors for each in lending.brokers)


def test_plain_lending_is_refused_by_a_broker_that_requires_tls(
    certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as stack, caplog.at_level(logging.WARNING):
        lending = pair(stack, {}, trusting(certificates, **TLS_REQUIRED))
        text = "this broker requires TLS: start the other one with --tls-cert and --tls-key, too"
        assert text in problem(lending)
        assert any(text in record.getMessage() and "refused" in record.getMessage() for record in caplog.records)
        assert links(lending.brokers[1].broker).visitors == {}


def test_a_broker_without_a_certificate_cannot_be_asked_by_tls(certificates: Certificates) -> None:
    with ExitStack() as stack:
        lending = pair(stack, trusting(certificates), {})
        assert "this broker has no certificate: start it with --tls-cert and --tls-key, too" in problem(lending)


def test_a_plain_broker_may_ask_one_that_does_not_require_tls(certificates: Certificates) -> None:
    with ExitStack() as stack:
        lending = pair(stack, {}, trusting(certificates))
        here, _ = lending.brokers
        here.wait_until(lambda it: links(it)._links["broker-1"].greeted)
        assert not links(here.broker)._links["broker-1"].pipe.secured


def test_a_certificate_of_another_authority_is_not_trusted(certificates: Certificates, others: Certificates) -> None:
    with ExitStack() as stack:
        lending = pair(stack, trusting(certificates), trusting(others))
        found = problem(lending)
        assert "certificate verify failed" in found
        assert "must name 127.0.0.1, and --tls-root-ca-file must vouch for it" in found
        assert links(lending.brokers[1].broker).visitors == {}


def test_a_certificate_for_another_host_is_not_trusted(certificates: Certificates, tmp_path: Path) -> None:
    elsewhere = certificates.issued("elsewhere.example.org", tmp_path)
    with ExitStack() as stack:
        lending = pair(stack, trusting(certificates), {**elsewhere, "tls_root_ca_file": certificates.ca})
        assert "IP address mismatch" in problem(lending)


def test_a_broker_whose_certificate_others_do_not_accept_is_not_heard(
    certificates: Certificates, others: Certificates
) -> None:
    with ExitStack() as stack:
        stranger = {**others.options, "tls_root_ca_file": certificates.ca}
        strict = trusting(certificates, **TLS_REQUIRED, tls_client_auth_policy="require-verify")
        lending = pair(stack, stranger, strict)
        assert problem(lending)
        assert links(lending.brokers[1].broker).visitors == {}
