"""What pop keeps alive: the bodies of messages in flight, however long that takes."""

from collections.abc import Iterator, Sequence

from popmq.broker.pop.check_point_table import CheckPointTable
from popmq.broker.pop.pop_check_point import PopCheckPoint, member_bits
from popmq.broker.store.consume_queue import Unit
from popmq.broker.store.message_store import MessageStore
from popmq.broker.store.retention import Body

_PER_PIECE = 64


class InFlightBodies:
    """Implements `store.retention.LiveBodies`."""

    def __init__(self, store: MessageStore, table: CheckPointTable) -> None:
        self._store = store
        self._table = table

    def unit_of(self, ck: PopCheckPoint, member: int, *, wait: bool = True) -> Unit:
        """Where the member's message is now; ColdRead instead of a wait for the disk."""
        moved = self._table.moved_body(ck, member)
        if moved is not None:
            return moved
        (unit,) = self._store.queue(ck.topic_id, ck.queue_id).units(
            ck.offset_of(member), 1, wait=wait
        )
        return unit

    def bodies_below(self, position: int) -> Iterator[Sequence[Body]]:
        # Check points made from now on read queues above the cut or ended before it.
        check_points = list(self._table)
        for at in range(0, len(check_points), _PER_PIECE):
            yield [
                body
                for ck in check_points[at : at + _PER_PIECE]
                for body in self._bodies_of(ck, position)
            ]

    def _bodies_of(self, ck: PopCheckPoint, position: int) -> Iterator[Body]:
        if self._table.find(ck.epoch, ck.sequence) is not ck:
            return
        for member in member_bits(ck.waiting):
            unit = self.unit_of(ck, member)
            if unit.position < position:
                yield Body(ck.topic_id, ck.queue_id, ck.offset_of(member), unit)
