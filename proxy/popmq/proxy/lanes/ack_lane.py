"""AckLane: ordinary acks that came together, as entries of one request to each broker."""

from collections.abc import Callable, Sequence

from google.protobuf.message import DecodeError

from popmq.common.errors import PopmqError
from popmq.common.protocol.messaging_payloads import (
    ACKED,
    AckResult,
    ack_entry,
    ack_head,
    id_tail,
)
from popmq.common.record.receipt import broker_of
from popmq.proxy.api import service_pb2 as service
from popmq.proxy.brokers.broker_ports import BrokerPorts
from popmq.proxy.brokers.metadata_cache import MetadataCache
from popmq.proxy.lanes.call_lane import CallLane, LaneAccess, Way
from popmq.proxy.lanes.ordinary_send import remember
from popmq.proxy.messaging.ack import (
    HANDLE_LIMIT,
    AckMessage,
    group_id,
    refuse_ack,
    topic_and_group,
)
from popmq.proxy.rpc.convert import one_acked_ok
from popmq.proxy.rpc.metrics import ProxyMetrics
from popmq.proxy.rpc.rpc import Rpc
from popmq.proxy.rpc.wire_scan import LEN, only_content
from popmq.proxy.transport.interface import Caller, LaneRun

_ENTRIES = service.AckMessageRequest.ENTRIES_FIELD_NUMBER
_HANDLE = service.AckMessageEntry.RECEIPT_HANDLE_FIELD_NUMBER
_ID_TAG = service.AckMessageEntry.MESSAGE_ID_FIELD_NUMBER << 3 | LEN


class AckLane(CallLane[bytes, AckResult]):
    """Keeps the bytes of each entry, with which its result begins."""

    def __init__(
        self,
        acks: AckMessage,
        brokers: BrokerPorts,
        routes: MetadataCache,
        metrics: ProxyMetrics,
        access: LaneAccess,
        on_client: Callable[[str, Caller], None],
        enabled: bool,
    ) -> None:
        name, general = "AckMessage", acks.start
        super().__init__(name, acks.acks, metrics, access, on_client, refuse_ack, general, enabled)
        self._acks = acks
        self._brokers = brokers
        self._routes = routes
        self._ways: dict[tuple[bytes, str], Way] = {}

    def read(self, run: LaneRun, start: int, stop: int) -> tuple[Way, bytes, bytes] | None:
        """One entry, in the order in which protobuf writes it."""
        data = run.data[start:stop]
        names_end = 2 + data[1]
        names_end += 2 + data[names_end + 1]
        at = only_content(data, _ENTRIES, names_end)
        entry = data[at:]
        handle_tag = 2 + entry[1]
        handle_at = only_content(entry, _HANDLE, handle_tag)
        handle = entry[handle_at:]
        usual = at and handle_at and entry[0] == _ID_TAG and 2 < handle_tag < 0x82
        if not usual or not 0 < len(handle) <= HANDLE_LIMIT or not handle.isascii():
            return None
        entry[2:handle_tag].decode()
        name = broker_of(handle)
        names = data[:names_end]
        head, group = _HEADS.get(names) or _head_of(names)
        port = self._brokers.port(name)
        tail = id_tail(group_id(self._brokers, self._routes, group))
        way = self._ways.get((names, name))
        if way is None or way.port is not port or way.tail is not tail:
            way = remember(self._ways, (names, name), Way(port, head, tail))
        return way, ack_entry(handle), entry

    def answers(self, kept: Sequence[bytes], results: Sequence[AckResult]) -> list[bytes]:
        self._metrics.acks += results.count(ACKED)
        return [
            one_acked_ok(entry) if result is ACKED else b""
            for entry, result in zip(kept, results, strict=True)
        ]

    def settle_unusual(
        self, rpc: Rpc, way: Way, result: AckResult | PopmqError, at_once: bool
    ) -> None:
        self._acks.settle_one(rpc, result)


# What acks of one group for one topic begin with at a broker, and the group, by what they begin
# with here.
_HEADS: dict[bytes, tuple[bytes, str]] = {}


def _head_of(names: bytes) -> tuple[bytes, str]:
    try:
        request = service.AckMessageRequest.FromString(names)
    except DecodeError as error:
        raise ValueError("not two names") from error
    if request.entries:
        raise ValueError("not two names")
    topic, group = topic_and_group(request.topic, request.group)
    return remember(_HEADS, names, (ack_head(topic, group), group))
