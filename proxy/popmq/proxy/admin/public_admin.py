"""The Admin service of the public API, in words of popmq's own admin service.

A call that has a counterpart there is that call, made within this process; who is connected is
what the telemetry streams of this proxy say.  What popmq has no answer to is refused with
UNSUPPORTED and the way to go instead (docs/reference/protocol.md).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from popmq.common.errors import Code, PopmqError, Refused, Unavailable
from popmq.common.version import VERSION
from popmq.common.wire import admin_pb2 as own
from popmq.proxy.admin.admin_service import Gathered
from popmq.proxy.admin.public_responses import (
    found_message,
    lookup,
    public_type,
    queue_span,
    summed,
    wall_ms,
)
from popmq.proxy.api import admin_pb2 as api
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.messaging.connected_subscriptions import ConnectedSubscriptions, told_of
from popmq.proxy.messaging.lite import SyncLiteSubscription
from popmq.proxy.rpc.convert import name_of, ok, parse
from popmq.proxy.rpc.metrics import ProxyMetrics
from popmq.proxy.rpc.rpc import Rpc, refuse_with_status
from popmq.proxy.rpc.rpc import method as any_method
from popmq.proxy.transport.interface import GrpcStatus, Method, OneByOne

SERVICE = "/apache.rocketmq.v2.Admin/"
_LEVEL = api.ChangeLogLevelRequest.Level
_LEVELS = {
    _LEVEL.TRACE: logging.DEBUG,
    _LEVEL.DEBUG: logging.DEBUG,
    _LEVEL.INFO: logging.INFO,
    _LEVEL.WARN: logging.WARNING,
    _LEVEL.ERROR: logging.ERROR,
}
INSTEAD = {
    "DeleteSubscription": "a subscription ends with its clients; popmq group delete drops places",
    "PrintThreadStackTrace": "clients are not asked for their threads: look at the client",
    "VerifyMessage": "a message is not put to one client by hand: see popmq explain",
    "AdminSendMessage": "messages are sent with SendMessage, or popmq send",
    "GetConsumerRunningInfo": "clients do not tell what they hold: see popmq lag and popmq explain",
    "GetTopicRoute": "routes are told by QueryRoute",
}
_R = TypeVar(
    "_R",
    own.TopicReply,
    own.LagReply,
    own.ResetOffsetReply,
    own.FindMessagesReply,
    own.TimeSpansReply,
)


class PublicAdmin:
    def __init__(
        self,
        inner: Sequence[Method],
        subscribed: ConnectedSubscriptions,
        lites: SyncLiteSubscription,
        metrics: ProxyMetrics,
        endpoint: Callable[[], str],
    ) -> None:
        """`inner` are the methods of popmq's own admin service."""
        self._inner = {method.path.rpartition("/")[2]: method for method in inner}
        self._subscribed = subscribed
        self._lites = lites
        self._metrics = metrics
        self._endpoint = endpoint
        self._stats_at = (metrics.now_s(), 0, 0)  # when they were asked for, and what was counted

    def methods(self) -> list[Method]:
        served: dict[str, Callable[[Rpc], None]] = {
            "ChangeLogLevel": _change_log_level,
            "DescribeTopicStatus": self._describe_topic,
            "ListSubscription": self._list_subscription,
            "DescribeSubscription": self._describe_subscription,
            "DescribeGroupAccumulation": self._accumulation,
            "ListConsumerConnection": self._connections,
            "ResetGroupOffset": self._reset,
            "QueryMessage": self._query_message,
            "QueryTimeSpan": self._time_spans,
            "GetProxyRuntimeStats": self._stats,
            **{name: partial(_refuse, name, why) for name, why in INSTEAD.items()},
        }
        return [
            any_method(
                name,
                handler,
                self._metrics,
                service=SERVICE,
                refusal=_remark if name == "ChangeLogLevel" else refuse_with_status,
            )
            for name, handler in served.items()
        ]

    def _ask(
        self,
        rpc: Rpc,
        name: str,
        request: own.DescribeTopicRequest
        | own.LagRequest
        | own.ResetOffsetRequest
        | own.TimeSpansRequest
        | own.FindMessagesRequest,
        reply: type[_R],
        then: Callable[[_R], None],
    ) -> None:
        """Go on with the answer of popmq's own admin service; what it refuses is refused."""

        def answered(data: bytes) -> None:
            decoded = reply.FromString(data)
            if decoded.status.code != Code.OK:
                raise Refused(Code(decoded.status.code), decoded.status.message)
            then(decoded)

        start = self._inner[name].start
        assert start is not None, "they are unary"
        start(_Within(rpc, answered), request.SerializeToString())

    def _describe_topic(self, rpc: Rpc) -> None:
        request = parse(api.DescribeTopicStatusRequest, rpc.data)

        def answered(decoded_reply: own.TopicReply) -> None:
            topic = decoded_reply.topic
            tags = {"queues": str(topic.queues), "permission": topic.permission}
            if topic.retention_ms:
                tags["retention_ms"] = str(topic.retention_ms)
            if topic.type == "lite":
                tags["lite_topics"] = str(topic.lite_topics)
            reply = api.DescribeTopicStatusResponse(
                status=ok(),
                topic_message_type=public_type(topic.type),
                description=f"{topic.type}, {topic.queues} queues, {topic.permission}",
                tags=tags,
            )
            rpc.reply(reply.SerializeToString())

        asked = own.DescribeTopicRequest(name=name_of(request.topic))
        self._ask(rpc, "DescribeTopic", asked, own.TopicReply, answered)

    # -- who is connected

    def _list_subscription(self, rpc: Rpc) -> None:
        """Those of the clients that are here, and pairs that a group has read without."""
        request = parse(api.ListSubscriptionRequest, rpc.data)
        here = self._subscribed.by_pair(_name(request.group), _name(request.topic))

        def answered(decoded_reply: own.LagReply) -> None:
            read = {(lag.group, lag.topic) for lag in decoded_reply.lags}
            infos = [
                told_of(group, topic, subscriptions)
                for (group, topic), subscriptions in sorted(here.items())
            ]
            infos += [
                api.SubscriptionInfo(
                    group=pb.Resource(name=group),
                    topic=pb.Resource(name=topic),
                    message_model=api.CLUSTERING,
                    subscription_consistency=True,
                )
                for group, topic in sorted(read - set(here))
            ]
            reply = api.ListSubscriptionResponse(status=ok(), subscription_info=infos)
            rpc.reply(reply.SerializeToString())

        asked = own.LagRequest(group=_name(request.group), topic=_name(request.topic))
        self._ask(rpc, "Lag", asked, own.LagReply, answered)

    def _describe_subscription(self, rpc: Rpc) -> None:
        request = parse(api.DescribeSubscriptionRequest, rpc.data)
        subscriptions = self._subscribed.by_pair(_name(request.group), _name(request.topic))
        infos = [
            api.DescribeSubscriptionResponse.ClientSubscriptionInfo(
                client_info=subscription.client,
                subscription_info=told_of(group, topic, [subscription]),
            )
            for (group, topic), reported_subscriptions in sorted(subscriptions.items())
            for subscription in reported_subscriptions
        ]
        reply = api.DescribeSubscriptionResponse(status=ok(), client_subscription_info=infos)
        rpc.reply(reply.SerializeToString())

    def _connections(self, rpc: Rpc) -> None:
        request = parse(api.ListConsumerConnectionRequest, rpc.data)
        client_infos = {
            subscription.client.client_id: subscription.client
            for subscriptions in self._subscribed.by_pair(
                name_of(request.group), _name(request.topic)
            ).values()
            for subscription in subscriptions
        }
        if request.HasField("liteTopic"):
            requested = partial(self._lites.subscribes, name=request.liteTopic)
            client_infos = {
                name: client for name, client in client_infos.items() if requested(name)
            }
        reply = api.ListConsumerConnectionResponse(status=ok(), client_info=client_infos.values())
        rpc.reply(reply.SerializeToString())

    def _stats(self, rpc: Rpc) -> None:
        now_s, sends, received = self._metrics.now_s(), self._metrics.sends, self._metrics.received
        before_s, sent_before, received_before = self._stats_at
        self._stats_at = (now_s, sends, received)
        passed_s = max(now_s - before_s, 0.001)
        producers, consumers = self._subscribed.clients()
        reply = api.GetProxyRuntimeStatsResponse(
            status=ok(),
            proxy_name=self._endpoint(),
            version=VERSION,
            in_tps=(sends - sent_before) / passed_s,
            out_tps=(received - received_before) / passed_s,
            connections=self._metrics.open_streams,
            producers=producers,
            consumers=consumers,
        )
        rpc.reply(reply.SerializeToString())

    # -- what groups have to do, and messages

    def _accumulation(self, rpc: Rpc) -> None:
        request = parse(api.DescribeGroupAccumulationRequest, rpc.data)
        group, topics = name_of(request.group), set(map(name_of, request.topics))
        if request.HasField("lite_topic"):
            raise Refused(
                Code.UNSUPPORTED,
                "a single lite topic has no lag: ask for the parent topic, whose lag is the sum",
            )

        def answered(decoded_reply: own.LagReply) -> None:
            _whole(decoded_reply)
            lags = [lag for lag in decoded_reply.lags if not topics or lag.topic in topics]
            by_topic: dict[str, list[own.Lag]] = {}
            for lag in lags:
                by_topic.setdefault(lag.topic, []).append(lag)
            reply = api.DescribeGroupAccumulationResponse(
                status=ok(), accumulation=summed(lags, decoded_reply.now_ms)
            )
            for topic, some in by_topic.items():
                reply.topic_accumulation[topic].CopyFrom(summed(some, decoded_reply.now_ms))
            rpc.reply(reply.SerializeToString())

        self._ask(rpc, "Lag", own.LagRequest(group=group), own.LagReply, answered)

    def _time_spans(self, rpc: Rpc) -> None:
        request = parse(api.QueryTimeSpanRequest, rpc.data)

        def answered(decoded_reply: own.TimeSpansReply) -> None:
            _whole(decoded_reply)
            spans = [queue_span(span, decoded_reply.now_ms) for span in decoded_reply.spans]
            reply = api.QueryTimeSpanResponse(status=ok(), queue_time_span_list=spans)
            rpc.reply(reply.SerializeToString())

        asked = own.TimeSpansRequest(
            group=name_of(request.group), topics=map(name_of, request.topics)
        )
        self._ask(rpc, "TimeSpans", asked, own.TimeSpansReply, answered)

    def _reset(self, rpc: Rpc) -> None:
        request = parse(api.ResetGroupOffsetRequest, rpc.data)
        if not request.HasField("reset_timestamp"):
            raise Refused(Code.BAD_REQUEST, "a reset names a time (reset_timestamp)")

        def answered(reply: own.ResetOffsetReply) -> None:
            _whole(reply)
            rpc.reply(api.ResetGroupOffsetResponse(status=ok()).SerializeToString())

        asked = own.ResetOffsetRequest(
            group=name_of(request.group),
            topic=name_of(request.topic),
            stored_ms=wall_ms(request.reset_timestamp),
        )
        self._ask(rpc, "ResetOffset", asked, own.ResetOffsetReply, answered)

    def _query_message(self, rpc: Rpc) -> None:
        request = parse(api.ListMessageRequest, rpc.data)

        def answered(decoded_reply: own.FindMessagesReply) -> None:
            messages = [
                found_message(message)
                for message in decoded_reply.messages
                if not request.HasField("broker_name") or message.broker == request.broker_name
            ]
            reply = api.ListMessageResponse(status=ok(), messages=messages)
            rpc.reply(reply.SerializeToString())

        self._ask(rpc, "FindMessages", lookup(request), own.FindMessagesReply, answered)


