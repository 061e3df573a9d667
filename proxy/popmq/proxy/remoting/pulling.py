"""PULL_MESSAGE and LITE_PULL_MESSAGE, and the offsets of consumers that pull.

A pull is answered when there is something, or when its time is over: a client pulls again at once,
so an early answer without messages would make it spin.
"""

from collections.abc import Callable
from functools import partial

from popmq.common.errors import Code, PopmqError, Refused, Unavailable
from popmq.common.protocol.messaging_payloads import FilterType, Kind
from popmq.common.quantities import KIB, MIB
from popmq.common.settings.settings import Settings
from popmq.common.topics import (
    check_group_name,
    check_readable_topic_name,
    group_of_pull_retry,
)
from popmq.common.wire import pull_pb2 as wire
from popmq.proxy.brokers.broker_ports import BrokerPorts, reachable_first
from popmq.proxy.brokers.metadata_cache import MetadataCache
from popmq.proxy.remoting.message_conversion import stored_form
from popmq.proxy.remoting.request import Request
from popmq.proxy.remoting.result_codes import ResultCode
from popmq.proxy.remoting.routes import Addresses
from popmq.proxy.remoting.sessions import Sessions, Subscription, expression_of
from popmq.proxy.remoting.stored_message import encode_all
from popmq.proxy.rpc.convert import read_reply
from popmq.proxy.rpc.rpc import Answer, Rpc

SUSPEND, SUBSCRIPTION = 2, 4  # bits of a pull's sysFlag
MAX_BATCH = 32
DEFAULT_REPLY_BYTES = 256 * KIB
MAX_REPLY_BYTES = 4 * MIB  # of stored messages; a frame of 16 MiB is the most that clients take
BROKER_RESERVE_MS = 5_000
_EVERYTHING: Subscription = (FilterType.NONE, "")


