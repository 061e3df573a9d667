"""Admission: whether the store may take another message now (D10)."""

from popmq.broker.log.commit_log import CommitLog
from popmq.broker.log.disk_guard import DiskGuard
from popmq.common.errors import Code, Refused, TooManyRequests
from popmq.common.record.message import LARGEST_TOKEN, message_size
from popmq.common.settings.settings import StoreSettings


class Admission:
    def __init__(self, log: CommitLog, guard: DiskGuard, settings: StoreSettings) -> None:
        self._log = log
        self._guard = guard
        self._settings = settings
        self.refused = 0

    def check(self) -> None:
        """Raise TooManyRequests while the disk is full, or too much waits for it."""
        self._guard.check_send()
        pending = self._log.pending_bytes
        if pending > self._settings.max_pending_bytes:
            self.refused += 1
            raise TooManyRequests(
                f"{pending} bytes wait for the disk, the limit is "
                f"{self._settings.max_pending_bytes} (store.max_pending_bytes); try again"
            )

    @property
    def largest_content(self) -> int:
        """How many bytes of head and properties pass `check_size`."""
        return self._settings.segment_bytes - LARGEST_TOKEN - message_size(b"", b"")

    def check_size(self, head: bytes, properties: bytes) -> None:
        """Raise PAYLOAD_TOO_LARGE unless the message, and each later copy of it, can be stored."""
        size = message_size(head, properties)
        if size + LARGEST_TOKEN > self._settings.segment_bytes:
            raise Refused(
                Code.PAYLOAD_TOO_LARGE,
                f"a message of {size} bytes and its retries do not fit a segment of "
                f"{self._settings.segment_bytes} bytes (store.segment_bytes)",
            )
