"""Requests that outlive a change of masters: two scripted brokers, and time that the test turns."""

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from popmq.common.errors import (
    Code,
    DeadlineExceeded,
    NotMaster,
    PopmqError,
    Refused,
    TooManyRequests,
    Unavailable,
)
from popmq.common.protocol.messaging_payloads import (
    Kind,
    OnReply,
    PopRequest,
    decode_pop,
    encode_pop,
)
from popmq.common.wire.pull_pb2 import PullRequest
from popmq.proxy.brokers import master_port
from popmq.proxy.brokers.master_port import REPEATED, MasterPort
from popmq.testing.harness.clock import ManualClock

TIMEOUT_MS = 3_000
LOST = Unavailable("connection lost", unknown=True)
NOT_CONNECTED = Unavailable("not connected")


class ScriptedBroker:
    """A way that keeps what it was asked; the test answers."""

    def __init__(self) -> None:
        self.usable = True
        self.asked: list[tuple[Kind, bytes, int]] = []
        self.cancelled: list[int] = []
        self._replies: dict[int, OnReply] = {}
        self._numbers = count(1)

    def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: OnReply) -> int:
        number = next(self._numbers)
        self.asked.append((kind, body, timeout_ms))
        self._replies[number] = on_reply
        return number

    def cancel(self, request_id: int) -> None:
        self.cancelled.append(request_id)
        del self._replies[request_id]

    def answer(self, answer: bytes | PopmqError, number: int = 0) -> None:
        """Of the newest request, or of that one."""
        self._replies.pop(number or max(self._replies))(answer)