class Pulls:
    def __init__(
        self,
        brokers: BrokerPorts,
        routes: MetadataCache,
        sessions: Sessions,
        settings: Settings,
        addresses: Addresses,
    ) -> None:
        self._brokers = brokers
        self._routes = routes
        self._sessions = sessions
        self._settings = settings
        self._addresses = addresses
        self._waiting: dict[Rpc, tuple[Request, int]] = {}  # held pulls, and the offset of each
        self._draining = False

    def pull(self, request: Request) -> None:
        group, topic = request.text("consumerGroup"), request.text("topic")
        check_pulled_topic(topic, group)
        subscription = self._subscription(request, group, topic)
        if subscription is None:
            request.end(
                ResultCode.SUBSCRIPTION_NOT_LATEST,
                f"no heartbeat of this client has named topic {topic} in group {group} yet",
            )
            return
        filter_type, expression = subscription
        suspend = bool(request.number("sysFlag", 0) & SUSPEND) and not self._draining
        wait_ms = max(0, request.number("suspendTimeoutMillis", 0)) if suspend else 0
        offset = request.number("queueOffset")
        asked = wire.PullRequest(
            topic=topic,
            group=group,
            queue_id=queue_id(request),
            offset=max(0, offset),
            limit=min(max(1, request.number("maxMsgNums", MAX_BATCH)), MAX_BATCH),
            poll_ms=min(wait_ms, self._settings.poll.max_ms),
            filter_type=filter_type,
            expression=expression,
            reply_bytes=_reply_bytes(request.number("maxMsgBytes", DEFAULT_REPLY_BYTES)),
            follows_reset=True,
        )
        broker = request.broker(self._brokers.names(), "")
        request.rpc.metrics.pulls += 1
        self._waiting[request.rpc] = request, offset
        request.rpc.on_cancelled(partial(self._forget, request.rpc))
        then = partial(self._answered, request, offset)

        def ask(topic_id: int, group_id: int) -> None:
            if request.rpc not in self._waiting:
                return  # it was answered when this proxy began to drain
            asked.topic_id, asked.group_id = topic_id, group_id
            port = self._brokers.port(broker)
            timeout_ms = asked.poll_ms + BROKER_RESERVE_MS
            request.rpc.send_request(port, Kind.PULL, asked.SerializeToString(), timeout_ms, then)

        self._routes.ids(topic, group, partial(request.rpc.run, ask))

    def check_client(self, request: Request) -> None:
        """CHECK_CLIENT_CONFIG: whether a broker takes the filter; a consumer with a wrong one does
        not start.  A pull that waits for nothing finds out."""
        content = request.json_body()
        given = content.get("subscriptionData")
        subscribed = given if isinstance(given, dict) else {}
        topic, group = str(subscribed.get("topic", "")), str(content.get("group", ""))
        check_pulled_topic(topic, group)
        kind = str(subscribed.get("expressionType", "TAG"))
        filter_type, expression = expression_of(kind, str(subscribed.get("subString", "")))
        asked = wire.PullRequest(
            topic=topic, group=group, limit=1, filter_type=filter_type, expression=expression
        )

        def answered(answer: Answer) -> None:
            if isinstance(answer, PopmqError) and answer.code is Code.ILLEGAL_FILTER_EXPRESSION:
                raise answer
            request.ok()

        names = reachable_first(self._brokers, self._brokers.names())
        if not names:
            raise Unavailable("no broker is known yet")
        port, rpc = self._brokers.port(names[0]), request.rpc
        rpc.send_request(port, Kind.PULL, asked.SerializeToString(), rpc.timeout_ms(), answered)

    def drain(self) -> None:
        """Answer the held pulls with nothing; their clients pull elsewhere."""
        self._draining = True
        for request, offset in list(self._waiting.values()):
            self._forget(request.rpc)
            request.rpc.cancel_requests()
            request.end(ResultCode.PULL_NOT_FOUND, "the server stops", _offsets(offset, 0, offset))

    def _forget(self, rpc: Rpc) -> None:
        self._waiting.pop(rpc, None)

    def _subscription(self, request: Request, group: str, topic: str) -> Subscription | None:
        """The flag counts, not whether the field is there: clients in Go send an empty one."""
        if group_of_pull_retry(topic):
            return _EVERYTHING
        if request.number("sysFlag", 0) & SUBSCRIPTION:
            kind = request.text("expressionType", "TAG")
            return expression_of(kind, request.text("subscription", "*"))
        return self._sessions.subscription(request.connection, group, topic)

    def _answered(self, request: Request, asked_offset: int, answer: Answer) -> None:
        self._forget(request.rpc)
        if isinstance(answer, PopmqError):
            raise answer
        reply = read_reply(wire.PullReply, answer)
        fields = _offsets(reply.next_offset, reply.min_offset, reply.max_offset)
        if reply.illegal_offset or asked_offset < 0:
            request.end(ResultCode.PULL_OFFSET_MOVED, reply.illegal_offset, fields)
        elif reply.messages:
            request.rpc.metrics.pulled += len(reply.messages)
            host = self._addresses.of(request.connection)
            forms = (
                stored_form(
                    message,
                    request.number("queueId"),
                    store_host=host,
                    cluster=self._settings.cluster.name,
                    body_limit=self._settings.lean.max_inflated_bytes,
                )
                for message in reply.messages
            )
            request.ok(fields, encode_all(forms))
        elif reply.next_offset > asked_offset:
            request.end(ResultCode.PULL_RETRY_IMMEDIATELY, "no message matches", fields)
        else:
            request.end(ResultCode.PULL_NOT_FOUND, "no new message", fields)


