"""A broker without a network, served to Spark's workers as a proxy would serve it."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc

from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.wire import report_pb2 as pb
from popmq.testing.harness.core_broker import CoreBroker

_KINDS = {"Describe": Kind.DESCRIBE_TABLES, "ReadRaw": Kind.READ_RAW, "Names": Kind.NAMES}


class ReportsServer:
    """A context manager; `endpoint` is where it listens."""

    def __init__(self, core: CoreBroker) -> None:
        self._core = core
        self._lock = threading.Lock()
        self._server = grpc.server(ThreadPoolExecutor(4))
        handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            name: grpc.unary_unary_rpc_method_handler(self._answer(kind))
            for name, kind in _KINDS.items()
        }
        lag: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            "Lag": grpc.unary_unary_rpc_method_handler(self._answer(Kind.LAG))
        }
        services = {"popmq.report.v1.Reports": handlers, "popmq.admin.v1.Admin": lag}
        self._server.add_generic_rpc_handlers(
            tuple(
                grpc.method_handlers_generic_handler(name, methods)
                for name, methods in services.items()
            )
        )
        self.endpoint = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> "ReportsServer":
        self._server.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.stop(None).wait()

    def _answer(self, kind: Kind) -> Callable[[bytes, object], bytes]:
        def answer(request: bytes, _: object) -> bytes:
            with self._lock:
                body = self._core.reply(kind, request)
                if kind is Kind.READ_RAW:
                    wait_ms = pb.ReadRawReply.FromString(body).retry_after_ms
                    self._core.advance(wait_ms)  # its clock stands still for the reader
                return body

        return answer
