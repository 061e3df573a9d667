"""Administration of topics, groups and users: protobuf in, protobuf out (`wire/admin.proto`)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from popmq.broker.core.broker import Broker
from popmq.broker.deliveries.pop_check_point import UnparkAction
from popmq.broker.handlers.request import Request
from popmq.broker.meta.user_changes import apply_change
from popmq.common.back_off import ExponentialBackOff
from popmq.common.errors import Code, Refused
from popmq.common.protocol.user_records import user_record
from popmq.common.topics import (
    CUSTOMISED_BACK_OFF_MS,
    CheckPoints,
    Durability,
    GroupType,
    MessageType,
    Permission,
    StartAt,
    SubscriptionGroup,
    TopicConfig,
    is_group_owned,
    is_internal_topic,
)
from popmq.common.wire import admin_pb2 as pb
from popmq.common.wire.meta_pb2 import ChangeUserReply, ChangeUserRequest, FollowUsersRequest
from popmq.common.wire.replication_pb2 import CopyMetaRequest

_PERMISSIONS = {
    "rw": Permission.READ_WRITE,
    "r": Permission.READ,
    "w": Permission.WRITE,
    "none": Permission.NONE,
}
_PERMISSION_NAMES = {permission: name for name, permission in _PERMISSIONS.items()}
_TYPES = {kind.name.lower(): kind for kind in MessageType}
_GROUP_TYPES = {kind.name.lower(): kind for kind in GroupType}
_STARTS = {start.name.lower(): start for start in StartAt}
_DURABILITIES = {kind.name.lower(): kind for kind in Durability}
_CHECK_POINTS = {kind.name.lower(): kind for kind in CheckPoints}
PARKED_LIMIT = 1_000
_UNPARK_ACTIONS = {
    "resume": UnparkAction.RESUME,
    "skip": UnparkAction.SKIP,
    "dead-letter": UnparkAction.DEAD_LETTER,
}
_PARKED_STATES = {
    None: "parked",
    UnparkAction.RESUME: "resumed",
    UnparkAction.DEAD_LETTER: "dead-lettering",
}
_T = TypeVar("_T")
_OK = pb.Status(code=Code.OK, message="OK")


def describe_topic(broker: Broker, request: Request) -> bytes:
    requested = pb.DescribeTopicRequest.FromString(request.body)
    return _topic_reply(
        broker, broker.metadata_resolver.topic(requested.name, auto_create=requested.auto_create)
    )


def create_topic(broker: Broker, request: Request) -> None:
    requested = pb.CreateTopicRequest.FromString(request.body)
    topic = requested.topic
    queues = topic.queues or broker.settings.topic.queues
    if topic.type == "lite" and not topic.queues:
        queues = 1  # and one for each lite topic
    blank = TopicConfig(0, topic.name, queues, created_by=requested.created_by)
    created = broker.metadata_resolver.create_topic(_changed_topic(blank, topic))
    _answer_in_order(broker, request, _topic_reply(broker, created))


def alter_topic(broker: Broker, request: Request) -> bytes:
    topic = pb.AlterTopicRequest.FromString(request.body).topic
    old = broker.registry.topic(topic.name)
    return _topic_reply(broker, broker.registry.alter_topic(_changed_topic(old, topic)))


def delete_topic(broker: Broker, request: Request) -> None:
    requested = pb.DeleteTopicRequest.FromString(request.body)
    reply = _topic_reply(broker, broker.registry.delete_topic(requested.name))
    # A topic with such a name is one that each broker group has for itself.
    deletion = pb.TopicReply if not is_internal_topic(requested.name) else None
    _answer_in_order(broker, request, reply, deletion=deletion)


def list_topics(broker: Broker, request: Request) -> bytes:
    system = pb.ListTopicsRequest.FromString(request.body).system
    return pb.ListTopicsReply(
        status=_OK,
        topics=[
            _topic_to_wire(broker, topic)
            for topic in broker.registry.topics()
            if system or not is_group_owned(topic.name)
        ],
    ).SerializeToString()


def describe_group(broker: Broker, request: Request) -> bytes:
    requested = pb.DescribeGroupRequest.FromString(request.body)
    group = broker.registry.group(requested.name)
    reply = _group_answer(broker, group)
    if requested.parked:
        _add_parked(broker, group, reply)
    return reply.SerializeToString()


def create_group(broker: Broker, request: Request) -> None:
    requested = pb.CreateGroupRequest.FromString(request.body)
    group = requested.group
    blank = SubscriptionGroup(
        0,
        group.name,
        max_attempts=broker.settings.group.max_attempts,
        back_off_ms=CUSTOMISED_BACK_OFF_MS,
        created_by=requested.created_by,
    )
    created = broker.registry.create_group(_changed_group(blank, group))
    _answer_in_order(broker, request, _group_reply(broker, created))


def alter_group(broker: Broker, request: Request) -> bytes:
    group = pb.AlterGroupRequest.FromString(request.body).group
    old = broker.registry.group(group.name)
    return _group_reply(broker, broker.registry.alter_group(_changed_group(old, group)))


def delete_group(broker: Broker, request: Request) -> None:
    requested = pb.DeleteGroupRequest.FromString(request.body)
    reply = _group_reply(broker, broker.registry.delete_group(requested.name))
    _answer_in_order(broker, request, reply, deletion=pb.GroupReply)


def list_groups(broker: Broker, request: Request) -> bytes:
    groups = [_group_to_wire(group) for group in broker.registry.groups()]
    return pb.ListGroupsReply(status=_OK, groups=groups).SerializeToString()


def unpark(broker: Broker, request: Request) -> bytes:
    requested = pb.UnparkRequest.FromString(request.body)
    action = _UNPARK_ACTIONS.get(requested.action)
    if action is None:
        known = ", ".join(_UNPARK_ACTIONS)
        raise Refused(
            Code.BAD_REQUEST, f"a parked message group takes {known}, not {requested.action!r}"
        )
    group = broker.registry.group(requested.group)
    topic = broker.metadata_resolver.topic(requested.topic)
    messages = broker.fifo.parking.apply_action(group, topic, requested.key, action)
    return pb.UnparkReply(status=_OK, messages=messages).SerializeToString()


def copy_meta(broker: Broker, request: Request) -> None:
    requested = CopyMetaRequest.FromString(request.body)
    if broker.followers.metadata.serve(requested, request.answer, request.number):
        request.wait(partial(broker.followers.metadata.cancel, request.number))


def follow_users(broker: Broker, request: Request) -> None:
    requested = FollowUsersRequest.FromString(request.body)
    if broker.followers.users.serve(requested, request.answer, request.number):
        request.wait(partial(broker.followers.users.cancel, request.number))


def change_user(broker: Broker, request: Request) -> bytes:
    user = apply_change(broker.registry, ChangeUserRequest.FromString(request.body))
    broker.followers.users.changed()
    reply = ChangeUserReply(epoch=broker.store.epoch, version=broker.registry.users.changes)
    if user is not None:
        reply.user.CopyFrom(user_record(user))
    return reply.SerializeToString()


def _answer_in_order(
    broker: Broker,
    request: Request,
    reply: bytes,
    *,
    deletion: type[pb.TopicReply | pb.GroupReply] | None = None,
) -> None:
    """`deletion` is the type of the reply to a deletion."""

    def release(not_copied: Sequence[str]) -> None:
        more = b""
        if deletion is not None and not_copied:
            more = deletion(incomplete=_not_copied_text(not_copied)).SerializeToString()
        request.on_reply(reply + more)  # so the parts are merged

    broker.followers.metadata.answer_in_order(release, deletion=deletion is not None)


def _not_copied_text(groups: Sequence[str]) -> str:
    names = ", ".join(groups)
    if len(groups) == 1:
        return f"broker group {names} has not copied the deletion yet, and does so once reachable"
    return f"broker groups {names} have not copied the deletion yet, and do so once reachable"


def _add_parked(broker: Broker, group: SubscriptionGroup, reply: pb.GroupReply) -> None:
    """The group's parked keys, those parked for longest first."""
    keys = sorted(broker.table.parked.of_group(group.id), key=lambda key: key.since_ms)
    now_ms = broker.store.log_ms()
    reply.parked_keys = len(keys)
    for key in keys[:PARKED_LIMIT]:
        topic = broker.registry.topic_by_id(key.topic_id)
        assert topic is not None, "a key parked of no topic"
        reply.parked.add(
            topic=topic.name,
            key=key.name.decode(errors="replace"),
            queue_id=key.queue_id,
            messages=len(key.messages),
            parked_ms=now_ms - key.since_ms,
            state=_PARKED_STATES[key.state],
            broker=broker.settings.broker.name,
        )


