"""AckMessage and ChangeInvisibleDuration: receipt handles find their broker by themselves.

A handle names its broker group; the proxy looks no further into it.  Push consumers repeat for
ever what is neither OK nor INVALID_RECEIPT_HANDLE, so one bad entry must not hide the others and
a single entry never becomes MULTIPLE_RESULTS.
"""

from collections.abc import Iterator, Sequence
from functools import partial

from popmq.common.errors import Code, InvalidReceiptHandle, PopmqError, Refused
from popmq.common.loop_iteration import CallSoon, at_once
from popmq.common.protocol.messaging_payloads import (
    AckRequest,
    AckResult,
    ChangeRequest,
    Kind,
    Port,
    ack_entry,
    ack_head,
    decode_ack_reply,
    encode_ack,
    encode_change,
    id_tail,
)
from popmq.common.settings.settings import Settings
from popmq.common.topics import check_group_name, check_readable_topic_name
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service
from popmq.proxy.brokers.broker_ports import BrokerPorts, broker_of_handle
from popmq.proxy.brokers.metadata_cache import MetadataCache
from popmq.proxy.brokers.request_batcher import RequestBatcher
from popmq.proxy.rpc.convert import (
    acked_ok,
    duration_ms,
    name_of,
    ok,
    parse,
    status,
    status_of,
    status_only,
)
from popmq.proxy.rpc.rpc import Answer, Rpc
from popmq.proxy.rpc.validate import change_invisible_ms, common_code

MAX_HANDLES = 1_024  # in one request to a broker
HANDLE_LIMIT = 512  # bytes; with the longest broker name a handle has 422


class AckMessage:
    def __init__(
        self, brokers: BrokerPorts, routes: MetadataCache, soon: CallSoon = at_once
    ) -> None:
        self._brokers = brokers
        self._routes = routes
        self.acks = RequestBatcher(Kind.ACK, decode_ack_reply, MAX_HANDLES, soon)

    def start(self, rpc: Rpc) -> None:
        request = parse(service.AckMessageRequest, rpc.data)
        topic, group = topic_and_group(request.topic, request.group)
        if not request.entries:
            raise Refused(Code.BAD_REQUEST, "the request has no entry to acknowledge")
        gathered = _Gathered(rpc, request.entries)
        by_broker: dict[str, tuple[Port, list[int]]] = {}
        for index, entry in enumerate(request.entries):
            try:
                name, port = broker_of_handle(self._brokers, handle_bytes(entry.receipt_handle))
                by_broker.setdefault(name, (port, []))[1].append(index)
            except PopmqError as error:
                gathered.settle(index, error)
        for port, indexes in by_broker.values():
            for part in _parts(indexes):
                self._ask(gathered, port, topic, group, part)

    def _ask(
        self, gathered: "_Gathered", port: Port, topic: str, group: str, part: Sequence[int]
    ) -> None:
        rpc = gathered.rpc
        try:
            timeout_ms = rpc.timeout_ms()
        except PopmqError as error:
            gathered.settle_all(part, error, True)
            return
        entries = [ack_entry(handle) for handle in gathered.handles(part)]
        tail = id_tail(group_id(self._brokers, self._routes, group))
        then = partial(gathered.settle_all, part)
        self.acks.add(rpc, port, ack_head(topic, group), timeout_ms, entries, then, tail)

    def settle_one(self, rpc: Rpc, result: AckResult | PopmqError) -> None:
        """What came of the one entry of a call that its lane had asked for."""
        entries = parse(service.AckMessageRequest, rpc.data).entries
        _Gathered(rpc, entries).settle(0, result)


class _Gathered:
    """One result per entry, in the order of the request; the reply leaves with the last."""

    def __init__(self, rpc: Rpc, entries: Sequence[service.AckMessageEntry]) -> None:
        self.rpc = rpc
        self._entries = entries
        self._results: list[AckResult] = [AckResult()] * len(entries)
        self._missing = len(entries)

    def handles(self, indexes: Sequence[int]) -> list[bytes]:
        return [handle_bytes(self._entries[index].receipt_handle) for index in indexes]

    def settle_all(
        self, indexes: Sequence[int], answer: Sequence[AckResult] | PopmqError, _at_once: bool
    ) -> None:
        if isinstance(answer, PopmqError):
            for index in indexes:
                self.settle(index, answer)
            return
        for index, result in zip(indexes, answer, strict=True):
            self.settle(index, result)

    def settle(self, index: int, result: AckResult | PopmqError) -> None:
        if isinstance(result, PopmqError):
            result = AckResult(result.code, str(result))
        metrics = self.rpc.metrics
        if result.code == Code.OK:
            metrics.acks += 1
        else:
            metrics.refused[result.code] += 1
        self._results[index] = result
        self._missing -= 1
        if not self._missing:
            self.rpc.reply(ack_reply(self._entries, self._results))


