"""Mistakes planted into retention, of the store and of a topic."""

from collections.abc import Iterator
from typing import Any

import pytest

from popmq.broker.core.record_applier import RecordApplier
from popmq.broker.deliveries.in_flight_bodies import InFlightBodies
from popmq.broker.deliveries.order_info import OrderInfo
from popmq.broker.deliveries.parked_keys import ParkedKeys
from popmq.broker.log.consume_queue import ConsumeQueue
from popmq.broker.log.dispatch import Dispatch
from popmq.broker.persistence import retention
from popmq.broker.persistence.checkpoint_scheduler import CheckpointScheduler
from popmq.broker.persistence.log_time import LogTime
from popmq.broker.persistence.retention import Retention
from popmq.broker.persistence.snapshot_scheduler import SnapshotScheduler
from popmq.broker.pop.pop_service import PopService
from popmq.broker.store.lookup import Lookup
from popmq.broker.store.message_store import MessageStore
from popmq.common.record.message import RecordKind

Patch = pytest.MonkeyPatch


def live_body_not_moved(patch: Patch) -> None:
    patch.setattr(MessageStore, "relocate", lambda self, body: None)


def deleted_above_the_older_snapshot(patch: Patch) -> None:
    patch.setattr(SnapshotScheduler, "older_position", property(lambda self: self.position))


def minimum_not_raised_before_the_moves(patch: Patch) -> None:
    patch.setattr(Dispatch, "log_starts_at", lambda self, position: None)


def deleted_before_the_moves_are_confirmed(patch: Patch) -> None:
    move_some = Retention._move_some

    def wrong(self: Retention, pieces: Any) -> int:
        done = move_some(self, pieces)
        self._wait_until = min(self._wait_until, 1)
        return done

    patch.setattr(Retention, "_move_some", wrong)


def log_start_not_durable_before_the_cut(patch: Patch) -> None:
    """Only the next checkpoint says it."""

    def wrong(self: CheckpointScheduler, position: int) -> None:
        self.log_start = position

    patch.setattr(CheckpointScheduler, "log_starts_at", wrong)


def moved_record_ignored_at_recovery(patch: Patch) -> None:
    apply = RecordApplier.apply

    def wrong(self: RecordApplier, record: Any) -> None:
        if record.header.kind != RecordKind.MOVED:
            apply(self, record)

    patch.setattr(RecordApplier, "apply", wrong)


def numbers_begin_at_0_in_a_rebuilt_index(patch: Patch) -> None:
    def wrong(self: Dispatch) -> None:
        self.rebuilding = False
        self._next_offset = {key: self.queue(*key).count for key in self._next_offset}

    patch.setattr(Dispatch, "rebuilt", wrong)


def messages_expire_too_early(patch: Patch) -> None:
    patch.setattr(retention, "HOUR_MS", 2_000_000)


def topic_expires_too_early(patch: Patch) -> None:
    by_log_time = Lookup.by_log_time

    def wrong(self: Lookup, topic_id: int, queue_id: int, log_ms: int) -> int:
        return by_log_time(self, topic_id, queue_id, log_ms + 300_000)

    patch.setattr(Lookup, "by_log_time", wrong)


def downtime_is_an_age(patch: Patch) -> None:
    patch.setattr(LogTime, "oldest_ms", lambda self, age_ms: self.clock.now_ms() - age_ms)


def topic_keeps_its_oldest(patch: Patch) -> None:
    """Its queue's minimum offset stays once it was moved."""
    raise_minimum = ConsumeQueue.raise_minimum

    def wrong(self: ConsumeQueue, offset: int) -> None:
        if not self.min_offset:
            raise_minimum(self, offset)

    patch.setattr(ConsumeQueue, "raise_minimum", wrong)


def expired_by_topic_not_counted(patch: Patch) -> None:
    take = PopService._take

    def wrong(
        self: PopService, params: Any, topic: Any, queue_id: int, batch: Any, queues: int
    ) -> None:
        before = self.metrics.expired
        take(self, params, topic, queue_id, batch, queues)
        if topic.retention_ms:
            self.metrics.expired = before

    patch.setattr(PopService, "_take", wrong)


def what_came_back_is_forgotten_by_the_next_round(patch: Patch) -> None:
    between = OrderInfo.waiting_between
    patch.setattr(OrderInfo, "waiting_between", lambda self, start, end: between(self, 0, end))


def parked_bodies_are_forgotten(patch: Patch) -> None:
    returned = InFlightBodies._returned_below

    def wrong(self: InFlightBodies, position: int, held: set[Any]) -> Iterator[Any]:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(ParkedKeys, "parked_queues", lambda self: iter(()))
            pieces = list(returned(self, position, held))
        return iter(pieces)

    patch.setattr(InFlightBodies, "_returned_below", wrong)
