"""OK means durable: crashes at random operations of a disk that keeps only what was synced."""

import os
import random
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from popmq.common.errors import Code
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Delivery, Kind
from popmq.common.topics import CheckPoints, MessageType
from popmq.testing.disk.lying_disk import LyingDisk, PowerCut
from popmq.testing.harness.core_broker import Answer, CoreBroker, pop

CRASHES = 10  # of a life
OPERATIONS_BETWEEN_CRASHES = 120
ACTIONS = ["send", "pop", "ack", "change", "time", "tick", "step"]


@dataclass
class History:
    """What clients were told."""

    sent_ok: set[bytes] = field(default_factory=set)
    ack_ok: set[bytes] = field(default_factory=set)
    ack_unknown: set[bytes] = field(default_factory=set)
    held: list[Delivery] = field(default_factory=list)
    delivered: int = 0
    starts: int = 0
    open_sends: list[tuple[bytes, Answer]] = field(default_factory=list)
    open_acks: list[tuple[bytes, Answer]] = field(default_factory=list)
    open_pops: list[Answer] = field(default_factory=list)

    def collect(self) -> None:
        """Note every answer that was released by now."""
        for body, answer in self.open_sends:
            if answer.body is not None:
                assert hop.decode_put_reply(answer.body)[0].code == Code.OK
                self.sent_ok.add(body)
        for body, answer in self.open_acks:
            if answer.body is not None and hop.decode_ack_reply(answer.body)[0].code == Code.OK:
                self.ack_ok.add(body)
        for answer in self.open_pops:
            if answer.body is not None:
                self.take(list(hop.decode_pop_reply(answer.body).deliveries))
        self.open_sends = [(b, a) for b, a in self.open_sends if not a.heard]
        self.open_acks = [(b, a) for b, a in self.open_acks if not a.heard]
        self.open_pops = [a for a in self.open_pops if not a.heard]

    def take(self, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            self.delivered += 1
            assert delivery.head not in self.ack_ok, f"{delivery.head!r} was acked and came back"
        self.held += deliveries

    def crash(self) -> None:
        """Unanswered requests stay unanswered; handles are still good afterwards.

        An ack without an answer may or may not have counted, so its message may stay away.
        """
        self.ack_unknown |= {body for body, _ in self.open_acks}
        self.open_sends.clear()
        self.open_acks.clear()
        self.open_pops.clear()


def act(core: CoreBroker, rng: random.Random, history: History, number: int) -> None:
    """One random request or a piece of time; half of the requests are left unsettled."""
    match rng.choices(ACTIONS, [5, 3, 3, 1, 1, 6, 2])[0]:
        case "send":
            body = b"message %d" % number
            entry = hop.PutEntry(MessageType.NORMAL, body, bytes(rng.randrange(2000)))
            request = hop.encode_put(hop.PutRequest("orders", [entry]))
            history.open_sends.append((body, core.ask(Kind.PUT, request, settle=False)))
        case "pop":
            invisible_ms = rng.choice((3_000, 6_000, 20_000))  # too short for a buffer, or not
            limit = rng.choice((1, 2, 8, 32))
            request = pop("orders", "g", limit=limit, invisible_ms=invisible_ms)
            history.open_pops.append(core.ask(Kind.POP, request, settle=False))
        case "ack" if history.held:
            delivery = history.held.pop(rng.randrange(len(history.held)))
            request = hop.encode_ack(hop.AckRequest("orders", "g", [delivery.handle]))
            history.open_acks.append((delivery.head, core.ask(Kind.ACK, request, settle=False)))
        case "change" if history.held:
            delivery = history.held.pop(rng.randrange(len(history.held)))
            change = hop.ChangeRequest("orders", "g", delivery.handle, rng.randrange(5_000))
            core.ask(Kind.CHANGE, hop.encode_change(change), settle=False)
        case "tick":
            core.tick()
        case "step":
            core.broker.step()
        case _:
            core.clock.advance(rng.randrange(2_000))
            core.run_steps()
    if rng.random() < 0.5:
        core.run_until_idle()
    history.collect()


def restart_until_it_holds(core: CoreBroker, disk: LyingDisk, rng: random.Random) -> int:
    """Start again; a third of the starts fail too, and half of all crashes are only of the
    process. Returns how many starts it took."""
    starts = 0
    while True:
        starts += 1
        if rng.random() < 0.5:
            disk.survive()
        else:
            disk.restore_power()
        if rng.random() < 0.33:
            disk.cut_at(rng.randrange(40))
        try:
            core.start()
        except PowerCut:
            continue
        return starts


def drain(core: CoreBroker, history: History) -> set[bytes]:
    """Receive and ack until nothing comes any more; returns all that came."""
    seen: set[bytes] = set()
    quiet = 0
    while quiet < 3:
        deliveries = core.receive("orders", "g", invisible_ms=3_000)
        history.take(deliveries)
        for delivery in deliveries:
            seen.add(delivery.head)
            (result,) = core.ack("orders", "g", delivery.handle)
            if result.code == Code.OK:
                history.ack_ok.add(delivery.head)
        quiet = 0 if deliveries else quiet + 1
        if not deliveries:
            core.advance(12_000)
    return seen


def crash_and_check(rng: random.Random, crashes: int, check_points: CheckPoints) -> History:
    """One broker's life with so many crashes; returns what its clients were told."""
    disk = LyingDisk()
    core = CoreBroker(disk=disk, seed=rng.randrange(1 << 32))
    core.topic("orders")
    core.group("g", max_attempts=10_000, check_points=check_points)
    history = History()
    number = 0
    for _ in range(crashes):
        disk.cut_at(rng.randrange(OPERATIONS_BETWEEN_CRASHES))
        with suppress(PowerCut):
            while True:
                number += 1
                act(core, rng, history, number)
        history.collect()
        history.crash()
        history.starts += restart_until_it_holds(core, disk, rng)
    disk.restore_power()
    core.start()
    acked_before_drain = set(history.ack_ok)
    seen = drain(core, history)
    lost = history.sent_ok - acked_before_drain - history.ack_unknown - seen
    assert not lost, f"{len(lost)} acknowledged messages are gone: {sorted(lost)[:5]}"
    return history


@pytest.mark.parametrize("lives", [4, pytest.param(20, marks=pytest.mark.more)])
@pytest.mark.parametrize("check_points", CheckPoints, ids=lambda kind: kind.name.lower())
def test_crashes_at_random_points_lose_no_acknowledged_send_and_no_acknowledged_ack(
    check_points: CheckPoints, lives: int
) -> None:
    seed = int(os.environ.get("POPMQ_TEST_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"seed {seed} (POPMQ_TEST_SEED={seed} repeats it)")
    rng = random.Random(seed)
    ended = [crash_and_check(rng, CRASHES, check_points) for _ in range(lives)]
    print(
        f"crashes {lives * CRASHES}, starts {sum(life.starts for life in ended)}, "
        f"sent OK {sum(len(life.sent_ok) for life in ended)}, "
        f"delivered {sum(life.delivered for life in ended)}, "
        f"acked OK {sum(len(life.ack_ok) for life in ended)}, lost 0, acked but seen again 0"
    )
    assert all(life.ack_ok for life in ended)
    assert (
        sum(len(life.ack_unknown) for life in ended) < sum(len(life.ack_ok) for life in ended) / 4
    )


def test_no_answer_leaves_before_the_sync_that_covers_it() -> None:
    core = CoreBroker()
    core.topic("orders")
    core.group("g")
    entry = hop.PutEntry(MessageType.NORMAL, b"one", b"")
    put = core.ask(Kind.PUT, hop.encode_put(hop.PutRequest("orders", [entry])), settle=False)
    assert not put.heard
    core.run_until_idle()
    assert put.heard
    popped = core.ask(Kind.POP, pop("orders", "g"), settle=False)
    assert not popped.heard
    core.run_until_idle()
    assert popped.body is not None
    (deliveries,) = hop.decode_pop_reply(popped.body).deliveries
    ack = core.ask(
        Kind.ACK, hop.encode_ack(hop.AckRequest("orders", "g", [deliveries.handle])), settle=False
    )
    assert not ack.heard
    core.run_until_idle()
    assert ack.heard


def test_a_message_is_not_visible_before_it_is_confirmed() -> None:
    core = CoreBroker()
    core.topic("orders")
    entry = hop.PutEntry(MessageType.NORMAL, b"one", b"")
    core.ask(Kind.PUT, hop.encode_put(hop.PutRequest("orders", [entry])), settle=False)
    early = core.ask(Kind.POP, pop("orders", "g"))
    assert early.body is not None
    assert not hop.decode_pop_reply(early.body).deliveries
    assert len(core.receive("orders", "g")) == 1


def test_check_points_and_handles_survive_a_crash() -> None:
    disk = LyingDisk()
    core = CoreBroker(disk=disk)
    core.topic("orders")
    for body in (b"one", b"two"):
        core.send("orders", body)
    first, second = core.receive("orders", "g", invisible_ms=5_000)
    disk.restore_power()
    core.start()
    assert core.receive("orders", "g") == []
    assert core.ack("orders", "g", first.handle)[0].code == Code.OK
    core.advance(5_100)
    (again,) = core.receive("orders", "g")
    assert (again.head, again.attempt) == (second.head, 2)


def test_a_repeated_ack_and_a_late_ack_get_true_answers_after_a_crash() -> None:
    disk = LyingDisk()
    core = CoreBroker(disk=disk)
    core.topic("orders")
    for body in (b"one", b"two"):
        core.send("orders", body, queue_id=0)
    first, second = core.receive("orders", "g", invisible_ms=1_000)
    core.ack("orders", "g", first.handle)
    core.advance(1_100)
    disk.restore_power()
    core.start()
    assert core.ack("orders", "g", first.handle)[0].code == Code.OK
    (late,) = core.ack("orders", "g", second.handle)
    assert "revived as attempt 2" in late.message


def test_time_in_the_log_goes_on_over_a_restart_and_ignores_steps_of_the_wall_clock() -> None:
    disk = LyingDisk()
    core = CoreBroker(disk=disk)
    core.topic("orders")
    core.send("orders", b"one")
    core.receive("orders", "g", invisible_ms=60_000)
    core.clock.step_wall(-3_600_000)
    core.advance(1_000)
    assert core.receive("orders", "g") == []
    core.clock.step_wall(7_200_000)
    core.advance(1_000)
    assert core.receive("orders", "g") == []
    core.stop()
    core.clock.advance(30_000)
    core.start()
    assert core.receive("orders", "g") == []
    core.advance(30_000)
    assert len(core.receive("orders", "g")) == 1


def test_a_dead_disk_refuses_to_confirm() -> None:
    disk = LyingDisk()
    core = CoreBroker(disk=disk)
    core.topic("orders")
    disk.cut_at(0)
    entry = hop.PutEntry(MessageType.NORMAL, b"one", b"")
    answer = core.ask(Kind.PUT, hop.encode_put(hop.PutRequest("orders", [entry])), settle=False)
    with suppress(PowerCut):
        core.run_until_idle()
    assert not answer.heard
