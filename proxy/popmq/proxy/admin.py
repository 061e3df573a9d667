"""The admin service on the public port: topics and groups, passed on to the brokers.

Requests go through as they came.  What describes or lists is asked of one broker group; what
changes something is asked of every one, in turn, and the first refusal ends it: done again, the
command goes on where it stopped.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from google.protobuf.message import DecodeError

from popmq.common.errors import Code, PopmqError, Refused, Unavailable
from popmq.common.hop import Kind
from popmq.common.wire import admin_pb2
from popmq.proxy.brokers import Brokers
from popmq.proxy.metrics import ProxyMetrics
from popmq.proxy.route import ask_any
from popmq.proxy.rpc import Answer, Rpc
from popmq.proxy.transport.seam import Call, Method, Shape

SERVICE = "/popmq.admin.v1.Admin/"
TIMEOUT_MS = 10_000

Reply = (
    admin_pb2.TopicReply
    | admin_pb2.ListTopicsReply
    | admin_pb2.GroupReply
    | admin_pb2.ListGroupsReply
)


@dataclass(frozen=True, slots=True)
class _Command:
    name: str
    kind: Kind
    reply: type[Reply]
    everywhere: bool = False


_COMMANDS = (
    _Command("DescribeTopic", Kind.DESCRIBE_TOPIC, admin_pb2.TopicReply),
    _Command("CreateTopic", Kind.CREATE_TOPIC, admin_pb2.TopicReply, everywhere=True),
    _Command("AlterTopic", Kind.ALTER_TOPIC, admin_pb2.TopicReply, everywhere=True),
    _Command("DeleteTopic", Kind.DELETE_TOPIC, admin_pb2.TopicReply, everywhere=True),
    _Command("ListTopics", Kind.LIST_TOPICS, admin_pb2.ListTopicsReply),
    _Command("DescribeGroup", Kind.DESCRIBE_GROUP, admin_pb2.GroupReply),
    _Command("CreateGroup", Kind.CREATE_GROUP, admin_pb2.GroupReply, everywhere=True),
    _Command("AlterGroup", Kind.ALTER_GROUP, admin_pb2.GroupReply, everywhere=True),
    _Command("DeleteGroup", Kind.DELETE_GROUP, admin_pb2.GroupReply, everywhere=True),
    _Command("ListGroups", Kind.LIST_GROUPS, admin_pb2.ListGroupsReply),
)


class Admin:
    def __init__(self, brokers: Brokers, metrics: ProxyMetrics) -> None:
        self._brokers = brokers
        self._metrics = metrics

    def methods(self) -> list[Method]:
        return [
            Method(SERVICE + one.name, Shape.UNARY, start=partial(self._start, one))
            for one in _COMMANDS
        ]

    def _start(self, command: _Command, call: Call, data: bytes) -> None:
        rpc = Rpc(call, data, self._metrics, partial(_refuse, command.reply))
        rpc.run(self._pass_on, command, rpc)

    def _pass_on(self, command: _Command, rpc: Rpc) -> None:
        if command.everywhere:
            self._change(command, rpc, tuple(self._brokers.names()))
            return
        answered = partial(rpc.run, _reply, command.reply, rpc)
        ask_any(self._brokers, command.kind, rpc.data, answered, timeout_ms=TIMEOUT_MS)

    def _change(self, command: _Command, rpc: Rpc, names: Sequence[str]) -> None:
        """Ask the first of `names`, then the others; the reply is the last one's."""
        if not names:
            raise Unavailable("no broker is known yet")

        def answered(answer: Answer) -> None:
            if not isinstance(answer, PopmqError) and len(names) > 1:
                self._change(command, rpc, names[1:])
            else:
                _reply(command.reply, rpc, answer)

        port = self._brokers.port(names[0])
        rpc.ask(port, command.kind, rpc.data, TIMEOUT_MS, answered)


def _reply(kind: type[Reply], rpc: Rpc, answer: Answer) -> None:
    if isinstance(answer, PopmqError):
        raise answer
    try:
        reply = kind.FromString(answer)
    except DecodeError as error:
        raise Refused(Code.INTERNAL_ERROR, f"a broker's reply is no {kind.__name__}") from error
    if not reply.status.code:
        reply.status.CopyFrom(admin_pb2.Status(code=Code.OK, message="OK"))
    rpc.reply(reply.SerializeToString())


def _refuse(kind: type[Reply], _request: bytes, error: PopmqError) -> Sequence[bytes]:
    status = admin_pb2.Status(code=error.code, message=str(error))
    return (kind(status=status).SerializeToString(),)
