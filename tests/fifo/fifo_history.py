"""Random lives of a FIFO group, and a model that knows what each reply may hold.

The model is told only what a client would see.  A power cut leaves it in doubt about the request
that was under way; everything that was answered is certain.
"""

import random
from collections import defaultdict
from dataclasses import dataclass, field, replace

from popmq.broker.deliveries.parked_keys import ParkedKey
from popmq.broker.deliveries.pop_check_point import UnparkAction
from popmq.broker.deliveries.queue_progress import FifoProgress
from popmq.common.errors import Code, InvalidReceiptHandle
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Delivery, Kind
from popmq.common.settings.settings import PopSettings
from popmq.common.topics import GroupType, MessageType
from popmq.testing.harness.core_broker import SMALL, CoreBroker, pop

LATE_MS = 60  # a bucket of 16 ms and the steps of `advance`
MAX_ATTEMPTS = 4
QUEUES = 2
Place = tuple[int, int]  # queue, offset


@dataclass(slots=True)
class Known:
    """What a client knows of one message."""

    key: str
    handle: bytes = b""
    until_ms: int = 0
    attempts: int = 0  # deliveries that were seen
    over: bool = False
    doubtful: bool = False  # an unanswered ack, or a reply that was not seen


@dataclass(slots=True)
class History:
    """`run` raises AssertionError when order, attempts or liveness are broken."""

    seed: int
    keys: int = 6
    rng: random.Random = field(init=False)
    core: CoreBroker = field(init=False)
    messages: dict[Place, Known] = field(default_factory=dict)
    places: dict[bytes, Place] = field(default_factory=dict)  # by body: parked ones have others
    by_key: dict[tuple[int, str], list[Place]] = field(default_factory=lambda: defaultdict(list))
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    in_doubt: bool = False  # a receive was not answered: some messages may be invisible

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        # A small window in half of the lives, so that the bound is met and keys are parked.
        limits = PopSettings(fifo_open_offsets=self.rng.choice((5, 10_000)), fifo_park_after_ms=500)
        settings = replace(SMALL, pop=limits)
        self.core = CoreBroker(settings=settings, seed=self.seed)
        self.core.topic("orders", queues=QUEUES, type=MessageType.MIXED)
        self.core.group("g", type=GroupType.FIFO, max_attempts=MAX_ATTEMPTS)

    @property
    def now_ms(self) -> int:
        return self.core.broker.store.log_ms()

    @property
    def top_lags(self) -> bool:
        return self.core.settings.pop.fifo_open_offsets < 100

    def run(self, actions: int) -> None:
        kinds = ("send", "receive", "ack", "change", "time", "restart", "cut", "unpark")
        weights = (9, 6, 3, 1, 3, 0.2, 0.4, 1.5) if self.top_lags else (6, 5, 6, 2, 3, 0.2, 0.4, 0)
        for _ in range(actions):
            (kind,) = self.rng.choices(kinds, weights)
            self.counts[kind] += 1
            getattr(self, kind)()
        self.drain()

    # -- actions

    def send(self) -> None:
        queue, key = self.rng.randrange(QUEUES), f"k{self.rng.randrange(self.keys)}"
        body = b"%d" % len(self.messages)
        result = self.core.send("orders", body, queue_id=queue, message_group=key)
        place = self.places[body] = (queue, result.queue_offset)
        self.messages[place] = Known(key)
        self.by_key[(queue, key)].append(place)

    def receive(self) -> None:
        limit = self.rng.choice((1, 2, 5, 32))
        invisible_ms = self.rng.choice((300, 2_000, 20_000))
        attempt_id = self.rng.choice(("", f"{self.rng.random()}"))
        got = self.core.receive(
            "orders", "g", limit=limit, invisible_ms=invisible_ms, attempt_id=attempt_id
        )
        self.check_live(got, limit)
        self.take(got, invisible_ms)
        if attempt_id and got:
            again = self.core.receive("orders", "g", limit=32, attempt_id=attempt_id)
            assert again == got, "the same attempt id, other deliveries"

    def ack(self) -> None:
        places = [
            place
            for place, delivery in self.messages.items()
            if delivery.handle and not delivery.over
        ]
        for place in self.rng.sample(places, min(len(places), self.rng.randrange(1, 4))):
            message = self.messages[place]
            (result,) = self.core.ack("orders", "g", message.handle)
            if result.code == Code.OK:
                message.over, message.doubtful = True, False
            else:
                assert message.until_ms <= self.now_ms or message.doubtful, result.message
                message.handle = b""

    def change(self) -> None:
        places = [
            place
            for place, delivery in self.messages.items()
            if delivery.handle and not delivery.over
        ]
        if not places:
            return
        message = self.messages[self.rng.choice(places)]
        invisible_ms = self.rng.choice((0, 500, 10_000))
        try:
            message.handle = self.core.change("orders", "g", message.handle, invisible_ms)
            message.until_ms = self.now_ms + invisible_ms
        except InvalidReceiptHandle:
            assert message.until_ms <= self.now_ms or message.doubtful
            message.handle = b""

    def time(self) -> None:
        self.core.advance(self.rng.choice((50, 400, 3_000)))

    def restart(self) -> None:
        self.core.stop()
        self.core.start()

    def cut(self) -> None:
        """The power goes while a request is under way; its answer was not seen."""
        places = [
            place
            for place, delivery in self.messages.items()
            if delivery.handle and not delivery.over
        ]
        if places and self.rng.random() < 0.5:
            message = self.messages[self.rng.choice(places)]
            body = hop.encode_ack(hop.AckRequest("orders", "g", [message.handle]))
            answer = self.core.ask(Kind.ACK, body, settle=False)
            message.doubtful = True
        else:
            answer = self.core.ask(Kind.POP, pop("orders", "g", invisible_ms=300), settle=False)
            self.in_doubt = True
        for _ in range(self.rng.randrange(4)):
            self.core.tick()
        assert not answer.heard or answer.body is not None
        self.core.disk.restore_power()  # type: ignore[attr-defined]
        self.core.start()
        if self.in_doubt:
            self.core.advance(500)  # what the lost reply held is back
            for message in self.messages.values():
                message.doubtful = True  # of its attempt

    def unpark(self) -> None:
        for key in self.parked():
            what = self.rng.choice((*UnparkAction, None))
            if what is not None:
                self.counts[what.name] += 1
                self.say(key, what)

    def parked(self) -> list[ParkedKey]:
        (group,) = self.core.broker.registry.groups()
        return self.core.broker.table.parked.of_group(group.id)

    def say(self, key: ParkedKey, what: UnparkAction) -> None:
        broker = self.core.broker
        progress = broker.table.progress(key.group_id, key.parking_id, 0)
        assert isinstance(progress, FifoProgress)
        if what is not UnparkAction.RESUME:
            for origin, offset in key.messages:
                message = self.messages[(key.queue_id, origin)]
                if offset not in progress.in_flight_offsets:
                    message.over = True
                elif what is UnparkAction.DEAD_LETTER:
                    message.doubtful = True  # as soon as it is not in flight any more
        topic = broker.registry.topic("orders")
        group = broker.registry.group("g")
        if broker.table.parked.find(group.id, topic.id, key.queue_id, key.name) is key:
            broker.fifo.parking.set_action(group.id, key.parking_id, key.messages[0][1], what)
        self.core.run_until_idle()
        self.core.run_steps()

    # -- the model

    def take(self, got: list[Delivery], invisible_ms: int) -> None:
        for delivery in got:
            place = self.places[delivery.head]
            message = self.messages[place]
            assert not message.over, f"{place} was acked and came again"
            assert message.until_ms <= self.now_ms, f"{place} came while it was invisible"
            line = self.by_key[(place[0], message.key)]
            for earlier in line[: line.index(place)]:
                before = self.messages[earlier]
                fine = before.over or before.until_ms > self.now_ms or before.doubtful
                fine = fine or before.attempts >= MAX_ATTEMPTS  # a dead letter
                assert fine, f"{place} before {earlier}, both of {message.key}"
                if not (before.over or before.doubtful) and before.until_ms > self.now_ms:
                    together = any(self.places[other.head] == earlier for other in got)
                    assert together, f"{place} while {earlier} of {message.key} is in flight"
            if not message.doubtful:
                assert delivery.attempt == message.attempts + 1, f"attempt of {place}"
            message.attempts, message.handle = delivery.attempt, delivery.handle
            message.until_ms = self.now_ms + invisible_ms
            self.counts["delivered"] += 1
            self.counts["again"] += delivery.attempt > 1

    def check_live(self, got: list[Delivery], limit: int) -> None:
        """A reply with room left holds the head of every key that is not busy."""
        if len(got) >= limit or self.top_lags:
            return
        taken = {self.places[delivery.head] for delivery in got}
        for line in self.by_key.values():
            left = [place for place in line if not self.messages[place].over]
            states = [self.messages[place] for place in left]
            busy = any(state.until_ms > self.now_ms - LATE_MS or state.doubtful for state in states)
            dead = any(state.attempts >= MAX_ATTEMPTS for state in states)
            if left and not busy and not dead:
                assert left[0] in taken, f"{left[0]} of {states[0].key} was not delivered"

    def drain(self) -> None:
        """Everything comes in the end; afterwards nothing is open and the offset is at the end."""
        for _ in range(2_000):
            self.core.advance(25_000)
            for key in self.parked():
                self.say(key, UnparkAction.RESUME)
            got = self.core.receive("orders", "g", limit=32, invisible_ms=1_000)
            self.take(got, 1_000)
            if not got and not self.parked():
                break
            results = self.core.ack("orders", "g", *(delivery.handle for delivery in got))
            assert all(result.code == Code.OK for result in results)
            for delivery in got:
                self.messages[self.places[delivery.head]].over = True
        broker = self.core.broker
        assert (broker.table.in_flight, len(broker.table)) == (0, 0)
        dead = 0
        for place, message in self.messages.items():
            fine = message.over or message.doubtful or message.attempts >= MAX_ATTEMPTS
            assert fine, f"{place} of {message.key} never came"
            dead += not message.over
        assert self.parked() == []
        for (_, topic_id, queue_id), progress in broker.table.progress_items():
            assert progress.committed == broker.store.queue(topic_id, queue_id).count
        self.counts["dead"] += dead
