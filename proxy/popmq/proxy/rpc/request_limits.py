"""How large a request of each method may be, and how many parts it may have.

Protobuf and the handlers make objects of every part: 1 MiB of empty messages, which is 1 KB of
gzip, would take 870 MiB and seconds of the loop.  So the parts are counted in the bytes before
anything is parsed.  A part takes at least two bytes, so a small request cannot have too many and
is not looked at (docs/security.md).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Protocol

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from popmq.common.errors import Code, PopmqError, Refused
from popmq.common.quantities import KIB, MIB
from popmq.common.settings.settings import Settings
from popmq.common.topics import LITE_NAME_LIMIT
from popmq.common.wire import admin_pb2, report_pb2
from popmq.proxy.api import admin_pb2 as public_admin_pb2
from popmq.proxy.api import service_pb2
from popmq.proxy.rpc.convert import status_only
from popmq.proxy.rpc.metrics import ProxyMetrics
from popmq.proxy.rpc.stream_limits import StreamLimits
from popmq.proxy.rpc.wire_scan import LEN, START_GROUP, field_at
from popmq.proxy.transport.interface import Call, Method, StreamListener

LEAST_PART_BYTES = 2  # a tag, and a length or a value
MAX_ENTRIES = 1_024  # what a handler goes through, one by one
MAX_PARTS = 16_384  # what protobuf alone does
_ACK_ENTRY_BYTES = KIB  # a handle of at most 512 bytes, a message id, a lite topic
_FILES = {
    "apache.rocketmq.v2.MessagingService": service_pb2.DESCRIPTOR,
    "apache.rocketmq.v2.Admin": public_admin_pb2.DESCRIPTOR,
    "popmq.admin.v1.Admin": admin_pb2.DESCRIPTOR,
    "popmq.report.v1.Reports": report_pb2.DESCRIPTOR,
}

# The fields of a message that hold messages, by number; PACKED where they hold many numbers.
Shape = dict[int, "Shape"]
PACKED: Shape = {}


@dataclass(frozen=True, slots=True)
class RequestLimit:
    """`max_entries` counts the fields of the request itself, `max_parts` those of all levels.

    `setting` names what `max_entries` follows, if it does.
    """

    max_bytes: int = MIB
    max_entries: int = MAX_ENTRIES
    max_parts: int = MAX_PARTS
    setting: str = ""

    def check(self, kind: Descriptor, data: bytes) -> None:
        """Raise BAD_REQUEST when `data`, a message of this kind, is over a limit."""
        size = len(data)
        if size > self.max_bytes:
            raise _over(kind, f"{size} bytes, and the limit is {self.max_bytes}")
        if size <= LEAST_PART_BYTES * self.max_entries:
            return
        try:
            if _fields_of(data, 0, size, {}, [], self.max_entries) > self.max_entries:
                where = f" ({self.setting})" if self.setting else ""
                raise _over(kind, f"more than {self.max_entries} entries{where}")
            if size > LEAST_PART_BYTES * self.max_parts:
                self._check_parts(kind, data)
        except (IndexError, ValueError) as error:
            raise Refused(Code.BAD_REQUEST, f"the request is no {kind.name}: {error}") from error

    def _check_parts(self, kind: Descriptor, data: bytes) -> None:
        """Level by level, until what is not read yet is too short to matter."""
        left, level = self.max_parts, [(0, len(data), _shape_of(kind))]
        while sum(end - start for start, end, _ in level) > LEAST_PART_BYTES * left:
            below: list[tuple[int, int, Shape]] = []
            for start, end, shape in level:
                left -= _fields_of(data, start, end, shape, below, left)
                if left < 0:
                    raise _over(kind, f"more than {self.max_parts} fields")
            level = below


def _fields_of(
    data: bytes,
    at: int,
    end: int,
    shape: Shape,
    below: list[tuple[int, int, Shape]],
    most: int,
) -> int:
    """How many fields data[at:end] has, or a number over `most`; the messages among them come
    into `below`. Raises ValueError or IndexError for what is no message."""
    count = 0
    while at < end and count <= most:
        count += 1
        key, size = data[at], data[at + 1]
        # Written out: this runs for every field.
        if key & 0x87 == LEN and size < 0x80:
            content, after = at + 2, at + 2 + size
            inner = shape.get(key >> 3)
        elif key & 7 == START_GROUP:
            raise ValueError("it has a group, which this protocol does not use")
        else:
            number, _, _, content, after = field_at(data, at)
            inner = shape.get(number)
        if inner is not None:
            if inner is PACKED:
                count += after - content
            elif content < after:
                below.append((content, after, inner))
        at = after
    if at > end:
        raise ValueError("a field ends behind its message")
    return count


def _over(kind: Descriptor, what: str) -> PopmqError:
    return Refused(Code.BAD_REQUEST, f"the {kind.name} has {what}")


@cache
def _shape_of(kind: Descriptor) -> Shape:
    shape: Shape = {}
    for field in kind.fields:
        if field.message_type is not None:
            shape[field.number] = _shape_of(field.message_type)
        elif field.is_repeated and field.cpp_type != FieldDescriptor.CPPTYPE_STRING:
            shape[field.number] = PACKED
    return shape


def request_limits(settings: Settings) -> dict[str, RequestLimit]:
    """By the names of methods; what is not here has `RequestLimit()`."""
    message = settings.message
    sends = RequestLimit(
        settings.lean.max_message_bytes, message.max_batch, 2 * MAX_PARTS, "message.max_batch"
    )
    small = RequestLimit(128 * KIB)
    names = settings.lite.max_client_subscriptions
    return {
        "SendMessage": sends,
        "AdminSendMessage": sends,
        "AckMessage": RequestLimit(MAX_ENTRIES * _ACK_ENTRY_BYTES),
        # A thread dump may come here too, which is not looked at.
        "Telemetry": RequestLimit(MIB, MAX_ENTRIES, MAX_PARTS // 2),
        "SyncLiteSubscription": RequestLimit(
            64 * KIB + names * (LITE_NAME_LIMIT + 2 * LEAST_PART_BYTES),
            names + MAX_ENTRIES,
            names + MAX_PARTS,
            "lite.max_client_subscriptions",
        ),
        **dict.fromkeys(
            (
                "QueryRoute",
                "QueryAssignment",
                "ReceiveMessage",
                "ChangeInvisibleDuration",
                "ForwardMessageToDeadLetterQueue",
                "EndTransaction",
                "RecallMessage",
                "Heartbeat",
                "NotifyClientTermination",
                "PullMessage",
                "UpdateOffset",
                "GetOffset",
                "QueryOffset",
            ),
            small,
        ),
    }


class Access(Protocol):
    """Who may call what (auth/gate.py)."""

    active: bool  # False: everybody may call everything

    def guarded(self, method: Method) -> Callable[[Call, bytes], None]:
        """What a call goes to instead of the method's handler while `active`."""
        ...

    def guarded_open(self, method: Method) -> Callable[[Call], StreamListener]: ...


