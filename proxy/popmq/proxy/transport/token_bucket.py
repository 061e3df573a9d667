"""A rate that lets bursts pass."""


class TokenBucket:
    """A bucket of tokens: `per_s` on average, and up to `burst` at once."""

    __slots__ = ("_burst", "_filled_ms", "_per_s", "_tokens")

    def __init__(self, per_s: int, burst: int) -> None:
        self._per_s = per_s
        self._burst = burst
        self._tokens = float(burst)
        self._filled_ms = 0

    def take(self, now_ms: int) -> bool:
        """Whether one more is within the rate; if so, it counts."""
        if not self.has_any(now_ms):
            return False
        self.spend(1)
        return True

    def has_any(self, now_ms: int) -> bool:
        passed_ms = now_ms - self._filled_ms
        if passed_ms > 0:
            self._filled_ms = now_ms
            self._tokens = min(self._burst, self._tokens + passed_ms * self._per_s / 1000)
        return self._tokens >= 1

    def spend(self, count: int) -> None:
        """Also more than there is: what is owed comes off what is filled in later."""
        self._tokens -= count