class Bench:
    """A MasterPort over node-a, with node-b beside it."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self._timers: list[tuple[int, int, Callable[[], None]]] = []
        self._numbers = count()
        self.a, self.b = ScriptedBroker(), ScriptedBroker()
        self.has_copies = self.owner_is_away = False
        self.port = MasterPort(
            "shop",
            self.clock,
            later=self._later,
            has_copies=lambda: self.has_copies,
            owner_is_away=lambda: self.owner_is_away,
        )
        self.port.use(self.a)
        self.answers: list[bytes | PopmqError] = []

    def _later(self, seconds: float, then: Callable[[], None]) -> None:
        due_ms = self.clock.boot_ms() + round(seconds * 1000)
        heapq.heappush(self._timers, (due_ms, next(self._numbers), then))

    def ask(self, kind: Kind = Kind.PUT, body: bytes = b"body") -> int:
        return self.port.request(kind, body, TIMEOUT_MS, self.answers.append)

    def run(self, ms: int) -> None:
        end_ms = self.clock.boot_ms() + ms
        while self._timers and self._timers[0][0] <= end_ms:
            due_ms, _, then = heapq.heappop(self._timers)
            self.clock.advance(due_ms - self.clock.boot_ms())
            then()
        self.clock.advance(end_ms - self.clock.boot_ms())


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_request_goes_to_the_master_and_its_answer_back(bench: Bench) -> None:
    bench.ask()
    assert bench.a.asked == [(Kind.PUT, b"body", TIMEOUT_MS)]
    bench.a.answer(b"stored")
    assert bench.answers == [b"stored"]


@pytest.mark.parametrize("kind", [Kind.PUT, Kind.POP, Kind.DELETE_TOPIC, Kind.RESET_OFFSET])
def test_a_request_that_was_refused_by_no_master_is_asked_of_the_next_one(
    bench: Bench, kind: Kind
) -> None:
    body = encode_pop(PopRequest("t", "g", "c", 1, 0, 2_000))
    bench.ask(kind, body)
    bench.a.answer(NotMaster("node-a is a slave"))
    bench.a.usable = False
    bench.run(400)
    bench.port.use(bench.b)
    ((asked, _, timeout_ms),) = bench.b.asked
    assert (asked, timeout_ms) == (kind, TIMEOUT_MS - 400)
    bench.b.answer(b"done")
    assert bench.answers == [b"done"]


def test_a_master_that_opens_is_asked_again_at_the_same_address(bench: Bench) -> None:
    bench.ask()
    bench.a.answer(NotMaster("opening"))
    bench.run(10)
    bench.a.answer(NotMaster("opening"))
    bench.run(20)
    bench.a.answer(b"stored")
    assert (bench.answers, len(bench.a.asked)) == ([b"stored"], 3)


def test_a_request_without_a_connection_waits_for_one(bench: Bench) -> None:
    bench.a.usable = False
    bench.ask(Kind.DELETE_TOPIC)
    bench.run(1_000)
    assert (bench.a.asked, bench.answers) == ([], [])
    bench.a.usable = True
    bench.run(100)
    assert len(bench.a.asked) == 1


def test_a_request_that_found_no_connection_at_the_first_attempt_is_asked_again(
    bench: Bench,
) -> None:
    bench.ask(Kind.DELETE_TOPIC)
    bench.a.answer(NOT_CONNECTED)
    bench.run(10)
    assert len(bench.a.asked) == 2


@pytest.mark.parametrize("kind", sorted(REPEATED))
def test_what_does_no_harm_twice_is_repeated_after_a_lost_connection(
    bench: Bench, kind: Kind
) -> None:
    pull = PullRequest(topic="t").SerializeToString()
    bench.ask(kind, pull if kind is Kind.PULL else encode_pop(PopRequest("t", "g", "c", 1, 0, 0)))
    bench.a.answer(LOST)
    bench.port.use(bench.b)
    bench.b.answer(b"done")
    assert bench.answers == [b"done"]


@pytest.mark.parametrize(
    "kind",
    sorted({kind for kind in Kind if Kind.PUT <= kind < Kind.REGISTER} - REPEATED),
)
def test_what_may_have_been_done_and_does_harm_twice_is_not_repeated(
    bench: Bench, kind: Kind
) -> None:
    bench.ask(kind)
    bench.a.answer(LOST)
    bench.port.use(bench.b)
    bench.run(TIMEOUT_MS)
    assert bench.b.asked == []
    (answer,) = bench.answers
    assert isinstance(answer, DeadlineExceeded)
    assert f"whether {kind.name} was done is unknown" in str(answer)


def test_what_waits_at_a_master_that_was_replaced_is_asked_of_the_next_one(bench: Bench) -> None:
    """A stopped process (SIGSTOP) breaks no connection."""
    number = bench.ask()
    bench.run(2_000)
    bench.port.use(bench.b)
    assert bench.a.cancelled == [1]
    bench.run(10)
    assert bench.b.asked == [(Kind.PUT, b"body", TIMEOUT_MS - 2_000)]
    bench.port.cancel(number)
    assert bench.b.cancelled == [1]


def test_a_receive_waits_at_the_next_master_only_for_the_rest_of_its_time(bench: Bench) -> None:
    bench.ask(Kind.POP, encode_pop(PopRequest("t", "g", "c", 1, 0, 2_500)))
    bench.run(2_000)
    bench.port.use(bench.b)
    bench.run(10)
    ((_, body, _),) = bench.b.asked
    assert decode_pop(body).poll_ms == 500


def test_a_pull_that_waited_elsewhere_waits_so_much_less(bench: Bench) -> None:
    bench.ask(Kind.PULL, PullRequest(topic="t", poll_ms=2_000).SerializeToString())
    bench.run(1_500)
    bench.a.answer(LOST)
    bench.port.use(bench.b)
    bench.run(10)
    ((_, body, _),) = bench.b.asked
    assert PullRequest.FromString(body).poll_ms == 500


@pytest.mark.parametrize(
    ("first", "wanted"),
    [
        (NotMaster("a slave"), Unavailable),
        (NOT_CONNECTED, Unavailable),
        (LOST, DeadlineExceeded),
    ],
    ids=["no master", "not connected", "lost"],
)
def test_without_a_master_in_time_the_client_is_told_whether_it_may_have_been_done(
    bench: Bench, first: PopmqError, wanted: type[PopmqError]
) -> None:
    bench.ask()
    bench.a.answer(first)
    bench.a.usable = False
    bench.run(TIMEOUT_MS)
    (answer,) = bench.answers
    assert type(answer) is wanted
    assert answer.code is not Code.NOT_MASTER  # no client knows that one
    bench.run(TIMEOUT_MS)
    assert len(bench.answers) == 1


def test_a_refusal_of_the_master_is_an_answer(bench: Bench) -> None:
    refusal = Refused(Code.HA_NOT_AVAILABLE, "1 of 2 in sync (replication.min_in_sync)")
    bench.ask()
    bench.a.answer(refusal)
    assert bench.answers == [refusal]


def test_a_request_that_was_cancelled_while_it_waited_is_asked_of_nobody(bench: Bench) -> None:
    number = bench.ask()
    bench.a.answer(NotMaster("a slave"))
    bench.port.cancel(number)
    bench.port.use(bench.b)
    bench.run(TIMEOUT_MS)
    assert (bench.b.asked, bench.answers, bench.port.waiting) == ([], [], 0)


def test_an_answer_of_the_master_before_is_passed_over(bench: Bench) -> None:
    bench.ask()
    late: Any = bench.a._replies[1]
    bench.port.use(bench.b)
    bench.run(10)
    late(b"from node-a")
    assert bench.answers == []
    bench.b.answer(b"from node-b")
    assert bench.answers == [b"from node-b"]


def test_only_so_many_requests_wait_for_a_master(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(master_port, "WAITING_LIMIT", 2)
    bench.a.usable = False
    for _ in range(3):
        bench.ask()
    (answer,) = bench.answers
    assert isinstance(answer, TooManyRequests)
    assert "2 requests (8 bytes) wait for a master of broker group shop" in str(answer)
    bench.a.usable = True
    bench.run(100)
    assert len(bench.a.asked) == 2
    assert bench.port.waiting == 0
    bench.a.usable = False
    bench.ask()
    assert len(bench.answers) == 1


def test_the_bytes_that_wait_are_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(master_port, "WAITING_BYTES_LIMIT", 7)
    bench.a.usable = False
    bench.ask()
    bench.ask()
    assert [type(answer) for answer in bench.answers] == [TooManyRequests]


def test_a_group_has_a_master_until_it_says_otherwise(bench: Bench) -> None:
    assert bench.port.has_master
    bench.ask()
    bench.a.answer(NotMaster("a slave"))
    assert not bench.port.has_master
    bench.run(10)
    bench.a.answer(b"stored")
    assert bench.port.has_master
    bench.a.usable = False
    assert not bench.port.has_master
    bench.port.use(bench.b)
    assert bench.port.has_master
    bench.port.use(None)
    assert not bench.port.has_master


def test_a_group_that_is_gone_refuses_what_waits(bench: Bench) -> None:
    bench.ask()
    bench.a.answer(NotMaster("a slave"))
    bench.ask()
    bench.port.close("broker group shop is gone")
    bench.ask()
    assert [str(answer)[:25] for answer in bench.answers] == ["broker group shop is gone"] * 3
    assert bench.a.cancelled == [2]


@pytest.mark.parametrize("kind", [Kind.PUT, Kind.SYNC_LITE])
def test_a_follower_that_does_not_know_a_topic_yet_is_asked_again_until_it_does(
    bench: Bench, kind: Kind
) -> None:
    bench.has_copies = True
    bench.port.request(kind, b"body", 10_000, bench.answers.append)
    for _ in range(3):
        bench.a.answer(Refused(Code.TOPIC_NOT_FOUND, "no such topic"))
        bench.run(100)
    bench.a.answer(b"stored")
    assert bench.answers == [b"stored"]


@pytest.mark.parametrize("kind", [Kind.PUT, Kind.POP, Kind.ACK, Kind.CHANGE])
def test_what_a_follower_has_not_copied_yet_is_waited_for_and_no_client_hears_of_it(
    bench: Bench, kind: Kind
) -> None:
    bench.has_copies = True
    for _ in range(2):
        bench.ask(kind, encode_pop(PopRequest("orders", "g", "c", 1, 0, 0)))
    for _ in range(2):
        bench.a.answer(Refused(Code.NOT_COPIED, "the old one is here"))
    bench.run(10)
    bench.a.answer(b"stored")
    while len(bench.answers) < 2:
        bench.a.answer(Refused(Code.NOT_COPIED, "the old one is here"))
        bench.run(100)
    stored, refused = bench.answers
    assert stored == b"stored"
    assert isinstance(refused, PopmqError)
    assert refused.code is Code.HA_NOT_AVAILABLE


@pytest.mark.parametrize(
    ("kind", "away", "code"),
    [
        (Kind.SYNC_LITE, False, Code.TOPIC_NOT_FOUND),
        (Kind.SYNC_LITE, True, Code.HA_NOT_AVAILABLE),
        (Kind.PUT, False, Code.HA_NOT_AVAILABLE),  # the owner has described it to the proxy
    ],
)
def test_a_topic_that_does_not_come_is_unknown_unless_its_owner_is_away_or_has_described_it(
    bench: Bench, kind: Kind, away: bool, code: Code
) -> None:
    bench.has_copies, bench.owner_is_away = True, away
    bench.port.request(kind, b"body", 10_000, bench.answers.append)
    while not bench.answers:
        bench.a.answer(Refused(Code.TOPIC_NOT_FOUND, "no such topic"))
        bench.run(100)
    (answer,) = bench.answers
    assert isinstance(answer, PopmqError)
    assert answer.code is code


@pytest.mark.parametrize("copies", [False, True], ids=["the owner", "dead letters"])
def test_what_cannot_come_by_copies_is_unknown_at_once(bench: Bench, copies: bool) -> None:
    bench.has_copies = copies
    topic = "%DLQ%g" if copies else "orders"
    bench.ask(Kind.POP, encode_pop(PopRequest(topic, "g", "c", 1, 0, 0)))
    bench.a.answer(Refused(Code.TOPIC_NOT_FOUND, "no such topic"))
    assert len(bench.answers) == 1
