"""FailureWaits: after each failed authentication a source waits twice as long."""

FIRST_MS, LONGEST_MS = 500, 30_000
FORGOTTEN_MS = 120_000  # after the last failure
LIMIT = 4_096


class FailureWaits:
    """By source, such as an address; the table is bounded, and the oldest failures go first.

    Invariant: the sources are in the order of their last failures.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._failures: dict[str, tuple[int, int]] = {}  # how many in a row, and when the last

    def __len__(self) -> int:
        return len(self._failures)

    def left_ms(self, source: str, now_ms: int) -> int:
        """How long the source has to wait; 0: not at all."""
        failures = self._failures.get(source)
        if failures is None:
            return 0
        count, last_ms = failures
        return max(0, last_ms + wait_ms(count) - now_ms)

    def failed(self, source: str, now_ms: int) -> None:
        count, last_ms = self._failures.pop(source, (0, now_ms))
        if now_ms - last_ms > FORGOTTEN_MS:
            count = 0
        self._failures[source] = (count + 1, now_ms)
        while len(self._failures) > self._limit:
            del self._failures[next(iter(self._failures))]

    def succeeded(self, source: str) -> None:
        self._failures.pop(source, None)


def wait_ms(failures: int) -> int:
    """After so many in a row."""
    return min(LONGEST_MS, FIRST_MS << min(failures - 1, 10))
