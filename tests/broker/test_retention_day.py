"""A day of retention on real files: all that is pending survives it, and the disk stays small."""

import random
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from popmq.broker.deliveries.pop_check_point import UnparkAction
from popmq.common.errors import Code
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Delivery, Kind, PutEntry, PutRequest, PutResult
from popmq.common.settings.send_settings import TransactionSettings
from popmq.common.settings.settings import (
    MessageSettings,
    PopSettings,
    StoreSettings,
    TimerSettings,
)
from popmq.common.topics import GroupType, MessageType
from popmq.common.wire import transaction_pb2
from popmq.proxy.api.definition_pb2 import SystemProperties
from popmq.testing.disk.lying_disk import ResidentDisk
from popmq.testing.harness.core_broker import SMALL, CoreBroker

HOUR_MS = 3_600_000
SEGMENT = 64 << 10
NOISE = bytes(12_000)
NOISE_AN_HOUR = 8  # messages: a segment and a half
SETTINGS = replace(
    SMALL,
    store=StoreSettings(segment_bytes=SEGMENT, snapshot_bytes=32 << 10, retention_hours=1),
    message=MessageSettings(max_body_bytes=16 << 10),
    timer=TimerSettings(wheel_slots=2_880, slot_ms=60_000, log_segment_bytes=16 << 10),
    transaction=TransactionSettings(keep_ms=48 * HOUR_MS),
    pop=PopSettings(fifo_open_offsets=12, fifo_park_after_ms=5_000),
)
# An hour's log, the hour that has to be over, two snapshot distances, segments allocated ahead
# and what is moved again and again.
LOG_BOUND = 12 * SEGMENT


@dataclass(slots=True)
class Day:
    folder: Path
    core: CoreBroker = field(init=False)
    held: dict[bytes, bytes] = field(default_factory=dict)  # handle of each body
    halves: dict[str, PutResult] = field(default_factory=dict)
    timers: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        settings = replace(SETTINGS, broker=replace(SMALL.broker, data=str(self.folder)))
        self.core = CoreBroker(disk=ResidentDisk(), settings=settings)
        core = self.core
        core.topic("held", queues=1)
        core.topic("noise", queues=1)
        core.topic("later", queues=1, type=MessageType.DELAY)
        core.topic("halves", queues=1, type=MessageType.TRANSACTION)
        core.topic("keys", queues=1, type=MessageType.FIFO)
        for name in ("holder", "g"):
            core.group(name, max_attempts=1_000)
        core.group("ordered", type=GroupType.FIFO, max_attempts=1_000)

    # -- what has to survive

    def put(self, topic: str, entry: PutEntry) -> PutResult:
        reply = self.core.reply(Kind.PUT, hop.encode_put(PutRequest(topic, [entry])))
        (result,) = hop.decode_put_reply(reply)
        assert result.code == Code.OK
        return result

    def hold_one(self, number: int) -> None:
        body = b"held %02d" % number
        self.core.send("held", body)
        (delivery,) = self.core.receive("held", "holder", invisible_ms=10 * HOUR_MS)
        self.held[body] = delivery.handle

    def keep_holding(self) -> None:
        for body, handle in self.held.items():
            self.held[body] = self.core.change("held", "holder", handle, 10 * HOUR_MS)

    def begin_timer(self, number: int) -> None:
        body = b"later %02d" % number
        self.put("later", PutEntry(MessageType.DELAY, body, b"", 0, 0, -26 * HOUR_MS))
        self.timers.append(body)

    def begin_half(self, number: int) -> None:
        name = f"half {number:02}"
        properties = SystemProperties(message_id=name).SerializeToString()
        entry = PutEntry(MessageType.TRANSACTION, name.encode(), properties, 0, 0, 0, name)
        self.halves[name] = self.put("halves", entry)

    def park_a_key(self) -> None:
        """`a1` is in flight and never acked, so that the others fill the window."""
        core = self.core
        core.send("keys", b"a1", message_group="a")
        (stuck,) = core.receive("keys", "ordered", invisible_ms=10 * HOUR_MS)
        assert stuck.head == b"a1"
        for number in range(2, 13):
            core.send("keys", b"a%d" % number, message_group="a")
        core.advance(6_000)
        assert core.receive("keys", "ordered") == []
        core.advance(6_000)
        group = core.broker.registry.group("ordered")
        assert [len(key.messages) for key in core.broker.table.parked.of_group(group.id)] == [11]

    # -- the day

    def hour(self) -> None:
        for _ in range(NOISE_AN_HOUR):
            self.core.send("noise", NOISE)
            self.core.clock.advance(HOUR_MS // NOISE_AN_HOUR)
            self.core.run_steps()

    def end_of_process(self, *, clean: bool) -> None:
        if clean:
            self.core.stop()
        else:
            self.core.broker.release_files()
        self.core.start()

    def log_bytes(self) -> int:
        return sum(file.stat().st_size for file in (self.folder / "commitlog").iterdir())

    def all_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())

    # -- and afterwards

    def received(self, topic: str, group: str = "g") -> list[bytes]:
        deliveries: list[Delivery] = []
        while batch := self.core.receive(topic, group):
            acked = self.core.ack(topic, group, *(delivery.handle for delivery in batch))
            assert {result.code for result in acked} == {Code.OK}
            deliveries += batch
        return [delivery.head for delivery in deliveries]

    def commit(self, name: str) -> None:
        request = transaction_pb2.EndTransactionRequest(
            topic="halves", message_id=name, transaction_id=self.halves[name].message, commit=True
        )
        assert self.core.reply(Kind.END_TRANSACTION, request.SerializeToString()) == b""


@pytest.mark.more
def test_a_day_of_retention_deletes_nothing_that_is_pending_and_bounds_the_disk(
    tmp_path: Path,
) -> None:
    day = Day(tmp_path)
    dice = random.Random(24)
    day.park_a_key()
    sizes = []
    for hour in range(24):
        day.hold_one(hour)
        day.begin_timer(hour)
        day.begin_half(hour)
        day.hour()
        if hour % 5 == 4:
            day.keep_holding()
        if hour % 4 == 3:
            day.end_of_process(clean=dice.random() < 0.5)
        assert day.log_bytes() <= LOG_BOUND
        sizes.append(day.all_bytes())
    assert day.core.broker.store.start > 24 * SEGMENT, "hardly anything was deleted"
    assert max(sizes[12:]) <= 1.5 * max(sizes[6:12]), sizes
    day.end_of_process(clean=False)

    for body, handle in day.held.items():
        assert day.core.ack("held", "holder", handle)[0].code == Code.OK, body
    for name in day.halves:
        day.commit(name)
    assert day.received("halves") == [name.encode() for name in day.halves]
    assert day.received("keys", "ordered") == []
    day.core.run_steps()  # a1 came back long ago, and is parked as well
    registry = day.core.broker.registry
    day.core.broker.fifo.parking.apply_action(
        registry.group("ordered"), registry.topic("keys"), "a", UnparkAction.RESUME
    )
    day.core.run_steps()
    assert day.received("keys", "ordered") == [b"a%d" % number for number in range(1, 13)]
    later = []
    for _ in range(26):
        day.hour()
        later += day.received("later")
    assert sorted(later) == day.timers
    assert day.received("held", "holder") == []
