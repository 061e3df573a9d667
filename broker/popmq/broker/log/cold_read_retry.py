"""ColdReadRetry: what is not in memory is read by a thread that may wait; then its reader tries
again (D3)."""

import logging
from collections.abc import Callable

from popmq.common.disk import ColdRead
from popmq.common.errors import Code, PopmqError, Refused
from popmq.common.step_loop import Done, Flusher

logger = logging.getLogger(__name__)


class ColdReadRetry:
    """The cold reads of one reader. `waiting` says how many of them are under way."""

    def __init__(self, readers: Flusher) -> None:
        self._readers = readers
        self.waiting = 0

    def warm(self, cold: ColdRead, then: Done | None = None) -> None:
        """Read, then call `then` on the loop with the error, or None.

        Without `then` the reader looks at `waiting` and tries again: an error shows once more, at
        the read that waits for the disk.
        """
        self.waiting += 1

        def read() -> None:
            cold.warm()

        def done(error: BaseException | None) -> None:
            self.waiting -= 1
            if then is not None:
                then(error)

        self._readers.submit(read, done)

    def retry(
        self, cold: ColdRead, again: Callable[[], None], refuse: Callable[[PopmqError], None]
    ) -> None:
        """Read, then call `again`; or `refuse` when the disk cannot be read."""

        def then(error: BaseException | None) -> None:
            if error is None:
                again()
                return
            log_failure(error)
            refuse(Refused(Code.INTERNAL_ERROR, f"old messages cannot be read: {error}"))

        self.warm(cold, then)


def log_failure(error: BaseException) -> None:
    logger.error("cannot read from the disk", extra={"reason": str(error)})
