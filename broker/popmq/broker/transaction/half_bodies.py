"""What transactions keep alive: the messages of all that are pending, however old."""

from collections.abc import Iterator, Sequence

from popmq.broker.persistence.retention import EVERYTHING, LiveBody
from popmq.broker.store.message_store import MessageStore
from popmq.broker.transaction.transaction_table import TransactionTable
from popmq.common import topics

_PER_PIECE = 512


class HalfBodies:
    """Implements `retention.LiveBodies`."""

    def __init__(self, store: MessageStore, table: TransactionTable) -> None:
        self._store = store
        self._table = table

    @property
    def keeps_from(self) -> int:
        return EVERYTHING

    def bodies_below(self, position: int) -> Iterator[Sequence[LiveBody]]:
        """Halves that are stored from now on are above the cut."""
        offsets = list(self._table.pending)
        for at in range(0, len(offsets), _PER_PIECE):
            half_messages = map(self._table.pending.get, offsets[at : at + _PER_PIECE])
            yield [
                LiveBody(topics.HALF_TOPIC_ID, 0, half.offset, half.unit)
                for half in half_messages
                if half is not None and half.unit.position < position
            ]

    def move(self, body: LiveBody) -> None:
        if body.queue_offset in self._table.pending:  # it may have ended since it was found
            self._store.relocate(body)
