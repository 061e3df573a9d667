"""RIGHTS: what a call of each method needs; a method without a row stops the start.

A row reads the request and yields needs, all of which must be met.  Names are whole names, with
the namespace of the header.  docs/concepts/users.md has the table for people.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from google.protobuf.message import Message

from popmq.common.namespaces import wrap_namespace
from popmq.common.wire import admin_pb2 as own
from popmq.common.wire import report_pb2 as report
from popmq.proxy.api import admin_pb2 as api
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service
from popmq.proxy.auth.policy import EVERY, SOME, Need, group_need, topic_need
from popmq.proxy.rpc.convert import name_of

MESSAGING = "/apache.rocketmq.v2.MessagingService/"
PUBLIC_ADMIN = "/apache.rocketmq.v2.Admin/"
ADMIN = "/popmq.admin.v1.Admin/"
REPORTS = "/popmq.report.v1.Reports/"

PUB, SUB, GET, UPDATE = ("pub",), ("sub",), ("get",), ("update",)
SUB_OR_GET, PUB_OR_SUB, ANY_USE = ("sub", "get"), ("pub", "sub"), ("pub", "sub", "get")

# Yields the needs of a request whose short names are in that namespace.
Needs = Callable[[Any, str], Iterator[Need]]


@dataclass(frozen=True, slots=True)
class Rights:
    """`request` is parsed for `needs`. `shown` names the parts of a reply that only Get shows:
    the field, and what of it has to be allowed."""

    request: type[Message]
    needs: Needs
    reply: type[Message] | None = None
    shown: Mapping[str, Needs] | None = None
    for_super: Callable[[Any], str] | None = None  # why this request is for Super users; "": not


def _name(resource: pb.Resource, namespace: str) -> str:
    name = name_of(resource) if not namespace else resource.name
    return wrap_namespace(namespace, name) if namespace else name


def _nothing(_request: Any, _namespace: str) -> Iterator[Need]:
    return iter(())


def _topic(actions: tuple[str, ...], request: Any, namespace: str) -> Iterator[Need]:
    yield topic_need(actions, _name(request.topic, namespace))


def _group(actions: tuple[str, ...], request: Any, namespace: str) -> Iterator[Need]:
    yield group_need(actions, _name(request.group, namespace))


def _consumes(request: Any, namespace: str) -> Iterator[Need]:
    yield group_need(SUB, _name(request.group, namespace))
    yield topic_need(SUB, _name(request.topic, namespace))


def _reads_queue(request: Any, namespace: str) -> Iterator[Need]:
    yield group_need(SUB, _name(request.group, namespace))
    yield topic_need(SUB, _name(request.message_queue.topic, namespace))


def _updates_offset(request: Any, namespace: str) -> Iterator[Need]:
    yield from _reads_queue(request, namespace)
    yield group_need(UPDATE, _name(request.group, namespace))


def _gets_offset(request: Any, namespace: str) -> Iterator[Need]:
    yield group_need(SUB_OR_GET, _name(request.group, namespace))


def _queries_offset(request: Any, namespace: str) -> Iterator[Need]:
    yield topic_need(SUB_OR_GET, _name(request.message_queue.topic, namespace))


def _sends(request: service.SendMessageRequest, namespace: str) -> Iterator[Need]:
    """One for each message, in their order."""
    for message in request.messages:
        yield topic_need(PUB, _name(message.topic, namespace))


def _declares(request: service.TelemetryCommand, namespace: str) -> Iterator[Need]:
    """What the settings of a client name."""
    settings = request.settings
    if settings.HasField("publishing"):
        for topic in settings.publishing.topics:
            yield topic_need(PUB, _name(topic, namespace))
    if settings.HasField("subscription"):
        if settings.subscription.group.name:
            yield group_need(SUB, _name(settings.subscription.group, namespace))
        for entry in settings.subscription.subscriptions:
            yield topic_need(SUB, _name(entry.topic, namespace))


def _own(kind: str, actions: tuple[str, ...], field: str, request: Any, _: str) -> Iterator[Need]:
    """Of popmq's own admin service, whose names are whole. `field` leads to a text."""
    value = request
    for part in field.split("."):
        value = getattr(value, part)
    yield (topic_need if kind == "topic" else group_need)(actions, str(value))


