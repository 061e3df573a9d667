"""A year of virtual time: retention each day, timers of up to 366 days, a bounded disk."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Kind, PutEntry, PutRequest
from popmq.common.settings.settings import TimerSettings
from popmq.common.topics import MessageType
from popmq.testing.disk.sim_disk import SimDisk
from popmq.testing.harness.core_broker import SMALL, CoreBroker

HOUR = 3_600_000
DAY = 24 * HOUR
TIMERS = 150
SETTINGS = replace(
    SMALL,
    store=replace(SMALL.store, segment_bytes=1 << 20, snapshot_bytes=256 << 10, retention_hours=24),
    timer=TimerSettings(wheel_slots=1_440, slot_ms=60_000, log_segment_bytes=16 << 10),
)


class Year:
    """A broker whose timers of `days` days were all sent on the first one."""

    def __init__(self, days: int, seed: int) -> None:
        rng = random.Random(seed)
        self.disk = SimDisk(random.Random(seed))
        self.core = CoreBroker(disk=self.disk, settings=SETTINGS)
        self.core.topic("orders", queues=1, type=MessageType.MIXED)
        self.core.topic("noise", queues=1)
        self.core.group("g")
        self.due: dict[bytes, int] = {}
        self.got: list[bytes] = []
        begin_ms = self.core.clock.wall_ms()
        for number in range(TIMERS):
            due_ms = begin_ms + rng.randrange(1, days * DAY)
            self.due[b"%04d" % number] = due_ms
            entry = PutEntry(MessageType.DELAY, b"%04d" % number, bytes(300), due_ms=due_ms)
            put = hop.encode_put(PutRequest("orders", [entry]))
            assert hop.decode_put_reply(self.core.reply(Kind.PUT, put))[0].due_ms == due_ms

    def day(self) -> None:
        core = self.core
        for _ in range(6):
            core.clock.advance(4 * HOUR)
            for _ in range(3):
                core.send("noise", bytes(60_000))
            core.run_steps()
            while deliveries := core.receive("orders", "g"):
                core.ack("orders", "g", *(delivery.handle for delivery in deliveries))
                self.got += [delivery.head for delivery in deliveries]
                assert all(
                    self.due[delivery.head] <= core.clock.wall_ms() for delivery in deliveries
                )

    def sizes(self) -> Iterator[tuple[str, int]]:
        folder = SETTINGS.broker.data
        queue = f"{folder}/consumequeue/rmq_sys_wheel_timer@4/0"
        for path in (f"{folder}/commitlog", f"{folder}/timerlog", queue):
            names = self.disk.names(path)
            yield path, sum(self.disk.open(f"{path}/{name}").size() for name in names)
        everything = self.disk.contents(f"{folder}/")
        yield f"{folder}/all of it", sum(len(content) for _, content in everything)


def run(days: int) -> Year:
    """`days` days with a restart now and then; what the disk holds at the end."""
    year = Year(days, seed=5)
    bounds = {"commitlog": 6 << 20, "timerlog": 64 << 10, "0": 320 << 10, "all of it": 7 << 20}
    for day in range(days):
        year.day()
        if day % 20 == 19:
            if day % 40 == 19:
                year.core.stop()
            year.core.start()
        for path, size in year.sizes():
            assert size <= bounds[path.rpartition("/")[2]], f"day {day}: {path} has {size} bytes"
    year.core.advance(HOUR)
    year.day()
    assert sorted(year.got) == sorted(year.due)
    assert year.core.broker.timers.state.pending == {}
    return year


@pytest.mark.more
def test_a_year_of_timers_comes_at_its_times_from_a_bounded_disk() -> None:
    broker = run(366).core.broker
    assert broker.store.retention.deleted_segments > 0
