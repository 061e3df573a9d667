"""A message between the Remoting form and popmq's two slices (D5).

What the public messages have a field for goes there, so that gRPC clients see it: id, tag, keys,
message group, delivery time, user properties.  The rest (the user's flag, and the names that
RocketMQ keeps for itself) goes into one field behind the system properties, which gRPC clients
skip:

    tag of field 1001, length-delimited | flag i32 | properties, as Remoting writes them

Bodies are stored as they were before the client compressed them, because a gRPC client cannot read
what a Remoting client packs (docs/concepts/remoting.md).
"""

import re
import struct
import zlib
from collections.abc import Mapping
from hashlib import md5
from typing import NamedTuple

from popmq.common.address import parse_address
from popmq.common.errors import Code, ConfigError, Refused
from popmq.common.record.message_deadline import deadline_of as message_deadline
from popmq.common.record.message_deadline import with_deadline, without_deadline
from popmq.common.topics import MessageType, check_group_name
from popmq.common.wire.pull_pb2 import PulledMessage
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.remoting.stored_message import (
    MAX_PROPERTIES_BYTES,
    Host,
    StoredForm,
    format_properties,
    parse_properties,
)
from popmq.proxy.rpc.validate import (
    DELAY_KEYS,
    RECOVERY_LIMIT_MS,
    RESERVED_KEYS,
    TIMES_S,
    MessageFacts,
    possible_time,
    time_ms,
)
from popmq.proxy.rpc.wire_scan import chunk, cut

COMPRESSED = 1  # bit of the sysFlag; bits 8 to 10 name the method
_METHODS = {0: "zlib", 1: "LZ4", 2: "ZSTD", 3: "zlib"}
_MORE = 1001
RECONSUME_TIME = "RECONSUME_TIME"  # of a copy in a retry topic: how often it was consumed before
_FIRST_PLACE = "POPMQ_FIRST_PLACE"  # of such a copy: queue and offset of the first one
_FIRST_CHECK = "CHECK_IMMUNITY_TIME_IN_SECONDS"
_COUNT = re.compile(r"[0-9]{1,18}", re.ASCII)
_FLAG = struct.Struct(">i")
_LATEST_MS = TIMES_S[1] * 1000
# Milliseconds of the delay levels 1 to 18.
DELAY_LEVELS_MS = (
    *(1_000, 5_000, 10_000, 30_000),
    *(minutes * 60_000 for minutes in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 30, 60, 120)),
)
# Names with a field of their own, and names that end with a send or belong to one delivery.
_WITH_FIELD = frozenset({"UNIQ_KEY", "KEYS", "TAGS", "__SHARDINGKEY", "TIMER_DELIVER_MS"})
_DROPPED = frozenset(
    {
        *("DELAY", "POP_CK", "POP_CK_OFFSET", "1ST_POP_TIME", "MIN_OFFSET", "MAX_OFFSET"),
        *("TRANSACTION_CHECK_TIMES", "__transactionId__", "TRANSACTION_PREPARED_QUEUE_OFFSET"),
        *("REAL_TOPIC", "REAL_QID", "RECONSUME_TIME", "MAX_RECONSUME_TIMES", "CLUSTER"),
        *("INNER_NUM", "INNER_BASE", "INNER_MULTI_DISPATCH", "INNER_MULTI_QUEUE_OFFSET"),
    }
)


