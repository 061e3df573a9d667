"""ReadAhead: old messages that the next pop will want come into memory beside this one's."""

import logging

from popmq.broker.store.message_store import MessageStore
from popmq.common.disk import ColdRead

logger = logging.getLogger(__name__)


class ReadAhead:
    """One read at a time: group commits wait behind those of the disk."""

    def __init__(self, store: MessageStore) -> None:
        self._store = store
        self._busy = False

    def fetch(self, cold: ColdRead) -> None:
        """Start the read, unless one is under way."""
        if self._busy:
            return
        self._busy = True

        def read() -> None:
            cold.warm()

        self._store.readers.submit(read, self._done)

    def _done(self, error: BaseException | None) -> None:
        self._busy = False
        if error is not None:  # a pop that finds nothing else answers with it
            logger.error("cannot read from the disk", extra={"reason": str(error)})
