"""What a start finds in the timer's files: steps 1 to 3 of docs/concepts/timer.md.

Whatever the checkpoint vouches for is there, or nothing is believed and the timer queue tells
all of it again.
"""

from typing import NamedTuple

from popmq.broker.timer.timer_checkpoint import TimerFilesCheckPoint
from popmq.broker.timer.timer_log import TimerLog
from popmq.broker.timer.timer_unit import TimerDamaged, TimerUnit
from popmq.broker.timer.timer_wheel import TimerWheel


class TimerFilesRecovery(NamedTuple):
    last_unit: TimerUnit | None
    newest_position: int | None  # of the newest record that has a unit
    early_ms: int  # the latest slot with timers that are due before it, of what was read
    overtaken: bool  # a later lap has taken the slot of a unit that the checkpoint calls not over


def recover(
    wheel: TimerWheel, log: TimerLog, checkpoint: TimerFilesCheckPoint
) -> TimerFilesRecovery | None:
    """Load both and bring them together; None when they have to be begun anew.

    The log is cut, durably; slots that changed are dirty.
    """
    if not wheel.load() or not log.load():
        return None
    try:
        files_recovery = _revise(wheel, log, checkpoint)
        if log.scanned < checkpoint.log_position:
            return None  # rolled units, too, may be lost, and no record comes again for them
        log.cut(log.scanned)
        if wheel.highest >= log.end and (files_recovery.overtaken or not _mend_slots(wheel, log)):
            return None  # the unit that stood for one that was overtaken may be cut
    except TimerDamaged:
        return None
    log.find_latest()
    return files_recovery


def _revise(
    wheel: TimerWheel, log: TimerLog, checkpoint: TimerFilesCheckPoint
) -> TimerFilesRecovery:
    """Count the units that the wheel does not know. The last one may have rolled, and be of an
    older record than the newest.  Raises TimerDamaged."""
    vouched, over_ms = checkpoint.log_position, checkpoint.last_read_ms
    unit, newest, early_ms, overtaken = None, None, 0, False
    for position, unit in log.scan(log.segment_before(vouched)):
        newest = unit.position if newest is None else max(newest, unit.position)
        if unit.slot_time_ms < over_ms:
            if position >= vouched:
                # Of a wheel that was turned back, whose checkpoint never came to be.
                raise TimerDamaged(f"the unit at {position} came into a slot that was over")
            continue
        if unit.due_ms < unit.slot_time_ms:
            early_ms = max(early_ms, unit.slot_time_ms)
        overtaken |= not wheel.revise(unit.slot_time_ms, position, starts=unit.prev < 0)
        if position >= vouched:
            # The slot may have been read from a page that never reached the disk.
            wheel.touch(unit.slot_time_ms)
    return TimerFilesRecovery(unit, newest, early_ms, overtaken)


def _mend_slots(wheel: TimerWheel, log: TimerLog) -> bool:
    """Empty the slots that point behind the log's end, and chain what is left of their units."""
    end = lowest = log.end
    behind = set()
    for slot in wheel.every():
        if slot.last >= end:
            behind.add(slot.time_ms)
            lowest = min(lowest, slot.first)
            wheel.clear(slot.time_ms)
    if lowest < log.start:
        return False
    for position, unit in log.scan(lowest):
        if unit.slot_time_ms in behind:
            wheel.revise(unit.slot_time_ms, position, starts=unit.prev < 0)
    wheel.find_newest()
    return log.scanned == end
