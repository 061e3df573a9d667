"""Timers whose slots and bodies are on the disk only: in memory before they are due, in few trips
of the thread that waits, and nothing that is due waits for them (D3)."""

import mmap
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from timer.timer_client import MINUTE, SECOND, recall, received, send

from popmq.broker.timer import due_timers, timer_log
from popmq.broker.timer.timer_log import SlotChain, TimerLog
from popmq.broker.timer.timer_unit import UNIT_SIZE, TimerDamaged, TimerUnit
from popmq.broker.timer.timer_wheel import Slot
from popmq.common.disk import ColdRead, RealDisk
from popmq.common.errors import Code
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Kind, PutEntry, PutRequest, RecallResult
from popmq.common.step_loop import Done, Work
from popmq.common.topics import MessageType
from popmq.proxy.api.definition_pb2 import SystemProperties
from popmq.testing.disk.lying_disk import ResidentFile
from popmq.testing.harness.core_broker import SMALL, CoreBroker

PAGE = mmap.PAGESIZE
SLOTS = 20
IN_SLOT = 100


class PagedFile(ResidentFile):
    """A real file of timers or messages whose pages are in memory if they were read since
    `evict`."""

    def __init__(self, path: str, *, create: bool, disk: "PagedDisk") -> None:
        super().__init__(path, create=create)
        self._disk = disk
        self._path = path
        self._kept: set[int] = set()
        self._kept_since = 0

    def view_cached(self, size: int, offset: int) -> memoryview | None:
        expected = self._pages(min(size, self.size() - offset), offset)
        if self._evictions and not expected <= self._in_memory():
            return None
        return super().view_cached(size, offset)

    def read(self, size: int, offset: int) -> bytes:
        data = super().read(size, offset)
        self._in_memory().update(self._pages(len(data), offset))
        self._disk.bytes_read += len(data)
        return data

    def write(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        self._in_memory().update(self._pages(len(data), offset))
        super().write(data, offset)

    @property
    def _evictions(self) -> int:
        return sum(folder in self._path for folder in self._disk.evicted)

    def _in_memory(self) -> set[int]:
        if self._kept_since != self._evictions:
            self._kept_since = self._evictions
            self._kept.clear()
        return self._kept

    def _pages(self, size: int, offset: int) -> set[int]:
        return set(range(offset // PAGE, (offset + size - 1) // PAGE + 1))


class PagedDisk(RealDisk):
    def __init__(self) -> None:
        self.evicted: list[str] = []
        self.bytes_read = 0

    def open(self, path: str, *, create: bool = False) -> PagedFile:
        return PagedFile(path, create=create, disk=self)

    def evict(self, *folders: str) -> None:
        """The kernel needs the memory for something else."""
        self.evicted += folders


class Reader:
    """The thread that waits for the disk; one call of `trip` is one piece of its work."""

    def __init__(self) -> None:
        self.asked: deque[tuple[Work, Done]] = deque()

    def submit(self, work: Work, done: Done) -> None:
        self.asked.append((work, done))

    def trip(self) -> None:
        work, done = self.asked.popleft()
        work()
        done(None)


@pytest.fixture
def disk() -> PagedDisk:
    return PagedDisk()


@pytest.fixture
def core(disk: PagedDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CoreBroker]:
    monkeypatch.setattr(timer_log, "_BLOCKS", 1)  # what the process itself keeps of the TimerLog
    settings = replace(SMALL, broker=replace(SMALL.broker, data=str(tmp_path)))
    broker = CoreBroker(disk=disk, settings=settings)
    broker.topic("orders", queues=1, type=MessageType.MIXED)
    broker.group("g")
    yield broker
    broker.broker.release_files()


@pytest.fixture
def reader(core: CoreBroker) -> Reader:
    new_reader = Reader()
    core.broker.store.readers = new_reader
    return new_reader


def send_mixed(core: CoreBroker, first_ms: int) -> None:
    """A hundred timers in each of twenty slots, so mixed that each slot is all over the files, and
    no two bodies of one slot come with one read."""
    entries = []
    for number in range(SLOTS * IN_SLOT):
        due_ms = first_ms + number % SLOTS * SECOND + number // SLOTS
        name = str(number)
        properties = SystemProperties(message_id=name).SerializeToString()
        entries.append(
            PutEntry(MessageType.DELAY, name.encode().ljust(1_000), properties, 0, 0, due_ms, name)
        )
    for at in range(0, len(entries), 250):
        reply = core.reply(Kind.PUT, hop.encode_put(PutRequest("orders", entries[at : at + 250])))
        assert {result.code for result in hop.decode_put_reply(reply)} == {Code.OK}
    core.run_steps()
    core.advance(2 * SECOND)  # the TimerLog's tail is written


def next_minute(core: CoreBroker) -> int:
    now_ms = core.clock.wall_ms()
    return now_ms - now_ms % MINUTE + 2 * MINUTE


def wait_until(core: CoreBroker, at_ms: int) -> None:
    core.clock.advance(at_ms - core.clock.wall_ms())
    core.run_steps()


def trips(core: CoreBroker, reader: Reader) -> int:
    """Let the reader do all that it is asked for."""
    done = 0
    while reader.asked:
        reader.trip()
        done += 1
        core.run_steps()
    return done


def names(core: CoreBroker) -> list[int]:
    found_names: list[int] = []
    while some := received(core):
        found_names += [int(name) for name in some]
    return found_names


def test_a_slot_that_is_cold_costs_one_trip_and_its_bodies_another_and_is_not_late(
    core: CoreBroker, disk: PagedDisk, reader: Reader
) -> None:
    first_ms = next_minute(core)
    send_mixed(core, first_ms)
    disk.evict("timerlog", "commitlog")
    wait_until(core, first_ms - due_timers.EARLY_MS)
    assert trips(core, reader) == 2
    assert core.broker.timers.service.cold.trips == 2
    for at_ms in range(first_ms, first_ms + IN_SLOT):
        wait_until(core, at_ms)
        assert core.broker.timers.service.fired == at_ms - first_ms + 1


def test_timers_that_are_due_do_not_wait_for_a_slot_that_comes_from_the_disk(
    core: CoreBroker, disk: PagedDisk, reader: Reader
) -> None:
    first_ms = next_minute(core)
    send_mixed(core, first_ms)
    wait_until(core, first_ms - due_timers.EARLY_MS)
    disk.evict("timerlog")
    wait_until(core, first_ms - due_timers.EARLY_MS + SECOND)
    assert reader.asked  # for the units of the second slot; the disk never answers
    for at_ms in range(first_ms, first_ms + IN_SLOT):
        wait_until(core, at_ms)
        assert core.broker.timers.service.fired == at_ms - first_ms + 1
    wait_until(core, first_ms + 3 * SECOND)
    assert core.broker.timers.service.fired == IN_SLOT
    trips(core, reader)
    assert core.broker.timers.service.fired == 3 * IN_SLOT + 1
    assert names(core) == sorted(range(SLOTS * IN_SLOT), key=due_order)[: 3 * IN_SLOT + 1]


def test_bodies_that_are_cold_when_they_are_due_come_in_one_trip(
    core: CoreBroker, disk: PagedDisk, reader: Reader
) -> None:
    first_ms = next_minute(core)
    send_mixed(core, first_ms)
    wait_until(core, first_ms - 1)
    disk.evict("commitlog")
    wait_until(core, first_ms + IN_SLOT)
    assert core.broker.timers.service.fired == 0
    reader.trip()
    core.run_steps()
    assert core.broker.timers.service.fired == IN_SLOT


def test_what_comes_for_a_slot_that_was_loaded_early_fires_in_its_place(
    core: CoreBroker, disk: PagedDisk, reader: Reader
) -> None:
    first_ms = next_minute(core)
    send_mixed(core, first_ms)
    disk.evict("timerlog")
    wait_until(core, first_ms - due_timers.EARLY_MS)
    assert trips(core, reader) == 1
    assert recall(core, str(SLOTS)) is RecallResult.DONE
    send(core, "5000000", first_ms + 1)
    wait_until(core, first_ms + 2)
    assert names(core) == [0, 5_000_000, 2 * SLOTS]


@pytest.mark.parametrize(("room", "loaded"), [(IN_SLOT - 1, False), (IN_SLOT, True)])
def test_a_slot_is_loaded_early_only_where_there_is_room_for_its_timers(
    core: CoreBroker, monkeypatch: pytest.MonkeyPatch, room: int, loaded: bool
) -> None:
    monkeypatch.setattr(due_timers, "EARLY_TIMERS", room)
    first_ms = next_minute(core)
    send_mixed(core, first_ms)
    due = core.broker.timers.service.due
    wait_until(core, first_ms - due_timers.EARLY_MS)
    assert (due.loaded_until > first_ms) is loaded
    wait_until(core, first_ms - SECOND - IN_SLOT // due_timers.UNITS_PER_MS)
    assert due.loaded_until == first_ms + SECOND


# -- the TimerLog


def unit(prev: int) -> TimerUnit:
    return TimerUnit(prev, False, False, 0, 100, 64, 5_007, 0, 5_000)


def log_with_chain(
    disk: PagedDisk, folder: Path, *, units: int, apart: int
) -> tuple[TimerLog, Slot]:
    """A chain of which each unit is so many units behind the one before."""
    log = TimerLog(disk, str(folder / "timerlog"), segment_bytes=1 << 20, slot_ms=SECOND)
    prev = -1
    for number in range(units * apart):
        if number % apart == 0:
            prev = log.append(unit(prev), now_ms=0)
        else:
            log.append(unit(-1), now_ms=0)
    log.flush()
    disk.evict("timerlog")
    return log, Slot(5_000, 0, prev, units)


def read_all(chain: SlotChain) -> tuple[int, int]:
    """Units and trips."""
    units = waits = 0
    while True:
        try:
            units += len(next(chain))
        except ColdRead as cold:
            cold.warm()
            waits += 1
        except StopIteration:
            return units, waits


@pytest.mark.parametrize(
    ("units", "apart", "trips", "at_most_bytes"),
    [
        pytest.param(20_000, 1, 1, 2 << 20, id="close together"),
        pytest.param(1_000, 40, 1, 3 << 20, id="all over a short log"),
        pytest.param(300, 400, 2, 2 << 20, id="far apart"),
    ],
)
def test_a_chain_that_is_cold_is_fetched_in_few_trips_and_little_beside_it(
    disk: PagedDisk, tmp_path: Path, units: int, apart: int, trips: int, at_most_bytes: int
) -> None:
    log, slot = log_with_chain(disk, tmp_path, units=units, apart=apart)
    disk.bytes_read = 0
    assert read_all(log.chain(slot, wait=False)) == (units, trips)
    assert disk.bytes_read <= at_most_bytes
    log.close()


def test_a_trip_along_a_damaged_chain_ends(disk: PagedDisk, tmp_path: Path) -> None:
    """Whoever reads the units sees the damage; the thread that fetches them believes nothing."""
    log, slot = log_with_chain(disk, tmp_path, units=1_000, apart=1)
    at = 500 * UNIT_SIZE + 4
    for prev in (-5, 600 * UNIT_SIZE, 1 << 62):
        file = disk.open(str(tmp_path / "timerlog" / ("0" * 20)))
        file.write(prev.to_bytes(8, "big", signed=True), at)
        file.close()
        disk.evict("timerlog")
        with pytest.raises(TimerDamaged):
            read_all(log.chain(slot, wait=False))
    log.close()


def due_order(number: int) -> tuple[int, int]:
    return number % SLOTS, number // SLOTS
