"""TAKE_TIMERS: pending timers that come from another broker group (docs/concepts/timer.md, "Moved
to another broker group"); and DRAIN, which begins, ends or describes that of this one."""

from popmq.broker.core.broker import Broker
from popmq.broker.diagnostics.lag import unread_lites
from popmq.broker.handlers.request import Request
from popmq.broker.timer.incoming_timers import IncomingTimer
from popmq.common.errors import Code, Refused, Unavailable
from popmq.common.wire import admin_pb2 as pb
from popmq.common.wire import replication_pb2 as replication


def take_timers(broker: Broker, request: Request) -> bytes:
    """Store what is not here. A refusal may come in the middle: asked again, it goes on there.

    Also while this group is drained itself: it was promised that somebody takes them, and it
    hands them on like its own.
    """
    sent = replication.TakeTimersRequest.FromString(request.body)
    own = broker.settings.cluster.name, broker.settings.broker.name
    if sent.cluster != own[0] or sent.group == own[1] or not sent.origin:
        raise Refused(
            Code.BAD_REQUEST,
            f"broker group {own[1]} of cluster {own[0]} takes no timers of broker group "
            f"{sent.group[:100]!r} of cluster {sent.cluster[:100]!r}",
        )
    broker.store.check_admission()
    for timer in sent.timers:
        if not broker.timers.incoming_timers.has_taken(sent.origin, timer.move):
            _check_topic(broker, timer)
            broker.timers.incoming_timers.store_migrated(
                sent.origin,
                IncomingTimer(
                    timer.move,
                    timer.topic_id,
                    timer.queue_id,
                    timer.tag_hash,
                    timer.due_ms,
                    timer.head,
                    timer.properties,
                ),
            )
    return replication.TakeTimersReply().SerializeToString()


def _check_topic(broker: Broker, timer: replication.TakeTimersRequest.Timer) -> None:
    """A topic that is not copied yet would be taken for one that was deleted."""
    if timer.topic and broker.registry.topic_by_id(timer.topic_id) is None:
        if broker.registry.owner:
            broker.registry.request_topic_copy(timer.topic)
        raise Unavailable(
            f"broker group {broker.settings.broker.name} has no topic {timer.topic} with the "
            f"number {timer.topic_id} yet: ask again"
        )


def drain(broker: Broker, request: Request) -> bytes:
    """Said twice it is the same."""
    asked = pb.DrainRequest.FromString(request.body)
    if asked.look:
        return _drain_reply(broker)
    requested = not asked.undo
    if requested and not broker.registry.owner:
        raise Refused(
            Code.PRECONDITION_FAILED,
            f"broker group {broker.settings.broker.name} owns the topics and consumer groups of "
            "the cluster: it cannot be drained",
        )
    if broker.registry.draining != requested:
        broker.registry.set_draining(requested)
    return _drain_reply(broker)


def _drain_reply(broker: Broker) -> bytes:
    """The encoded DrainReply, as of now."""
    departures = broker.timers.outgoing_timers
    subscribed = broker.lites.subscriptions.topics()
    unread = unread_lites(broker.store, broker.registry, broker.table, subscribed)
    return pb.DrainReply(
        status=pb.Status(code=Code.OK, message="OK"),
        draining=broker.registry.draining,
        timers=broker.timers.state.pending_total,
        leaving=len(departures.leaving),
        moved=departures.moved,
        waits=departures.waits_for,
        counted=True,
        transactions=len(broker.transactions.table.pending),
        unread=[pb.DrainReply.Unread(topic=topic.name, messages=count) for topic, count in unread],
    ).SerializeToString()
