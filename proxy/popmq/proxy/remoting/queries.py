"""What an operator asks over Remoting: messages by key or id (12), the age of a queue (32) and what
a consumer does (307)."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from popmq.common.clock import Clock
from popmq.common.errors import Code, PopmqError, Refused, Unavailable
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.settings.settings import Settings
from popmq.common.topics import check_readable_topic_name
from popmq.common.wire.admin_pb2 import FindMessagesReply, FindMessagesRequest, FoundMessage
from popmq.common.wire.pull_pb2 import PulledMessage
from popmq.proxy.brokers.broker_ports import BrokerPorts
from popmq.proxy.remoting.clients import Clients
from popmq.proxy.remoting.connection import RemotingConnection
from popmq.proxy.remoting.frames import Command
from popmq.proxy.remoting.message_conversion import stored_form
from popmq.proxy.remoting.pulling import MAX_REPLY_BYTES, queue_id
from popmq.proxy.remoting.request import Request
from popmq.proxy.remoting.request_codes import RequestCode
from popmq.proxy.remoting.result_codes import ResultCode
from popmq.proxy.remoting.routes import Addresses
from popmq.proxy.remoting.stored_message import encode_stored
from popmq.proxy.rpc.convert import read_reply
from popmq.proxy.rpc.rpc import Answer

FOUND_LIMIT = 64  # of one query, as brokers return at most
COPIES_MS = 3_000  # in which the copies of one query come
QUERIES_LIMIT = 100  # of one connection, whose copies are counted
_LATEST_MS = 1 << 62


class _Query(NamedTuple):
    topic: str
    name: str
    by_id: bool
    begin_ms: int
    end_ms: int
    limit: int

    def request(self) -> bytes:
        asked = FindMessagesRequest(topic=self.topic, limit=self.limit)
        if self.by_id:
            asked.message_id = self.name
        else:
            asked.key, asked.begin_ms = self.name, self.begin_ms
            asked.end_ms = self.end_ms if self.end_ms < _LATEST_MS else 0
        return asked.SerializeToString()


class Queries:
    def __init__(
        self,
        brokers: BrokerPorts,
        clients: Clients,
        settings: Settings,
        addresses: Addresses,
        clock: Clock,
    ) -> None:
        self._brokers = brokers
        self._clients = clients
        self._settings = settings
        self._addresses = addresses
        self._clock = clock
        # Of a connection, the queries whose copies still come: how many, and until when.
        self._copies: dict[RemotingConnection, dict[_Query, tuple[int, int]]] = {}

    def messages(self, request: Request) -> None:
        """QUERY_MESSAGE, by key or message id.

        A client asks each broker group of the route, all of them here, and does not say which: the
        first copy of a query gets what all groups have, the others nothing.
        """
        query = _query(request)
        names = self._groups(request)
        if len(names) > 1 and self._is_copy(request.connection, query, len(names)):
            request.end(ResultCode.QUERY_NOT_FOUND, "another answer has what was found")
            return
        messages: list[FoundMessage] = []
        failures: list[PopmqError] = []
        missing = len(names)

        def answered(answer: Answer) -> None:
            nonlocal missing
            missing -= 1
            if isinstance(answer, PopmqError):
                failures.append(answer)
            else:
                messages.extend(read_reply(FindMessagesReply, answer).messages)
            if missing:
                return
            if failures and not messages:
                raise failures[0]
            self._answer(request, messages[: query.limit])

        self._ask(request, names, query.request(), answered)

    def earliest_time(self, request: Request) -> None:
        """GET_EARLIEST_MSG_STORETIME; -1 of an empty queue."""
        topic = request.text("topic")
        check_readable_topic_name(topic)
        asked = FindMessagesRequest(topic=topic, queue_id=queue_id(request), stored_ms=0, limit=1)

        def answered(answer: Answer) -> None:
            if isinstance(answer, PopmqError):
                raise answer
            messages = read_reply(FindMessagesReply, answer).messages
            request.ok({"timestamp": str(messages[0].stored_ms if messages else -1)})

        broker = request.broker(self._brokers.names(), "")
        self._ask(request, [broker], asked.SerializeToString(), answered)

    def running_info(self, request: Request) -> None:
        """GET_CONSUMER_RUNNING_INFO: the client itself knows."""
        names = ("consumerGroup", "clientId", "jstackEnable")
        fields = {name: request.text(name, "false") for name in names}
        command = Command(RequestCode.GET_CONSUMER_RUNNING_INFO, fields=fields)

        def answered(answer: Command) -> None:
            if answer.code:
                why = f"the client answered {answer.code}: {answer.remark[:200]}"
                raise Refused(Code.BAD_REQUEST, why)
            request.ok(body=answer.body)

        self._clients.ask(request.rpc, request.text("clientId"), command, answered)

    def _groups(self, request: Request) -> Sequence[str]:
        named = request.command.fields.get("bname", "") or request.connection.broker_group
        names = self._brokers.names()
        if not names:
            raise Unavailable("no broker is known yet")
        return [request.broker(names, named)] if named else names

    def _is_copy(self, connection: RemotingConnection, query: _Query, groups: int) -> bool:
        if connection not in self._copies:
            self._copies[connection] = {}
            connection.on_lost(partial(self._copies.__delitem__, connection))
        now_ms, known = self._clock.boot_ms(), self._copies[connection]
        for other, (_, until_ms) in list(known.items()):
            if until_ms <= now_ms:
                del known[other]
        if query in known:
            left, until_ms = known.pop(query)
            if left > 1:
                known[query] = left - 1, until_ms
            return True
        if len(known) < QUERIES_LIMIT:
            known[query] = groups - 1, now_ms + COPIES_MS
        return False

    def _ask(
        self,
        request: Request,
        names: Sequence[str],
        body: bytes,
        answered: Callable[[Answer], None],
    ) -> None:
        rpc = request.rpc
        for name in names:
            try:
                port = self._brokers.port(name)
            except PopmqError as error:
                rpc.run(answered, error)
            else:
                rpc.send_request(port, Kind.FIND_MESSAGES, body, rpc.timeout_ms(), answered)

    def _answer(self, request: Request, messages: Sequence[FoundMessage]) -> None:
        if not messages:
            request.end(ResultCode.QUERY_NOT_FOUND, "no message has that key or id")
            return
        parts: list[bytes] = []
        size = 0
        for part in map(partial(self._stored, request.connection), messages):
            size += len(part)
            if parts and size > MAX_REPLY_BYTES:
                break
            parts.append(part)
        fields = {"indexLastUpdateTimestamp": "0", "indexLastUpdatePhyoffset": "0"}
        request.ok(fields, b"".join(parts))

    def _stored(self, connection: RemotingConnection, message: FoundMessage) -> bytes:
        pulled = PulledMessage(
            queue_offset=message.queue_offset,
            stored_ms=message.stored_ms,
            head=message.head,
            properties=message.properties,
            position=message.position,
            attempt=message.attempt,
        )
        form = stored_form(
            pulled,
            message.queue_id,
            store_host=self._addresses.of(connection),
            cluster=self._settings.cluster.name,
            body_limit=self._settings.lean.max_inflated_bytes,
        )
        return encode_stored(form)


def _query(request: Request) -> _Query:
    topic, kind = request.text("topic"), request.text("indexType", "")
    check_readable_topic_name(topic)
    if kind not in ("", "K", "U"):
        raise Refused(
            Code.NOT_IMPLEMENTED,
            f"index type {kind[:40]!r}: messages are found by key (K) or id (U)",
        )
    return _Query(
        topic,
        request.text("key"),
        kind == "U" or request.flag("_UNIQUE_KEY_QUERY"),
        max(0, request.number("beginTimestamp", 0)),
        max(0, request.number("endTimestamp", 0)),
        min(max(1, request.number("maxNum", FOUND_LIMIT)), FOUND_LIMIT),
    )
