"""What pop keeps alive: the bodies of messages in flight, however long that takes."""

from collections.abc import Iterator, Sequence

from popmq.broker.deliveries.check_point_table import CheckPointTable
from popmq.broker.deliveries.pop_check_point import PopCheckPoint, member_bits
from popmq.broker.deliveries.relocated_bodies import Identity
from popmq.broker.log.queue_unit import QueueUnit
from popmq.broker.persistence.retention import EVERYTHING, LiveBody
from popmq.broker.store.message_store import MessageStore

_PER_PIECE = 64


class InFlightBodies:
    """Implements `retention.LiveBodies`."""

    def __init__(self, store: MessageStore, table: CheckPointTable) -> None:
        self._store = store
        self._table = table
        self._before: dict[Identity, QueueUnit] = {}  # where bodies were that a round moves

    def unit_of(self, ck: PopCheckPoint, member: int, *, wait: bool = True) -> QueueUnit:
        """Where the member's message is now; ColdRead instead of a wait for the disk."""
        return self.unit_at((ck.topic_id, ck.queue_id, ck.offset_of(member)), wait=wait)

    def unit_at(self, identity: Identity, *, wait: bool = True) -> QueueUnit:
        topic_id, queue_id, offset = identity
        moved = self.moved_to(identity)
        if moved is not None:
            return moved
        (unit,) = self._store.queue(topic_id, queue_id).units(offset, 1, wait=wait)
        return unit

    def moved_to(self, identity: Identity) -> QueueUnit | None:
        """Where retention moved the message to, if it did; until that record is on the disk,
        where it was before: that stays until then."""
        moved = self._table.moved.get(identity)
        if moved is not None and moved.position >= self._store.confirmed:
            return self._before.get(identity, moved)
        return moved

    @property
    def keeps_from(self) -> int:
        return EVERYTHING

    def move(self, body: LiveBody) -> None:
        self._store.relocate(body)
        self._before[body[:3]] = body.unit

    def bodies_below(self, position: int) -> Iterator[Sequence[LiveBody]]:
        """Each body once, whichever groups hold it.

        Only first check points are looked at: a change gives a member a check point of its own
        at any moment, but the first one lives until all its members have ended.  Check points
        made from now on read above the cut.
        """
        self._before.clear()  # of the round before, whose moves are on the disk
        held: set[Identity] = set()
        roots = [ck for ck in self._table if ck.first_check_point is None]
        for at in range(0, len(roots), _PER_PIECE):
            piece = []
            for ck in roots[at : at + _PER_PIECE]:
                bodies = self._bodies_of(ck, held)
                piece += [body for body in bodies if body.unit.position < position]
            yield piece
        # Last, because what was in flight above may have come back to its place meanwhile.
        yield from self._returned_below(position, held)
        self._table.moved.keep(held)

    def _returned_below(self, position: int, held: set[Identity]) -> Iterator[Sequence[LiveBody]]:
        """Messages of FIFO groups that wait in place for their next attempt, or are parked."""
        positions = []
        for (_, topic_id, queue_id), progress in self._table.fifo_places():
            positions += [(topic_id, queue_id, offset) for offset in progress.attempts]
        positions += [
            (topic_id, 0, offset) for topic_id, offset in self._table.parked.parked_queues()
        ]
        identities = [identity for identity in dict.fromkeys(positions) if identity not in held]
        held.update(identities)
        for at in range(0, len(identities), _PER_PIECE):
            there = self._store.dispatch.has_topic  # else it was deleted since the piece before
            some = [identity for identity in identities[at : at + _PER_PIECE] if there(identity[0])]
            # What was parked just now is in its queue when it is confirmed; it is at the log's end.
            entered = [
                queue_offset
                for queue_offset in some
                if queue_offset[2] < self._store.queue(*queue_offset[:2]).count
            ]
            bodies = [
                LiveBody(*queue_offset, self.unit_at(queue_offset)) for queue_offset in entered
            ]
            yield [body for body in bodies if body.unit.position < position]

    def _bodies_of(self, ck: PopCheckPoint, held: set[Identity]) -> Iterator[LiveBody]:
        if self._table.find(ck.epoch, ck.sequence) is not ck:
            return
        for member in member_bits(ck.members & ~(ck.acked | ck.revived)):
            identity = (ck.topic_id, ck.queue_id, ck.offset_of(member))
            if identity not in held:
                held.add(identity)
                yield LiveBody(*identity, self.unit_of(ck, member))