def ack_reply(entries: Sequence[service.AckMessageEntry], results: Sequence[AckResult]) -> bytes:
    if all(item.code == Code.OK for item in results):
        return acked_ok(entries)
    code = common_code([item.code for item in results])
    differing = "entries had different results; see each entry"
    text = results[0].message if code == results[0].code else differing
    reply = service.AckMessageResponse(status=status(code, text or "OK"))
    for entry, result in zip(entries, results, strict=True):
        reply.entries.add(
            message_id=entry.message_id,
            receipt_handle=entry.receipt_handle,
            status=status(result.code, result.message or "OK"),
        )
    return reply.SerializeToString()


def refuse_ack(request: bytes, error: PopmqError) -> Sequence[bytes]:
    """The whole request is refused: each entry says so too."""
    try:
        entries = parse(service.AckMessageRequest, request).entries
    except PopmqError:
        return (status_only(error),)
    if not entries:
        return (status_only(error),)
    return (ack_reply(entries, [AckResult(error.code, str(error))] * len(entries)),)


class ChangeInvisibleDuration:
    def __init__(self, brokers: BrokerPorts, routes: MetadataCache, settings: Settings) -> None:
        self._brokers = brokers
        self._routes = routes
        self._limits = settings.pop

    def start(self, rpc: Rpc) -> None:
        request = parse(service.ChangeInvisibleDurationRequest, rpc.data)
        topic, group = topic_and_group(request.topic, request.group)
        invisible_ms = change_invisible_ms(duration_ms(request.invisible_duration), self._limits)
        handle = handle_bytes(request.receipt_handle)
        _, port = broker_of_handle(self._brokers, handle)
        known = group_id(self._brokers, self._routes, group)
        body = encode_change(ChangeRequest(topic, group, handle, invisible_ms, known))
        rpc.send_request(port, Kind.CHANGE, body, rpc.timeout_ms(), partial(self._changed, rpc))

    def _changed(self, rpc: Rpc, answer: Answer) -> None:
        if isinstance(answer, PopmqError):
            raise answer
        rpc.metrics.changes += 1
        rpc.reply(_change_reply(ok(), answer.decode()))


def group_id(brokers: BrokerPorts, routes: MetadataCache, group: str) -> int:
    """As a broker group that copies groups is told; a single broker group owns them."""
    return routes.known_group_id(group) if len(brokers.names()) > 1 else 0


def refuse_change(request: bytes, error: PopmqError) -> Sequence[bytes]:
    """With the handle of the request: clients store the field before they look at the status."""
    try:
        handle = parse(service.ChangeInvisibleDurationRequest, request).receipt_handle
    except PopmqError:
        handle = ""
    return (_change_reply(status_of(error), handle),)


def handle_bytes(handle: str) -> bytes:
    if len(handle) > HANDLE_LIMIT:
        raise InvalidReceiptHandle(
            f"the receipt handle of {len(handle)} characters is over the limit of {HANDLE_LIMIT}"
        )
    try:
        return handle.encode("ascii")
    except UnicodeEncodeError as error:
        raise InvalidReceiptHandle("the receipt handle is not base64 text") from error


def _change_reply(found_status: pb.Status, handle: str) -> bytes:
    reply = service.ChangeInvisibleDurationResponse(status=found_status, receipt_handle=handle)
    return reply.SerializeToString()


def topic_and_group(topic: pb.Resource, group: pb.Resource) -> tuple[str, str]:
    names = name_of(topic), name_of(group)
    check_readable_topic_name(names[0])
    check_group_name(names[1])
    return names


def _parts(indexes: Sequence[int]) -> Iterator[Sequence[int]]:
    return (indexes[at : at + MAX_HANDLES] for at in range(0, len(indexes), MAX_HANDLES))


class ForwardToDeadLetterQueue:
    """A consumer gives a message up for its group.

    Clients repeat it for ever on everything but OK and INVALID_RECEIPT_HANDLE, like an ack.  The
    broker knows the attempt by the handle; the numbers that a client sends are not used.
    """

    def __init__(self, brokers: BrokerPorts) -> None:
        self._brokers = brokers

    def start(self, rpc: Rpc) -> None:
        request = parse(service.ForwardMessageToDeadLetterQueueRequest, rpc.data)
        topic, group = name_of(request.topic), name_of(request.group)
        check_readable_topic_name(topic)
        check_group_name(group)
        handle = handle_bytes(request.receipt_handle)
        _, port = broker_of_handle(self._brokers, handle)
        body = encode_ack(AckRequest(topic, group, [handle]))
        rpc.send_request(port, Kind.REJECT, body, rpc.timeout_ms(), partial(_answered, rpc))


def _answered(rpc: Rpc, answer: Answer) -> None:
    if isinstance(answer, PopmqError):
        raise answer
    (result,) = decode_ack_reply(answer)
    if result.code != Code.OK:
        raise Refused(Code(result.code), result.message)
    reply = service.ForwardMessageToDeadLetterQueueResponse(status=ok())
    rpc.reply(reply.SerializeToString())
