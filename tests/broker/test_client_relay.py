"""ClientRelay by itself: requests and outcomes of proxies, with a clock of the test's."""

import pytest

from popmq.broker.operations.client_relay import (
    ABSENT_MS,
    ClientRelay,
    ClientRequest,
    Outcome,
)
from popmq.common.errors import TooManyRequests

WAIT_MS = 1_000


class Owner:
    def __init__(self) -> None:
        self.relay = ClientRelay()
        self.now_ms = 1_000
        self.requests: dict[str, list[ClientRequest]] = {}  # of ended waits, by proxy
        self.outcomes: list[bytes | None] = []
        self._number = 0

    def wait(self, proxy: str, *outcomes: Outcome, wait_ms: int = WAIT_MS) -> int:
        self._number += 1
        self.relay.wait(
            self._number,
            proxy,
            outcomes,
            wait_ms=wait_ms,
            now_ms=self.now_ms,
            answer=lambda requests: self.requests.setdefault(proxy, []).extend(requests),
        )
        self.relay.check_invariants()
        return self._number

    def ask(self, client_id: str = "c", request: bytes = b"x") -> int:
        self._number += 1
        self.relay.ask(
            self._number,
            client_id,
            request,
            deadline_ms=self.now_ms + 2_000,
            on_outcome=self.outcomes.append,
        )
        self.relay.check_invariants()
        return self._number

    def pass_ms(self, ms: int) -> None:
        self.now_ms += ms
        self.relay.step(self.now_ms)
        self.relay.check_invariants()


def test_every_proxy_is_offered_a_request_and_the_first_answer_ends_it() -> None:
    owner = Owner()
    owner.wait("p1")
    owner.wait("p2")
    owner.ask()
    ((first,), (second,)) = owner.requests["p1"], owner.requests["p2"]
    assert first == second == ClientRequest(first.number, "c", b"x")
    owner.wait("p1", Outcome(first.number, None))
    assert owner.outcomes == []
    owner.wait("p2", Outcome(first.number, b"yes"), wait_ms=0)
    assert owner.outcomes == [b"yes"]
    owner.wait("p1", Outcome(first.number, b"again"))  # nobody waits for it any more
    assert owner.outcomes == [b"yes"]


def test_a_client_is_absent_once_every_proxy_says_so() -> None:
    owner = Owner()
    owner.wait("p1")
    owner.wait("p2")
    owner.ask()
    number = owner.requests["p1"][0].number
    owner.wait("p1", Outcome(number, None))
    owner.wait("p2", Outcome(number, None))
    assert owner.outcomes == [None]


def test_a_proxy_that_asks_later_is_offered_what_is_open() -> None:
    owner = Owner()
    owner.ask()
    owner.pass_ms(1_000)
    assert owner.outcomes == []  # a new owner knows no proxy yet
    owner.wait("late")
    ((request,),) = owner.requests.values()
    owner.wait("late", Outcome(request.number, b"yes"))
    assert owner.outcomes == [b"yes"]


def test_a_request_ends_at_its_deadline_and_when_its_last_proxy_is_gone() -> None:
    owner = Owner()
    owner.ask()
    owner.pass_ms(2_000)
    assert owner.outcomes == [None]
    owner.wait("p1", wait_ms=0)
    owner.pass_ms(ABSENT_MS - 500)
    owner.ask()
    owner.pass_ms(501)
    assert owner.outcomes == [None, None]


def test_a_wait_ends_at_its_time_and_when_the_same_proxy_waits_anew() -> None:
    owner = Owner()
    owner.wait("p1")
    owner.wait("p1")
    assert owner.requests == {"p1": []}
    owner.pass_ms(WAIT_MS)
    owner.wait("p1")
    cancelled = owner.wait("p2")
    owner.relay.cancel_wait(cancelled)
    owner.ask()
    assert [name for name, requests in owner.requests.items() if requests] == ["p1"]


def test_what_its_asker_cancels_is_not_offered_any_more() -> None:
    owner = Owner()
    asker = owner.ask()
    owner.relay.cancel_ask(asker)
    owner.relay.check_invariants()
    owner.wait("p1")
    owner.pass_ms(WAIT_MS)
    assert (owner.requests, owner.outcomes) == ({"p1": []}, [])


def test_a_broker_that_stops_answers_everybody() -> None:
    owner = Owner()
    owner.wait("p1")
    owner.relay.dismiss()
    owner.ask()
    owner.relay.dismiss()
    owner.relay.check_invariants()
    assert (owner.requests, owner.outcomes) == ({"p1": []}, [None])


def test_requests_are_bounded_in_number_and_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("popmq.broker.operations.client_relay.OPEN_LIMIT", 2)
    monkeypatch.setattr("popmq.broker.operations.client_relay.OPEN_BYTES_LIMIT", 10)
    owner = Owner()
    owner.ask(request=bytes(8))
    with pytest.raises(TooManyRequests, match="1 requests of 8 bytes wait for clients"):
        owner.ask(request=bytes(3))
    owner.ask(request=bytes(2))
    with pytest.raises(TooManyRequests, match="2 of 10 may"):
        owner.ask(request=b"")
