"""One RPC by itself: what it leaves behind, and who hears that its client is gone."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

from popmq.common.errors import Code
from popmq.common.protocol.messaging_payloads import Kind, OnReply
from popmq.proxy.api import service_pb2 as service
from popmq.proxy.rpc.metrics import ProxyMetrics
from popmq.proxy.rpc.rpc import Rpc
from popmq.proxy.transport.interface import GrpcStatus, OneByOne


class LiveCall(OneByOne):
    """Forgets its callbacks when it ends, as those of both transports do."""

    peer = ""

    def __init__(self) -> None:
        self.metadata: dict[str, str] = {}
        self.sent: list[bytes] = []
        self.gone_callbacks: list[Callable[[], None]] = []
        self.gone = False

    encrypted = False

    def remaining_ms(self) -> int | None:
        return None

    def send(self, message: bytes) -> None:
        self.sent.append(message)

    def finish(self, status: GrpcStatus = GrpcStatus.OK, detail: str = "") -> None:
        self.gone_callbacks.clear()

    def on_cancelled(self, callback: Callable[[], None]) -> None:
        if self.gone:
            callback()
        else:
            self.gone_callbacks.append(callback)

    def leave(self) -> None:
        self.gone = True
        for callback in self.gone_callbacks:
            callback()

    def on_unread(self, callback: Callable[[], None]) -> None: ...


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
    connected: list[str] = []
    rpc.on_cancelled(lambda: connected.append("first"))
    rpc.send_request(broker, Kind.POP, b"", 1_000, lambda answer: connected.append("answer"))
    rpc.send_request(broker, Kind.POP, b"", 1_000, lambda answer: connected.append("answer"))
    rpc.on_cancelled(lambda: connected.append("second"))
    assert len(call.gone_callbacks) == 1
    call.gone_callbacks[0]()
    assert connected == ["first", "second"]
    assert broker.cancelled == [1, 2]


def test_what_is_asked_for_a_client_that_is_gone_is_given_up_at_once() -> None:
    broker = WaitingPort()
    call = LiveCall()
    rpc = Rpc(call, b"", ProxyMetrics())
    connected: list[str] = []
    rpc.on_cancelled(lambda: connected.append("first"))
    call.leave()
    rpc.on_cancelled(lambda: connected.append("second"))
    rpc.send_request(broker, Kind.PUT, b"", 1_000, lambda answer: connected.append("answer"))
    assert connected == ["first", "second"]
    assert broker.cancelled == [1]


def test_a_client_id_with_a_control_character_is_refused(bench: Any, make_call: Any) -> None:
    call = make_call(metadata={"x-mq-client-id": "me\x9b31m"})
    bench.methods["Heartbeat"].start(call, b"")
    (reply,) = call.sent
    assert service.HeartbeatResponse.FromString(reply).status.code == Code.CLIENT_ID_REQUIRED.value
    assert not bench.proxy.clients._heard
