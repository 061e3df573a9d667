"""ReadBudget: reports read so many bytes a second, because the event loop has others to serve."""


class ReadBudget:
    """May be overdrawn by one answer; who comes then waits until that is made up for."""

    def __init__(self, bytes_per_second: int) -> None:
        self._rate = bytes_per_second
        self._left = bytes_per_second
        self._at_ms: int | None = None
        self.refused = 0
        self.read_bytes = 0

    def wait_ms(self, now_ms: int) -> int:
        """0: read, and `charge`; else how long to wait."""
        if self._at_ms is not None:
            self._left += (now_ms - self._at_ms) * self._rate // 1_000
        self._at_ms = now_ms
        self._left = min(self._left, self._rate)
        if self._left > 0:
            return 0
        self.refused += 1
        return 1 - self._left * 1_000 // self._rate

    def charge(self, size: int) -> None:
        self._left -= size
        self.read_bytes += size
