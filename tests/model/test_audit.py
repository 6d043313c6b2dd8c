"""The audit of lending: honest brokers are never accused, however reports are lost or late; liars are found."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from srtm.model.audit import Audit, Book, Party, slack_ntok
from srtm.model.bucket import TokenBucket
from srtm.units import NANO_PER_TOKEN, NS_PER_S

TOKEN = NANO_PER_TOKEN
A, B, C = Party("a", 1), Party("b", 1), Party("c", 1)
WHOLE = TokenBucket.of(100, 30)
SHARE = TokenBucket.of(50, 15)


def book(lent: dict[Party, int] | None = None, borrowed: dict[Party, int] | None = None, spent: int = 0) -> Book:
    return Book(
        {party: tokens * TOKEN for party, tokens in (lent or {}).items()},
        {party: tokens * TOKEN for party, tokens in (borrowed or {}).items()},
        spent,
    )


def test_a_claim_is_compared_only_with_a_report_of_a_later_instant() -> None:
    audit = Audit()
    audit.hear(B, book(), asked=1, newest=2)
    audit.hear(A, book(borrowed={B: 5}), asked=2, newest=3)
    audit.hear(B, book(), asked=3, newest=4)  # asked for before A's report was heard
    assert audit.accused == {}
    audit.hear(B, book(lent={A: 5}), asked=4, newest=5)
    assert audit.accused == {}


def test_tokens_that_were_not_sent_are_found_with_both_figures() -> None:
    audit = Audit()
    audit.hear(A, book(borrowed={B: 40}), asked=1, newest=1)
    audit.hear(B, book(lent={A: 10}), asked=2, newest=2)
    assert audit.accused == {"a": "a says it borrowed 40.0 tokens from b, which says it lent 10.0"}


def test_a_lender_that_several_borrowers_contradict_is_the_liar() -> None:
    audit = Audit()
    audit.hear(A, book(borrowed={B: 5}), 1, 1)
    audit.hear(C, book(borrowed={B: 7}), 1, 1)
    audit.hear(B, book(), 2, 2)
    assert list(audit.accused) == ["b"]
    assert "a says it borrowed 5.0" in audit.accused["b"]
    assert "c says it borrowed 7.0" in audit.accused["b"]


def test_a_process_that_was_started_again_begins_anew() -> None:
    audit = Audit()
    audit.hear(A, book(borrowed={B: 40}), 1, 1)
    audit.hear(B, book(), 2, 2)
    assert audit.accused
    again = Party("b", 2)
    audit.restarted(again)
    audit.hear(again, book(), 3, 3)
    assert audit.accused == {}
    audit.hear(A, book(borrowed={B: 41, again: 1}), 4, 4)
    audit.hear(again, book(lent={A: 1}), 5, 5)
    assert audit.accused == {}
    audit.hear(A, book(borrowed={B: 41, again: 2}), 6, 6)
    audit.hear(again, book(lent={A: 1}), 7, 7)
    assert list(audit.accused) == ["a"]


def spending(audit: Audit, second: int, spent: int, **amounts: dict[Party, int]) -> None:
    audit.hear(A, book(spent=spent, **amounts), second + 1, second + 1)
    audit.check_spending(A, SHARE, WHOLE, 0, second * NS_PER_S)


def test_a_broker_that_spends_at_its_rate_for_an_hour_is_not_accused_and_one_at_twice_that_soon_is() -> None:
    honest, liar = Audit(), Audit()
    for second in range(3600):
        spending(honest, second, 15 + 50 * second)
    assert honest.accused == {}
    found = 0
    while not liar.accused:
        found += 1
        spending(liar, found, 100 * found)
    assert found * 50 * TOKEN <= slack_ntok(WHOLE) + SHARE.b_ntok + 50 * TOKEN
    assert liar.accused["a"].startswith("a spent and lent ")


def test_borrowed_tokens_may_be_spent_if_lenders_confirm_them() -> None:
    honest, liar = Audit(), Audit()
    for second in range(200):
        came = {B: 50 * second}
        honest.hear(B, book(lent={A: 50 * second}), second + 1, second + 1)
        spending(honest, second, 100 * second, borrowed=came)
        liar.hear(B, book(), second + 1, second)  # never late enough to be compared
        spending(liar, second, 100 * second, borrowed=came)
    assert honest.accused == {}
    assert "a" in liar.accused


def test_a_lender_that_does_not_debit_itself_is_found() -> None:
    audit = Audit()
    for second in range(60):
        spending(audit, second, 50 * second, lent={B: 40 * second})
    assert list(audit.accused) == ["a"]


def test_after_a_silence_the_account_begins_anew() -> None:
    audit = Audit()
    spending(audit, 0, 0)
    audit.lost_sight("a")
    spending(audit, 20, 10_000)
    spending(audit, 21, 10_050)
    assert audit.accused == {}


@given(st.data())
def test_honest_brokers_are_never_accused(data: st.DataObject) -> None:
    """Tokens move, reports are made, heard later or never, and brokers start again, in any order."""
    names = ["a", "b", "c"]
    numbers = dict.fromkeys(names, 1)
    lent: defaultdict[Party, defaultdict[Party, int]] = defaultdict(lambda: defaultdict(int))
    taken: defaultdict[Party, defaultdict[Party, int]] = defaultdict(lambda: defaultdict(int))
    on_the_way: list[tuple[Party, Party, int]] = []
    reports: list[tuple[int, Party, Book]] = []  # the exchange that each answers
    heard: dict[str, int] = {}
    audit, newest = Audit(), 0

    def party(name: str) -> Party:
        return Party(name, numbers[name])

    for _ in range(data.draw(st.integers(0, 60))):
        match data.draw(st.sampled_from(["lend", "take", "take", "ask", "hear", "hear", "restart"])):
            case "lend":
                lender, borrower = data.draw(st.permutations(names))[:2]
                lent[party(lender)][party(borrower)] += 1
                on_the_way.append((party(lender), party(borrower), 1))
            case "take" if on_the_way:
                lender_, borrower_, tokens = on_the_way.pop(data.draw(st.integers(0, len(on_the_way) - 1)))
                if party(borrower_.name) == borrower_:  # its successor expects nothing
                    taken[borrower_][lender_] += tokens
            case "ask":
                newest += 1
                who = party(data.draw(st.sampled_from(names)))
                reports.append((newest, who, book(dict(lent[who]), dict(taken[who]))))
            case "hear" if reports:
                asked, who, said = reports.pop(data.draw(st.integers(0, len(reports) - 1)))
                current = party(who.name) == who  # the controller ignores what a dead process said
                if current and asked > heard.get(who.name, 0):  # and what comes out of order
                    heard[who.name] = asked
                    audit.restarted(who)
                    audit.hear(who, said, asked, newest)
            case "restart":
                numbers[data.draw(st.sampled_from(names))] += 1
            case _:
                pass
        assert audit.accused == {}
