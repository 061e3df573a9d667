"""From what the admin service answers to the values of model.py."""

import json
from collections.abc import Sequence

from popmq.cli.consumer_offsets import joined
from popmq.cli.lookup import message_of
from popmq.cli.messages import body_text
from popmq.common.quantities import format_duration
from popmq.common.wire import admin_pb2 as admin
from popmq.common.wire import controller_pb2 as pb
from popmq.console.model import (
    BrokerGroup,
    BrokerNode,
    ConnectedClient,
    CountKey,
    DeadLetter,
    GroupStory,
    LagRow,
    MessageStory,
    Step,
    StoredMessage,
    TimerRow,
)


def lag_row(row: admin.Lag, now_ms: int) -> LagRow:
    return LagRow(
        group=row.group,
        topic=row.topic,
        ready=row.ready,
        in_flight=row.in_flight,
        delayed=row.delayed,
        blocked=row.blocked,
        retries=row.retries,
        expired=row.expired,
        oldest_age_ms=max(0, now_ms - row.oldest_ready_ms) if row.oldest_ready_ms else None,
    )


def lag_rows(reply: admin.LagReply) -> list[LagRow]:
    """One for each group and topic; those whose oldest message waits for longest come first."""
    rows = [lag_row(row, reply.now_ms) for row in joined(reply)]
    return sorted(rows, key=lambda row: (-(row.oldest_age_ms or 0), -row.lag, row.group))


def total_row(group: str, rows: Sequence[LagRow]) -> LagRow:
    """All topics of a group together."""
    return LagRow(
        group=group,
        topic="",
        ready=sum(row.ready for row in rows),
        in_flight=sum(row.in_flight for row in rows),
        delayed=sum(row.delayed for row in rows),
        blocked=sum(row.blocked for row in rows),
        retries=sum(row.retries for row in rows),
        expired=sum(row.expired for row in rows),
        oldest_age_ms=max(
            (r.oldest_age_ms for r in rows if r.oldest_age_ms is not None), default=None
        ),
    )


def counts_of(reply: admin.LagReply) -> dict[CountKey, int]:
    counts = {(row.broker, "", row.topic): row.stored for row in reply.stored}
    counts.update({(row.broker, row.group, row.topic): row.delivered for row in reply.lags})
    return counts


def dead_letters_of(reply: admin.LagReply) -> dict[str, int]:
    """By group, without those that were redriven."""
    counts: dict[str, int] = {}
    for row in reply.dead_letters:
        counts[row.group] = counts.get(row.group, 0) + row.stored - row.redriven
    return {group: count for group, count in sorted(counts.items()) if count > 0}


def broker_groups(reply: pb.ListReplicasReply) -> list[BrokerGroup]:
    return [
        BrokerGroup(state.group, state.trouble, [_node(state, member) for member in state.members])
        for state in reply.groups
    ]


def _node(state: pb.GroupState, member: pb.Member) -> BrokerNode:
    in_sync = (
        member.broker.store_id in state.record.sync_state_set
        if state.HasField("record")
        else member.replicas <= 1
    )
    return BrokerNode(
        node=member.broker.node or state.group,
        role=pb.BrokerRole.Name(member.role).lower().replace("_", " "),
        alive=member.alive,
        in_sync=in_sync,
        draining=member.broker.draining,
        epoch=member.broker.epoch,
        end=member.end,
        confirmed=member.confirmed,
        behind=max(each.end for each in state.members) - member.end,
        silent_ms=member.silent_ms,
        address=member.broker.address,
        tables_differ=bool(member.tables_differ_at),
    )


def topic_settings(topic: admin.Topic) -> dict[str, str]:
    settings = {
        "type": topic.type,
        "queues": str(topic.queues),
        "permission": topic.permission,
        "retention": format_duration(topic.retention_ms) if topic.retention_ms else "the broker's",
        "durability": topic.durability or "disk",
        "broker groups": ", ".join(topic.brokers) or "all",
    }
    if topic.type == "lite":
        settings["lite topics"] = str(topic.lite_topics)
    return settings


def group_settings(group: admin.Group) -> dict[str, str]:
    settings = {
        "type": group.type,
        "most attempts": str(group.max_attempts),
        "starts at": group.start_at,
        "retry": group.retry or "customised",
        "check points": group.check_points or "durable",
    }
    if group.back_off_ms:
        settings["back-off"] = ", ".join(map(format_duration, group.back_off_ms))
    return settings


def connected_client(client: admin.ConnectedClient) -> ConnectedClient:
    last = client.connections[0] if client.connections else admin.ClientConnection()
    return ConnectedClient(
        client_id=client.client_id,
        kind=client.kind,
        language=client.language,
        version=client.version,
        protocol=client.protocol,
        topics=list(client.topics),
        subscriptions=[
            (group.name, subscription.topic, subscription.filter)
            for group in client.groups
            for subscription in group.subscriptions or [admin.ClientSubscription()]
        ],
        address=last.address,
        proxy=last.proxy,
        since_ms=last.since_ms,
        silent_ms=last.silent_ms,
    )


def stored_message(match: admin.FoundMessage) -> StoredMessage:
    message = message_of(match)
    properties = message.system_properties
    return StoredMessage(
        message_id=properties.message_id,
        topic=match.topic,
        broker=match.broker,
        queue_id=match.queue_id,
        queue_offset=match.queue_offset,
        stored_ms=match.stored_ms,
        tag=properties.tag,
        keys=list(properties.keys),
        message_group=properties.message_group,
        properties=dict(message.user_properties),
        body=message.body,
        text=body_text(message),
        record=match.record and json.dumps(json.loads(match.record), ensure_ascii=False),
    )


def message_story(message: admin.ExplainedMessage) -> MessageStory:
    return MessageStory(
        topic=message.topic,
        broker=message.broker,
        queue_id=message.queue_id,
        queue_offset=message.queue_offset,
        stored_ms=message.stored_ms,
        groups=[
            GroupStory(
                group=group.group,
                state=group.state,
                since_ms=group.since_ms,
                until_ms=group.until_ms,
                attempt=group.attempt,
                client=group.client,
                why=group.text,
                next=group.next,
                steps=[
                    Step(proof.what, proof.wall_ms, proof.position, proof.text)
                    for proof in sorted(group.proofs, key=lambda proof: proof.position)
                ],
            )
            for group in message.groups
        ],
    )


def timer_row(timer: admin.Timer) -> TimerRow:
    return TimerRow(
        topic=timer.topic,
        message_id=timer.message_id,
        queue_id=timer.queue_id,
        broker=timer.broker,
        due_ms=timer.due_ms,
        stored_ms=timer.stored_ms,
        state=timer.state,
    )


def dead_letter(letter: admin.DeadLetter) -> DeadLetter:
    match = admin.FoundMessage(
        broker=letter.broker,
        topic=letter.origin_topic,
        queue_id=letter.origin_queue_id,
        queue_offset=letter.origin_offset,
        position=letter.position,
        attempt=letter.attempts,
        head=letter.head,
        properties=letter.properties,
    )
    return DeadLetter(
        broker=letter.broker,
        queue_offset=letter.queue_offset,
        dead_ms=letter.dead_ms,
        attempts=letter.attempts,
        reason=letter.reason,
        origin_topic=letter.origin_topic,
        redriven=letter.redriven,
        message=stored_message(match),
    )
