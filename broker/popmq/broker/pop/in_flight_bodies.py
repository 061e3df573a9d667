"""What pop keeps alive: the bodies of messages in flight, however long that takes."""

from collections.abc import Iterator, Sequence

from popmq.broker.pop.check_point_table import CheckPointTable, Identity
from popmq.broker.pop.pop_check_point import PopCheckPoint, member_bits
from popmq.broker.store.message_store import MessageStore
from popmq.broker.store.retention import Body
from popmq.broker.store.unit_check import Unit

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
        """Each body once, whichever groups hold it.

        Only first check points are looked at: a change gives a member a check point of its own
        at any moment, but the first one lives until all its members have ended.  Check points
        made from now on read above the cut.
        """
        held: set[Identity] = set()
        roots = [ck for ck in self._table if ck.root is None]
        for at in range(0, len(roots), _PER_PIECE):
            piece = []
            for ck in roots[at : at + _PER_PIECE]:
                bodies = self._bodies_of(ck, held)
                piece += [body for body in bodies if body.unit.position < position]
            yield piece
        self._table.keep_moved(held)

    def _bodies_of(self, ck: PopCheckPoint, held: set[Identity]) -> Iterator[Body]:
        if self._table.find(ck.epoch, ck.sequence) is not ck:
            return
        for member in member_bits(ck.members & ~(ck.acked | ck.revived)):
            identity = (ck.topic_id, ck.queue_id, ck.offset_of(member))
            if identity not in held:
                held.add(identity)
                yield Body(*identity, self.unit_of(ck, member))