def _cluster(actions: tuple[str, ...], _request: Any, _namespace: str) -> Iterator[Need]:
    yield Need(actions, "cluster")


def _lists(kind: str, _request: Any, _namespace: str) -> Iterator[Need]:
    yield Need(("list",), kind, SOME)


def _gets_named(request: Any, namespace: str) -> Iterator[Need]:
    """Get on the topic and the group that it names; what it does not name, it lists."""
    for kind in ("group", "topic"):
        value = getattr(request, kind)
        name = _name(value, namespace) if isinstance(value, pb.Resource) else str(value)
        need = topic_need if kind == "topic" else group_need
        yield need(GET, name) if name else Need(("list",), kind, SOME)


def _gets_topics(request: Any, namespace: str) -> Iterator[Need]:
    yield group_need(GET, _text(request.group, namespace))
    for topic in request.topics:
        yield topic_need(GET, _text(topic, namespace))


def _text(value: str | pb.Resource, namespace: str) -> str:
    return value if isinstance(value, str) else _name(value, namespace)


def _topic_or_every(actions: tuple[str, ...], request: Any, namespace: str) -> Iterator[Need]:
    name = _text(request.topic, namespace)
    yield topic_need(actions, name) if name else Need(actions, "topic", EVERY)


def _explains(request: own.ExplainRequest, namespace: str) -> Iterator[Need]:
    yield from _topic_or_every(SUB, request, namespace)
    if request.group:
        yield group_need(SUB_OR_GET, request.group)


def _dead_letters(request: own.ListDeadLettersRequest, _: str) -> Iterator[Need]:
    yield group_need(SUB if request.bodies else SUB_OR_GET, request.group)


def _redrives(request: own.RedriveRequest, namespace: str) -> Iterator[Need]:
    yield group_need(UPDATE, request.group)
    yield from _topic_or_every(PUB, request, namespace)


def _unparks(request: own.UnparkRequest, _: str) -> Iterator[Need]:
    yield group_need(UPDATE, request.group)
    yield topic_need(SUB, request.topic)


def _lists_timers(request: own.ListTimersRequest, _: str) -> Iterator[Need]:
    yield topic_need(GET, request.topic) if request.topic else Need(("list",), "topic", SOME)


def _forecasts(request: own.ForecastTimersRequest, _: str) -> Iterator[Need]:
    """A sum over all topics cannot be shown in part."""
    yield topic_need(GET, request.topic) if request.topic else Need(GET, "topic", EVERY)


def _drains(request: own.DrainRequest, _: str) -> Iterator[Need]:
    yield Need(GET if request.look else UPDATE, "cluster")


def _gets_pair(part: Any, namespace: str) -> Iterator[Need]:
    yield group_need(GET, _text(part.group, namespace))
    yield topic_need(GET, _text(part.topic, namespace))


def _gets_client(client: own.ConnectedClient, _: str) -> Iterator[Need]:
    for group in client.groups:
        yield group_need(GET, group.name)
        for entry in group.subscriptions:
            yield topic_need(GET, entry.topic)
    for topic in client.topics:
        yield topic_need(GET, topic)
    if not client.groups and not client.topics:
        yield Need(GET, "cluster")


def _gets_told(part: api.DescribeSubscriptionResponse.ClientSubscriptionInfo, ns: str):  # type: ignore[no-untyped-def]
    return _gets_pair(part.subscription_info, ns)


def _is_unclean(request: own.FailoverRequest) -> str:
    return "an unclean failover may lose messages" if request.unclean else ""


def _row(path: str, request: type[Message], needs: Needs, **more: Any) -> tuple[str, Rights]:
    return path, Rights(request, needs, **more)