class Offsets:
    """QUERY_CONSUMER_OFFSET, UPDATE_CONSUMER_OFFSET, and the offsets that a queue has."""

    def __init__(self, brokers: BrokerPorts, routes: MetadataCache) -> None:
        self._brokers = brokers
        self._routes = routes

    def query(self, request: Request) -> None:
        """Where the group is. One that never was in a queue that still has its first message begins
        there, as at RocketMQ; otherwise its client decides."""
        group, topic = request.text("consumerGroup"), request.text("topic")
        check_pulled_topic(topic, group)
        asked = wire.GetOffsetRequest(topic=topic, group=group, queue_id=queue_id(request))

        def known(answer: Answer) -> None:
            if isinstance(answer, PopmqError) and answer.code is Code.OFFSET_NOT_FOUND:
                first = wire.QueryOffsetRequest(topic=topic, queue_id=asked.queue_id)
                first.beginning = True
                self._ask(request, Kind.QUERY_OFFSET, first, partial(begin, answer))
                return
            _reply_offset(request, answer)

        def begin(unknown: PopmqError, answer: Answer) -> None:
            if isinstance(answer, PopmqError):
                raise answer
            if read_reply(wire.OffsetReply, answer).offset:
                raise unknown
            request.ok({"offset": "0"})

        self._ask(request, Kind.GET_OFFSET, asked, known)

    def update(self, request: Request) -> None:
        group, topic = request.text("consumerGroup"), request.text("topic")
        check_pulled_topic(topic, group)
        offset = request.number("commitOffset")
        if offset < 0:
            raise Refused(Code.ILLEGAL_OFFSET, f"offset {offset} is negative")
        asked = wire.UpdateOffsetRequest(
            topic=topic,
            group=group,
            queue_id=queue_id(request),
            offset=offset,
            only_forward=True,
        )

        def updated(answer: Answer) -> None:
            if isinstance(answer, PopmqError):
                raise answer
            request.ok()

        self._ask(request, Kind.UPDATE_OFFSET, asked, updated)

    def latest(self, request: Request) -> None:
        self._of_queue(request, lambda asked: setattr(asked, "end", True))

    def earliest(self, request: Request) -> None:
        self._of_queue(request, lambda asked: setattr(asked, "beginning", True))

    def by_time(self, request: Request) -> None:
        stored_ms = max(0, request.number("timestamp"))
        self._of_queue(request, lambda asked: setattr(asked, "stored_ms", stored_ms))

    def _of_queue(self, request: Request, place: Callable[[wire.QueryOffsetRequest], None]) -> None:
        topic = request.text("topic")
        check_pulled_topic(topic, group_of_pull_retry(topic))
        asked = wire.QueryOffsetRequest(topic=topic, queue_id=queue_id(request))
        place(asked)
        self._ask(request, Kind.QUERY_OFFSET, asked, partial(_reply_offset, request))

    def _ask(
        self,
        request: Request,
        kind: Kind,
        asked: wire.UpdateOffsetRequest | wire.GetOffsetRequest | wire.QueryOffsetRequest,
        then: Callable[[Answer], None],
    ) -> None:
        rpc = request.rpc
        broker = request.broker(self._brokers.names(), "")

        def ask(topic_id: int, group_id: int) -> None:
            asked.topic_id = topic_id
            if not isinstance(asked, wire.QueryOffsetRequest):
                asked.group_id = group_id
            port = self._brokers.port(broker)
            rpc.send_request(port, kind, asked.SerializeToString(), rpc.timeout_ms(), then)

        group = "" if isinstance(asked, wire.QueryOffsetRequest) else asked.group
        self._routes.ids(asked.topic, group, partial(rpc.run, ask))


def check_pulled_topic(topic: str, group: str) -> None:
    """A group's own retry topic is its to read, and nobody else's."""
    owner = group_of_pull_retry(topic)
    check_group_name(owner or group or "group")
    if owner and owner != group:
        raise Refused(Code.ILLEGAL_TOPIC, f"{topic} is read by group {owner} only")
    if not owner:
        check_readable_topic_name(topic)


def queue_id(request: Request) -> int:
    number = request.number("queueId", bits=32)
    if number < 0:
        raise Refused(Code.BAD_REQUEST, f"queue {number}: name one of the route")
    return number


def _reply_offset(request: Request, answer: Answer) -> None:
    if isinstance(answer, PopmqError):
        raise answer
    request.ok({"offset": str(read_reply(wire.OffsetReply, answer).offset)})


def _reply_bytes(asked: int) -> int:
    return min(max(asked, 1), MAX_REPLY_BYTES)


def _offsets(following: int, low: int, high: int) -> dict[str, str]:
    return {
        "nextBeginOffset": str(following),
        "minOffset": str(low),
        "maxOffset": str(high),
        "suggestWhichBrokerId": "0",
    }