def _changed_topic(old: TopicConfig, requested: pb.Topic) -> TopicConfig:
    """`old` with every field that `requested` has set."""
    return replace(
        old,
        queues=requested.queues or old.queues,
        type=_named(_TYPES, requested.type, "a topic's type") if requested.type else old.type,
        permission=(
            _named(_PERMISSIONS, requested.permission, "a permission")
            if requested.permission
            else old.permission
        ),
        retention_ms=max(0, requested.retention_ms) if requested.retention_ms else old.retention_ms,
        brokers=tuple(sorted(set(requested.brokers))) or old.brokers,
        durability=(
            _named(_DURABILITIES, requested.durability, "a topic's durability")
            if requested.durability
            else old.durability
        ),
        lite_ttl_ms=max(0, requested.lite_ttl_ms) if requested.lite_ttl_ms else old.lite_ttl_ms,
    )


def _changed_group(old: SubscriptionGroup, requested: pb.Group) -> SubscriptionGroup:
    return replace(
        old,
        type=_named(_GROUP_TYPES, requested.type, "a group's type") if requested.type else old.type,
        max_attempts=requested.max_attempts or old.max_attempts,
        back_off_ms=tuple(requested.back_off_ms) or old.back_off_ms,
        exponential=_changed_exponential(old, requested),
        start_at=(
            _named(_STARTS, requested.start_at, "where a group starts")
            if requested.start_at
            else old.start_at
        ),
        check_points=(
            _named(_CHECK_POINTS, requested.check_points, "how check points are kept")
            if requested.check_points
            else old.check_points
        ),
    )


