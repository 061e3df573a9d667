"""Checks that look into the broker: what no client sees, or sees too late.

The committed offset (I9), the counts (I16), where the log ends after a start, what stands
behind that end on the disk, and whether every unit of an index points at its own record.
"""

from popmq.broker.deliveries.pop_check_point import FIFO, member_bits
from popmq.broker.deliveries.queue_progress import FifoProgress
from popmq.broker.log.message_reader import DamagedMessage
from popmq.common import topics
from popmq.common.record.message import HEADER_SIZE, BadRecord, RecordKind, check_record
from popmq.testing.harness.invariants import broken_invariant
from popmq.testing.oracle.client_history import MessageHistory
from popmq.testing.oracle.delivery_oracle import Oracle
from popmq.testing.sim.simulated_broker import SimulatedBroker

_Place = tuple[int, int, int]


class StoreChecks:
    def __init__(self, machine: SimulatedBroker, oracle: Oracle) -> None:
        self._machine = machine
        self._oracle = oracle
        self._committed: dict[_Place, int] = {}
        self.kept_attempts: set[tuple[_Place, int]] = set()

    def forget_offsets(self) -> None:
        """What expired is passed over without a record, and redone after a start."""
        self._committed.clear()

    def after_start(self) -> None:
        """The log ends where it may; what a filter passed over is no record and is redone,
        and so is what a buffered group took and did not ack."""
        self._machine.broker.diagnostics.audit.on_scrape()  # counts along, from here on
        soft = {r.group.name for r in self._oracle.readers if r.tags or r.group.buffered}
        groups = self._machine.broker.registry
        for place in list(self._committed):
            group = groups.group_by_id(place[0])
            if group is None or group.name in soft:
                del self._committed[place]
        machine, ends = self._machine, self._machine.ends
        if self._oracle.log_lost:
            return
        size = machine.settings.store.segment_bytes
        # The last bytes of a segment are passed over when no header fits into them.
        latest = ends.appended + (size - ends.appended % size) % size
        if latest - ends.appended >= HEADER_SIZE:
            latest = ends.appended
        if not ends.confirmed <= machine.recovered <= latest:
            self._oracle.report_violation(
                "log-end",
                f"the log ended at {machine.recovered} for this start, the last process had "
                f"confirmed {ends.confirmed} and appended {ends.appended}",
            )

    def invariants(self) -> None:
        """Whatever an action did, each table agrees with itself."""
        if broken := broken_invariant(self._machine.broker):
            self._oracle.report_violation("I19 tables-agree", broken)
        for place, progress in self._machine.broker.table.progress_items():
            if isinstance(progress, FifoProgress) and progress.attempts:
                self._check_attempts(place, progress)

    def _check_attempts(self, place: _Place, progress: FifoProgress) -> None:
        """A message that is over waits for no attempt.

        Allowed, and counted: one that a filter, an expiry or damage passed over. That is no
        record, so its attempts stay until a check point says that all below it was over.
        """
        for offset in progress.attempts:
            if offset >= progress.committed and progress.finished.end_of(offset) == offset:
                continue
            self.kept_attempts.add((place, offset))
            if (life := self._life_of(place, offset)) is not None:
                self._oracle.report_violation(
                    "I19 tables-agree",
                    f"{place}: {offset} was ended by its consumer and waits for another attempt",
                    life,
                )

    def _life_of(self, place: _Place, offset: int) -> MessageHistory | None:
        """What the group did with the message, if it certainly ended it."""
        group_id, topic_id, queue_id = place
        registry = self._machine.broker.registry
        group, topic = registry.group_by_id(group_id), registry.topic_by_id(topic_id)
        if group is None or topic is None or self._oracle.log_lost:
            return None
        for sent in self._oracle.messages:
            if (sent.topic.name, sent.queue_id, sent.offset) != (topic.name, queue_id, offset):
                continue
            for reader in self._oracle.readers:
                life = reader.lives.get(sent.number)
                mine = reader.group.name == group.name and reader.topic is sent.topic
                if life is None or life.loose or not (mine and reader.alive):
                    continue
                if life.acked == 2 or life.rejected == 2:
                    return life
        return None

    def tail_is_clean(self) -> None:
        """Right after recovery: nothing that was cut can be found again (RULES, not caught)."""
        disk, end = self._machine.disk, self._machine.recovered
        folder = f"{self._machine.settings.broker.data}/commitlog"
        size = self._machine.settings.store.segment_bytes
        for name in disk.names(folder)[-2:]:
            start = int(name)
            behind = disk.durable(f"{folder}/{name}")[max(0, end - start) :]
            if end < start + size and behind.strip(b"\0"):
                self._oracle.report_violation("tail", f"bytes behind the log's end {end} in {name}")

    def at_rest(self) -> None:
        """I9 and I16 while nothing is on its way."""
        broker = self._machine.broker
        if self._oracle.log_lost or broker.store.confirmed != broker.store.end:
            return
        if not any(ck.rolled_back and ck.waiting for ck in broker.table):
            self._oracle.all_undone()
        in_flight = 0
        seen: dict[_Place, int] = {}
        for place, progress in broker.table.progress_items():
            in_flight += progress.in_flight
            seen[place] = progress.committed
        for place, before in self._committed.items():
            group, topic, queue = place
            known = broker.registry.group_by_id(group) and broker.registry.topic_by_id(topic)
            if known and seen.get(place, 0) < before:
                self._oracle.report_violation(
                    "I9 offset-monotonic",
                    f"group {group}, topic {topic}, queue {queue}: committed {before}, now "
                    f"{seen.get(place, 0)}",
                )
        self._committed = seen
        for ck in broker.table:
            open_members = ck.members & ~(ck.acked | ck.revived)
            if open_members and not ck.flags & FIFO:
                lowest = ck.offset_of(member_bits(open_members)[0])
                if lowest < seen[ck.place]:
                    self._oracle.report_violation(
                        "I9 offset-monotonic",
                        f"{ck.place}: committed {seen[ck.place]}, {lowest} is in flight",
                    )
        audit = broker.diagnostics.audit
        audit.on_scrape()
        if audit.unaccounted:
            self._oracle.report_violation(
                "I16 counts-true",
                f"the audit misses {audit.unaccounted} messages: {audit.balances}",
            )
        waiting = sum(ck.waiting.bit_count() for ck in broker.table)
        if not in_flight == broker.table.in_flight == waiting:
            self._oracle.report_violation(
                "I16 counts-true",
                f"in flight: queues say {in_flight}, the table {broker.table.in_flight}, "
                f"check points {waiting}",
            )

    def at_end(self, lasting: set[str]) -> None:
        """After the drain: nothing in flight, everything committed, every index true.

        `lasting` names the groups and topics that certainly exist; of others nothing is known.
        """
        broker = self._machine.broker
        groups = {group.id for group in broker.registry.groups() if group.name in lasting}
        all_topics = list(broker.registry.topics())
        known = {config.id for config in all_topics if _base(config.name) in lasting}
        all_known = len(known) == len(all_topics)
        if all_known and (broker.table.in_flight or len(broker.table)):
            self._oracle.report_violation(
                "I16 counts-true",
                f"after the drain {broker.table.in_flight} messages and {len(broker.table)} check "
                "points are left",
            )
        for (group, topic, queue), progress in broker.table.progress_items():
            count = broker.store.queue(topic, queue).count
            if progress.committed != count and group in groups and topic in known:
                self._oracle.report_violation(
                    "I16 counts-true",
                    f"group {group}, topic {topic}, queue {queue}: {count} stored, "
                    f"{progress.committed} committed after the drain",
                )
        for config in broker.registry.topics():
            for queue_id in range(config.queues):
                self._check_index(config.id, queue_id)
        for queue_id in range(topics.REVIVE_QUEUES):
            self._check_revive_queue(queue_id)

    def stored(self, name: str) -> int:
        """Messages in a topic's queues that did not expire."""
        broker = self._machine.broker
        config = broker.registry.topic(name)
        queues = [broker.store.queue(config.id, q) for q in range(config.queues)]
        return sum(queue.count - queue.min_offset for queue in queues)

    def padded_segments(self) -> int:
        """Segments of the log that end in a PADDING record."""
        disk, folder = self._machine.disk, f"{self._machine.settings.broker.data}/commitlog"
        padded = 0
        for name in disk.names(folder):
            file = disk.open(f"{folder}/{name}")
            data = file.read(file.size(), 0)
            at = size = 0
            while (size := int.from_bytes(data[at : at + 4], "big")) and at + size < len(data):
                at += size
            padded += size > 0 and data[at + 9] == RecordKind.PADDING
        return padded

    def _check_index(self, topic_id: int, queue_id: int) -> None:
        store = self._machine.broker.store
        queue = store.queue(topic_id, queue_id)
        messages = store.reader.read(queue.units(queue.min_offset, queue.count))
        for offset, message in enumerate(messages, queue.min_offset):
            if isinstance(message, DamagedMessage):
                reason = message.reason
            else:
                header = message.header
                reason = f"{header.topic_id}/{header.queue_id}/{header.queue_offset}"
            if reason != f"{topic_id}/{queue_id}/{offset}":
                self._oracle.report_violation(
                    "index", f"unit {topic_id}/{queue_id}/{offset} leads to {reason}"
                )
                return

    def _check_revive_queue(self, queue_id: int) -> None:
        queue = self._machine.broker.store.queue(topics.REVIVE_TOPIC_ID, queue_id)
        data = queue.raw(queue.min_offset, queue.count)
        at = 0
        for offset in range(queue.min_offset, queue.count):
            try:
                position = int.from_bytes(data[at + 16 : at + 24], "big")
                header = check_record(data, at, position)
                good = (header.queue_id, header.queue_offset) == (queue_id, offset)
                at += header.size
            except BadRecord:
                good = False
            if not good:
                self._oracle.report_violation(
                    "index", f"unit {offset} of revive queue {queue_id} is bad"
                )
                return


def _base(name: str) -> str:
    """The topic that a retry or dead-letter topic belongs to; the group for dead letters."""
    if topics.is_retry_topic(name):
        return name.partition("+")[2]
    return name.removeprefix(topics.DLQ_PREFIX)
