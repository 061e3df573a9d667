"""Mistakes planted into buffered check points."""

from dataclasses import replace

import pytest

from popmq.broker.deliveries.check_point_buffer import CheckPointBuffer
from popmq.broker.deliveries.pop_check_point import PopCheckPoint
from popmq.broker.meta.offset_record import OffsetRecord

Patch = pytest.MonkeyPatch


def check_point_written_before_those_in_front(patch: Patch) -> None:
    def wrong(self: CheckPointBuffer, ck: PopCheckPoint) -> None:
        self.before_batch()
        if ck.buffered:
            self._write_one(ck)

    patch.setattr(CheckPointBuffer, "write", wrong)


def durable_check_point_before_the_buffered(patch: Patch) -> None:
    patch.setattr(CheckPointBuffer, "write_queue", lambda self, place: None)


def buffered_ack_answered_before_it_is_durable(patch: Patch) -> None:
    patch.setattr(
        CheckPointBuffer,
        "when_acks_confirmed",
        lambda self, callback: self._store.when_log_confirmed(callback),
    )


def acks_written_with_their_group_commit_only(patch: Patch) -> None:
    """Whoever looks at what is acked before that does not see them."""
    before_batch, write_acks = CheckPointBuffer.before_batch, CheckPointBuffer.flush_acks

    def wrong(self: CheckPointBuffer) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(CheckPointBuffer, "flush_acks", write_acks)
            before_batch(self)

    patch.setattr(CheckPointBuffer, "flush_acks", lambda self: None)
    patch.setattr(CheckPointBuffer, "before_batch", wrong)


def ack_answered_before_its_record(patch: Patch) -> None:
    patch.setattr(
        CheckPointBuffer,
        "when_acks_confirmed",
        lambda self, callback: (
            self._replies.append(callback)
            if self._acked
            else self._store.when_log_confirmed(callback)
        ),
    )


def buffered_acks_not_written(patch: Patch) -> None:
    patch.setattr(CheckPointBuffer, "_commit", lambda self, place, acked: None)


def commit_without_the_acks_of_its_check_points(patch: Patch) -> None:
    """The next broker does not know them, and refuses an ack that was done."""
    encode = OffsetRecord.encode
    patch.setattr(OffsetRecord, "encode", lambda self: encode(replace(self, acked=())))


def snapshot_without_the_buffer(patch: Patch) -> None:
    patch.setattr(CheckPointBuffer, "write_all", CheckPointBuffer.before_batch)
