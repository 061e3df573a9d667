"""A change of topics or groups at every broker group, so that doing it again completes it.

The brokers are asked in turn.  One that has what is to be created, with the same settings, or
lacks what is to be altered or deleted, is passed over; any other refusal ends the change and
says where.  The reply is the sum of those of the brokers that changed, which is the last one unless
the command counts something; when none did, the first refusal.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from popmq.common.errors import Code, PopmqError, Refused, Unavailable
from popmq.common.hop import Kind
from popmq.common.wire import admin_pb2
from popmq.proxy.brokers import Brokers
from popmq.proxy.rpc import Answer, Rpc

TIMEOUT_MS = 10_000

_NOT_FOUND = (Code.NOT_FOUND, Code.TOPIC_NOT_FOUND, Code.CONSUMER_GROUP_NOT_FOUND)
# A request to create, and how to ask for what is there.
_DESCRIBE = {
    Kind.CREATE_TOPIC: Kind.DESCRIBE_TOPIC,
    Kind.CREATE_GROUP: Kind.DESCRIBE_GROUP,
}


# Makes one reply of what was said so far and what the next broker says.
Sum: TypeAlias = Callable[[bytes, bytes], bytes]


def last(_said: bytes, reply: bytes) -> bytes:
    return reply


class AdminChange:
    """One command on its way from broker to broker; `then` gets its end."""

    def __init__(
        self,
        brokers: Brokers,
        rpc: Rpc,
        kind: Kind,
        then: Callable[[Answer], None],
        *,
        sums: Sum = last,
    ) -> None:
        self._brokers = brokers
        self._rpc = rpc
        self._kind = kind
        self._then = then
        self._sum = sums
        self._names: Sequence[str] = ()
        self._at = 0
        self._done: list[str] = []
        self._reply = b""
        self._passed_over: PopmqError | None = None

    def start(self) -> None:
        self._names = tuple(self._brokers.names())
        if not self._names:
            raise Unavailable("no broker is known yet")
        self._next()

    @property
    def _name(self) -> str:
        return self._names[self._at]

    def _next(self) -> None:
        if self._at < len(self._names):
            self._ask(self._kind, self._rpc.data, self._answered)
        elif self._done:
            self._then(self._reply)
        else:
            assert self._passed_over is not None, "a broker changed, was passed over, or refused"
            self._then(self._passed_over)

    def _ask(self, kind: Kind, body: bytes, then: Callable[[Answer], None]) -> None:
        try:
            port = self._brokers.port(self._name)
        except PopmqError as error:
            then(error)
            return
        self._rpc.ask(port, kind, body, TIMEOUT_MS, then)

    def _answered(self, answer: Answer) -> None:
        if not isinstance(answer, PopmqError):
            self._reply = self._sum(self._reply, answer)
            self._done.append(self._name)
            self._at += 1
            self._next()
        elif answer.code in _NOT_FOUND and self._kind not in _DESCRIBE:
            self._pass_over(answer)
        elif answer.code is Code.BAD_REQUEST and self._kind in _DESCRIBE:
            self._compare(answer)
        else:
            self._end(answer)

    def _compare(self, refusal: PopmqError) -> None:
        """Creating was refused: perhaps it is there already, just as it should be."""

        def described(answer: Answer) -> None:
            if not isinstance(answer, PopmqError) and self._is_same(answer):
                self._pass_over(refusal)
            else:
                self._end(refusal)

        if len(self._names) == 1:
            self._end(refusal)
            return
        name = _wanted(self._kind, self._rpc.data).name
        body = admin_pb2.DescribeTopicRequest(name=name).SerializeToString()
        if self._kind is Kind.CREATE_GROUP:
            body = admin_pb2.DescribeGroupRequest(name=name).SerializeToString()
        self._ask(_DESCRIBE[self._kind], body, described)

    def _is_same(self, described: bytes) -> bool:
        """What the request leaves out is the broker's to choose."""
        wanted = _wanted(self._kind, self._rpc.data)
        reply = admin_pb2.TopicReply if self._kind is Kind.CREATE_TOPIC else admin_pb2.GroupReply
        read = reply.FromString(described)
        found = read.topic if isinstance(read, admin_pb2.TopicReply) else read.group
        return all(
            _plain(value) == _plain(getattr(found, field.name))
            for field, value in wanted.ListFields()
            if field.name != "id"
        )

    def _pass_over(self, refusal: PopmqError) -> None:
        self._passed_over = self._passed_over or refusal
        self._at += 1
        self._next()

    def _end(self, refusal: PopmqError) -> None:
        if len(self._names) == 1:
            self._then(refusal)
            return
        done = f"; done at {', '.join(self._done)}" if self._done else ""
        self._then(Refused(refusal.code, f"broker {self._name}: {refusal}{done}"))


def _wanted(kind: Kind, request: bytes) -> admin_pb2.Topic | admin_pb2.Group:
    if kind is Kind.CREATE_TOPIC:
        return admin_pb2.CreateTopicRequest.FromString(request).topic
    return admin_pb2.CreateGroupRequest.FromString(request).group


def _plain(value: object) -> object:
    """Brokers read names of types and the like in any case."""
    return value.lower() if isinstance(value, str) else value
