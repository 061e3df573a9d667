"""One RPC between the transport and its handler: refusals, failures and giving up, in one place.

A handler raises a `PopmqError` wherever it finds one, at the start or when a broker answered
later, and the client gets it as the reply's Status.  Anything else that a handler raises is a
fault of ours: it is logged and ends this call only.
"""

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from popmq.common.errors import Code, DeadlineExceeded, PopmqError, Refused
from popmq.common.observability import Histogram
from popmq.common.protocol.messaging_payloads import Kind, Port
from popmq.proxy.rpc.convert import status_only
from popmq.proxy.rpc.metrics import ProxyMetrics
from popmq.proxy.rpc.namespaces import NamespaceCall, NamespaceTranslator, namespace_of
from popmq.proxy.rpc.validate import CONTROL
from popmq.proxy.transport.interface import Call, GrpcStatus, Method, MethodType

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

    __slots__ = (
        "_asked",
        "_began_s",
        "_hears_gone",
        "_refusal",
        "_took",
        "_when_gone",
        "call",
        "client_id",
        "data",
        "metrics",
    )

    def __init__(
        self,
        call: Call,
        data: bytes,
        metrics: ProxyMetrics,
        refusal: Refusal = refuse_with_status,
        took: Histogram | None = None,
    ) -> None:
        self.call = call
        self.client_id = call.metadata.get("x-mq-client-id", "").strip()
        self.data = data
        self.metrics = metrics
        self._refusal = refusal
        # Only those that ask or wait by themselves have any: an ordinary send does not.
        self._asked: dict[object, tuple[Port, int]] | None = None
        self._when_gone: list[Callable[[], None]] | None = None
        self._hears_gone = False
        self._took = took
        self._began_s = metrics.now_s() if took is not None else 0.0

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
        if len(messages) == 1:
            self.call.send(messages[0])
        else:
            self.call.send_all(messages)
        self.call.finish()
        if self._took is not None:
            self._took.observe(int((self.metrics.now_s() - self._began_s) * 1_000))
        # They lead back here: the garbage collector would have to find every RPC.
        self._when_gone = None

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

    def send_request(
        self, port: Port, kind: Kind, body: bytes, timeout_ms: int, then: Callable[[Answer], None]
    ) -> None:
        """Put a question to a broker; it is given up when the client goes away."""
        token = object()
        answered = False

        def on_reply(answer: Answer) -> None:
            nonlocal answered
            answered = True
            if self._asked is not None:
                self._asked.pop(token, None)
            self.run(then, answer)

        request_id = port.request(kind, body, timeout_ms, on_reply)
        if not answered:
            if self._asked is None:
                self._asked = {}
            self._asked[token] = (port, request_id)
            self._hear_gone()

    def on_cancelled(self, callback: Callable[[], None]) -> None:
        """`callback` runs if the client goes away before the reply, at once if it is gone."""
        if self._when_gone is None:
            self._when_gone = []
        self._when_gone.append(callback)
        self._hear_gone()

    def guard(self, then: Callable[[T], None]) -> Callable[[T | PopmqError], None]:
        """A callback that refuses this RPC with a refusal, and else goes on with `then`."""
        return lambda answer: self.run(_or_raise, then, answer)

    def cancel_requests(self) -> None:
        """Cancel what was asked of brokers; the RPC itself goes on."""
        asked, self._asked = self._asked, None
        if asked is not None:
            for port, request_id in asked.values():
                port.cancel(request_id)

    def _hear_gone(self) -> None:
        if not self._hears_gone:
            self._hears_gone = True
            self.call.on_cancelled(self._gone)

    def _gone(self) -> None:
        self._hears_gone = False  # what begins from now on hears of it at once
        callbacks, self._when_gone = self._when_gone, None
        for callback in callbacks or ():
            callback()
        self.cancel_requests()


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
    shape: MethodType = MethodType.UNARY,
    on_client: Callable[[str, Call], None] | None = None,
    service: str = SERVICE,
) -> Method:
    """A method of a public service; with `on_client` every client of it must name itself, and is.

    One that names a namespace too gets a handler that sees whole names only.
    """

    took = metrics.taken(name)

    def checked(rpc: Rpc) -> None:
        if on_client is not None and not (rpc.client_id and rpc.client_id.isprintable()):
            _check_client_id(rpc.client_id)
        if namespace := namespace_of(rpc.call.metadata):
            translator = NamespaceTranslator(namespace, name)
            data, call = translator.inward(rpc.data), NamespaceCall(rpc.call, translator.outward)
            whole = Rpc(call, data, metrics, refusal, took)
            whole.run(handler, whole)
        else:
            handler(rpc)

    def start(call: Call, data: bytes) -> None:
        rpc = Rpc(call, data, metrics, refusal, took)
        if on_client is not None and rpc.client_id.isprintable():
            on_client(rpc.client_id, call)
        rpc.run(checked, rpc)

    return Method(service + name, shape, start=start, refusal=refusal)


def check_client(call: Call) -> None:
    """Raise unless the headers name a client."""
    _check_client_id(call.metadata.get("x-mq-client-id", "").strip())


def _check_client_id(client_id: str) -> None:
    if not client_id:
        raise Refused(Code.CLIENT_ID_REQUIRED, "the header x-mq-client-id is missing or blank")
    if CONTROL.search(client_id):
        raise Refused(
            Code.CLIENT_ID_REQUIRED,
            f"the header x-mq-client-id, {client_id[:100]!r}, has a control character",
        )
