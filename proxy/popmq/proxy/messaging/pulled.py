"""A pulled message as its consumer sees it: stored slices, and where it lies; no receipt handle."""

from google.protobuf.timestamp_pb2 import Timestamp

from popmq.common.wire import pull_pb2 as wire
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service
from popmq.proxy.rpc.wire_scan import chunk

_SYSTEM_PROPERTIES = pb.Message.SYSTEM_PROPERTIES_FIELD_NUMBER
_MESSAGE = service.PullMessageResponse.MESSAGE_FIELD_NUMBER


def pulled_part(one: wire.PulledMessage, queue_id: int, store_host: bytes) -> bytes:
    """PullMessageResponse{message}: head + one field of stored and own properties (D5)."""
    seconds, ms = divmod(one.stored_ms, 1000)
    own = pb.SystemProperties(
        store_timestamp=Timestamp(seconds=seconds, nanos=ms * 1_000_000),
        store_host=store_host.decode(),
        queue_id=queue_id,
        queue_offset=one.queue_offset,
    ).SerializeToString()
    return chunk(_MESSAGE, one.head + chunk(_SYSTEM_PROPERTIES, one.properties + own))
