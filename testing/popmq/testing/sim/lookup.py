"""Lookups in a run: what stands in the log is found by its names, its place and its time, and
nothing else is (docs/concepts/store.md, "The key index").

Looks at one message of so many, at others each time, while nothing is on its way.
"""

from collections.abc import Iterator

from popmq.broker.deliveries.pop_check_point import member_bits
from popmq.broker.index.message_keys import ID, names_in
from popmq.broker.log.message_reader import DamagedMessage
from popmq.broker.log.queue_unit import QueueUnit
from popmq.broker.store.lookup import MESSAGES_LIMIT
from popmq.common import topics
from popmq.common.errors import Refused
from popmq.common.record.message import StoredMessage
from popmq.common.topics import TopicConfig
from popmq.testing.harness.sometimes import Sometimes, StateCounts
from popmq.testing.oracle.client_history import ResourceIncarnation
from popmq.testing.oracle.delivery_oracle import Oracle
from popmq.testing.sim.simulated_broker import SimulatedBroker


class LookupChecks:
    def __init__(
        self,
        machine: SimulatedBroker,
        oracle: Oracle,
        tally: StateCounts,
        places: dict[str, ResourceIncarnation | None],
    ) -> None:
        self._machine = machine
        self._oracle = oracle
        self._tally = tally
        self._places = places  # the topics that clients know of
        self._turn = 0

    def look(self, share: int) -> None:
        """One message of `share` in each queue, and every body in flight that was moved."""
        broker = self._machine.broker
        if self._oracle.log_lost or broker.store.confirmed != broker.store.end:
            return
        self._turn += 1
        for config in broker.registry.topics():
            for queue_id in range(config.queues):
                self._look_into(config, queue_id, share)
        for config, queue_id, offset, unit in self._moved():
            message = self._read(config, unit)
            if message is not None:
                self._check_names(config, queue_id, offset, message)
                self._tally.hit(Sometimes.MOVED_FOUND)

    def _look_into(self, config: TopicConfig, queue_id: int, share: int) -> None:
        store = self._machine.broker.store
        queue = store.queue(config.id, queue_id)
        units = queue.units(0, queue.count)
        stored_ms: dict[int, int] = {}
        for offset in range(self._turn % share, len(units), share):
            if units[offset].position < store.index.start:
                continue
            message = self._read(config, units[offset])
            if message is None:
                return
            self._check_names(config, queue_id, offset, message)
            self._check_place(config, queue_id, offset, message)
            if offset >= queue.min_offset:
                stored_ms[offset] = message.header.wall_ms
        if stored_ms:
            self._check_time(config, queue_id, stored_ms)

    def _moved(self) -> Iterator[tuple[TopicConfig, int, int, QueueUnit]]:
        broker = self._machine.broker
        for ck in broker.table:
            config = broker.registry.topic_by_id(ck.topic_id)
            for member in member_bits(ck.waiting):
                unit = broker.table.moved.of_member(ck, member)
                if config is not None and unit is not None:
                    yield config, ck.queue_id, ck.offset_of(member), unit

    def _read(self, config: TopicConfig, unit: QueueUnit) -> StoredMessage | None:
        (message,) = self._machine.broker.store.reader.read([unit])
        if isinstance(message, DamagedMessage):
            self._complain(f"{config.name}: {unit} leads to {message.reason}")
            return None
        return message

    # -- by id and key

    def _check_names(
        self, config: TopicConfig, queue_id: int, offset: int, message: StoredMessage
    ) -> None:
        lookup = self._machine.broker.lookup
        for kind, raw in names_in(message.properties):
            try:
                name = raw.decode()
            except UnicodeDecodeError:
                continue  # nobody can ask for it
            lookup_result = (lookup.by_id if kind == ID else lookup.by_key)(config.id, name)
            places = {
                (message.header.queue_id, message.header.queue_offset)
                for message in lookup_result.messages
            }
            missing = (queue_id, offset) not in places and len(
                lookup_result.messages
            ) < MESSAGES_LIMIT
            what = f"{config.name} by {'id' if kind == ID else 'key'} {name}"
            if missing:
                self._complain(f"{what}: not {queue_id}/{offset}, but {sorted(places)}")
            if lookup_result.incomplete and len(lookup_result.messages) < MESSAGES_LIMIT:
                self._complain(f"{what}: {lookup_result.incomplete}")
            for position in lookup_result.messages:
                self._check_own(config, what, (kind, raw), position)
            self._tally.hit(Sometimes.FOUND_SEVERAL, int(len(places) > 1))

    def _check_own(
        self, config: TopicConfig, what: str, name: tuple[int, bytes], message: StoredMessage
    ) -> None:
        """What was found is of that topic, with that name, and as it was sent."""
        number = int(message.head[:6]) if message.head[:6].isdigit() else -1
        sent = self._oracle.messages[number] if 0 <= number < len(self._oracle.messages) else None
        mine = (
            sent is not None and sent.head == message.head and sent.properties == message.properties
        )
        base = topics.is_retry_topic(config.name) or topics.is_dead_letter_topic(config.name)
        if sent is None or not mine or name not in names_in(sent.properties):
            self._complain(f"{what}: found {message.head[:40]!r}, which has no such name")
        elif not base and sent.topic is not (self._places.get(config.name) or sent.topic):
            self._complain(f"{what}: found message {number} of another topic")

    # -- by place and time

    def _check_place(
        self, config: TopicConfig, queue_id: int, offset: int, message: StoredMessage
    ) -> None:
        broker = self._machine.broker
        what = f"{config.name} at {queue_id}/{offset}"
        place = self._places.get(config.name)
        sent = self._oracle.sent_at(place, queue_id, offset) if place else None
        if sent is not None and sent.head != message.head:
            self._complain(f"{what}: {message.head[:20]!r}, message {sent.number} was sent there")
        expired = offset < broker.store.queue(config.id, queue_id).min_offset
        try:
            messages = broker.lookup.at(config.id, queue_id, offset).messages
        except Refused:
            messages = []
        if [message.head for message in messages] != ([] if expired else [message.head]):
            self._complain(f"{what}: {len(messages)} messages, expired is {expired}")

    def _check_time(self, config: TopicConfig, queue_id: int, stored_ms: dict[int, int]) -> None:
        """Offset -> time of some messages. Where the clock went back any border will do."""
        store, lookup = self._machine.broker.store, self._machine.broker.lookup
        queue = store.queue(config.id, queue_id)
        wanted_ms = list(stored_ms.values())[len(stored_ms) // 2]
        first = lookup.by_time(config.id, queue_id, wanted_ms)
        around = range(max(queue.min_offset, first - 1), min(queue.count, first + 1))
        if self._machine.clock_went_back:
            messages = [lookup.at(config.id, queue_id, offset).messages[0] for offset in around]
            stored_ms = dict(
                zip(around, (message.header.wall_ms for message in messages), strict=True)
            )
        for offset, at_ms in stored_ms.items():
            if (offset < first) != (at_ms < wanted_ms):
                self._complain(
                    f"{config.name}/{queue_id} by time {wanted_ms}: offset {first}, but {offset} "
                    f"was stored at {at_ms}"
                )

    def _complain(self, what: str) -> None:
        self._oracle.report_violation("lookup", what)
