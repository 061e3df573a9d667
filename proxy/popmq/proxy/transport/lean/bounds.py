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
STREAM_BOUNDS = ("streams", "message_bytes", "incoming_bytes", "slow_request", "unsent")
# Why a client's TLS, or its lack, is refused.
TLS_REFUSALS = ("off", "certificate", "handshake", "record", "alpn", "plain")


@dataclass(slots=True)
class LeanCounters:
    """Of one transport; `connections`, `streams` and `incoming_bytes` also go down."""

    connections: int = 0
    streams: int = 0
    incoming_bytes: int = 0  # of requests that are not complete, decompressed
    calls: int = 0
    idle_closed: int = 0
    aged: int = 0  # connections that reached lean.max_age_ms
    faults: int = 0  # connections that broke the protocol
    cut_off: Counter[str] = field(default_factory=Counter)
    tls_refused: Counter[str] = field(default_factory=Counter)
