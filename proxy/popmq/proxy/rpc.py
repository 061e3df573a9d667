"""One RPC between the transport and its handler: refusals, failures and giving up, in one place.

A handler raises a `PopmqError` wherever it finds one, at the start or when a broker answered
later, and the client gets it as the reply's Status.  Anything else that a handler raises is a
fault of ours: it is logged and ends this call only.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from popmq.common.errors import Code, DeadlineExceeded, PopmqError, Refused
from popmq.common.hop import Kind, Port
from popmq.proxy.convert import status_only
from popmq.proxy.metrics import ProxyMetrics
from popmq.proxy.transport.seam import Call, GrpcStatus, Method, Shape

logger = logging.getLogger(__name__)

BROKER_TIMEOUT_MS = 10_000
REPLY_RESERVE_MS = 100  # an answer must leave before the client's deadline
SERVICE = "/apache.rocketmq.v2.MessagingService/"

T = TypeVar("T")
Answer = bytes | PopmqError
Handler = Callable[["Rpc"], None]
# The messages that refuse a request; most replies hold nothing but their Status then.
Refusal = Callable[[bytes, PopmqError], Sequence[bytes]]


def refuse_with_status(_request: bytes, error: PopmqError) -> Sequence[bytes]:
    return (status_only(error),)


class Rpc:
    """A call in progress, the bytes of its request, and how to refuse it."""

    __slots__ = ("_asked", "_hears_gone", "_refusal", "_when_gone", "call", "data", "metrics")

    def __init__(
        self,
        call: Call,
        data: bytes,
        metrics: ProxyMetrics,
        refusal: Refusal = refuse_with_status,
    ) -> None:
        self.call = call
        self.data = data
        self.metrics = metrics
        self._refusal = refusal
        self._asked: dict[object, tuple[Port, int]] = {}
        self._when_gone: list[Callable[[], None]] = []
        self._hears_gone = False

    @property
    def client_id(self) -> str:
        return self.call.metadata.get("x-mq-client-id", "").strip()

    def timeout_ms(self) -> int:
        """How long a broker may take; raises DeadlineExceeded when there is no time to ask."""
        remaining_ms = self.call.remaining_ms()
        if remaining_ms is None:
            return BROKER_TIMEOUT_MS
        left_ms = min(remaining_ms - REPLY_RESERVE_MS, BROKER_TIMEOUT_MS)
        if left_ms <= 0:
            raise DeadlineExceeded(f"the deadline leaves {remaining_ms} ms: nothing was done")
        return left_ms

    def reply(self, *messages: bytes) -> None:
        for message in messages:
            self.call.send(message)
        self.call.finish()
        # They lead back here: the garbage collector would have to find every RPC.
        self._when_gone.clear()

    def refuse(self, error: PopmqError) -> None:
        self.metrics.refuse(error)
        self.reply(*self._refusal(self.data, error))

    def run(self, step: Callable[..., None], *arguments: object) -> None:
        """Call `step`; what it raises ends this RPC and goes no further."""
        try:
            step(*arguments)
        except PopmqError as error:
            self.refuse(error)
        except Exception:
            logger.exception("a handler failed", extra={"step": getattr(step, "__name__", "")})
            self.call.finish(GrpcStatus.INTERNAL, "internal error")

    def ask(
        self, port: Port, kind: Kind, body: bytes, timeout_ms: int, then: Callable[[Answer], None]
    ) -> None:
        """Put a question to a broker; it is given up when the client goes away."""
        token = object()
        answered = False

        def on_reply(answer: Answer) -> None:
            nonlocal answered
            answered = True
            self._asked.pop(token, None)
            self.run(then, answer)

        request_id = port.request(kind, body, timeout_ms, on_reply)
        if not answered:
            self._asked[token] = (port, request_id)
            self._hear_gone()

    def on_gone(self, callback: Callable[[], None]) -> None:
        """`callback` runs if the client goes away before the reply."""
        self._when_gone.append(callback)
        self._hear_gone()

    def later(self, then: Callable[[T], None]) -> Callable[[T | PopmqError], None]:
        """A callback that refuses this RPC with a refusal, and else goes on with `then`."""
        return lambda answer: self.run(_or_raise, then, answer)

    def give_up(self) -> None:
        """Cancel what was asked of brokers; the RPC itself goes on."""
        asked, self._asked = self._asked, {}
        for port, request_id in asked.values():
            port.cancel(request_id)

    def _hear_gone(self) -> None:
        if not self._hears_gone:
            self._hears_gone = True
            self.call.on_gone(self._gone)

    def _gone(self) -> None:
        for callback in self._when_gone:
            callback()
        self.give_up()


def _or_raise(then: Callable[[T], None], answer: T | PopmqError) -> None:
    if isinstance(answer, PopmqError):
        raise answer
    then(answer)


def method(
    name: str,
    handler: Handler,
    metrics: ProxyMetrics,
    *,
    refusal: Refusal = refuse_with_status,
    shape: Shape = Shape.UNARY,
    heard: Callable[[str], None],
) -> Method:
    """A method of the public service; every client of it must name itself, and is `heard`."""

    def start(call: Call, data: bytes) -> None:
        rpc = Rpc(call, data, metrics, refusal)
        heard(rpc.client_id)
        rpc.run(partial(_checked, handler), rpc)

    return Method(SERVICE + name, shape, start=start)


def _checked(handler: Handler, rpc: Rpc) -> None:
    check_client(rpc.call)
    handler(rpc)


def check_client(call: Call) -> None:
    """Raise unless the headers name a client, and no namespace."""
    if not call.metadata.get("x-mq-client-id", "").strip():
        raise Refused(Code.CLIENT_ID_REQUIRED, "the header x-mq-client-id is missing or blank")
    if namespace := call.metadata.get("x-mq-namespace", "").strip():
        raise Refused(
            Code.UNSUPPORTED,
            f"namespace {namespace!r} in the header x-mq-namespace: popmq has no namespaces, "
            "leave it empty",
        )
