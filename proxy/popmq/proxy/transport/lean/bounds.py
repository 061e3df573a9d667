"""What a connection may cost, counted where it is cut off: rates, counters, shared totals.

The limits are settings of section `lean`; each name that is counted here is a label of
`popmq_proxy_lean_cut_off_total` (docs/concepts/transport.md, "Bounds").
"""

from collections import Counter
from dataclasses import dataclass, field

# What a connection is cut off for, and what one stream is.
CONNECTION_BOUNDS = (
    "connections",
    "handshake",
    "header_bytes",
    "header_frames",
    "resets",
    "control_frames",
    "empty_frames",
    "unread",
    "stalled",
    "silent",
)
STREAM_BOUNDS = ("streams", "message_bytes", "incoming_bytes", "unsent")
# Why a client's TLS, or its lack, is refused.
TLS_REFUSALS = ("off", "certificate", "handshake", "record", "alpn", "plain")


@dataclass(slots=True)
class LeanCounters:
    """Of one transport; `connections`, `streams` and `incoming_bytes` also go down."""

    connections: int = 0
    streams: int = 0
    incoming_bytes: int = 0  # of messages that are not complete
    calls: int = 0
    idle_closed: int = 0
    aged: int = 0  # connections that reached lean.max_age_ms
    faults: int = 0  # connections that broke the protocol
    cut_off: Counter[str] = field(default_factory=Counter)
    tls_refused: Counter[str] = field(default_factory=Counter)


class TokenBucket:
    """A bucket of tokens: `per_s` on average, and up to `burst` at once."""

    __slots__ = ("_burst", "_filled_ms", "_per_s", "_tokens")

    def __init__(self, per_s: int, burst: int) -> None:
        self._per_s = per_s
        self._burst = burst
        self._tokens = float(burst)
        self._filled_ms = 0

    def take(self, now_ms: int) -> bool:
        """Whether one more is within the rate."""
        passed_ms = now_ms - self._filled_ms
        if passed_ms > 0:
            self._filled_ms = now_ms
            self._tokens = min(self._burst, self._tokens + passed_ms * self._per_s / 1000)
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True
