"""The small parts: doors of a broker, the work of one life, the pace of a copy."""

from collections.abc import Callable

import pytest

from popmq.broker.ha.catch_up_progress import CatchUpProgress
from popmq.broker.ha.flusher_group import FlusherGroup
from popmq.broker.ha.slave_progress import ByteRate
from popmq.broker.node.gate import Gate
from popmq.common.errors import Code, PopmqError, Unavailable
from popmq.common.protocol.messaging_payloads import Kind, OnReply
from popmq.common.step_loop import Done, Work


class Served:
    """A part of a broker that answers nothing and remembers everything."""

    def __init__(self) -> None:
        self.asked: list[Kind] = []
        self.cancelled: list[int] = []

    def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: OnReply) -> int:
        self.asked.append(kind)
        return len(self.asked)

    def cancel(self, request_id: int) -> None:
        self.cancelled.append(request_id)


def gate() -> Gate:
    return Gate(lambda kind, body, on_reply: on_reply(kind.name.encode()))


def ask(which: Gate, kind: Kind) -> tuple[int, list[bytes | PopmqError]]:
    answers: list[bytes | PopmqError] = []
    return which.request(kind, b"", 1_000, answers.append), answers


CLIENT_KINDS = [
    Kind.PUT,
    Kind.POP,
    Kind.ACK,
    Kind.CHANGE,
    Kind.RECALL,
    Kind.RESCHEDULE,
    Kind.CREATE_TOPIC,
    Kind.LAG,
]
SLAVE_KINDS = [
    Kind.HANDSHAKE,
    Kind.FETCH,
    Kind.ACKED,
    Kind.READ_SNAPSHOT,
    Kind.TIMER_CHECK_POINT,
]


@pytest.mark.parametrize("kind", [*CLIENT_KINDS, *SLAVE_KINDS])
def test_nobody_is_served_by_a_broker_that_leads_nobody(kind: Kind) -> None:
    which = gate()
    _, (answer,) = ask(which, kind)
    assert isinstance(answer, PopmqError)
    assert answer.code is Code.NOT_MASTER
    assert which.refused_by_code == {Code.NOT_MASTER: 1}


@pytest.mark.parametrize("kind", [Kind.PUT, Kind.TAKE_TIMERS])
def test_what_could_not_be_confirmed_is_not_stored(kind: Kind) -> None:
    which, clients = gate(), Served()
    which.clients.open(clients)

    def too_few() -> None:
        raise Unavailable("1 replica is in sync")

    which.check_send_quorum = too_few
    _, (answer,) = ask(which, kind)
    assert isinstance(answer, Unavailable)
    assert clients.asked == []


def test_slaves_are_served_before_clients_are() -> None:
    which, slaves = gate(), Served()
    which.slaves.open(slaves)
    for kind in (*CLIENT_KINDS, *SLAVE_KINDS):
        ask(which, kind)
    assert slaves.asked == SLAVE_KINDS


@pytest.mark.parametrize("kind", [Kind.HAND_OVER, Kind.DESCRIBE_ROLE])
def test_what_a_broker_says_of_itself_it_always_says(kind: Kind) -> None:
    _, answers = ask(gate(), kind)
    assert answers == [kind.name.encode()]


def test_only_sends_need_an_admission() -> None:
    which, clients = gate(), Served()
    which.clients.open(clients)

    def refuse() -> None:
        raise Unavailable("too few replicas")

    which.check_send_quorum = refuse
    _, (answer,) = ask(which, Kind.PUT)
    assert isinstance(answer, Unavailable)
    ask(which, Kind.POP)
    ask(which, Kind.ACK)
    assert clients.asked == [Kind.POP, Kind.ACK]


def test_a_cancel_finds_its_part_also_when_the_door_is_closed() -> None:
    which, clients, slaves = gate(), Served(), Served()
    which.clients.open(clients)
    which.slaves.open(slaves)
    pop, _ = ask(which, Kind.POP)
    fetch, _ = ask(which, Kind.FETCH)
    which.clients.close()
    which.cancel(pop)
    which.cancel(fetch)
    assert (clients.cancelled, slaves.cancelled) == ([1], [1])


def test_a_cancel_of_an_older_life_reaches_nobody() -> None:
    which, old, new = gate(), Served(), Served()
    which.clients.open(old)
    number, _ = ask(which, Kind.POP)
    which.clients.detach()
    which.cancel(number)
    which.clients.open(new)
    which.cancel(number)
    assert (old.cancelled, new.cancelled) == ([], [])


class Later:
    """A flusher whose work ends when the test says so."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Work, Done]] = []

    def submit(self, work: Work, done: Done) -> None:
        self.jobs.append((work, done))

    def finish(self) -> None:
        jobs, self.jobs = self.jobs, []
        for work, done in jobs:
            work()
            done(None)


def test_the_next_life_begins_when_the_last_work_of_the_old_one_ended() -> None:
    own, disk = FlusherGroup(), Later()
    flusher = own.wrap(disk)
    results: list[str] = []

    def note(what: str) -> Callable[[], None]:
        return lambda: results.append(what)

    flusher.submit(note("written"), lambda error: results.append("heard"))
    own.stop(note("over"))
    flusher.submit(note("too late"), lambda error: results.append("heard"))
    assert results == []
    disk.finish()
    assert results == ["written", "over"]  # nobody is told of it any more


def test_a_life_without_work_ends_at_once() -> None:
    own, flusher_groups = FlusherGroup(), []
    own.stop(lambda: flusher_groups.append("over"))
    assert flusher_groups == ["over"]


def test_a_rate_lets_so_many_bytes_through_in_a_second_and_saves_up_no_more_than_a_burst() -> None:
    rate = ByteRate(1_000, 200, now_ms=0)
    sent = 0
    for now_ms in range(0, 10_000, 10):
        if rate.left(now_ms) > 0:
            rate.take(100)
            sent += 100
    assert 9_500 <= sent <= 10_500
    assert rate.left(60_000) == 200


def test_without_a_rate_nothing_is_held_back() -> None:
    rate = ByteRate(0, 200, now_ms=0)
    rate.take(1 << 40)
    assert rate.left(0) > 1 << 40


def test_a_copy_is_active_from_far_behind_until_it_is_near() -> None:
    copying = CatchUpProgress(near_bytes=100)
    copying.begin(50, 100, now_ms=0)
    assert not copying.active
    copying.begin(0, 1_000, now_ms=0)
    copying.look(500, 1_000, now_ms=10)
    assert (copying.active, copying.percent) == (True, 50)
    copying.look(905, 1_000, now_ms=20)
    assert (copying.active, copying.percent, copying.finished) == (False, 100, 1)
