"""How far a slave that is far behind has got, for logs, metrics and operators."""

import logging

logger = logging.getLogger(__name__)

SAY_EVERY_MS = 10_000


class CatchUpProgress:
    """`active` from a start far behind until the slave has nearly what the master has."""

    def __init__(self, near_bytes: int) -> None:
        self._near_bytes = near_bytes
        self._said_ms = 0
        self.active = False
        self.began_at = 0
        self.position = 0
        self.target = 0
        self.finished = 0

    def begin(self, position: int, target: int, now_ms: int) -> None:
        """A session with the master begins at `position`, its log ends at `target`."""
        if self.active or target - position <= self._near_bytes:
            return
        self.active, self.began_at, self.position, self.target = True, position, position, target
        self._said_ms = now_ms
        logger.info("copying the log", extra={"from_bytes": position, "to_bytes": target})

    def look(self, position: int, target: int, now_ms: int) -> None:
        if not self.active:
            return
        self.position, self.target = position, target
        if target - position <= self._near_bytes:
            self.active = False
            self.finished += 1
            logger.info("copied the log", extra={"from_bytes": self.began_at, "to_bytes": position})
        elif now_ms - self._said_ms >= SAY_EVERY_MS:
            self._said_ms = now_ms
            logger.info(
                "copying the log",
                extra={"bytes": position, "to_bytes": target, "percent": self.percent},
            )

    @property
    def percent(self) -> int:
        whole = self.target - self.began_at
        return 100 * (self.position - self.began_at) // whole if self.active and whole else 100
