"""What reports ask on the admin port: passed on to the brokers, their answers put together."""

from collections.abc import Callable, Sequence
from functools import partial

from popmq.common.errors import Code, PopmqError, Unavailable
from popmq.common.protocol.frame_kinds import Kind
from popmq.common.wire import admin_pb2, report_pb2
from popmq.proxy.admin.broadcast_change import TIMEOUT_MS
from popmq.proxy.brokers.broker_ports import BrokerPorts, all_groups
from popmq.proxy.rpc.convert import parse, read_reply
from popmq.proxy.rpc.metrics import ProxyMetrics
from popmq.proxy.rpc.rpc import Answer, Rpc
from popmq.proxy.transport.interface import Call, Method, MethodType

SERVICE = "/popmq.report.v1.Reports/"
_OK = admin_pb2.Status(code=Code.OK, message="OK")

Gathered = report_pb2.DescribeReply | report_pb2.NamesReply
Reply = Gathered | report_pb2.ReadRawReply


class Reports:
    def __init__(self, brokers: BrokerPorts, metrics: ProxyMetrics) -> None:
        self._brokers = brokers
        self._metrics = metrics

    def methods(self) -> list[Method]:
        return [
            self._method("Describe", report_pb2.DescribeReply, self._describe),
            self._method("ReadRaw", report_pb2.ReadRawReply, self._read_raw),
            self._method("Names", report_pb2.NamesReply, self._names),
        ]

    def _method(self, name: str, reply: type[Reply], handler: Callable[[Rpc], None]) -> Method:
        def start(call: Call, data: bytes) -> None:
            rpc = Rpc(call, data, self._metrics, partial(_refuse, reply))
            rpc.run(handler, rpc)

        return Method(SERVICE + name, MethodType.UNARY, start=start)

    def _read_raw(self, rpc: Rpc) -> None:
        request = parse(report_pb2.ReadRawRequest, rpc.data)
        port = self._brokers.port(request.broker)

        def answered(answer: Answer) -> None:
            if isinstance(answer, PopmqError):
                raise answer
            rpc.reply(answer)

        rpc.send_request(port, Kind.READ_RAW, rpc.data, TIMEOUT_MS, answered)

    def _describe(self, rpc: Rpc) -> None:
        parse(report_pb2.DescribeRequest, rpc.data)
        reply = report_pb2.DescribeReply()
        self._gather(rpc, Kind.DESCRIBE_TABLES, all_groups(self._brokers), reply, [])

    def _names(self, rpc: Rpc) -> None:
        broker = parse(report_pb2.NamesRequest, rpc.data).broker
        names = [broker] if broker else all_groups(self._brokers)
        self._gather(rpc, Kind.NAMES, names, report_pb2.NamesReply(), [])

    def _gather(
        self,
        rpc: Rpc,
        kind: Kind,
        names: Sequence[str],
        result: Gathered,
        refusals: Sequence[tuple[str, PopmqError]],
    ) -> None:
        """Ask one broker group after the other; who does not answer is named in the reply, which
        is a refusal when nobody answered."""
        if not names:
            if not result.brokers:
                raise refusals[0][1] if refusals else Unavailable("no broker is known yet")
            result.status.CopyFrom(_OK)
            result.incomplete = "; ".join(f"broker {name}: {error}" for name, error in refusals)
            rpc.reply(result.SerializeToString())
            return

        def answered(answer: Answer) -> None:
            refused = list(refusals)
            if isinstance(answer, PopmqError):
                refused.append((names[0], answer))
            else:
                result.MergeFromString(read_reply(type(result), answer).SerializeToString())
            self._gather(rpc, kind, names[1:], result, refused)

        try:
            port = self._brokers.port(names[0])
        except PopmqError as error:
            answered(error)
            return
        rpc.send_request(port, kind, rpc.data, TIMEOUT_MS, answered)


def _refuse(reply: type[Reply], _request: bytes, error: PopmqError) -> Sequence[bytes]:
    status = admin_pb2.Status(code=error.code, message=str(error))
    return (reply(status=status).SerializeToString(),)
