"""SyncLiteSubscription: which lite topics of a parent topic a client wants.

Clients ask any proxy and receive through another one, so brokers keep it: every broker group is
told, since each has lite topics of its own.  It is OK when all that have a master took it.  A
proxy remembers what it was told only to tell a new master sooner than the clients do.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from popmq.common.clock import Clock
from popmq.common.errors import Code, PopmqError, Refused, Unavailable
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.settings.lite_settings import LiteSettings
from popmq.common.topics import check_group_name, check_lite_topic_name, check_topic_name
from popmq.common.wire.lite_pb2 import SyncLite
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service
from popmq.proxy.brokers.broker_ports import BrokerPorts
from popmq.proxy.rpc.convert import name_of, ok, parse
from popmq.proxy.rpc.rpc import Answer, Rpc

RESUBSCRIBE = 4  # an action between our processes: adds, and begins nothing
_REMEMBERED_MS = 35_000  # clients say everything each 30 s
_AGAIN_MS = 5_000
_AWAY = (Code.HA_NOT_AVAILABLE, Code.PROXY_TIMEOUT, Code.NOT_MASTER)
_AT_ONCE = 8  # requests to one broker group
_Who = tuple[str, str, str]  # client, topic, group
_LANGUAGE = "x-mq-language"
_POLICY = pb.OffsetOption.Policy


class _Told(NamedTuple):
    """What a client said through this proxy, and when."""

    names: frozenset[str]
    heard_ms: int


class SyncLiteSubscription:
    """Remembers for half a minute what clients said, for brokers that have forgotten it."""

    def __init__(self, brokers: BrokerPorts, settings: LiteSettings, clock: Clock) -> None:
        self._brokers = brokers
        self._limit = settings.max_subscriptions
        self._clock = clock
        self._told: OrderedDict[_Who, _Told] = OrderedDict()  # by when it was heard
        self._of_client: dict[str, set[_Who]] = {}
        self._names = 0  # in all of them
        self._again: dict[str, deque[_Who]] = {}  # what is being told again, by broker group

    def start(self, rpc: Rpc) -> None:
        request = parse(service.SyncLiteSubscriptionRequest, rpc.data)
        sync = _sync_of(rpc, request)
        body = sync.SerializeToString()
        names = self._brokers.names()
        if not names:
            raise Unavailable("no broker is known yet")
        timeout_ms = rpc.timeout_ms()
        # One that is away hears of it within 30 s of its return: clients say everything again.
        here = [name for name in names if self._brokers.has_master(name)] or names
        ports = [self._brokers.port(name) for name in here]
        answers: list[Answer] = []
        then = partial(self._answered, rpc, sync, answers, len(ports))
        for port in ports:
            rpc.send_request(port, Kind.SYNC_LITE, body, timeout_ms, then)

    def _answered(
        self, rpc: Rpc, sync: SyncLite, answers: list[Answer], count: int, answer: Answer
    ) -> None:
        """The last one ends it: with a refusal, if one of them was."""
        answers.append(answer)
        if len(answers) < count:
            return
        for answer_or_error in answers:
            if isinstance(answer_or_error, PopmqError):
                raise answer_or_error
        self._remember(sync)
        rpc.reply(service.SyncLiteSubscriptionResponse(status=ok()).SerializeToString())

    # -- a broker group with a new master, which knows of no subscription

    def resend_to(self, broker: str) -> None:
        """Tell it what clients said here lately; they say it themselves within 30 s."""
        self._forget_old()
        beginning = not self._again.get(broker)
        self._again[broker] = deque(self._told)
        if beginning:
            for _ in range(_AT_ONCE):
                self._tell_next(broker)

    def on_client_closed(self, client_id: str) -> None:
        """It said good-bye."""
        for client in list(self._of_client.get(client_id, ())):
            self._forget(client)

    def subscribes(self, client_id: str, name: str) -> bool:
        """Whether it said so here lately."""
        return any(
            name in self._told[client].names for client in self._of_client.get(client_id, ())
        )

    def ended(self, client_id: str, names: Sequence[str]) -> None:
        """A broker group ended these subscriptions: another one is not told of them again."""
        for client in list(self._of_client.get(client_id, ())):
            reply = self._told[client]
            left = reply.names.difference(names)
            if not left:
                self._forget(client)
                continue
            self._names -= len(reply.names) - len(left)
            self._told[client] = _Told(left, reply.heard_ms)

    def _tell_next(self, broker: str, answer: Answer = b"") -> None:
        if isinstance(answer, PopmqError) and answer.code in _AWAY:
            self._again.pop(broker, None)  # its next master will be told
        left = self._again.get(broker)
        while left:
            client = left.popleft()
            reply = self._told.get(client)
            if reply is None:
                continue
            client_id, topic, group = client
            sync = SyncLite(
                topic=topic,
                group=group,
                client_id=client_id,
                action=RESUBSCRIBE,
                names=sorted(reply.names),
            )
            body = sync.SerializeToString()
            try:
                port = self._brokers.port(broker)
            except PopmqError:
                break
            port.request(Kind.SYNC_LITE, body, _AGAIN_MS, partial(self._tell_next, broker))
            return
        self._again.pop(broker, None)

    def _remember(self, sync: SyncLite) -> None:
        client = (sync.client_id, sync.topic, sync.group)
        before = self._told.get(client)
        names = before.names if before is not None else frozenset[str]()
        match sync.action:
            case pb.LiteSubscriptionAction.PARTIAL_ADD:
                names = names.union(sync.names)
            case pb.LiteSubscriptionAction.PARTIAL_REMOVE:
                names = names.difference(sync.names)
            case _:
                names = frozenset(sync.names)  # of COMPLETE_REMOVE none
        self._forget(client)
        if names:
            self._told[client] = _Told(names, self._clock.boot_ms())
            self._of_client.setdefault(client[0], set()).add(client)
            self._names += len(names)
        self._forget_old()

    def _forget_old(self) -> None:
        old_ms = self._clock.boot_ms() - _REMEMBERED_MS
        while self._told:
            client, oldest = next(iter(self._told.items()))
            if oldest.heard_ms > old_ms and self._names <= self._limit:
                break
            self._forget(client)

    def _forget(self, client: _Who) -> None:
        gone = self._told.pop(client, None)
        if gone is None:
            return
        self._names -= len(gone.names)
        mine = self._of_client[client[0]]
        mine.discard(client)
        if not mine:
            del self._of_client[client[0]]


def _sync_of(rpc: Rpc, request: service.SyncLiteSubscriptionRequest) -> SyncLite:
    topic, group = name_of(request.topic), name_of(request.group)
    check_topic_name(topic)
    check_group_name(group)
    adds = request.action in (
        pb.LiteSubscriptionAction.PARTIAL_ADD,
        pb.LiteSubscriptionAction.COMPLETE_ADD,
    )
    names = _names_of(rpc, request)
    if request.action not in pb.LiteSubscriptionAction.values():
        raise Refused(Code.BAD_REQUEST, f"action {request.action} on lite subscriptions is unknown")
    if adds:
        for name in names:
            check_lite_topic_name(name)
    sync = SyncLite(
        topic=topic,
        group=group,
        client_id=rpc.client_id,
        action=request.action,
        names=names,
    )
    _add_begin(sync, request.offset_option)
    return sync


def _names_of(rpc: Rpc, request: service.SyncLiteSubscriptionRequest) -> Sequence[str]:
    """The lite topics that the client means.

    `subscribe_lite` of the Python client (5.1.2) says the one name letter by letter, as so many
    names; only what it says again every 30 s has it whole.
    """
    names = request.lite_topic_set
    added = request.action == pb.LiteSubscriptionAction.PARTIAL_ADD
    if added and rpc.call.metadata.get(_LANGUAGE) == "PYTHON" and {*map(len, names)} == {1}:
        return ["".join(names)]
    return names


def _add_begin(sync: SyncLite, option: pb.OffsetOption) -> None:
    """Where the group begins in what it never read; LAST is where it was, which needs no word."""
    match option.WhichOneof("offset_type"):
        case "policy" if option.policy != _POLICY.LAST:
            sync.newest = option.policy == _POLICY.MAX
        case "offset":
            sync.offset = max(0, option.offset)
        case "tail_n":
            sync.tail = max(0, option.tail_n)
        case "timestamp":
            sync.stored_ms = max(0, option.timestamp)
