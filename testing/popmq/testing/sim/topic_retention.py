"""Retention of a topic of its own, in a run: what it passes over is old enough, what it leaves
in front is not, and it is counted.

Looks at the queues right after each step of the broker's expiry, when the old messages can
still be read.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from popmq.broker.core.broker import Broker
from popmq.broker.deliveries.pop_check_point import member_bits
from popmq.broker.log.consume_queue import ConsumeQueue
from popmq.broker.log.message_reader import DamagedMessage
from popmq.broker.log.queue_unit import QueueUnit
from popmq.broker.meta.topic_expiry import TopicExpiry
from popmq.common.topics import TopicConfig
from popmq.testing.harness.sometimes import Sometimes, StateCounts
from popmq.testing.oracle.delivery_oracle import Oracle
from popmq.testing.sim.retention import RetentionChecks
from popmq.testing.sim.simulated_broker import SimulatedBroker

BRIEF_MS = (600_000, 2_400_000)


class TopicRetention:
    def __init__(
        self,
        machine: SimulatedBroker,
        oracle: Oracle,
        tally: StateCounts,
        retention: RetentionChecks,
    ) -> None:
        self._machine = machine
        self._oracle = oracle
        self._tally = tally
        self._retention = retention
        self._low: dict[tuple[int, int], int] = {}

    def on_start(self) -> bool:
        """After a good start; returns whether what was passed over may come again."""
        broker, passed_over = self._machine.broker, any(self._low.values())
        self._low.clear()
        self._after_step()
        watched = _WatchedExpiry(broker, self._after_step)
        broker.expiries = replace(broker.expiries, topics=watched)
        return passed_over

    def check_fronts(self) -> None:
        """After hours without a fault: nothing too old is in front of a queue."""
        self._machine.run_steps()  # the round that the last step began
        log_time = self._machine.broker.store.log_time
        for config, queue_id, queue in self._queues():
            first = queue.units(queue.min_offset, 1)
            oldest_ms = log_time.oldest_ms(config.retention_ms)
            if first and self._stored_ms(first[0]) < oldest_ms:
                self._complain(
                    f"{config.name}/{queue_id}: offset {queue.min_offset} was stored before "
                    f"{oldest_ms}, kept for {config.retention_ms} ms"
                )

    # -- inside

    def _after_step(self) -> None:
        raised = False
        for config, queue_id, queue in self._queues():
            before = self._low.get((config.id, queue_id), 0)
            if queue.min_offset > before:
                raised = True
                self._passed_over(config, queue_id, queue, before)
            self._low[(config.id, queue_id)] = queue.min_offset
        if raised:
            self._retention.count_gaps()

    def _queues(self) -> Iterator[tuple[TopicConfig, int, ConsumeQueue]]:
        broker = self._machine.broker
        for config in broker.registry.topics() if not self._oracle.log_lost else ():
            for queue_id in range(config.queues if config.retention_ms else 0):
                yield config, queue_id, broker.store.queue(config.id, queue_id)

    def _passed_over(
        self, config: TopicConfig, queue_id: int, queue: ConsumeQueue, before: int
    ) -> None:
        """Judge those that a cut did not take already."""
        starts_at = self._machine.broker.store.dispatch.log_start
        held = self._held(config.id, queue_id)
        for offset, unit in enumerate(queue.units(before, queue.min_offset - before), before):
            copy = (config.id, queue_id, offset)
            if unit.position < starts_at or copy in self._retention.gone:
                continue
            sent = self._retention.expire(config, copy, unit)
            self._tally.hit(Sometimes.TOPIC_EXPIRED)
            self._tally.hit(Sometimes.TOPIC_EXPIRED_HELD, int(offset in held))
            age_ms = self._machine.ran_ms - (sent.asked_ran_ms if sent else 0)
            if sent is not None and age_ms < config.retention_ms:
                self._complain(
                    f"message {sent.number} of {config.name} is passed over at an age of "
                    f"{age_ms} ms, kept for {config.retention_ms}"
                )

    def _held(self, topic_id: int, queue_id: int) -> set[int]:
        """Offsets in flight."""
        return {
            ck.offset_of(member)
            for ck in self._machine.broker.table
            if (ck.topic_id, ck.queue_id) == (topic_id, queue_id)
            for member in member_bits(ck.waiting)
        }

    def _stored_ms(self, unit: QueueUnit) -> int:
        (message,) = self._machine.broker.store.reader.read([unit])
        return 0 if isinstance(message, DamagedMessage) else message.header.log_ms

    def _complain(self, what: str) -> None:
        self._oracle.report_violation("topic-retention", what)


class _WatchedExpiry(TopicExpiry):
    """The broker's expiry, looked at after each of its steps."""

    def __init__(self, broker: Broker, after: Callable[[], None]) -> None:
        super().__init__(broker.store, broker.registry, broker.lookup)
        self._after = after

    def step(self, *, now_ms: int) -> int:
        done = super().step(now_ms=now_ms)
        self._after()
        return done