class _Within(OneByOne):
    """A call from within this process: its one answer goes on to a handler; implements Call."""

    def __init__(self, rpc: Rpc, then: Callable[[bytes], None]) -> None:
        self._rpc = rpc
        self._then = then
        self._answer = b""

    metadata: Mapping[str, str] = {}
    peer = ""
    encrypted = True  # it never left this process

    def remaining_ms(self) -> int | None:
        return self._rpc.call.remaining_ms()

    def send(self, message: bytes) -> None:
        self._answer = message

    def finish(self, status: GrpcStatus = GrpcStatus.OK, detail: str = "") -> None:
        if status is GrpcStatus.OK:
            self._rpc.run(self._then, self._answer)
        else:
            self._rpc.call.finish(status, detail)

    def on_cancelled(self, callback: Callable[[], None]) -> None:
        self._rpc.on_cancelled(callback)

    def on_unread(self, callback: Callable[[], None]) -> None:
        self._rpc.call.on_unread(callback)


def _remark(_request: bytes, error: PopmqError) -> Sequence[bytes]:
    """The reply of ChangeLogLevel has no status."""
    return (api.ChangeLogLevelResponse(remark=str(error)).SerializeToString(),)


def _change_log_level(rpc: Rpc) -> None:
    """Of this process. There is no field for a refusal: the remark says what was done."""
    asked = parse(api.ChangeLogLevelRequest, rpc.data).level
    level = _LEVELS.get(asked)
    if level is None:
        remark = f"level {asked} is unknown, nothing was changed: it takes 0 (TRACE) to 4 (ERROR)"
    else:
        ours = logging.getLogger("popmq")
        before = logging.getLevelName(ours.getEffectiveLevel())
        remark = f"this process logs {logging.getLevelName(level)} and above, after {before}"
        ours.setLevel(level)
    rpc.reply(api.ChangeLogLevelResponse(remark=remark).SerializeToString())


def _refuse(name: str, instead: str, rpc: Rpc) -> None:
    raise Refused(Code.UNSUPPORTED, f"{name} is not served: {instead}")


def _name(resource: pb.Resource) -> str:
    """Empty: any."""
    return name_of(resource) if resource.name else ""


def _whole(gathered: Gathered) -> None:
    """Part of an answer would be taken for all of it."""
    if gathered.incomplete:
        raise Unavailable(gathered.incomplete)
