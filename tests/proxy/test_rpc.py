"""One RPC by itself: what it leaves behind, and who hears that its client is gone."""

import gc
import weakref
from collections.abc import Callable

from popmq.common.protocol.messaging_payloads import Kind, OnReply
from popmq.proxy.rpc.metrics import ProxyMetrics
from popmq.proxy.rpc.rpc import Rpc
from popmq.proxy.transport.interface import GrpcStatus


class LiveCall:
    """Forgets its callbacks when it ends, as those of both transports do."""

    peer = ""

    def __init__(self) -> None:
        self.metadata: dict[str, str] = {}
        self.sent: list[bytes] = []
        self.gone_callbacks: list[Callable[[], None]] = []

    def remaining_ms(self) -> int | None:
        return None

    def send(self, message: bytes) -> None:
        self.sent.append(message)

    def finish(self, status: GrpcStatus = GrpcStatus.OK, detail: str = "") -> None:
        self.gone_callbacks.clear()

    def on_cancelled(self, callback: Callable[[], None]) -> None:
        self.gone_callbacks.append(callback)


class WaitingPort:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.open: list[OnReply] = []
        self.cancelled: list[int] = []

    def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: OnReply) -> int:
        self.open.append(on_reply)
        return len(self.open)

    def cancel(self, request_id: int) -> None:
        self.cancelled.append(request_id)


def asked(port: WaitingPort) -> weakref.ref[LiveCall]:
    """A call that waits for a broker, as its RPC alone holds it."""
    call = LiveCall()
    rpc = Rpc(call, b"", ProxyMetrics())
    rpc.on_cancelled(rpc.cancel_requests)
    rpc.send_request(port, Kind.POP, b"", 1_000, lambda answer: rpc.reply(b"done"))
    return weakref.ref(call)


def test_an_rpc_that_was_answered_is_no_work_for_the_garbage_collector() -> None:
    port = WaitingPort()
    gc.disable()
    try:
        call = asked(port)
        assert call() is not None
        port.open.pop()(b"an answer")
        assert call() is None
    finally:
        gc.enable()


def test_a_client_that_goes_away_ends_every_question_and_is_told_to_each_callback() -> None:
    broker = WaitingPort()
    call = LiveCall()
    rpc = Rpc(call, b"", ProxyMetrics())
    heard: list[str] = []
    rpc.on_cancelled(lambda: heard.append("first"))
    rpc.send_request(broker, Kind.POP, b"", 1_000, lambda answer: heard.append("answer"))
    rpc.send_request(broker, Kind.POP, b"", 1_000, lambda answer: heard.append("answer"))
    rpc.on_cancelled(lambda: heard.append("second"))
    assert len(call.gone_callbacks) == 1
    call.gone_callbacks[0]()
    assert heard == ["first", "second"]
    assert broker.cancelled == [1, 2]
