"""What the proxy counts: plain integers, which become readings of the table at each scrape."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from popmq.common.errors import PopmqError
from popmq.common.metric_table.table import reading
from popmq.common.observability import Histogram, Metric

REQUEST_MS = (
    *(1, 2, 5, 10, 20, 50, 100, 200, 500),
    *(1_000, 2_000, 5_000, 10_000, 20_000, 30_000, 60_000),
)


@dataclass(slots=True)
class ProxyMetrics:
    """`waiting_receives` and `open_streams` go up and down; everything else only up."""

    now_s: Callable[[], float] = time.monotonic  # costs a third of what a Clock does
    sends: int = 0  # messages stored
    receives: int = 0  # ReceiveMessage calls
    received: int = 0  # messages handed to clients
    pulls: int = 0  # PullMessage calls
    pulled: int = 0  # messages handed to pull consumers
    acks: int = 0  # entries answered OK
    changes: int = 0  # invisible times changed
    refused: Counter[int] = field(default_factory=Counter)  # by code
    auth_refused: Counter[str] = field(default_factory=Counter)  # by reason
    auth_observed: Counter[str] = field(default_factory=Counter)  # would be, with auth.mode on
    transaction_checks: int = 0  # handed to producers
    admin_changes: Counter[str] = field(default_factory=Counter)  # that were audited, by call
    foreign_good_byes: int = 0  # NotifyClientTermination from another address than the client's
    lite_notices: int = 0  # lite topics that consumers were told to forget
    open_streams: int = 0  # Telemetry
    waiting_receives: int = 0
    long_polling: int = 0  # receives that were ready to wait
    short_polling_hits: int = 0  # those of them that a look at the broker groups answered
    pops_with_notify: int = 0  # those that waited at all broker groups at once
    plain_polls: int = 0  # those that waited at one, beside many others
    calls_by_path: Counter[tuple[str, str]] = field(default_factory=Counter)  # lanes/call_lane.py
    took: dict[str, Histogram] = field(default_factory=dict)  # by method

    def refuse(self, error: PopmqError) -> None:
        self.refused[int(error.code)] += 1

    def taken(self, method: str) -> Histogram:
        """Milliseconds that calls of this method take."""
        return self.took.setdefault(method, Histogram(REQUEST_MS, divisor=1_000))


def proxy_metrics(counts: ProxyMetrics) -> list[Metric]:
    return [
        reading("proxy_sends", counts.sends),
        reading("proxy_receives", counts.receives),
        reading("proxy_received", counts.received),
        reading("proxy_pulls", counts.pulls),
        reading("proxy_pulled", counts.pulled),
        reading("proxy_acks", counts.acks),
        reading("proxy_changes", counts.changes),
        reading("proxy_transaction_checks", counts.transaction_checks),
        reading("proxy_foreign_good_byes", counts.foreign_good_byes),
        reading("proxy_lite_notices", counts.lite_notices),
        reading("proxy_open_streams", counts.open_streams),
        reading("proxy_waiting_receives", counts.waiting_receives),
        reading("proxy_is_long_polling", counts.long_polling),
        reading("proxy_is_short_polling_hit", counts.short_polling_hits),
        reading("proxy_pop_with_notify", counts.pops_with_notify),
        reading("proxy_plain_polls", counts.plain_polls),
        *(reading("proxy_request_seconds", took, name) for name, took in counts.took.items()),
        *(
            reading("proxy_lane_calls", count, *name_and_path)
            for name_and_path, count in counts.calls_by_path.items()
        ),
        *(
            reading("proxy_admin_changes", count, call)
            for call, count in counts.admin_changes.items()
        ),
        *(reading("proxy_auth_refused", count, why) for why, count in counts.auth_refused.items()),
        *(
            reading("proxy_auth_observed", count, why)
            for why, count in counts.auth_observed.items()
        ),
        *(reading("proxy_refused", count, str(code)) for code, count in counts.refused.items()),
    ]
