"""RelocatedBodies: where persistence/retention.py moved the bodies of messages in flight to.

A function of the log's MOVED records, apart from what nobody holds any more; few or none.
"""

from popmq.broker.deliveries.pop_check_point import PopCheckPoint
from popmq.broker.log.queue_unit import QueueUnit
from popmq.broker.persistence.retention import LiveBody

Identity = tuple[int, int, int]  # topic, queue, offset of a message


class RelocatedBodies:
    def __init__(self) -> None:
        self._units: dict[Identity, QueueUnit] = {}

    def apply(self, body: LiveBody) -> None:
        """A body was appended again. Several groups may hold it, so the entry stays until a
        round of retention finds that none does (`keep`)."""
        self._units[(body.topic_id, body.queue_id, body.queue_offset)] = body.unit

    def get(self, identity: Identity) -> QueueUnit | None:
        """Where the message is now, if retention moved it."""
        return self._units.get(identity)

    def of_member(self, ck: PopCheckPoint, member: int) -> QueueUnit | None:
        return self._units.get((ck.topic_id, ck.queue_id, ck.offset_of(member)))

    def keep(self, held: set[Identity]) -> None:
        """Forget where bodies went that no group holds any more."""
        for identity in [identity for identity in self._units if identity not in held]:
            del self._units[identity]

    def items(self) -> list[tuple[Identity, QueueUnit]]:
        return list(self._units.items())
