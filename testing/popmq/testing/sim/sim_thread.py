"""The broker's threads, stopped and resumed between two operations of the disk.

A job that is to be stopped runs on a real thread, in strict hand-over: while it runs, the
simulator waits, and the other way round, so that a seed says who comes next.  A crash ends a
job that is stopped: its next operation raises PowerCut and never happens.
"""

import _thread
from collections import deque
from collections.abc import Callable

from popmq.common.step_loop import Done, Work
from popmq.testing.disk.lying_disk import PowerCut
from popmq.testing.disk.sim_disk import SimDisk, at_once, go_ahead


class SimThread:
    """One thread of the broker; implements `popmq.common.step_loop.Flusher`."""

    def __init__(
        self,
        disk: SimDisk,
        now_ms: Callable[[], int],
        takes_ms: Callable[[], int],
        soon: Callable[[Callable[[], None]], None],
    ) -> None:
        self._disk = disk
        self._now_ms = now_ms
        self._takes_ms = takes_ms
        self._soon = soon  # the way back to the loop
        self._jobs: deque[tuple[int, Work, Done]] = deque()
        self._stopped: _Job | None = None

    def submit(self, work: Work, done: Done) -> None:
        """The job may take its time before it begins."""
        self._jobs.append((self._now_ms() + self._takes_ms(), work, done))

    @property
    def busy(self) -> bool:
        return bool(self._jobs)

    @property
    def due_ms(self) -> int:
        """When the first job goes on."""
        return 0 if self._stopped is not None else self._jobs[0][0]

    @property
    def stopped(self) -> bool:
        """Whether a job is between two of its operations."""
        return self._stopped is not None

    def run(self, operations: int | None = None) -> None:
        """The first job, or so many operations of it; its news then goes to the loop."""
        _, work, done = self._jobs[0]
        error: OSError | None = None
        try:
            if not self._go_on(work, operations):
                return
        except OSError as failure:
            error = failure
        self._jobs.popleft()
        self._soon(lambda: done(error))

    def kill(self) -> None:
        """The process is gone, in the middle of an operation or not."""
        self._jobs.clear()
        stopped, self._stopped = self._stopped, None
        if stopped is not None:
            stopped.kill()

    def forget_thread(self) -> None:
        """In a fork of the process, which has no thread but the one that forked."""
        self._stopped = None

    def _go_on(self, work: Work, operations: int | None) -> bool:
        """Whether the job came to its end; raises what ended it."""
        job = self._stopped
        if job is None and operations is None:
            work()
            return True
        job = job or _Job(self._disk, work)
        self._stopped = None
        if not job.run(operations):
            self._stopped = job
            return False
        return True


class _Job:
    """Some work on a thread of its own. Exactly one of that thread and the caller runs."""

    def __init__(self, disk: SimDisk, work: Work) -> None:
        self._disk = disk
        self._work = work
        self._left: int | None = 0
        self._killed = False
        self._finished = False
        self._error: BaseException | None = None
        self._asked: Callable[[], None] | None = None
        self._go, self._back = _thread.allocate_lock(), _thread.allocate_lock()
        self._go.acquire()
        self._back.acquire()
        # Cheaper than a Thread, which waits until it has begun; this one waits for its turn.
        _thread.start_new_thread(self._run, ())

    def run(self, operations: int | None) -> bool:
        """Let it do so many operations; True, or what it raised, when that was its end."""
        self._left = operations
        self._hand_over()
        if self._error is not None:
            raise self._error
        return self._finished

    def kill(self) -> None:
        self._killed = True
        self._hand_over()
        assert self._finished, "a job that was killed goes on"

    def _hand_over(self) -> None:
        self._disk.before, self._disk.on_main = self._before, self._on_main
        try:
            self._go.release()
            self._back.acquire()
            while self._asked is not None:
                work, self._asked = self._asked, None
                work()
                self._go.release()
                self._back.acquire()
        finally:
            self._disk.before, self._disk.on_main = go_ahead, at_once

    def _run(self) -> None:
        self._go.acquire()
        try:
            self._work()
        except BaseException as error:  # handed to the scheduler, which decides
            self._error = error
        self._finished = True
        self._back.release()

    def _on_main(self, work: Callable[[], None]) -> None:
        """On the job's thread: the scheduler's does that in between. What it raises ends the run
        there, and this thread stands still for ever."""
        self._asked = work
        self._back.release()
        self._go.acquire()

    def _before(self) -> None:
        """On the job's thread, before each operation of the disk."""
        if self._left == 0 and not self._killed:
            self._back.release()
            self._go.acquire()
        if self._killed:
            raise PowerCut
        if self._left is not None:
            self._left -= 1