class RemotingMessage(NamedTuple):
    """A message as its sender gave it, with its body unpacked."""

    body: bytes
    properties: Mapping[str, str]
    flag: int
    born_ms: int

    @property
    def user_properties(self) -> dict[str, str]:
        known = RESERVED_KEYS | _WITH_FIELD | _DROPPED
        return {name: text for name, text in self.properties.items() if name not in known}

    def facts(self) -> MessageFacts:
        given = self.properties
        properties = self.user_properties
        level = _number(given, "DELAY")
        if level > 0:
            delay_ms = DELAY_LEVELS_MS[min(level, len(DELAY_LEVELS_MS)) - 1]
            for key in DELAY_KEYS:
                properties.pop(key, None)
            properties["TIMER_DELAY_MS"] = str(delay_ms)
        due = level <= 0 and "TIMER_DELIVER_MS" in given
        return MessageFacts(
            body_bytes=len(self.body),
            message_id=given["UNIQ_KEY"],
            user_properties=properties,
            tag=given.get("TAGS", ""),
            keys=given.get("KEYS", "").split(),
            message_group=given.get("__SHARDINGKEY", ""),
            deliver_at_ms=_number(given, "TIMER_DELIVER_MS") if due else None,
            claimed_type=self._claimed_type,
        )

    def producer_group(self) -> str:
        """Of a half message. Raises ILLEGAL_MESSAGE_PROPERTY_KEY, after which no client repeats."""
        name = self.properties["PGROUP"]
        try:
            check_group_name(name)
        except Refused as error:
            why = f"property PGROUP = {name[:40]!r}: {error}"
            raise Refused(Code.ILLEGAL_MESSAGE_PROPERTY_KEY, why) from error
        return name

    def first_check_ms(self) -> int:
        """Of a half message: when its producer wants the first check; 0: as ever."""
        seconds = _number(self.properties, _FIRST_CHECK)
        if seconds * 1_000 > RECOVERY_LIMIT_MS:
            raise Refused(
                Code.ILLEGAL_MESSAGE_PROPERTY_KEY,
                f"property {_FIRST_CHECK} = {seconds} is over the limit of "
                f"{RECOVERY_LIMIT_MS // 1_000} s",
            )
        return seconds * 1_000

    @property
    def _claimed_type(self) -> MessageType:
        is_half = self.properties.get("TRAN_MSG") == "true"
        return MessageType.TRANSACTION if is_half else MessageType.NORMAL

    def slices(
        self,
        topic: str,
        kind: MessageType,
        facts: MessageFacts,
        peer: str,
        reconsume_times: int = 0,
    ) -> tuple[bytes, bytes]:
        """`head` and `properties` as they are stored; a deadline may be added behind them."""
        head = pb.Message(
            topic=pb.Resource(name=topic), user_properties=self.user_properties, body=self.body
        )
        own = pb.SystemProperties(
            tag=facts.tag or None,
            keys=facts.keys,
            message_id=facts.message_id,
            body_digest=pb.Digest(
                type=pb.DigestType.MD5,
                checksum=md5(self.body, usedforsecurity=False).hexdigest().upper(),
            ),
            body_encoding=pb.Encoding.IDENTITY,
            message_type=pb.MessageType.ValueType(kind),
            born_host=peer,
            message_group=facts.message_group or None,
        )
        own.born_timestamp.FromMilliseconds(min(max(0, self.born_ms), _LATEST_MS))
        if facts.deliver_at_ms is not None:
            own.delivery_timestamp.FromMilliseconds(max(0, facts.deliver_at_ms))
        kept = {
            name: text
            for name, text in self.properties.items()
            if name in RESERVED_KEYS and name not in _WITH_FIELD and name not in _DROPPED
        }
        if reconsume_times:
            kept[RECONSUME_TIME] = str(reconsume_times)
        return head.SerializeToString(), own.SerializeToString() + _encode_more(self.flag, kept)


def _number(properties: Mapping[str, str], name: str) -> int:
    text = properties.get(name, "0")
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise Refused(
            Code.ILLEGAL_MESSAGE_PROPERTY_KEY,
            f"property {name} = {text[:40]!r} is no whole number from 0 of at most 18 digits",
        )
    return int(text)


class ReturnedCopy(NamedTuple):
    """What a stored message says about its earlier deliveries."""

    origin_topic: str  # of its first copy
    first_place: tuple[int, int]  # queue and offset of the first copy
    reconsume_times: int
    tag: str
    system: bytes
    flag: int
    kept: Mapping[str, str]
    deadline_ms: int

    def properties(self, *, dead: bool) -> bytes:
        """Its slice for the next delivery, with the number of those before; a dead letter begins to
        count anew when it is redriven.  A deadline stays at the end."""
        times = {} if dead else {RECONSUME_TIME: str(self.reconsume_times + 1)}
        stored = self.system + _encode_more(self.flag, {**self.kept, **times})
        return with_deadline(stored, self.deadline_ms) if self.deadline_ms else stored


