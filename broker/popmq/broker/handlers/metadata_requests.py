"""Administration of topics and groups: protobuf in, protobuf out (`wire/admin.proto`)."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TypeVar

from popmq.broker.core.broker import Broker
from popmq.broker.deliveries.pop_check_point import UnparkAction
from popmq.broker.handlers.request import Request
from popmq.common.back_off import ExponentialBackOff
from popmq.common.errors import Code, Refused
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
    wanted = pb.DescribeTopicRequest.FromString(request.body)
    return _topic_reply(broker, broker.directory.topic(wanted.name, auto_create=wanted.auto_create))


def create_topic(broker: Broker, request: Request) -> None:
    topic = pb.CreateTopicRequest.FromString(request.body).topic
    queues = topic.queues or broker.settings.topic.queues
    if topic.type == "lite" and not topic.queues:
        queues = 1  # and one for each lite topic
    blank = TopicConfig(0, topic.name, queues)
    created = broker.directory.create_topic(_changed_topic(blank, topic))
    _answer_in_order(broker, request, _topic_reply(broker, created))


def alter_topic(broker: Broker, request: Request) -> bytes:
    topic = pb.AlterTopicRequest.FromString(request.body).topic
    old = broker.registry.topic(topic.name)
    return _topic_reply(broker, broker.registry.alter_topic(_changed_topic(old, topic)))


def delete_topic(broker: Broker, request: Request) -> None:
    wanted = pb.DeleteTopicRequest.FromString(request.body)
    reply = _topic_reply(broker, broker.registry.delete_topic(wanted.name))
    # A topic with such a name is one that each broker group has for itself.
    _answer_in_order(broker, request, reply, deletion=wanted.name[:1] != "%")


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
    wanted = pb.DescribeGroupRequest.FromString(request.body)
    group = broker.registry.group(wanted.name)
    reply = _group_answer(broker, group)
    if wanted.parked:
        _add_parked(broker, group, reply)
    return reply.SerializeToString()


def create_group(broker: Broker, request: Request) -> None:
    group = pb.CreateGroupRequest.FromString(request.body).group
    blank = SubscriptionGroup(
        0,
        group.name,
        max_attempts=broker.settings.group.max_attempts,
        back_off_ms=CUSTOMISED_BACK_OFF_MS,
    )
    created = broker.registry.create_group(_changed_group(blank, group))
    _answer_in_order(broker, request, _group_reply(broker, created))


def alter_group(broker: Broker, request: Request) -> bytes:
    group = pb.AlterGroupRequest.FromString(request.body).group
    old = broker.registry.group(group.name)
    return _group_reply(broker, broker.registry.alter_group(_changed_group(old, group)))


def delete_group(broker: Broker, request: Request) -> None:
    wanted = pb.DeleteGroupRequest.FromString(request.body)
    reply = _group_reply(broker, broker.registry.delete_group(wanted.name))
    _answer_in_order(broker, request, reply, deletion=True)


def list_groups(broker: Broker, request: Request) -> bytes:
    groups = [_group_to_wire(group) for group in broker.registry.groups()]
    return pb.ListGroupsReply(status=_OK, groups=groups).SerializeToString()


def unpark(broker: Broker, request: Request) -> bytes:
    wanted = pb.UnparkRequest.FromString(request.body)
    action = _UNPARK_ACTIONS.get(wanted.action)
    if action is None:
        known = ", ".join(_UNPARK_ACTIONS)
        raise Refused(
            Code.BAD_REQUEST, f"a parked message group takes {known}, not {wanted.action!r}"
        )
    group = broker.registry.group(wanted.group)
    topic = broker.directory.topic(wanted.topic)
    messages = broker.parking.apply_action(group, topic, wanted.key, action)
    return pb.UnparkReply(status=_OK, messages=messages).SerializeToString()


def copy_meta(broker: Broker, request: Request) -> None:
    wanted = CopyMetaRequest.FromString(request.body)
    if broker.meta_copies.serve(wanted, request.answer, request.number):
        request.wait(partial(broker.meta_copies.cancel, request.number))


def _answer_in_order(
    broker: Broker, request: Request, reply: bytes, *, deletion: bool = False
) -> None:
    broker.meta_copies.answer_in_order(partial(request.on_reply, reply), deletion=deletion)


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
