"""What several brokers say about timers, as one answer."""

from popmq.common.protocol.messaging_payloads import RecallResult
from popmq.common.wire import admin_pb2

# From what counts least to what counts most.
_RANKS = ("", RecallResult.NOT_FOUND, RecallResult.ALREADY_VISIBLE, RecallResult.DONE)


def join_recall(reply: admin_pb2.RecallReply, part: admin_pb2.RecallReply) -> None:
    """Done at one broker is done: the others may never have had the message, or have moved it."""
    reply.outcome = max(reply.outcome, part.outcome, key=_rank)


def join_reschedule(reply: admin_pb2.RescheduleReply, part: admin_pb2.RescheduleReply) -> None:
    if _rank(part.outcome) > _rank(reply.outcome):
        reply.outcome, reply.due_ms = part.outcome, part.due_ms


def join_timers(reply: admin_pb2.ListTimersReply, part: admin_pb2.ListTimersReply) -> None:
    reply.timers.extend(part.timers)
    reply.timers.sort(key=lambda timer: (timer.due_ms, timer.position, timer.broker))


def join_forecast(
    reply: admin_pb2.ForecastTimersReply, part: admin_pb2.ForecastTimersReply
) -> None:
    topics = {topic.topic: topic for topic in reply.pending}
    for pending in part.pending:
        if (topic := topics.get(pending.topic)) is None:
            topic = reply.pending.add(topic=pending.topic)
        topic.count += pending.count
    reply.pending.sort(key=lambda pending: pending.topic)
    buckets = {bucket.within_ms: bucket for bucket in reply.buckets}
    for added in part.buckets:
        if (bucket := buckets.get(added.within_ms)) is None:
            bucket = reply.buckets.add(within_ms=added.within_ms)
        bucket.count += added.count
    reply.buckets.sort(key=lambda bucket: (bucket.within_ms < 0, bucket.within_ms))
    known = [due_ms for due_ms in (reply.next_due_ms, part.next_due_ms) if due_ms]
    reply.next_due_ms = min(known, default=0)


def _rank(outcome: str) -> int:
    return _RANKS.index(outcome) if outcome in _RANKS else 0
