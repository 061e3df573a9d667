"""EXPLAIN: finds the message by its id, in every topic unless one is named, and tells its story
for each group."""

from functools import partial

from popmq.broker.core.broker import Broker
from popmq.broker.diagnostics.explanation import Explanation, StoredCopy
from popmq.broker.handlers.request import Request
from popmq.broker.handlers.timer_explanation import TimerExplainer
from popmq.broker.operations.resumable_reads import ResumableRead, read
from popmq.common import topics
from popmq.common.errors import Code, Refused
from popmq.common.record.message import StoredMessage
from popmq.common.topics import SubscriptionGroup, TopicConfig
from popmq.common.wire import admin_pb2 as pb

ID_LIMIT = 1_024  # characters
MESSAGES_LIMIT = 8  # of one id
GROUPS_LIMIT = 256


def explain(broker: Broker, request: Request) -> ResumableRead[bytes]:
    asked = pb.ExplainRequest.FromString(request.body)
    if not asked.message_id or len(asked.message_id) > ID_LIMIT:
        raise Refused(
            Code.ILLEGAL_MESSAGE_ID,
            f"a message id of {len(asked.message_id)} characters: it takes 1 to {ID_LIMIT}",
        )
    group = broker.registry.group(asked.group) if asked.group else None
    topic = None
    if asked.topic:
        topics.check_readable_topic_name(asked.topic)
        topic = broker.registry.topic(asked.topic)
    return _explain(broker, asked.message_id, topic, group)


def _explain(
    broker: Broker,
    message_id: str,
    only: TopicConfig | None,
    group: SubscriptionGroup | None,
) -> ResumableRead[bytes]:
    reply = pb.ExplainReply(status=pb.Status(code=Code.OK, message="OK"))
    timers = yield from TimerExplainer.find(broker, message_id, only)
    everywhere = [one for one in broker.registry.topics() if not one.name.startswith("%")]
    for topic in [only] if only is not None else everywhere:
        look = partial(broker.lookup.by_id, topic.id, message_id, wait=False)
        if broker.registry.topic_by_id(topic.id) is None:
            continue  # deleted meanwhile
        findings = yield from read(look)
        for message in findings.messages:
            if len(reply.messages) >= MESSAGES_LIMIT:
                reply.incomplete = f"these are the newest {MESSAGES_LIMIT} of that id; name a topic"
                break
            told = yield from _message(broker, message_id, StoredCopy(message, topic), group)
            for proof in reversed(timers.proofs(message)):
                for one in told.groups:
                    one.proofs.insert(0, proof)
            reply.messages.append(told)
        if findings.incomplete:
            reply.incomplete = findings.incomplete
    waiting = yield from timers.told(group)
    reply.messages.extend(waiting[: MESSAGES_LIMIT - len(reply.messages)])
    return reply.SerializeToString()


def _message(
    broker: Broker, message_id: str, first: StoredCopy, group: SubscriptionGroup | None
) -> ResumableRead[pb.ExplainedMessage]:
    message: StoredMessage = first.message
    header = message.header
    told = pb.ExplainedMessage(
        broker=broker.settings.broker.name,
        topic=first.topic.name,
        queue_id=header.queue_id,
        queue_offset=header.queue_offset,
        stored_ms=header.wall_ms,
        position=header.position,
    )
    groups = [group] if group else broker.explainer.readers(first.topic)[:GROUPS_LIMIT]
    for one in groups:
        explained = yield from broker.explainer.explain(first, one, message_id)
        told.groups.append(_to_wire(broker, explained))
    return told


def _to_wire(broker: Broker, told: Explanation) -> pb.Explained:
    return pb.Explained(
        group=told.group,
        state=told.state.value,
        since_ms=told.since_ms,
        until_ms=broker.wall_ms_of(told.until_log_ms),
        attempt=told.attempt,
        client=broker.clients.name(told.client) if told.client else "",
        text=told.text,
        next=told.next_step_text,
        proofs=[
            pb.Proof(what=one.what, position=one.position, wall_ms=one.wall_ms, text=one.text)
            for one in told.proofs
        ],
    )