def bounded(
    methods: Iterable[Method],
    limits: dict[str, RequestLimit],
    metrics: ProxyMetrics,
    access: Access,
) -> list[Method]:
    """The methods, each with its limit and the check of its caller before its handler."""
    return [
        _bounded(
            method, limits.get(method.path.rpartition("/")[2], RequestLimit()), metrics, access
        )
        for method in methods
    ]


def _bounded(method: Method, limit: RequestLimit, metrics: ProxyMetrics, access: Access) -> Method:
    service, _, name = method.path[1:].partition("/")
    described = _FILES[service].services_by_name[service.rpartition(".")[2]]
    kind = described.methods_by_name[name].input_type
    if method.start is None:
        streams = StreamLimits(partial(limit.check, kind), access.guarded_open(method))
        return replace(method, max_bytes=limit.max_bytes, open=streams.open)
    handler, guarded = method.start, access.guarded(method)
    unread_bytes = LEAST_PART_BYTES * limit.max_entries

    def start(call: Call, data: bytes) -> None:
        if len(data) > unread_bytes:
            try:
                limit.check(kind, data)
            except PopmqError as error:
                metrics.refuse(error)
                call.send(status_only(error))
                call.finish()
                return
        if access.active:
            guarded(call, data)
        else:
            handler(call, data)

    return replace(method, start=start, max_bytes=limit.max_bytes)
