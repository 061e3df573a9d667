"""DiskGuard: what a broker does while its disk runs full (D10).

Sends stop at `store.disk_stop_percent`; receives, acks and check points go on into segments
that were allocated ahead, so that a full cluster can be drained.  When even those are nearly
used up, everything that writes is refused; nothing is ever lost by a write that did not fit.
"""

import errno
import logging
from collections.abc import Callable

from popmq.broker.log.commit_log import CommitLog
from popmq.common.disk import NO_FILE_LIMIT, Disk, is_shortage
from popmq.common.errors import TooManyRequests
from popmq.common.settings.settings import StoreSettings
from popmq.common.step_loop import Flusher

logger = logging.getLogger(__name__)

LOOK_MS = 1_000
# Left over for records that nobody asked for: revivals, epochs, topics.
_MARGIN_BYTES = 256 << 10


def used_percent(free_bytes: int, total_bytes: int) -> float:
    return 100 * (1 - free_bytes / total_bytes) if total_bytes else 100.0


class DiskGuard:
    def __init__(
        self,
        disk: Disk,
        folder: str,
        log: CommitLog,
        settings: StoreSettings,
        flusher: Flusher,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._disk = disk
        self._folder = folder
        self._log = log
        self._settings = settings
        self._flusher = flusher
        self._on_failure = on_failure
        self._look_due_ms = 0
        self._reserving = False
        self._cannot_reserve = False
        self.over_quota = False  # the room is there, and a quota refuses it
        self.index_blocked = False  # units of queues could not be written
        self.used_percent = 0.0
        self.free_bytes = 0
        self.free_files = NO_FILE_LIMIT
        self.sends_refused = 0
        self.writes_refused = 0

    @property
    def full(self) -> bool:
        """Whether sends are refused."""
        return (
            self.used_percent >= self._settings.disk_stop_percent
            or self._cannot_reserve
            or self.index_blocked
        )

    @property
    def copies_unlimited(self) -> bool:
        """Whether segments can be reserved: any number of copies is allowed until that changes."""
        return not self._cannot_reserve

    @property
    def copies_allowed(self) -> bool:
        """Whether revivals may copy bodies: not into the last reserved segment."""
        return not self._cannot_reserve or self._log.reserved >= 1

    def check_send(self) -> None:
        """Raise TooManyRequests while the disk is too full for new messages."""
        if not self.full:
            return
        self.sends_refused += 1
        raise TooManyRequests(
            f"{self.refusal}: receives and acks go on; free some space and try again"
        )

    @property
    def refusal(self) -> str:
        """Why sends are refused, while they are."""
        if self.used_percent >= self._settings.disk_stop_percent:
            return (
                f"the disk of {self._folder} is {self.used_percent:.1f} % used, sends stop at "
                f"{self._settings.disk_stop_percent} % (store.disk_stop_percent)"
            )
        if not self.free_files:
            return (
                f"the disk of {self._folder} has no inode for another file (df -i), "
                f"{self.free_bytes} bytes are free"
            )
        if self.over_quota:
            return f"a quota of the disk of {self._folder} is used up (quota -s, repquota)"
        return (
            f"the disk of {self._folder} has {self.free_bytes} bytes free, too few for the "
            f"next segment of {self._settings.segment_bytes} (store.segment_bytes)"
        )

    def check_write(self) -> None:
        """Raise TooManyRequests when not even small records fit any more."""
        if not self._cannot_reserve or self._log.room >= _MARGIN_BYTES:
            return
        self.writes_refused += 1
        raise TooManyRequests(
            f"the disk of {self._folder} is full and the reserved segments are used up "
            "(store.reserved_segments): free some space and try again"
        )

    def check_block(self, size: int) -> None:
        """Raise TooManyRequests when a block fits into no segment, and none can be made."""
        if not self._cannot_reserve or self._log.room >= size:
            return
        self.writes_refused += 1
        raise TooManyRequests(
            f"the disk of {self._folder} is full: {size} bytes of the master's log do not fit into "
            f"the {self._log.room} that are left of this one's segments; free some space"
        )

    def step(self, now_ms: int) -> int:
        """Look at the disk and allocate ahead. Returns 1 when a segment is being allocated."""
        if self._reserving:
            return 0
        looking = now_ms >= self._look_due_ms
        if looking:
            self._look_due_ms = now_ms + LOOK_MS
            self._look()
        if self._log.reserved >= self._settings.reserved_segments:
            self._cannot_reserve = self.over_quota = False
            return 0
        if self._cannot_reserve and not looking:
            return 0
        self._reserving = True
        position, segments = self._log.end, self._settings.reserved_segments
        self._flusher.submit(lambda: self._log.reserve(position, segments), self._reserved)
        return 1

    def _look(self) -> None:
        was_full = self.full
        self.free_bytes, total = self._disk.space(self._folder)
        self.free_files = self._disk.free_files(self._folder)
        self.used_percent = used_percent(self.free_bytes, total)
        if self.full != was_full:
            self._tell()

    def _reserved(self, error: BaseException | None) -> None:
        self._reserving = False
        was_full = self.full
        if is_shortage(error):
            self._cannot_reserve = True
            self.over_quota = error.errno == errno.EDQUOT
        elif error is not None:
            self._on_failure(error)
            return
        else:
            self._cannot_reserve = self.over_quota = False
        if self.full != was_full:
            self._tell()

    def _tell(self) -> None:
        logger.warning(
            "sends are refused" if self.full else "sends go on",
            extra={
                "why": self.refusal if self.full else "",
                "used_percent": round(self.used_percent, 1),
                "free_bytes": self.free_bytes,
                "reserved_segments": self._log.reserved,
            },
        )
