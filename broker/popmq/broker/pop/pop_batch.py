"""Batch: what one pop collects, within its count, its bytes, and what it may look at."""

from popmq.broker.filter.message_filter import MessageFilter
from popmq.broker.log.queue_unit import QueueUnit
from popmq.common.disk import ColdRead, is_shortage
from popmq.common.protocol.pop_reply import PopReplyBuilder
from popmq.common.topics import TopicConfig

SCAN_UNITS = 800  # index units that one pop looks through for its filter, in all queues together
# Messages, and their bytes, that one pop reads in all for a filter on their content: a few
# milliseconds of a loop that others need.
LOOK_UNITS = 256
LOOK_BYTES = 512 << 10


class PopBatch:
    __slots__ = (
        "bytes_left",
        "cold",
        "deliveries",
        "limit",
        "position",
        "read_bytes_left",
        "read_units_left",
        "refusal",
        "remaining",
        "scan_units",
        "shortage",
    )

    def __init__(self, limit: int, reply_bytes: int) -> None:
        self.limit = limit
        self.bytes_left = reply_bytes
        self.read_units_left = LOOK_UNITS
        self.read_bytes_left = LOOK_BYTES
        self.scan_units = SCAN_UNITS
        self.deliveries = PopReplyBuilder()
        self.position = 0  # of the last one
        self.remaining = 0
        self.refusal = ""
        self.shortage = ""  # why a queue could not be opened
        self.cold: list[ColdRead] = []

    @property
    def full(self) -> bool:
        return self.deliveries.count >= self.limit

    def pass_over(self, topic: TopicConfig, queue_id: int, error: OSError) -> None:
        """A queue that cannot be opened for want of room or of a descriptor. What other queues
        gave is delivered all the same. Raises any other error."""
        if not is_shortage(error):
            raise error
        self.shortage = f"queue {queue_id} of {topic.name}: {error}; try again"

    def share(self, queues: int) -> int:
        """Units to look through in the next one of so many queues: what is left is divided evenly,
        and what a short queue does not use is the others'."""
        return max(1, self.scan_units // queues)

    def take_all(self, units: list[QueueUnit], room: int) -> list[QueueUnit]:
        """The first of the units, within room and bytes.

        The first message of a reply always fits, whatever its size.
        """
        left = self.bytes_left - sum([size for _, size, _ in units])
        if left >= 0 and len(units) <= room:
            self.bytes_left = left
            return units
        taken: list[QueueUnit] = []
        for unit in units[:room]:
            if unit.size > self.bytes_left and (taken or self.deliveries.count):
                break
            taken.append(unit)
            self.bytes_left -= unit.size
        return taken

    def choose(
        self, units: list[QueueUnit], offset: int, requested: MessageFilter, room: int
    ) -> tuple[list[tuple[int, QueueUnit]], int]:
        """The units to deliver with their offsets, and how many units were passed in all.

        The first message of a reply always fits, whatever its size.
        """
        taken: list[tuple[int, QueueUnit]] = []
        first = not self.deliveries.count
        for passed, unit in enumerate(units):
            if not requested.may_match_hash(unit.tag_hash):
                continue
            if len(taken) == room or (unit.size > self.bytes_left and not first):
                return taken, passed
            first = False
            taken.append((offset + passed, unit))
            self.bytes_left -= unit.size
        return taken, len(units)

    def can_read(self, work: int) -> int:
        """How many units this pop may still look at, where each costs `work`; the first always."""
        untouched = self.read_units_left == LOOK_UNITS
        return max(int(untouched), self.read_units_left // work) if self.read_bytes_left > 0 else 0

    def units_to_read(self, units: list[QueueUnit], work: int) -> list[QueueUnit]:
        """The first of the units, within the bytes that this pop may still read."""
        size = 0
        for count, unit in enumerate(units):
            size += unit.size
            if size > self.read_bytes_left and (count or self.read_units_left < LOOK_UNITS):
                units, size = units[:count], size - unit.size
                break
        self.read_units_left -= len(units) * work
        self.read_bytes_left -= size
        return units