def returned_copy(pulled: PulledMessage, topic: str, queue_id: int) -> ReturnedCopy:
    """The copy of a message of `topic` that a consumer sends back: it says in which topic and where
    its first copy is, and under which id."""
    system, more = cut(without_deadline(pulled.properties), _MORE)
    own = pb.SystemProperties.FromString(system)
    flag, kept = _more(more)
    times = _count(kept.pop(RECONSUME_TIME, ""))
    origin = kept.setdefault("RETRY_TOPIC", topic)
    kept.setdefault("ORIGIN_MESSAGE_ID", own.message_id)
    place = kept.setdefault(_FIRST_PLACE, f"{queue_id} {pulled.queue_offset}")
    queue, _, offset = place.partition(" ")
    first = _count(queue), _count(offset)
    deadline_ms = message_deadline(pulled.properties)
    return ReturnedCopy(origin, first, times, own.tag, system, flag, kept, deadline_ms)


def _encode_more(flag: int, kept: Mapping[str, str]) -> bytes:
    return chunk(_MORE, _FLAG.pack(flag) + format_properties(kept).encode())


def _count(text: str) -> int:
    return int(text) if _COUNT.fullmatch(text) else 0


def unpacked(body: bytes, sys_flag: int, limit: int) -> bytes:
    """The body of a send as it was before its client compressed it."""
    if not sys_flag & COMPRESSED:
        return body
    method = _METHODS.get(sys_flag >> 8 & 7, "unknown")
    if method != "zlib":
        raise Refused(
            Code.MESSAGE_CORRUPTED,
            f"the body is compressed with {method}, popmq reads zlib: set the producer's "
            "compressType to ZLIB",
        )
    return _inflated(body, limit)


def _inflated(body: bytes, limit: int) -> bytes:
    reader = zlib.decompressobj(wbits=47)  # zlib or gzip, by its first bytes
    try:
        plain = reader.decompress(body, limit + 1)
    except zlib.error as error:
        raise Refused(Code.MESSAGE_CORRUPTED, f"the body is no zlib data: {error}") from error
    if len(plain) > limit:
        raise Refused(
            Code.MESSAGE_BODY_TOO_LARGE,
            f"the body has more than {limit} bytes when it is unpacked (message.max_body_bytes)",
        )
    if not reader.eof:
        raise Refused(Code.MESSAGE_CORRUPTED, "the compressed body ends early")
    return plain


def stored_form(
    pulled: PulledMessage, queue_id: int, *, store_host: Host, cluster: str, body_limit: int
) -> StoredForm:
    """A message that a broker returned, for a Remoting client."""
    system, more = cut(without_deadline(pulled.properties), _MORE)
    own, message = pb.SystemProperties.FromString(system), pb.Message.FromString(pulled.head)
    flag, kept = _more(more)
    reconsume_times = _count(kept.pop(RECONSUME_TIME, ""))
    kept.pop(_FIRST_PLACE, None)
    properties = {"UNIQ_KEY": own.message_id, "KEYS": " ".join(own.keys), "TAGS": own.tag}
    properties["__SHARDINGKEY"] = own.message_group
    properties |= kept
    properties["CLUSTER"] = cluster
    for name, text in message.user_properties.items():
        properties.setdefault(name, text)
    body = message.body
    if own.body_encoding == pb.Encoding.GZIP:
        body = _inflated(body, body_limit)
    return StoredForm(
        topic=message.topic.name,
        queue_id=queue_id,
        queue_offset=pulled.queue_offset,
        physical_offset=pulled.position,
        flag=flag,
        sys_flag=0,
        born_ms=time_ms(*possible_time(own.born_timestamp.seconds, own.born_timestamp.nanos)),
        born_host=_host(own.born_host),
        stored_ms=pulled.stored_ms,
        store_host=store_host,
        reconsume_times=max(reconsume_times, pulled.attempt - 1),
        body=body,
        properties=_bounded(properties),
    )


def _more(pieces: list[bytes]) -> tuple[int, dict[str, str]]:
    if not pieces or len(pieces[-1]) < _FLAG.size:
        return 0, {}
    (flag,) = _FLAG.unpack_from(pieces[-1])
    return flag, parse_properties(pieces[-1][_FLAG.size :].decode(errors="replace"))


def _host(text: str) -> Host:
    try:
        return parse_address(text)
    except ConfigError:
        return ("0.0.0.0", 0)


def _bounded(properties: dict[str, str]) -> dict[str, str]:
    """Without the last ones, if they do not fit what a client can read: those of the user."""
    room = MAX_PROPERTIES_BYTES
    kept = {}
    for name, text in properties.items():
        room -= len(name.encode()) + len(text.encode()) + 2
        if room < 0:
            break
        kept[name] = text
    return kept