_MESSAGING_ROWS = (
    _row("QueryRoute", service.QueryRouteRequest, partial(_topic, ANY_USE)),
    _row("QueryAssignment", service.QueryAssignmentRequest, _consumes),
    _row("SendMessage", service.SendMessageRequest, _sends),
    _row("ReceiveMessage", service.ReceiveMessageRequest, _reads_queue),
    _row("AckMessage", service.AckMessageRequest, _consumes),
    _row("ChangeInvisibleDuration", service.ChangeInvisibleDurationRequest, _consumes),
    _row(
        "ForwardMessageToDeadLetterQueue",
        service.ForwardMessageToDeadLetterQueueRequest,
        _consumes,
    ),
    _row("EndTransaction", service.EndTransactionRequest, partial(_topic, PUB)),
    _row("RecallMessage", service.RecallMessageRequest, partial(_topic, PUB)),
    _row("Telemetry", service.TelemetryCommand, _declares),
    # Any user, for its own clients.
    _row("Heartbeat", service.HeartbeatRequest, _nothing),
    _row("NotifyClientTermination", service.NotifyClientTerminationRequest, _nothing),
    _row("PullMessage", service.PullMessageRequest, _reads_queue),
    _row("UpdateOffset", service.UpdateOffsetRequest, _updates_offset),
    _row("GetOffset", service.GetOffsetRequest, _gets_offset),
    _row("QueryOffset", service.QueryOffsetRequest, _queries_offset),
    _row("SyncLiteSubscription", service.SyncLiteSubscriptionRequest, _consumes),
)
_PUBLIC_ADMIN_ROWS = (
    _row("ChangeLogLevel", api.ChangeLogLevelRequest, partial(_cluster, UPDATE)),
    _row("DescribeTopicStatus", api.DescribeTopicStatusRequest, partial(_topic, GET)),
    _row(
        "ListSubscription",
        api.ListSubscriptionRequest,
        _gets_named,
        reply=api.ListSubscriptionResponse,
        shown={"subscription_info": _gets_pair},
    ),
    _row(
        "DescribeSubscription",
        api.DescribeSubscriptionRequest,
        _gets_named,
        reply=api.DescribeSubscriptionResponse,
        shown={"client_subscription_info": _gets_told},
    ),
    _row("DescribeGroupAccumulation", api.DescribeGroupAccumulationRequest, _gets_topics),
    _row("ListConsumerConnection", api.ListConsumerConnectionRequest, partial(_group, GET)),
    _row("ResetGroupOffset", api.ResetGroupOffsetRequest, partial(_group, UPDATE)),
    _row("QueryMessage", api.ListMessageRequest, partial(_topic, SUB)),
    _row("QueryTimeSpan", api.QueryTimeSpanRequest, _gets_topics),
    _row("GetProxyRuntimeStats", api.GetProxyRuntimeStatsRequest, partial(_cluster, GET)),
    # popmq refuses them for everybody.
    _row("DeleteSubscription", api.DeleteSubscriptionRequest, partial(_group, UPDATE)),
    _row("PrintThreadStackTrace", api.PrintThreadStackTraceRequest, partial(_group, GET)),
    _row("VerifyMessage", api.VerifyMessageRequest, partial(_topic, SUB)),
    _row("AdminSendMessage", api.AdminSendMessageRequest, partial(_topic, PUB)),
    _row("GetConsumerRunningInfo", api.GetConsumerRunningInfoRequest, partial(_group, GET)),
    _row("GetTopicRoute", api.GetTopicRouteRequest, partial(_topic, ANY_USE)),
)
_ADMIN_ROWS = (
    _row("DescribeTopic", own.DescribeTopicRequest, partial(_own, "topic", GET, "name")),
    _row("CreateTopic", own.CreateTopicRequest, partial(_own, "topic", ("create",), "topic.name")),
    _row("AlterTopic", own.AlterTopicRequest, partial(_own, "topic", UPDATE, "topic.name")),
    _row("DeleteTopic", own.DeleteTopicRequest, partial(_own, "topic", ("delete",), "name")),
    _row(
        "ListTopics",
        own.ListTopicsRequest,
        partial(_lists, "topic"),
        reply=own.ListTopicsReply,
        shown={"topics": partial(_own, "topic", GET, "name")},
    ),
    _row("DescribeGroup", own.DescribeGroupRequest, partial(_own, "group", GET, "name")),
    _row("CreateGroup", own.CreateGroupRequest, partial(_own, "group", ("create",), "group.name")),
    _row("AlterGroup", own.AlterGroupRequest, partial(_own, "group", UPDATE, "group.name")),
    _row("DeleteGroup", own.DeleteGroupRequest, partial(_own, "group", ("delete",), "name")),
    _row(
        "ListGroups",
        own.ListGroupsRequest,
        partial(_lists, "group"),
        reply=own.ListGroupsReply,
        shown={"groups": partial(_own, "group", GET, "name")},
    ),
    _row("Unpark", own.UnparkRequest, _unparks),
    _row("FindMessages", own.FindMessagesRequest, partial(_topic_or_every, SUB)),
    _row("Explain", own.ExplainRequest, _explains),
    _row(
        "Lag",
        own.LagRequest,
        _gets_named,
        reply=own.LagReply,
        shown={
            "lags": _gets_pair,
            "dead_letters": partial(_own, "group", GET, "group"),
            "stored": partial(_own, "topic", GET, "topic"),
        },
    ),
    _row("TimeSpans", own.TimeSpansRequest, _gets_topics),
    _row(
        "ListClients",
        own.ListClientsRequest,
        _gets_named,
        reply=own.ListClientsReply,
        shown={"clients": _gets_client},
    ),
    _row("ResetOffset", own.ResetOffsetRequest, partial(_own, "group", UPDATE, "group")),
    _row("ListDeadLetters", own.ListDeadLettersRequest, _dead_letters),
    _row("Redrive", own.RedriveRequest, _redrives),
    _row("Recall", own.RecallRequest, partial(_own, "topic", UPDATE, "topic")),
    _row("Reschedule", own.RescheduleRequest, partial(_own, "topic", UPDATE, "topic")),
    _row(
        "ListTimers",
        own.ListTimersRequest,
        _lists_timers,
        reply=own.ListTimersReply,
        shown={"timers": partial(_own, "topic", GET, "topic")},
    ),
    _row("ForecastTimers", own.ForecastTimersRequest, _forecasts),
    _row("Drain", own.DrainRequest, _drains),
    _row("RotateKeys", own.RotateKeysRequest, _drains),
    _row("ResealSecrets", own.ResealSecretsRequest, partial(_cluster, UPDATE)),
    _row("ListBrokers", own.ListBrokersRequest, partial(_cluster, GET)),
    _row("Failover", own.FailoverRequest, partial(_cluster, UPDATE), for_super=_is_unclean),
    _row("DescribeSettings", own.DescribeSettingsRequest, partial(_cluster, GET)),
    # One can grant only what one has: admin/user_admin.py checks that too.
    _row("CreateUser", own.CreateUserRequest, partial(_cluster, UPDATE)),
    _row("AlterUser", own.AlterUserRequest, partial(_cluster, UPDATE)),
    _row("DeleteUser", own.DeleteUserRequest, partial(_cluster, UPDATE)),
    _row("DescribeUser", own.DescribeUserRequest, partial(_cluster, GET)),
    _row("ListUsers", own.ListUsersRequest, partial(_cluster, GET)),
    _row("Grant", own.GrantRequest, partial(_cluster, UPDATE)),
    _row("Revoke", own.RevokeRequest, partial(_cluster, UPDATE)),
    _row("SetUserClock", own.SetUserClockRequest, partial(_cluster, UPDATE)),
    _row("CheckAccess", own.CheckAccessRequest, partial(_cluster, GET)),
    _row("SetAuthMode", own.SetAuthModeRequest, partial(_cluster, UPDATE)),
)
_REPORT_ROWS = (
    _row("Describe", report.DescribeRequest, partial(_cluster, GET)),
    _row("Names", report.NamesRequest, partial(_cluster, GET)),
)


def _reads_log(_request: report.ReadRawRequest, _namespace: str) -> Iterator[Need]:
    """The log holds the messages of every topic."""
    yield Need(SUB, "topic", EVERY)


RIGHTS: Mapping[str, Rights] = {
    **{MESSAGING + name: rights for name, rights in _MESSAGING_ROWS},
    **{PUBLIC_ADMIN + name: rights for name, rights in _PUBLIC_ADMIN_ROWS},
    **{ADMIN + name: rights for name, rights in _ADMIN_ROWS},
    **{REPORTS + name: rights for name, rights in _REPORT_ROWS},
    REPORTS + "ReadRaw": Rights(report.ReadRawRequest, _reads_log),
}
