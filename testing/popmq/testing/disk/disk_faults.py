"""Faults of a simulated disk: armed one at a time, each strikes once (power: until `crash`)."""

import errno
from collections.abc import Callable
from enum import Enum

from popmq.testing.disk.lying_disk import PowerCut


class FailedPages(Enum):
    """What the page cache does with pages whose fsync failed; POSIX allows either."""

    DROPPED = "dropped"  # they read as before the write
    CLEAN = "clean"  # they read as written, and no later fsync writes them (ext4)


class Demand(Enum):
    """What an operation takes from the machine, and may be refused."""

    SPACE = "space"  # a new name, or blocks that the file does not have yet
    DESCRIPTOR = "descriptor"


class Faults:
    """What is armed, and how far away it is."""

    def __init__(self) -> None:
        self._cut_in: int | None = None
        self._cut_after: tuple[str, int] | None = None
        self._fail_write_in: int | None = None
        self._fail_sync_in: int | None = None
        self._fail_sync_below = ""
        self.failed_pages = FailedPages.DROPPED
        self.budget: int | None = None  # bytes that files may still grow by
        self.sick = False  # an EIO was raised since the last crash
        self.operations = 0  # since the run began
        self.at_operation: Callable[[str], None] | None = None  # hears of each, before a cut there
        # Hears of each demand before its operation, and may raise the OSError of a refusal.
        self.at_demand: Callable[[Demand, str], None] | None = None
        self.fault_hit = ""  # the path at which the power went last

    def cut_at(self, operations: int, *, after_start_of: str = "") -> None:
        """The n-th following operation raises PowerCut, and so does every later one until
        `crash`; with `after_start_of` the count starts when a file in such a folder is made,
        or written from its first byte on."""
        if after_start_of:
            self._cut_after = (after_start_of, operations)
        else:
            self._cut_in = operations

    def fail_write_at(self, writes: int) -> None:
        """The n-th following write puts down a part of its bytes and raises EIO."""
        self._fail_write_in = writes

    def fail_sync_at(self, syncs: int, *, below: str = "") -> None:
        """The n-th following sync of a file in such a folder raises EIO: its bytes never reach
        the platter."""
        self._fail_sync_in, self._fail_sync_below = syncs, below

    def heal(self) -> None:
        """Disarm every fault."""
        self._cut_in = self._cut_after = None
        self._fail_write_in = self._fail_sync_in = self.budget = None

    @property
    def off(self) -> bool:
        """Whether the power is gone."""
        return self._cut_in is not None and self._cut_in < 0

    # -- for SimDisk

    def started(self, path: str) -> None:
        """A file was made, or written from its first byte on."""
        if self._cut_after is not None and self._cut_after[0] in path:
            self._cut_in = self._cut_after[1]
            self._cut_after = None

    def touch(self, path: str) -> None:
        """An operation is under way."""
        if self.at_operation is not None:
            self.at_operation(path)
        self.operations += not self.off
        if self._cut_in is not None:
            self._cut_in -= 1
            if self._cut_in == -1:
                self.fault_hit = path
            if self._cut_in < 0:
                raise PowerCut

    def write_fails(self) -> bool:
        if self._fail_write_in is None:
            return False
        self._fail_write_in -= 1
        return self._fail_write_in == -1

    def sync_fails(self, path: str) -> bool:
        if self._fail_sync_in is None or self._fail_sync_below not in path:
            return False
        self._fail_sync_in -= 1
        return self._fail_sync_in == -1

    def demand(self, demand: Demand, path: str) -> None:
        """An operation needs this; OSError when the machine has none."""
        if self.at_demand is not None:
            self.at_demand(demand, path)

    def spend(self, size: int, path: str) -> None:
        """Raise ENOSPC when the files may not grow by `size` any more."""
        if size <= 0:
            return
        self.demand(Demand.SPACE, path)
        if self.budget is None:
            return
        if size > self.budget:
            raise OSError(errno.ENOSPC, "no space left on the simulated disk")
        self.budget -= size
