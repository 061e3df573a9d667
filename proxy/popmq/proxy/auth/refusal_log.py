"""RefusalLog: refusals as lines of the audit log, summed per (user, address, reason) and second.

A caller that is refused a thousand times a second writes one line, not a thousand.
"""

import logging
from collections import Counter

from popmq.proxy.auth.identity import AccessRefused
from popmq.proxy.rpc.metrics import ProxyMetrics

audit = logging.getLogger("popmq.audit")

SUMS_LIMIT = 1_000  # of one second; what is beyond is one more line

_Key = tuple[str, str, str, str, str, bool]
_OTHERS: _Key = ("", "", "others", "", "", False)


class RefusalLog:
    def __init__(self, metrics: ProxyMetrics) -> None:
        self._metrics = metrics
        self._sums: Counter[_Key] = Counter()

    def add(self, refusal: AccessRefused, host: str, *, observed: bool) -> None:
        counts = self._metrics.auth_observed if observed else self._metrics.auth_refused
        counts[refusal.reason] += 1
        key = (refusal.user, host, refusal.reason, refusal.entry, str(refusal), observed)
        if key not in self._sums and len(self._sums) >= SUMS_LIMIT:
            key = _OTHERS
        self._sums[key] += 1

    def flush(self) -> None:
        """Once a second."""
        sums, self._sums = self._sums, Counter()
        for (user, host, reason, entry, why, observed), count in sums.items():
            extra = {
                "user": user,
                "address": host,
                "reason": reason,
                "entry": entry,
                "why": why,
                "count": count,
            }
            audit.info("would be refused" if observed else "refused", extra=extra)
