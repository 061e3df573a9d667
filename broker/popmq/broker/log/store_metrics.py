"""What the store counts; plain integers on the hot path, read by `broker/node/metrics.py`."""

from dataclasses import dataclass, field
from typing import NamedTuple

from popmq.common.observability import Histogram

FLUSH_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 5_000)
FLUSH_RECORDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 5_000)
FLUSH_BYTES = (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)


class EpochLogTime(NamedTuple):
    """A master of that epoch lived at that log time. Times of two lives say nothing together: the
    log may go on at an earlier one."""

    epoch: int = 0
    log_ms: int = 0


NEVER = EpochLogTime()


@dataclass(slots=True)
class StoreMetrics:
    records: int = 0
    bytes: int = 0
    flushes: int = 0
    flushed_bytes: int = 0
    torn_bytes: int = 0
    recovered_records: int = 0
    newest: EpochLogTime = NEVER  # of them
    slow_flushes: int = 0
    disk_failed: bool = False
    flush_ms: Histogram = field(default_factory=lambda: Histogram(FLUSH_MS, divisor=1_000))
    flush_records: Histogram = field(default_factory=lambda: Histogram(FLUSH_RECORDS))
    flush_bytes: Histogram = field(default_factory=lambda: Histogram(FLUSH_BYTES))

    def recovered(self, records: int, newest: EpochLogTime) -> None:
        self.recovered_records, self.newest = records, newest
