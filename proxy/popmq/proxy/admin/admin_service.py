"""The admin service on the admin port: topics, groups, stored messages; passed on to brokers.

Requests go through as they came.  What is the same everywhere is asked of one broker group; what
changes something is asked of every one (`admin/broadcast_change.py`).  What looks for messages, or
for what became of them, gathers the answers of all.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from google.protobuf.message import Message

from popmq.common.errors import Code, PopmqError, Unavailable
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.topics import is_dead_letter_topic
from popmq.common.wire import admin_pb2
from popmq.proxy.admin.broadcast_change import AWAY_OWNER_MS, BroadcastChange, Sum, last, left_ms
from popmq.proxy.admin.broadcast_change import named as named_answer
from popmq.proxy.auth.calls import AuthorizedCall
from popmq.proxy.brokers.broker_ports import BrokerPorts, all_groups
from popmq.proxy.brokers.metadata_cache import ask_any
from popmq.proxy.brokers.timer_replies import (
    join_forecast,
    join_recall,
    join_reschedule,
    join_timers,
)
from popmq.proxy.rpc.convert import parse, read_reply
from popmq.proxy.rpc.metrics import ProxyMetrics
from popmq.proxy.rpc.rpc import Answer, Rpc
from popmq.proxy.transport.interface import Call, Method, MethodType

SERVICE = "/popmq.admin.v1.Admin/"

# What every broker adds to; `incomplete` says what is missing.
Gathered = (
    admin_pb2.FindMessagesReply
    | admin_pb2.ExplainReply
    | admin_pb2.LagReply
    | admin_pb2.TimeSpansReply
    | admin_pb2.ListClientsReply
    | admin_pb2.ResetOffsetReply
    | admin_pb2.ListDeadLettersReply
    | admin_pb2.RedriveReply
    | admin_pb2.RecallReply
    | admin_pb2.RescheduleReply
    | admin_pb2.ListTimersReply
    | admin_pb2.ForecastTimersReply
    | admin_pb2.GroupReply
)
Reply = (
    admin_pb2.TopicReply
    | admin_pb2.ListTopicsReply
    | admin_pb2.ListGroupsReply
    | Gathered
    | admin_pb2.UnparkReply
    | admin_pb2.DrainReply
    | admin_pb2.RotateKeysReply
)

# Adds the second, one broker's answer, to the first; both are of the command's type.
_Join: TypeAlias = Callable[[Any, Any], None]


def _append(message: Message, part: Message) -> None:
    message.MergeFromString(part.SerializeToString())


@dataclass(frozen=True, slots=True)
class _Command:
    name: str
    kind: Kind
    reply: type[Reply]
    owned: bool = False  # by one broker group, which is asked; the others follow it
    everywhere: bool = False
    gathers: type[Gathered] | None = None
    join: _Join = _append
    sums: Sum = last  # of what was changed everywhere
    # What it creates belongs to the user that calls.
    created: type[admin_pb2.CreateTopicRequest | admin_pb2.CreateGroupRequest] | None = None

    def asked_of(self, data: bytes) -> str:
        """The broker group that the request names, if any; the others have nothing to say to it.

        Raises BAD_REQUEST unless a broker can read the request.
        """
        request: type[Message] = getattr(admin_pb2, f"{self.name}Request")
        return str(getattr(parse(request, data), "broker", ""))


_TIMER_COMMANDS: tuple[tuple[str, Kind, type[Gathered], _Join], ...] = (
    ("Recall", Kind.RECALL, admin_pb2.RecallReply, join_recall),
    ("Reschedule", Kind.RESCHEDULE, admin_pb2.RescheduleReply, join_reschedule),
    ("ListTimers", Kind.LIST_TIMERS, admin_pb2.ListTimersReply, join_timers),
    ("ForecastTimers", Kind.FORECAST_TIMERS, admin_pb2.ForecastTimersReply, join_forecast),
)
SHOWN_LIMIT = 1_000  # parked message groups


def join_group(reply: admin_pb2.GroupReply, part: admin_pb2.GroupReply) -> None:
    """The settings are those of the first broker that answered: a change goes to all of them."""
    if not reply.HasField("group"):
        reply.group.CopyFrom(part.group)
    reply.parked_keys += part.parked_keys
    parked = [*reply.parked, *part.parked]
    parked.sort(key=lambda key: (-key.parked_ms, key.broker, key.topic, key.key, key.queue_id))
    del reply.parked[:]
    reply.parked.extend(parked[:SHOWN_LIMIT])


def join_clients(reply: admin_pb2.ListClientsReply, part: admin_pb2.ListClientsReply) -> None:
    """One row for each client: each broker says the same, and every proxy what it heard.

    The list ends where that of one broker ends.
    """
    rows = {client.client_id: client for client in reply.clients}
    for client in part.clients:
        known = rows.setdefault(client.client_id, client)
        if known is not client:
            _add_to_client(known, client)
    reply.until = min(filter(None, (reply.until, part.until)), default="")
    listed = (
        sorted(rows) if not reply.until else sorted(name for name in rows if name <= reply.until)
    )
    clients = [rows[client_id] for client_id in listed]
    reply.now_ms = max(reply.now_ms, part.now_ms)
    del reply.clients[:]
    reply.clients.extend(clients)


def _add_to_client(client: admin_pb2.ConnectedClient, other: admin_pb2.ConnectedClient) -> None:
    known = {connection.proxy: connection for connection in client.connections}
    at_other_proxies = []
    for connection in other.connections:
        if connection.proxy in known:
            same = known[connection.proxy]
            same.silent_ms = min(same.silent_ms, connection.silent_ms)
        else:
            at_other_proxies.append(connection)
    client.connections.extend(at_other_proxies)
    if len(client.connections) > 1:
        client.connections.sort(key=lambda connection: connection.silent_ms)
    if not at_other_proxies:
        return  # one proxy says the same to every broker
    for name in ("language", "version", "kind"):
        setattr(client, name, getattr(client, name) or getattr(other, name))
    groups = {group.name for group in client.groups}
    client.groups.extend(group for group in other.groups if group.name not in groups)
    client.topics.extend(sorted({*other.topics}.difference(client.topics)))
    client.shortened |= other.shortened


def join_unparked(joined: bytes, part: bytes) -> bytes:
    """A message group is parked in each queue by itself, and queues are at several brokers."""
    reply = admin_pb2.UnparkReply.FromString(joined)
    reply.messages += admin_pb2.UnparkReply.FromString(part).messages
    return reply.SerializeToString()


def join_keys(joined: bytes, part: bytes) -> bytes:
    reply = admin_pb2.RotateKeysReply.FromString(joined)
    reply.keys.extend(admin_pb2.RotateKeysReply.FromString(part).keys)
    return reply.SerializeToString()


_COMMANDS = (
    _Command("DescribeTopic", Kind.DESCRIBE_TOPIC, admin_pb2.TopicReply),
    _Command(
        "CreateTopic",
        Kind.CREATE_TOPIC,
        admin_pb2.TopicReply,
        owned=True,
        created=admin_pb2.CreateTopicRequest,
    ),
    _Command("AlterTopic", Kind.ALTER_TOPIC, admin_pb2.TopicReply, owned=True),
    _Command("DeleteTopic", Kind.DELETE_TOPIC, admin_pb2.TopicReply, owned=True),
    _Command("ListTopics", Kind.LIST_TOPICS, admin_pb2.ListTopicsReply),
    _Command(
        "DescribeGroup",
        Kind.DESCRIBE_GROUP,
        admin_pb2.GroupReply,
        gathers=admin_pb2.GroupReply,
        join=join_group,
    ),
    _Command(
        "CreateGroup",
        Kind.CREATE_GROUP,
        admin_pb2.GroupReply,
        owned=True,
        created=admin_pb2.CreateGroupRequest,
    ),
    _Command("AlterGroup", Kind.ALTER_GROUP, admin_pb2.GroupReply, owned=True),
    _Command("DeleteGroup", Kind.DELETE_GROUP, admin_pb2.GroupReply, owned=True),
    _Command("ListGroups", Kind.LIST_GROUPS, admin_pb2.ListGroupsReply),
    _Command("Drain", Kind.DRAIN, admin_pb2.DrainReply),
    _Command("Unpark", Kind.UNPARK, admin_pb2.UnparkReply, everywhere=True, sums=join_unparked),
    _Command(
        "RotateKeys",
        Kind.ROTATE_KEYS,
        admin_pb2.RotateKeysReply,
        everywhere=True,
        sums=join_keys,
    ),
    _Command(
        "ListClients",
        Kind.LIST_CLIENTS,
        admin_pb2.ListClientsReply,
        gathers=admin_pb2.ListClientsReply,
        join=join_clients,
    ),
    *(
        _Command(name, kind, reply, gathers=reply)
        for name, kind, reply in (
            ("FindMessages", Kind.FIND_MESSAGES, admin_pb2.FindMessagesReply),
            ("Explain", Kind.EXPLAIN, admin_pb2.ExplainReply),
            ("Lag", Kind.LAG, admin_pb2.LagReply),
            ("TimeSpans", Kind.TIME_SPANS, admin_pb2.TimeSpansReply),
            ("ResetOffset", Kind.RESET_OFFSET, admin_pb2.ResetOffsetReply),
            ("ListDeadLetters", Kind.LIST_DEAD_LETTERS, admin_pb2.ListDeadLettersReply),
            ("Redrive", Kind.REDRIVE, admin_pb2.RedriveReply),
        )
    ),
    *(
        _Command(name, kind, reply, gathers=reply, join=join)
        for name, kind, reply, join in _TIMER_COMMANDS
    ),
)


class Admin:
    def __init__(self, brokers: BrokerPorts, metrics: ProxyMetrics) -> None:
        self._brokers = brokers
        self._metrics = metrics

    def methods(self) -> list[Method]:
        return [
            Method(SERVICE + command.name, MethodType.UNARY, start=partial(self._start, command))
            for command in _COMMANDS
        ]

    def _start(self, command: _Command, call: Call, data: bytes) -> None:
        rpc = Rpc(call, data, self._metrics, partial(_refuse, command.reply))
        rpc.run(self._begin, command, rpc)

    def _begin(self, command: _Command, rpc: Rpc) -> None:
        if command.created is not None:
            request = parse(command.created, rpc.data)
            request.created_by = rpc.call.user if isinstance(rpc.call, AuthorizedCall) else ""
            rpc.data = request.SerializeToString()
        self._pass_on(command, rpc)

    def _pass_on(self, command: _Command, rpc: Rpc) -> None:
        named = command.asked_of(rpc.data)
        if command.everywhere or (command.owned and _is_dead_letters(rpc.data, command.kind)):
            then = partial(_reply, command.reply, rpc)
            change = BroadcastChange(self._brokers, rpc, command.kind, then, sums=command.sums)
            self._when_owner_known(rpc, change.start)
            return
        if command.gathers is not None:
            gathered = command.gathers()

            def gather() -> None:
                asks = [(name, rpc.data) for name in all_groups(self._brokers)]
                self._gather(command, rpc, asks, gathered, [])

            if named:
                self._gather(command, rpc, [(named, rpc.data)], gathered, [])
            else:  # with the owner the proxy knows which groups are absent
                self._when_owner_known(rpc, gather)
            return
        answered = partial(rpc.run, _reply, command.reply, rpc)
        if command.kind is Kind.DRAIN:
            group = parse(admin_pb2.DrainRequest, rpc.data).group
            self._ask_one(command, rpc, group, answered)
            return
        if command.owned:

            def ask_owner() -> None:
                self._ask_one(command, rpc, self._brokers.owner(), answered)

            self._when_owner_known(rpc, ask_owner)
            return
        ask_any(self._brokers, command.kind, rpc.data, answered, timeout_ms=rpc.timeout_ms())

    def _ask_one(
        self, command: _Command, rpc: Rpc, name: str, answered: Callable[[Answer], None]
    ) -> None:
        timeout_ms = min(rpc.timeout_ms(), left_ms(self._brokers, rpc, name, AWAY_OWNER_MS))
        rpc.send_request(self._brokers.port(name), command.kind, rpc.data, timeout_ms, answered)

    def _when_owner_known(self, rpc: Rpc, then: Callable[[], None]) -> None:
        """Controllers that have just started may not know the owner: `then` runs when they do."""
        if self._brokers.owner():
            then()
            return
        if not self._brokers.names():
            raise Unavailable("no broker is known yet")

        def known() -> None:
            timer.cancel()
            rpc.run(then)

        def unknown() -> None:
            forget()
            rpc.refuse(
                Unavailable(
                    "which broker group owns topics and consumer groups is not known yet: try again"
                )
            )

        timer = asyncio.get_running_loop().call_later(rpc.timeout_ms() / 1_000, unknown)
        forget = self._brokers.when_owner_known(known)
        rpc.on_cancelled(forget)
        rpc.on_cancelled(timer.cancel)

    def _gather(
        self,
        command: _Command,
        rpc: Rpc,
        asks: Sequence[tuple[str, bytes]],
        gathered: Gathered,
        refusals: Sequence[PopmqError],
        *,
        more: bool = True,
    ) -> None:
        """Ask brokers by name in turn and add what they answer to `gathered`; then, if there is
        `more` to ask because of what others said, that.

        A broker that refuses or is away makes the reply incomplete; the first refusal is the
        reply when nobody answered. One that is silent leaves half of the client's time to those
        who are asked after it, so that the client hears what the others said.
        """
        if not asks:
            asks = missing_lags(gathered) if more and command.kind is Kind.LAG else ()
            if asks:
                self._gather(command, rpc, asks, gathered, refusals, more=False)
            else:
                _finish_gather(command, rpc, gathered, refusals)
            return
        name, body = asks[0]

        def answered(answer: Answer) -> None:
            refused = list(refusals)
            if isinstance(answer, PopmqError):
                refused.append(answer)
                _note(gathered, named_answer(name, answer))
            else:
                part = read_reply(type(gathered), answer)
                incomplete, part.incomplete = part.incomplete, ""
                command.join(gathered, part)
                gathered.status.CopyFrom(admin_pb2.Status(code=Code.OK, message="OK"))
                if incomplete:
                    _note(gathered, f"broker {name}: {incomplete}")
            self._gather(command, rpc, asks[1:], gathered, refused, more=more)

        try:
            port = self._brokers.port(name)
            timeout_ms = left_ms(self._brokers, rpc, name)
            is_last = len(asks) == 1 and not (more and command.kind is Kind.LAG)
            if not is_last and rpc.call.remaining_ms() is not None:
                timeout_ms = min(timeout_ms, max(1, rpc.timeout_ms() // 2))
        except PopmqError as error:
            answered(error)
            return
        rpc.send_request(port, command.kind, body, timeout_ms, answered)


def _is_dead_letters(request: bytes, kind: Kind) -> bool:
    """Every broker group has dead letters of its own."""
    if kind is not Kind.DELETE_TOPIC:
        return False
    return is_dead_letter_topic(parse(admin_pb2.DeleteTopicRequest, request).name)


def _note(gathered: Gathered, reason: str) -> None:
    gathered.incomplete = "; ".join(filter(None, (gathered.incomplete, reason)))


def _finish_gather(
    command: _Command,
    rpc: Rpc,
    gathered: Gathered,
    refusals: Sequence[PopmqError],
) -> None:
    if not gathered.status.code:
        raise refusals[0] if refusals else Unavailable("no broker is known yet")
    _reply(command.reply, rpc, gathered.SerializeToString())


def _reply(kind: type[Reply], rpc: Rpc, answer: Answer) -> None:
    if isinstance(answer, PopmqError):
        raise answer
    reply = read_reply(kind, answer)
    if not reply.status.code:
        reply.status.CopyFrom(admin_pb2.Status(code=Code.OK, message="OK"))
    rpc.reply(reply.SerializeToString())


def _refuse(kind: type[Reply], _request: bytes, error: PopmqError) -> Sequence[bytes]:
    status = admin_pb2.Status(code=error.code, message=str(error))
    return (kind(status=status).SerializeToString(),)


def missing_lags(message: Message) -> Sequence[tuple[str, bytes]]:
    """(broker, request) for each broker that said nothing of a pair that another one told of.

    A broker tells of the topics that a group has read there; messages may wait at another one that
    the group has not come to yet.
    """
    assert isinstance(message, admin_pb2.LagReply), "the command is LAG"
    sets: dict[str, set[tuple[str, str]]] = {broker: set() for broker in message.brokers}
    for lag in message.lags:
        sets.setdefault(lag.broker, set()).add((lag.group, lag.topic))
    every = set().union(*sets.values())
    asks = []
    for broker, pairs in sorted(sets.items()):
        if missing := sorted(every - pairs):
            requested = [admin_pb2.LagPair(group=group, topic=topic) for group, topic in missing]
            asks.append((broker, admin_pb2.LagRequest(pairs=requested).SerializeToString()))
    return asks
