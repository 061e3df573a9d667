"""Administration of topics and groups: protobuf in, protobuf out (`wire/admin.proto`)."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from popmq.broker.core.broker import Broker
from popmq.broker.handlers.drain_requests import drain_reply, take_timers
from popmq.broker.handlers.lookup_requests import find_messages
from popmq.broker.handlers.parking_requests import add_parked, unpark
from popmq.common.back_off import ExponentialBackOff
from popmq.common.errors import Code, Refused
from popmq.common.protocol.messaging_payloads import Kind
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
)
from popmq.common.wire import admin_pb2 as pb

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
_T = TypeVar("_T")
_OK = pb.Status(code=Code.OK, message="OK")


def answer_admin(broker: Broker, kind: Kind, body: bytes) -> bytes:
    """The encoded reply; refusals are raised."""
    return ADMIN_KINDS[kind](broker, body)


def _describe_topic(broker: Broker, body: bytes) -> bytes:
    request = pb.DescribeTopicRequest.FromString(body)
    return _topic_reply(
        broker, broker.directory.topic(request.name, auto_create=request.auto_create)
    )


def _create_topic(broker: Broker, body: bytes) -> bytes:
    topic = pb.CreateTopicRequest.FromString(body).topic
    queues = topic.queues or broker.settings.topic.queues
    if topic.type == "lite" and not topic.queues:
        queues = 1  # and one for each lite topic
    blank = TopicConfig(0, topic.name, queues)
    return _topic_reply(broker, broker.directory.create_topic(_changed_topic(blank, topic)))


def _alter_topic(broker: Broker, body: bytes) -> bytes:
    topic = pb.AlterTopicRequest.FromString(body).topic
    old = broker.registry.topic(topic.name)
    return _topic_reply(broker, broker.registry.alter_topic(_changed_topic(old, topic)))


def _delete_topic(broker: Broker, body: bytes) -> bytes:
    request = pb.DeleteTopicRequest.FromString(body)
    return _topic_reply(broker, broker.registry.delete_topic(request.name))


def _list_topics(broker: Broker, body: bytes) -> bytes:
    system = pb.ListTopicsRequest.FromString(body).system
    return pb.ListTopicsReply(
        status=_OK,
        topics=[
            _topic_to_wire(broker, topic)
            for topic in broker.registry.topics()
            if system or not is_group_owned(topic.name)
        ],
    ).SerializeToString()


def _describe_group(broker: Broker, body: bytes) -> bytes:
    request = pb.DescribeGroupRequest.FromString(body)
    group = broker.registry.group(request.name)
    reply = _group_answer(broker, group)
    if request.parked:
        add_parked(broker, group, reply)
    return reply.SerializeToString()


def _create_group(broker: Broker, body: bytes) -> bytes:
    group = pb.CreateGroupRequest.FromString(body).group
    blank = SubscriptionGroup(
        0,
        group.name,
        max_attempts=broker.settings.group.max_attempts,
        back_off_ms=CUSTOMISED_BACK_OFF_MS,
    )
    return _group_reply(broker, broker.registry.create_group(_changed_group(blank, group)))


def _alter_group(broker: Broker, body: bytes) -> bytes:
    group = pb.AlterGroupRequest.FromString(body).group
    old = broker.registry.group(group.name)
    return _group_reply(broker, broker.registry.alter_group(_changed_group(old, group)))


def _delete_group(broker: Broker, body: bytes) -> bytes:
    request = pb.DeleteGroupRequest.FromString(body)
    return _group_reply(broker, broker.registry.delete_group(request.name))


def _list_groups(broker: Broker, body: bytes) -> bytes:
    groups = [_group_to_wire(group) for group in broker.registry.groups()]
    return pb.ListGroupsReply(status=_OK, groups=groups).SerializeToString()


def _drain(broker: Broker, body: bytes) -> bytes:
    """Said twice it is the same."""
    request = pb.DrainRequest.FromString(body)
    if request.look:
        return drain_reply(broker)
    wanted = not request.undo
    if wanted and not broker.registry.owner:
        raise Refused(
            Code.PRECONDITION_FAILED,
            f"broker group {broker.settings.broker.name} owns the topics and consumer groups of "
            "the cluster: it cannot be drained",
        )
    if broker.registry.draining != wanted:
        broker.registry.set_draining(wanted)
    return drain_reply(broker)


ADMIN_KINDS: dict[Kind, Callable[[Broker, bytes], bytes]] = {
    Kind.DRAIN: _drain,
    Kind.DESCRIBE_TOPIC: _describe_topic,
    Kind.CREATE_TOPIC: _create_topic,
    Kind.ALTER_TOPIC: _alter_topic,
    Kind.DELETE_TOPIC: _delete_topic,
    Kind.LIST_TOPICS: _list_topics,
    Kind.DESCRIBE_GROUP: _describe_group,
    Kind.CREATE_GROUP: _create_group,
    Kind.ALTER_GROUP: _alter_group,
    Kind.DELETE_GROUP: _delete_group,
    Kind.LIST_GROUPS: _list_groups,
    Kind.FIND_MESSAGES: find_messages,
    Kind.UNPARK: unpark,
    Kind.TAKE_TIMERS: take_timers,
}


def _changed_topic(old: TopicConfig, wanted: pb.Topic) -> TopicConfig:
    """`old` with every field that `wanted` has set."""
    return replace(
        old,
        queues=wanted.queues or old.queues,
        type=_named(_TYPES, wanted.type, "a topic's type") if wanted.type else old.type,
        permission=(
            _named(_PERMISSIONS, wanted.permission, "a permission")
            if wanted.permission
            else old.permission
        ),
        retention_ms=max(0, wanted.retention_ms) if wanted.retention_ms else old.retention_ms,
        brokers=tuple(sorted(set(wanted.brokers))) or old.brokers,
        durability=(
            _named(_DURABILITIES, wanted.durability, "a topic's durability")
            if wanted.durability
            else old.durability
        ),
        lite_ttl_ms=max(0, wanted.lite_ttl_ms) if wanted.lite_ttl_ms else old.lite_ttl_ms,
    )


def _changed_group(old: SubscriptionGroup, wanted: pb.Group) -> SubscriptionGroup:
    return replace(
        old,
        type=_named(_GROUP_TYPES, wanted.type, "a group's type") if wanted.type else old.type,
        max_attempts=wanted.max_attempts or old.max_attempts,
        back_off_ms=tuple(wanted.back_off_ms) or old.back_off_ms,
        exponential=_changed_exponential(old, wanted),
        start_at=(
            _named(_STARTS, wanted.start_at, "where a group starts")
            if wanted.start_at
            else old.start_at
        ),
        check_points=(
            _named(_CHECK_POINTS, wanted.check_points, "how check points are kept")
            if wanted.check_points
            else old.check_points
        ),
    )


def _changed_exponential(old: SubscriptionGroup, wanted: pb.Group) -> ExponentialBackOff | None:
    """Steps replace an exponential back-off, and the other way round; the newer word counts."""
    retry = wanted.retry.lower()
    if retry not in ("", "customised", "exponential"):
        raise Refused(
            Code.BAD_REQUEST, f"a retry is customised or exponential, not {wanted.retry!r}"
        )
    given = wanted.HasField("exponential") and bool(wanted.exponential.ListFields())
    if wanted.back_off_ms and (given or retry == "exponential"):
        raise Refused(
            Code.BAD_REQUEST, "a group has back-off steps or an exponential back-off, not both"
        )
    if retry == "customised" and given:
        raise Refused(
            Code.BAD_REQUEST, "initial, max, multiplier and jitter are of an exponential back-off"
        )
    if retry == "customised" or wanted.back_off_ms:
        return None
    if not given and retry != "exponential":
        return old.exponential
    set_ = {field.name: value for field, value in wanted.exponential.ListFields()}
    return replace(old.exponential or ExponentialBackOff(), **set_)


def _named(known: Mapping[str, _T], name: str, what: str) -> _T:
    found = known.get(name.lower())
    if found is None:
        raise Refused(Code.BAD_REQUEST, f"{what} is one of {', '.join(known)}, not {name!r}")
    return found


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
