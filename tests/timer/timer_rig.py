"""TimerFiles on a simulated disk, and a plain list of the timers that went in."""

import random
from dataclasses import dataclass, field

from popmq.broker.timer.timer_files import Cursors, TimerFiles
from popmq.broker.timer.timer_unit import TimerUnit
from popmq.common.settings.settings import TimerSettings
from popmq.common.step_loop import InlineFlusher
from popmq.testing.disk.sim_disk import SimDisk

SLOT_MS = 1000
SLOTS = 1024
SEGMENT = 4096  # 78 units and a blank
SETTINGS = TimerSettings(wheel_slots=SLOTS, slot_ms=SLOT_MS, log_segment_bytes=SEGMENT)
FOLDER = "data"
WHEEL, LOG, CHECKPOINT = "data/timerwheel", "data/timerlog", "data/timercheckpoint"


@dataclass
class Rig:
    disk: SimDisk = field(default_factory=lambda: SimDisk(random.Random(1)))
    settings: TimerSettings = SETTINGS
    added: list[TimerUnit] = field(default_factory=list)  # one record each, 100 bytes apart
    failures: list[BaseException] = field(default_factory=list)
    last_read_ms: int = 0
    now_ms: int = 0
    files: TimerFiles = field(init=False)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.files = TimerFiles(
            self.disk, FOLDER, self.settings, InlineFlusher(), self.failures.append
        )
        self.files.open()

    def add(self, slot: int, *, ahead: int = 0, moved_from: int | None = None) -> None:
        """The next record's timer, in slot number `slot`, due `ahead` slots later."""
        position = 100 * len(self.added)
        identity = position if moved_from is None else moved_from
        unit = TimerUnit(
            prev=-1,
            roll=ahead > 0,
            moved=moved_from is not None,
            position=position,
            size=100,
            topic_id=64,
            due_ms=(slot + ahead) * SLOT_MS + 7,
            identity=identity,
            slot_time_ms=slot * SLOT_MS,
        )
        self.added.append(unit)
        self.files.add(
            slot_time_ms=unit.slot_time_ms,
            due_ms=unit.due_ms,
            position=position,
            size=unit.size,
            identity=identity,
            topic_id=unit.topic_id,
            roll=unit.roll,
            now_ms=self.now_ms,
        )

    def cursors(self) -> Cursors:
        return Cursors(self.last_read_ms, len(self.added), len(self.added), 3, self.now_ms)

    def flush(self) -> None:
        self.now_ms += self.settings.flush_ms
        self.files.step(self.now_ms, self.cursors)

    def in_slot(self, slot: int) -> list[TimerUnit]:
        """The slot's units, oldest first, without where the log keeps them."""
        lists = self.files.log.chain(self.files.wheel.get(slot * SLOT_MS))
        return [unit._replace(prev=-1) for units in lists for unit in units][::-1]

    def found(self) -> list[TimerUnit]:
        """What the slots lead to, in the order of the records; each slot's count is right."""
        units = []
        for slot in self.files.wheel.occupied(0, SLOTS * SLOT_MS):
            inside = self.in_slot(slot.time_ms // SLOT_MS)
            assert len(inside) == slot.num
            units += inside
        return sorted(units, key=lambda unit: unit.position)

    def flip(self, path: str, at: int) -> None:
        """Damage one byte of a file, durably."""
        file = self.disk.open(path)
        byte = file.read(1, at)[0]
        file.write(bytes([byte ^ 0x10]), at)
        file.sync()
