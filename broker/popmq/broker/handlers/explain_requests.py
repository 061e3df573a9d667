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
    for topic in [only] if only is not None else _topics(broker):
        look = partial(broker.lookup.by_id, topic.id, message_id, wait=False)
        if broker.registry.topic_by_id(topic.id) is None:
            continue  # deleted meanwhile
        findings = yield from read(look)
        for message in findings.messages:
            if len(reply.messages) >= MESSAGES_LIMIT:
                reply.incomplete = f"these are the newest {MESSAGES_LIMIT} of that id; name a topic"
                break
            reported_message = yield from _message(
                broker, message_id, StoredCopy(message, topic), group
            )
            for proof in reversed(timers.proofs(message)):
                for explanation in reported_message.groups:
                    explanation.proofs.insert(0, proof)
            reply.messages.append(reported_message)
        if findings.incomplete:
            reply.incomplete = findings.incomplete
    waiting = yield from timers.undelivered(group)
    reply.messages.extend(waiting[: MESSAGES_LIMIT - len(reply.messages)])
    return reply.SerializeToString()


def _topics(broker: Broker) -> list[TopicConfig]:
    """Those of users, and then the retries of pull consumers, which are messages of their own.

    What other internal topics have is part of the explanation of a first copy.
    """
    all_topics = list(broker.registry.topics())
    retries = [topic for topic in all_topics if topics.group_of_pull_retry(topic.name)]
    return [topic for topic in all_topics if not topics.is_internal_topic(topic.name)] + retries


def _message(
    broker: Broker, message_id: str, first: StoredCopy, group: SubscriptionGroup | None
) -> ResumableRead[pb.ExplainedMessage]:
    message: StoredMessage = first.message
    header = message.header
    reported_message = pb.ExplainedMessage(
        broker=broker.settings.broker.name,
        topic=first.topic.name,
        queue_id=header.queue_id,
        queue_offset=header.queue_offset,
        stored_ms=header.wall_ms,
        position=header.position,
    )
    groups = [group] if group else broker.diagnostics.explainer.readers(first.topic)[:GROUPS_LIMIT]
    for subscription in groups:
        explained = yield from broker.diagnostics.explainer.explain(first, subscription, message_id)
        reported_message.groups.append(_to_wire(broker, explained))
    return reported_message


def _to_wire(broker: Broker, explanation: Explanation) -> pb.Explained:
    return pb.Explained(
        group=explanation.group,
        state=explanation.state.value,
        since_ms=explanation.since_ms,
        until_ms=broker.wall_ms_of(explanation.until_log_ms),
        attempt=explanation.attempt,
        client=broker.deliveries.clients.name(explanation.client) if explanation.client else "",
        text=explanation.text,
        next=explanation.next_step_text,
        proofs=[
            pb.Proof(
                what=proof.what, position=proof.position, wall_ms=proof.wall_ms, text=proof.text
            )
            for proof in explanation.proofs
        ],
    )
