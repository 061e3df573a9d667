"""What several brokers say about timers, as one answer."""

from popmq.common.protocol.messaging_payloads import RecallResult
from popmq.common.wire import admin_pb2

# From what counts least to what counts most.
_RANKS = ("", RecallResult.NOT_FOUND, RecallResult.ALREADY_VISIBLE, RecallResult.DONE)


def join_recall(found: admin_pb2.RecallReply, part: admin_pb2.RecallReply) -> None:
    """Done at one broker is done: the others may never have had the message, or have moved it."""
    found.outcome = max(found.outcome, part.outcome, key=_rank)


def join_reschedule(found: admin_pb2.RescheduleReply, part: admin_pb2.RescheduleReply) -> None:
    if _rank(part.outcome) > _rank(found.outcome):
        found.outcome, found.due_ms = part.outcome, part.due_ms


def join_timers(found: admin_pb2.ListTimersReply, part: admin_pb2.ListTimersReply) -> None:
    found.timers.extend(part.timers)
    found.timers.sort(key=lambda timer: (timer.due_ms, timer.position, timer.broker))


def join_forecast(
    found: admin_pb2.ForecastTimersReply, part: admin_pb2.ForecastTimersReply
) -> None:
    topics = {one.topic: one for one in found.pending}
    for pending in part.pending:
        if (topic := topics.get(pending.topic)) is None:
            topic = found.pending.add(topic=pending.topic)
        topic.count += pending.count
    found.pending.sort(key=lambda pending: pending.topic)
    buckets = {one.within_ms: one for one in found.buckets}
    for added in part.buckets:
        if (bucket := buckets.get(added.within_ms)) is None:
            bucket = found.buckets.add(within_ms=added.within_ms)
        bucket.count += added.count
    found.buckets.sort(key=lambda bucket: (bucket.within_ms < 0, bucket.within_ms))
    known = [due_ms for due_ms in (found.next_due_ms, part.next_due_ms) if due_ms]
    found.next_due_ms = min(known, default=0)


def _rank(outcome: str) -> int:
    return _RANKS.index(outcome) if outcome in _RANKS else 0
