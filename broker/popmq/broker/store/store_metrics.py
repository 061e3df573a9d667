"""What the store counts; plain integers on the hot path, read by `broker/metrics.py`."""

from dataclasses import dataclass


@dataclass(slots=True)
class StoreMetrics:
    records: int = 0
    bytes: int = 0
    flushes: int = 0
    flushed_bytes: int = 0
    torn_bytes: int = 0
    recovered_records: int = 0
    flush_ms: int = 0
    slow_flushes: int = 0
