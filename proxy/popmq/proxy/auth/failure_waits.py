"""FailureWaits: how long a source address waits after calls whose signature was not good.

The first FREE_FAILURES of a source and access key cost nothing; each one after them doubles a wait,
up to `auth.failure_wait_ms`.  Every access key that a source fails with counts once more for the
source itself, so that guessing names is as slow as guessing secrets.  A user that was verified from
a source never waits there: behind NAT and ingresses many clients have one address.

Always holds: both tables are bounded, and a wait that is refused is not made longer.
"""

import ipaddress
from collections import OrderedDict
from functools import lru_cache

from popmq.common.errors import PopmqError, TooManyRequests

FREE_FAILURES = 4
FIRST_WAIT_MS = 100
KEPT_MS = 900_000  # a failure, and a success
SOURCES_KEPT = 8_192


class _Failures:
    __slots__ = ("count", "last_ms", "until_ms")

    def __init__(self) -> None:
        self.count = 0
        self.last_ms = self.until_ms = 0


class FailureWaits:
    def __init__(self, longest_ms: int) -> None:
        """0: nobody waits."""
        self._longest_ms = longest_ms
        # By source and access key; "" is the source itself.
        self._failures: OrderedDict[tuple[str, str], _Failures] = OrderedDict()
        self._verified: OrderedDict[tuple[str, str], int] = OrderedDict()

    def check(self, host: str, access_key: str, now_ms: int) -> None:
        """Raises TOO_MANY_REQUESTS while the source waits."""
        if not self._failures:
            return
        source = source_of(host)
        if self._is_verified(source, access_key, now_ms):
            return
        for key in ((source, access_key), (source, "")):
            failures = self._failures.get(key)
            if failures is not None and now_ms < failures.until_ms:
                raise self._refusal(host, failures, now_ms)

    def failed(self, host: str, access_key: str, now_ms: int) -> None:
        source = source_of(host)
        if not self._longest_ms or self._is_verified(source, access_key, now_ms):
            return
        if self._count((source, access_key), now_ms) == 1 and access_key:
            self._count((source, ""), now_ms)

    def succeeded(self, host: str, access_key: str, now_ms: int) -> None:
        if not self._longest_ms:
            return
        key = source_of(host), access_key
        self._verified[key] = now_ms
        self._verified.move_to_end(key)
        if len(self._verified) > SOURCES_KEPT:
            self._verified.popitem(last=False)

    def _is_verified(self, source: str, access_key: str, now_ms: int) -> bool:
        at_ms = self._verified.get((source, access_key))
        return at_ms is not None and now_ms - at_ms < KEPT_MS

    def _count(self, key: tuple[str, str], now_ms: int) -> int:
        """The failures of that key, with this one."""
        failures = self._failures.get(key)
        if failures is None or now_ms - failures.last_ms >= KEPT_MS:
            failures = self._failures[key] = _Failures()
        self._failures.move_to_end(key)
        if len(self._failures) > SOURCES_KEPT:
            self._failures.popitem(last=False)
        failures.count += 1
        failures.last_ms = now_ms
        doubled = failures.count - FREE_FAILURES - 1
        if doubled >= 0:
            wait_ms = min(FIRST_WAIT_MS << min(doubled, 20), self._longest_ms)
            failures.until_ms = now_ms + wait_ms
        return failures.count

    def _refusal(self, host: str, failures: _Failures, now_ms: int) -> PopmqError:
        left_s = -(-(failures.until_ms - now_ms) // 1_000)
        return TooManyRequests(
            f"{failures.count} calls from {host or 'this address'} had no good signature: the next "
            f"one is looked at within {left_s} s (auth.failure_wait_ms: {self._longest_ms})"
        )


@lru_cache(maxsize=8_192)
def source_of(host: str) -> str:
    """The address; of IPv6 its network of 64 bits, which a machine has for itself."""
    if ":" not in host:
        return host
    try:
        return str(ipaddress.IPv6Network((host.strip("[]").partition("%")[0], 64), strict=False))
    except ValueError:
        return host