def _changed_exponential(old: SubscriptionGroup, requested: pb.Group) -> ExponentialBackOff | None:
    """Steps replace an exponential back-off, and the other way round; the newer word counts."""
    retry = requested.retry.lower()
    if retry not in ("", "customised", "exponential"):
        raise Refused(
            Code.BAD_REQUEST, f"a retry is customised or exponential, not {requested.retry!r}"
        )
    given = requested.HasField("exponential") and bool(requested.exponential.ListFields())
    if requested.back_off_ms and (given or retry == "exponential"):
        raise Refused(
            Code.BAD_REQUEST, "a group has back-off steps or an exponential back-off, not both"
        )
    if retry == "customised" and given:
        raise Refused(
            Code.BAD_REQUEST, "initial, max, multiplier and jitter are of an exponential back-off"
        )
    if retry == "customised" or requested.back_off_ms:
        return None
    if not given and retry != "exponential":
        return old.exponential
    set_ = {field.name: value for field, value in requested.exponential.ListFields()}
    return replace(old.exponential or ExponentialBackOff(), **set_)


def _named(known: Mapping[str, _T], name: str, what: str) -> _T:
    member = known.get(name.lower())
    if member is None:
        raise Refused(Code.BAD_REQUEST, f"{what} is one of {', '.join(known)}, not {name!r}")
    return member


def _topic_to_wire(broker: Broker, topic: TopicConfig) -> pb.Topic:
    return pb.Topic(
        name=topic.name,
        queues=topic.queues,
        type=topic.type.name.lower(),
        permission=_PERMISSION_NAMES[topic.permission],
        id=topic.id,
        retention_ms=topic.retention_ms,
        brokers=topic.brokers,
        durability=topic.durability.name.lower(),
        lite_ttl_ms=topic.lite_ttl_ms,
        lite_topics=broker.registry.lites.count(topic.id),
    )


def _group_to_wire(group: SubscriptionGroup) -> pb.Group:
    return pb.Group(
        name=group.name,
        type=group.type.name.lower(),
        max_attempts=group.max_attempts,
        back_off_ms=group.back_off_ms,
        start_at=group.start_at.name.lower(),
        check_points=group.check_points.name.lower(),
        id=group.id,
        retry="exponential" if group.exponential else "customised",
        exponential=exponential_to_wire(group.exponential) if group.exponential else None,
    )


def exponential_to_wire(back_off: ExponentialBackOff) -> pb.ExponentialBackOff:
    return pb.ExponentialBackOff(
        initial_ms=back_off.initial_ms,
        max_ms=back_off.max_ms,
        multiplier_milli=back_off.multiplier_milli,
        jitter_percent=back_off.jitter_percent,
    )


def _topic_reply(broker: Broker, topic: TopicConfig) -> bytes:
    epoch, version = broker.registry.meta_state
    return pb.TopicReply(
        status=_OK, topic=_topic_to_wire(broker, topic), meta_epoch=epoch, meta_version=version
    ).SerializeToString()


def _group_reply(broker: Broker, group: SubscriptionGroup) -> bytes:
    return _group_answer(broker, group).SerializeToString()


def _group_answer(broker: Broker, group: SubscriptionGroup) -> pb.GroupReply:
    epoch, version = broker.registry.meta_state
    return pb.GroupReply(
        status=_OK, group=_group_to_wire(group), meta_epoch=epoch, meta_version=version
    )
