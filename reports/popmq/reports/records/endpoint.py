"""ReportEndpoint: asks a proxy for what reports read, and waits where waiting helps.

A broker that is away is asked again until `patience_s` is over.  What was pinned is read, no more
and no less: records that retention took meanwhile are an error, or are counted as missing.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from popmq.common.admin_endpoint import ID_HEADER, AdminRoute
from popmq.common.errors import Code, PopmqError, Refused, Unavailable
from popmq.common.settings.settings import CLIENT_TLS_CA, OVER_TLS
from popmq.common.signing import signer_of
from popmq.common.wire import report_pb2 as pb

SERVICE = "/popmq.report.v1.Reports/"
CALL_TIMEOUT_S = 30.0  # a proxy asks one broker group after the other, each for 10 s at most
PATIENCE_S = 30.0
MAX_REPLY_BYTES = 64 << 20
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 2.0
_AWAY = (Code.HA_NOT_AVAILABLE, Code.TOO_MANY_REQUESTS, Code.PROXY_TIMEOUT)
_SAMPLES = ("offsets", "topics", "timers")

R = TypeVar("R", pb.DescribeReply, pb.NamesReply, pb.ReadRawReply)


class BrokerUnavailable(PopmqError):
    """A broker group did not answer, and the report is not to be made without it."""

    code = Code.HA_NOT_AVAILABLE


class RecordsGone(PopmqError):
    """Retention took what was to be read."""

    code = Code.MESSAGE_NOT_FOUND


@dataclass(frozen=True, slots=True)
class Piece:
    """Whole records, the first of which is number `first` of its partition."""

    first: int
    next: int
    data: bytes


@dataclass(slots=True)
class ReportEndpoint:
    """One channel to one proxy; a context manager. Nothing is connected before the first call.

    `address` may be several with commas: the first that serves reports is used.  A public port that
    names its admin port to callers on its machine leads there.
    """

    address: str
    patience_s: float = PATIENCE_S
    skip_gone: bool = False  # count them in `gone` instead of raising RecordsGone
    gone: int = 0
    _channel: grpc.Channel | None = field(default=None, init=False)
    _route: AdminRoute = field(init=False)

    def __post_init__(self) -> None:
        self._route = AdminRoute(self.address.split(","))

    def __enter__(self) -> "ReportEndpoint":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def describe(
        self,
        tables: Sequence[str],
        *,
        topics: Sequence[str] = (),
        sample: bool = True,
        partial: bool = False,
    ) -> tuple[list[pb.BrokerTables], str]:
        """Every broker group's tables, and why some are missing. Unless `partial`, a group that
        is still away when patience ends is BrokerUnavailable."""
        request = pb.DescribeRequest(
            tables=tables, topics=topics, sample=sample, offset_records=True
        )
        reply = self._whole("Describe", request, pb.DescribeReply, partial)
        return list(reply.brokers), reply.incomplete

    def names(self, *, partial: bool = False) -> dict[str, pb.BrokerNames]:
        reply = self._whole("Names", pb.NamesRequest(), pb.NamesReply, partial)
        return {broker.broker: broker for broker in reply.brokers}

    def read(
        self, broker: str, partition: pb.Partition, *, epoch: int = 0, limit: int = 0
    ) -> Iterator[Piece]:
        """The partition's records of [min, next) in order, at most `limit` a piece (0: 1 MiB)."""
        at = partition.min
        samples = partition.layout in _SAMPLES
        while at < partition.next:
            request = pb.ReadRawRequest(
                broker=broker,
                layout=partition.layout,
                table=partition.table,
                topic_id=partition.topic_id,
                queue_id=partition.queue_id,
                next=min(partition.next, at + limit) if limit else partition.next,
                epoch=epoch if samples else 0,
            )
            setattr(request, "from", at)
            reply = self._patiently(lambda request=request: self._read_once(request))  # type: ignore[misc]
            first = getattr(reply, "from")
            if first > at and not samples:
                self._miss(broker, partition, at, min(first, partition.next))
            if reply.next <= at or first >= partition.next:
                return
            yield Piece(first, reply.next, reply.data)
            at = reply.next

    def _miss(self, broker: str, partition: pb.Partition, first: int, end: int) -> None:
        if not self.skip_gone:
            raise RecordsGone(
                f"broker {broker} has deleted records {first} to {end - 1} of {partition.table} "
                f"{partition.topic} queue {partition.queue_id} (store.retention_hours)"
            )
        self.gone += end - first

    def _read_once(self, request: pb.ReadRawRequest) -> pb.ReadRawReply:
        while True:
            reply = self._call("ReadRaw", request, pb.ReadRawReply)
            if not reply.retry_after_ms:
                return reply
            time.sleep(reply.retry_after_ms / 1_000)

    def _whole(self, name: str, request: Message, kind: type[R], partial: bool) -> R:
        def ask() -> R:
            reply = self._call(name, request, kind)
            if getattr(reply, "incomplete", "") and not partial:
                raise BrokerUnavailable(getattr(reply, "incomplete", ""))
            return reply

        return self._patiently(ask)

    def _patiently(self, ask: Callable[[], R]) -> R:
        """Ask again while it may help; then raise what was said last."""
        until_s = time.monotonic() + self.patience_s
        wait_s = _FIRST_WAIT_S
        while True:
            try:
                return ask()
            except PopmqError as error:
                if error.code not in _AWAY or time.monotonic() + wait_s > until_s:
                    raise
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def _call(self, name: str, request: Message, kind: type[R]) -> R:
        try:
            reply = self._call_used(name, request, kind)
        except grpc.RpcError as error:
            if not self._has_next(error):
                raise Unavailable(f"{self._route.used.address}: {_reason(error)}") from None
            return self._call(name, request, kind)
        if reply.status.code != Code.OK:
            raise _refusal(reply.status.code, reply.status.message)
        return reply

    def _call_used(self, name: str, request: Message, kind: type[R]) -> R:
        call: grpc.UnaryUnaryMultiCallable[Message, R] = self._open().unary_unary(
            SERVICE + name,
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=kind.FromString,
        )
        # Out of the environment, as the certificates: what an option says shows in Spark's plans.
        metadata = signer_of(os.environ).headers()
        if proxy_id := self._route.used.proxy_id:
            metadata.append((ID_HEADER, proxy_id))
        return call(request, timeout=CALL_TIMEOUT_S, metadata=tuple(metadata))

    def _has_next(self, error: grpc.RpcError) -> bool:
        """Go on to the admin port that the refusal names, or to the next address."""
        code, details = (getattr(error, name, lambda: "")() for name in ("code", "details"))
        if code not in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAVAILABLE):
            return False
        implemented = code is not grpc.StatusCode.UNIMPLEMENTED
        self._close()
        return self._route.go_on(implemented=implemented, details=str(details or ""))

    def _close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _open(self) -> grpc.Channel:
        if self._channel is None:
            options = [
                ("grpc.max_receive_message_length", MAX_REPLY_BYTES),
                ("grpc.enable_http_proxy", 0),
                # Two endpoints of one process must not share a connection that one of them closes.
                ("grpc.use_local_subchannel_pool", 1),
            ]
            address = self._route.used.address
            if address.startswith(OVER_TLS):
                trusted = grpc.ssl_channel_credentials(_certificates())
                where = address.removeprefix(OVER_TLS)
                self._channel = grpc.secure_channel(where, trusted, options)
            else:
                self._channel = grpc.insecure_channel(address, options)
        return self._channel


class EndpointRefused(Refused):
    """What the cluster said, with its code."""


def _refusal(number: int, message: str) -> PopmqError:
    try:
        code = Code(number)
    except ValueError:
        code = Code.INTERNAL_ERROR
    return EndpointRefused(code, f"{code.name} ({number}): {message}")


def _reason(error: grpc.RpcError) -> str:
    details = getattr(error, "details", lambda: "")() or ""
    code = getattr(error, "code", lambda: None)()
    return f"{getattr(code, 'name', 'no answer')}: {details}" if details else "no answer"


def _certificates() -> bytes | None:
    """PEM of those to trust. Out of a file: what an option says shows in Spark's plans."""
    path = os.environ.get(CLIENT_TLS_CA)
    if not path:
        return None
    with open(path, "rb") as file:
        return file.read()
