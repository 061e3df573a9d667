"""Rejects and redrives through power cuts: each life of a message ends once, whatever crashes."""

import os
import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from popmq.common.errors import Code, PopmqError
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Delivery, Kind
from popmq.common.wire import admin_pb2 as pb
from popmq.testing.disk.lying_disk import LyingDisk, PowerCut
from popmq.testing.harness.core_broker import Answer, CoreBroker, pop

MESSAGES = 24
CRASHES = 12
ACTIONS = ("pop", "ack", "reject", "redrive", "time", "tick", "step")


@dataclass
class History:
    """What clients were told; answers that a crash took stay unknown."""

    held: list[Delivery] = field(default_factory=list)
    rejected: Counter[bytes] = field(default_factory=Counter)
    acked: set[bytes] = field(default_factory=set)
    unknown: set[bytes] = field(default_factory=set)  # whose last word was not heard
    open: list[tuple[str, bytes, Answer]] = field(default_factory=list)

    def collect(self) -> None:
        for what, head, answer in self.open:
            if answer.body is None:
                continue
            if what == "pop":
                self.take(list(hop.decode_pop_reply(answer.body).deliveries))
            elif hop.decode_ack_reply(answer.body)[0].code != Code.OK:
                continue
            elif what == "ack":
                self.acked.add(head)
            else:
                self.rejected[head] += 1
        self.open = [entry for entry in self.open if not entry[2].heard]

    def take(self, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            assert delivery.head not in self.acked, f"{delivery.head!r} was acked and came back"
        self.held += deliveries

    def crash(self) -> None:
        self.unknown |= {head for what, head, _ in self.open if what != "pop"}
        self.open.clear()


def act(core: CoreBroker, rng: random.Random, history: History) -> None:
    action = rng.choices(ACTIONS, [3, 1, 4, 2, 1, 6, 2])[0]
    settle = rng.random() < 0.5
    match action:
        case "pop":
            body = pop("orders", "g", limit=rng.randrange(1, 5), invisible_ms=5_000)
            history.open.append(("pop", b"", core.ask(Kind.POP, body, settle=False)))
        case "ack" | "reject" if history.held:
            delivery = history.held.pop(rng.randrange(len(history.held)))
            request = hop.encode_ack(hop.AckRequest("orders", "g", [delivery.handle]))
            kind = Kind.ACK if action == "ack" else Kind.REJECT
            history.open.append((action, delivery.head, core.ask(kind, request, settle=False)))
            if rng.random() < 0.3:  # the client asks again: nothing more may come of it
                core.ask(kind, request, settle=False)
        case "redrive":
            redrive = pb.RedriveRequest(group="g", limit=rng.randrange(1, 4))
            core.ask(Kind.REDRIVE, redrive.SerializeToString(), settle=False)
        case "time":
            core.clock.advance(rng.choice((100, 2_000)))
        case "tick":
            core.tick()
        case _:
            core.broker.step()
    if settle:  # after the books: the power may be cut in it
        core.run_until_idle()
    history.collect()


def letters(core: CoreBroker) -> list[pb.DeadLetter]:
    request = pb.ListDeadLettersRequest(group="g", bodies=True)
    reply = core.reply(Kind.LIST_DEAD_LETTERS, request.SerializeToString())
    return list(pb.ListDeadLettersReply.FromString(reply).letters)


def drain(core: CoreBroker, history: History) -> None:
    """Redrive and ack until nothing is left."""
    for _ in range(4):
        core.advance(6_000)
        core.reply(Kind.REDRIVE, pb.RedriveRequest(group="g").SerializeToString())
        while batch := core.receive("orders", "g", invisible_ms=5_000):
            history.take(batch)
            for delivery in batch:
                assert core.ack("orders", "g", delivery.handle)[0].code == Code.OK
                assert delivery.head not in history.acked
                history.acked.add(delivery.head)


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.more) for part in (1, 2, 3))]
)
def test_every_life_of_a_message_ends_once_whatever_crashes(part: int) -> None:
    base = int(os.environ.get("POPMQ_TEST_SEED", random.SystemRandom().randrange(1 << 32)))
    for seed in range(base + 10 * part, base + 10 * part + 5):
        print(f"seed {seed} (POPMQ_TEST_SEED={seed - 10 * part} repeats it)")
        rng = random.Random(seed)
        disk = LyingDisk()
        core = CoreBroker(disk=disk, seed=seed)
        core.topic("orders", queues=2)
        core.group("g", max_attempts=3)
        history = History()
        for number in range(MESSAGES):
            core.send("orders", b"%03d" % number)
        for _ in range(CRASHES):
            disk.cut_at(rng.randrange(5, 120))
            with suppress(PowerCut, OSError, PopmqError):
                for _ in range(400):
                    act(core, rng, history)
            history.collect()
            history.crash()
            disk.restore_power()
            core.start()
        drain(core, history)

        dead_letters = letters(core)
        dead = Counter(dead_letter.head for dead_letter in dead_letters)
        assert all(dead_letter.redriven for dead_letter in dead_letters), seed
        deaths = Counter(
            (dead_letter.origin_topic, dead_letter.origin_queue_id, dead_letter.origin_offset)
            for dead_letter in dead_letters
        )
        assert sorted(deaths.values()) == sorted(dead.values()), seed
        for number in range(MESSAGES):
            head = b"%03d" % number
            # Each redriven letter began one more life, and the last life ended in an ack.
            assert head in history.acked or head in history.unknown, (seed, head)
            assert dead[head] >= history.rejected[head], (seed, head)
        assert core.broker.table.in_flight == 0
        assert core.receive("orders", "g") == []
