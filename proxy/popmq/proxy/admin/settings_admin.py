"""DescribeSettings: what this proxy, the masters and the controllers run with."""

from collections.abc import Callable, Sequence
from functools import partial

from popmq.common.errors import Code, PopmqError
from popmq.common.protocol.messaging_payloads import Kind, Port
from popmq.common.settings.settings import Settings
from popmq.common.settings.settings_reply import process_settings
from popmq.common.wire import admin_pb2
from popmq.proxy.admin.admin_service import SERVICE
from popmq.proxy.admin.broadcast_change import named
from popmq.proxy.brokers.broker_ports import BrokerPorts
from popmq.proxy.rpc.convert import parse, read_reply
from popmq.proxy.rpc.metrics import ProxyMetrics
from popmq.proxy.rpc.rpc import Answer, Rpc
from popmq.proxy.transport.interface import Call, Method, MethodType

TIMEOUT_MS = 1_000
Ask = tuple[str, Callable[[], Port]]


class SettingsAdmin:
    def __init__(
        self,
        settings: Settings,
        brokers: BrokerPorts,
        controllers: Sequence[Port],
        metrics: ProxyMetrics,
        endpoint: Callable[[], str],
    ) -> None:
        self._settings = settings
        self._brokers = brokers
        self._controllers = controllers
        self._metrics = metrics
        self._endpoint = endpoint

    def methods(self) -> list[Method]:
        return [Method(SERVICE + "DescribeSettings", MethodType.UNARY, start=self._start)]

    def _start(self, call: Call, data: bytes) -> None:
        rpc = Rpc(call, data, self._metrics, _refuse)
        rpc.run(self._describe, rpc)

    def _describe(self, rpc: Rpc) -> None:
        parse(admin_pb2.DescribeSettingsRequest, rpc.data)
        status = admin_pb2.Status(code=Code.OK, message="OK")
        own = process_settings("proxy", self._endpoint(), self._settings)
        reply = admin_pb2.DescribeSettingsReply(status=status, processes=[own])
        asks: list[Ask] = [
            (f"broker {name}", partial(self._brokers.port, name)) for name in self._brokers.names()
        ]
        for place, port in enumerate(self._controllers, 1):
            asks.append((f"controller {place}", lambda port=port: port))  # type: ignore[misc]
        self._ask(rpc, asks, reply)

    def _ask(self, rpc: Rpc, asks: Sequence[Ask], reply: admin_pb2.DescribeSettingsReply) -> None:
        if not asks:
            rpc.reply(reply.SerializeToString())
            return
        (name, port_of), *rest = asks

        def answered(answer: Answer) -> None:
            if isinstance(answer, PopmqError):
                missing = named(name.removeprefix("broker "), answer)
                reply.incomplete = "; ".join(filter(None, (reply.incomplete, missing)))
            else:
                part = read_reply(admin_pb2.DescribeSettingsReply, answer)
                reply.processes.extend(part.processes)
            self._ask(rpc, rest, reply)

        try:
            port = port_of()
        except PopmqError as error:
            answered(error)
            return
        rpc.send_request(port, Kind.DESCRIBE_SETTINGS, b"", TIMEOUT_MS, answered)


def _refuse(_request: bytes, error: PopmqError) -> Sequence[bytes]:
    status = admin_pb2.Status(code=error.code, message=str(error))
    return (admin_pb2.DescribeSettingsReply(status=status).SerializeToString(),)
