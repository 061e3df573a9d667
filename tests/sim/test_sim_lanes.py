"""The broker's threads in the simulator: stopped between operations, and killed there."""

import random
from collections.abc import Callable

from popmq.testing.disk.crash_loss import Loss
from popmq.testing.disk.lying_disk import PowerCut
from popmq.testing.disk.sim_disk import SimDisk
from popmq.testing.sim.sim_thread import SimThread


class Thread:
    """A lane, what its job saw, and what went to the loop."""

    def __init__(self) -> None:
        self.disk = SimDisk(random.Random(1))
        self.soon: list[Callable[[], None]] = []
        self.seen: list[str] = []
        self.lane = SimThread(self.disk, lambda: 0, lambda: 0, self.soon.append)

    def submit(self, work: Callable[[], None]) -> None:
        self.lane.submit(work, lambda error: self.seen.append(f"done {error}"))

    def write_twice(self) -> None:
        try:
            file = self.disk.open("data/file", create=True)
            file.write(b"one", 0)
            self.seen.append("one written")
            file.write(b"two", 3)
            self.seen.append("two written")
        except PowerCut:
            self.seen.append("cut")
            raise


def test_a_job_stops_before_the_operation_that_it_was_not_given() -> None:
    thread = Thread()
    thread.submit(thread.write_twice)
    thread.lane.run(2)
    assert thread.seen == ["one written"]
    assert thread.lane.stopped
    assert not thread.soon
    thread.lane.run()
    thread.soon.pop()()
    assert thread.seen == ["one written", "two written", "done None"]
    assert not thread.lane.busy


def test_the_loop_sees_the_disk_as_the_stopped_job_left_it() -> None:
    thread = Thread()
    thread.submit(thread.write_twice)
    thread.lane.run(2)
    assert thread.disk.open("data/file").read(10, 0) == b"one"


def test_a_killed_job_does_nothing_more_to_the_disk_and_tells_nobody() -> None:
    thread = Thread()
    thread.submit(thread.write_twice)
    thread.lane.run(2)
    thread.lane.kill()
    assert thread.seen == ["one written", "cut"]
    assert thread.disk.open("data/file").read(10, 0) == b"one"
    assert not thread.soon
    assert not thread.lane.busy


def test_a_sync_does_not_cover_what_was_written_while_it_ran() -> None:
    thread = Thread()
    file = thread.disk.open("data/file", create=True)
    thread.disk.sync_folder("data")
    file.write(b"one", 0)
    thread.submit(file.sync)
    thread.lane.run(1)
    file.write(b"two", 3)
    thread.lane.run()
    thread.disk.crash(Loss.ALL)
    assert thread.disk.open("data/file").read(10, 0) == b"one"


def test_a_rename_is_seen_before_it_is_durable() -> None:
    thread = Thread()
    thread.disk.open("data/new", create=True)
    thread.disk.sync_folder("data")
    thread.submit(lambda: thread.disk.replace("data/new", "data/old"))
    thread.lane.run(1)
    assert thread.disk.exists("data/old")
    thread.lane.kill()
    thread.disk.crash(Loss.ALL)
    assert thread.disk.names("data") == ["new"]
