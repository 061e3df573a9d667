"""What the timer's files cost: CPU per timer put in, and per timer read from its slot.

    python -m bench.timer_files [--timers 1000000] [--slots 3600]

Timers go to random slots of `--slots`, on a real disk below the current folder, with a flush each
second on a thread as in a broker; then the files are opened again, and every slot is read.  The
times of `add` and `read` are this thread's CPU; those of `open` are on the clock.
"""

import argparse
import asyncio
import random
import tempfile
import time

from popmq.broker.timer.timer_files import Cursors, TimerFiles
from popmq.common.disk import ColdRead, RealDisk
from popmq.common.settings.settings import TimerSettings
from popmq.common.step_loop import FlusherThread

SETTINGS = TimerSettings()


def fail(error: BaseException) -> None:
    raise error


async def fill(files: TimerFiles, slots: list[int]) -> float:
    """CPU seconds of the calls of `add` and `step`."""
    used = 0.0
    for first in range(0, len(slots), 1000):
        begin = time.thread_time()
        for number, slot in enumerate(slots[first : first + 1000], first):
            time_ms = slot * SETTINGS.slot_ms
            files.add(
                slot_time_ms=time_ms,
                due_ms=time_ms + 500,
                position=number * 1000,
                size=1000,
                identity=number * 1000,
                topic_id=64,
                roll=False,
                now_ms=0,
            )
        files.step(int(time.monotonic() * 1000), lambda: Cursors(0, len(slots)))
        used += time.thread_time() - begin
        await asyncio.sleep(0)
    return used


def read(files: TimerFiles, slots: int) -> tuple[int, float]:
    """Units, and CPU seconds."""
    begin, count = time.thread_time(), 0
    for slot in files.wheel.occupied(0, slots * SETTINGS.slot_ms):
        chain, left = files.log.chain(slot, wait=False), slot.num
        while left:
            try:
                left -= len(next(chain))
            except ColdRead as cold:
                cold.warm()
        count += slot.num
    return count, time.thread_time() - begin


async def measure(timers: int, slots: int, folder: str) -> None:
    flusher = FlusherThread(asyncio.get_running_loop(), "housekeeper")
    files = TimerFiles(RealDisk(), folder, SETTINGS, flusher, fail)
    files.open()
    rng = random.Random(1)
    used = await fill(files, [rng.randrange(slots) for _ in range(timers)])
    flusher.stop()
    files.flush_now(Cursors(0, timers))
    files.close()
    print(f"add   {used / timers * 1e6:6.2f} us a timer, {timers} timers in {slots} slots")
    begin = time.monotonic()
    files.open()
    print(f"open  {time.monotonic() - begin:6.2f} s")
    count, used = read(files, slots)
    assert count == timers, f"{count} of {timers} timers were found"
    print(f"read  {used / count * 1e6:6.2f} us a timer")
    files.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--timers", type=int, default=1_000_000)
    parser.add_argument("--slots", type=int, default=3600)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        asyncio.run(measure(args.timers, args.slots, folder))


if __name__ == "__main__":
    main()
