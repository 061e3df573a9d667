"""What administrators ask of controllers, passed on: which brokers there are, and failovers.

The controllers are asked in turn until one answers; what it says counts, unless it says that it
does not know the broker group.
"""

from collections.abc import Callable, Sequence
from functools import partial

from popmq.common.errors import Code, PopmqError, Unavailable
from popmq.common.protocol.messaging_payloads import Kind, Port
from popmq.common.wire import admin_pb2, controller_pb2
from popmq.proxy.admin.admin_service import SERVICE
from popmq.proxy.rpc.convert import parse, read_reply
from popmq.proxy.rpc.metrics import ProxyMetrics
from popmq.proxy.rpc.rpc import Answer, Rpc
from popmq.proxy.transport.interface import Call, Method, MethodType

LIST_TIMEOUT_MS = 2_000
FAILOVER_TIMEOUT_MS = 8_000

_AWAY = (Code.HA_NOT_AVAILABLE, Code.PROXY_TIMEOUT)
Reply = admin_pb2.ListBrokersReply | admin_pb2.FailoverReply


class ClusterAdmin:
    def __init__(self, controllers: Sequence[Port], cluster: str, metrics: ProxyMetrics) -> None:
        self._controllers = controllers
        self._cluster = cluster
        self._metrics = metrics

    def methods(self) -> list[Method]:
        return [
            self._method("ListBrokers", admin_pb2.ListBrokersReply, self._list),
            self._method("Failover", admin_pb2.FailoverReply, self._failover),
        ]

    def _method(self, name: str, reply: type[Reply], handler: Callable[[Rpc], None]) -> Method:
        def start(call: Call, data: bytes) -> None:
            rpc = Rpc(call, data, self._metrics, partial(_refuse, reply))
            rpc.run(handler, rpc)

        return Method(SERVICE + name, MethodType.UNARY, start=start)

    def _list(self, rpc: Rpc) -> None:
        asked = parse(admin_pb2.ListBrokersRequest, rpc.data)
        request = controller_pb2.ListReplicasRequest(cluster=self._cluster, group=asked.group)

        def answered(answer: bytes) -> None:
            decoded_reply = read_reply(controller_pb2.ListReplicasReply, answer)
            reply = admin_pb2.ListBrokersReply(status=_OK, found=decoded_reply)
            rpc.reply(reply.SerializeToString())

        body = request.SerializeToString()
        self._ask(rpc, Kind.LIST_REPLICAS, body, LIST_TIMEOUT_MS, answered)

    def _failover(self, rpc: Rpc) -> None:
        asked = parse(admin_pb2.FailoverRequest, rpc.data)
        request = controller_pb2.FailoverRequest(
            cluster=self._cluster,
            group=asked.group,
            node=asked.node,
            unclean=asked.unclean,
            dry_run=asked.dry_run,
        )

        def answered(answer: bytes) -> None:
            done = read_reply(controller_pb2.FailoverReply, answer)
            reply = admin_pb2.FailoverReply(status=_OK, done=done)
            rpc.reply(reply.SerializeToString())

        body = request.SerializeToString()
        self._ask(rpc, Kind.FAILOVER, body, FAILOVER_TIMEOUT_MS, answered)

    def _ask(
        self, rpc: Rpc, kind: Kind, body: bytes, timeout_ms: int, then: Callable[[bytes], None]
    ) -> None:
        """A failover that may have been done is not asked of the next controller."""
        repeatable = _AWAY if kind is Kind.LIST_REPLICAS else (Code.HA_NOT_AVAILABLE,)
        left = list(self._controllers)

        def answered(answer: Answer) -> None:
            if not isinstance(answer, PopmqError):
                then(answer)
                return
            unsent = not (isinstance(answer, Unavailable) and answer.unknown)
            again = answer.code in (*repeatable, Code.NOT_FOUND)
            if left and again and (unsent or kind is Kind.LIST_REPLICAS):
                rpc.send_request(left.pop(0), kind, body, timeout_ms, answered)
            else:
                raise answer

        if not left:
            raise Unavailable("this proxy knows no controller (controller.addresses)")
        rpc.send_request(left.pop(0), kind, body, timeout_ms, answered)


_OK = admin_pb2.Status(code=Code.OK, message="OK")


def _refuse(reply: type[Reply], _request: bytes, error: PopmqError) -> Sequence[bytes]:
    status = admin_pb2.Status(code=error.code, message=str(error))
    return (reply(status=status).SerializeToString(),)
