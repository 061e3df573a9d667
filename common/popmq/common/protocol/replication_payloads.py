"""What the brokers of a group ask each other: payloads of HANDSHAKE, FETCH, ACKED and their like.

Each carries epoch and store id, and all after the handshake its session, so that nothing of
another time or connection can be taken for news (R10, docs/concepts/replication.md).  Positions
are bytes of the group's one log.
"""

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from popmq.common.protocol.payload import PayloadReader, checked_encode, text


class TablesMark(IntEnum):
    """What a slave says of its tables (docs/concepts/diverging-tables.md, "State on slaves")."""

    EQUAL = 0  # they are the master's, as far as anything was compared
    DIFFER = 1  # they are not the master's: leave this store out of the SyncStateSet
    COMPARE = 2  # they were not those of an earlier master: compare them with a snapshot soon


class EpochEntry(NamedTuple):
    """From `start` on, up to the next entry's, the log was written by the master of `epoch`."""

    epoch: int
    start: int


SIGNING_KEYS = 1  # of a handshake's features: several keys of receipt handles


class Handshake(NamedTuple):
    """A slave with log up to `end` wants to follow the master of `epoch`."""

    epoch: int
    store_id: str
    node: str
    log_id: str  # empty while the log is
    end: int
    segment_bytes: int  # of its log: segments of all replicas end at the same positions
    features: int = 0  # what records it understands; releases without the field send none


class HandshakeReply(NamedTuple):
    """The master's log, for the slave to find where they agree (R21)."""

    epoch: int
    store_id: str
    session: int
    log_id: str
    start: int
    end: int
    confirmed: int
    snapshot_position: int  # of the newest finished one; 0: there is none
    snapshot_bytes: int
    entries: Sequence[EpochEntry]


class Fetch(NamedTuple):
    """Log from `position`; answered when there is some, or `confirmed` is old, or after a while."""

    epoch: int
    store_id: str
    session: int
    position: int
    max_bytes: int
    confirmed: int  # as the slave knows it
    wait_ms: int
    round: int = 0  # of the block before


class Block(NamedTuple):
    """Whole records of one epoch, which begins at `epoch_start`; none when nothing was new."""

    epoch: int  # the master's
    block_epoch: int
    epoch_start: int
    position: int
    confirmed: int
    end: int  # of the master's log
    data: bytes
    round: int = 0  # the next fetch says it again: that one was sent after this


class Acked(NamedTuple):
    """Everything below `position` is fsynced by the slave."""

    epoch: int
    store_id: str
    session: int
    position: int
    tables: TablesMark = TablesMark.EQUAL


class AckedReply(NamedTuple):
    epoch: int
    confirmed: int


class ReadSnapshot(NamedTuple):
    """A piece of the snapshot that the handshake's reply named."""

    epoch: int
    store_id: str
    session: int
    snapshot_position: int
    offset: int
    max_bytes: int


class TimerCheckPointRequest(NamedTuple):
    """For the TimerCheckPoint of the master."""

    epoch: int
    store_id: str
    session: int


class MasterTimers(NamedTuple):
    """Up to where the master fired (wall milliseconds), and its offset in the timer queue; and
    its log time, 0 while it waits for a disk."""

    epoch: int
    last_read_ms: int
    queue_offset: int
    log_ms: int


_HANDSHAKE = struct.Struct(">IQQ")
_REPLY = struct.Struct(">IQQQQQQH")
_ENTRY = struct.Struct(">IQ")
_FETCH = struct.Struct(">IQQIQIQ")
_BLOCK = struct.Struct(">IIQQQQQ")
_ACKED = struct.Struct(">IQQ")
_ACKED_REPLY = struct.Struct(">IQ")
_READ_SNAPSHOT = struct.Struct(">IQQQI")
_ASK_TIMERS = struct.Struct(">IQ")
_TIMERS = struct.Struct(">IqQQ")


@checked_encode
def encode_handshake(request: Handshake) -> bytes:
    epoch, store_id, node, log_id, end, segment_bytes, features = request
    fields = _HANDSHAKE.pack(epoch, end, segment_bytes)
    # Masters of such releases ignore what follows.
    return fields + text(store_id) + text(node) + text(log_id) + bytes((features,) * bool(features))


def decode_handshake(body: bytes) -> Handshake:
    reader = PayloadReader(body)
    epoch, end, segment_bytes = reader.fields(_HANDSHAKE)
    names = reader.text(), reader.text(), reader.text()
    features = body[reader.at] if reader.at < len(body) else 0
    return Handshake(epoch, *names, end, segment_bytes, features)


@checked_encode
def encode_handshake_reply(reply: HandshakeReply) -> bytes:
    fields = _REPLY.pack(
        reply.epoch,
        reply.session,
        reply.start,
        reply.end,
        reply.confirmed,
        reply.snapshot_position,
        reply.snapshot_bytes,
        len(reply.entries),
    )
    entries = (_ENTRY.pack(*entry) for entry in reply.entries)
    return b"".join((fields, text(reply.store_id), text(reply.log_id), *entries))


def decode_handshake_reply(body: bytes) -> HandshakeReply:
    reader = PayloadReader(body)
    epoch, session, start, end, confirmed, snapshot, size, count = reader.fields(_REPLY)
    store_id, log_id = reader.text(), reader.text()
    entries = [EpochEntry(*reader.fields(_ENTRY)) for _ in range(count)]
    return HandshakeReply(
        epoch, store_id, session, log_id, start, end, confirmed, snapshot, size, entries
    )


@checked_encode
def encode_fetch(request: Fetch) -> bytes:
    epoch, store_id, *numbers = request
    return _FETCH.pack(epoch, *numbers) + text(store_id)


def decode_fetch(body: bytes) -> Fetch:
    reader = PayloadReader(body)
    epoch, *numbers = reader.fields(_FETCH)
    return Fetch(epoch, reader.text(), *numbers)


def encode_block(block: Block) -> bytes:
    *numbers, data, round_ = block
    return _BLOCK.pack(*numbers, round_) + data


def decode_block(body: bytes) -> Block:
    epoch, of, start, position, confirmed, end, round_ = PayloadReader(body).fields(_BLOCK)
    return Block(epoch, of, start, position, confirmed, end, body[_BLOCK.size :], round_)


@checked_encode
def encode_acked(request: Acked) -> bytes:
    fields = _ACKED.pack(request.epoch, request.session, request.position)
    # An older master reads the fields that it knows and ignores the mark behind them.
    mark = bytes((request.tables,)) if request.tables else b""
    return fields + text(request.store_id) + mark


def decode_acked(body: bytes) -> Acked:
    reader = PayloadReader(body)
    epoch, session, position = reader.fields(_ACKED)
    store_id = reader.text()
    mark = body[reader.at] if reader.at < len(body) else 0
    # Whatever a newer slave means by another number, its tables are not known to be equal.
    tables = TablesMark(min(mark, TablesMark.COMPARE))
    return Acked(epoch, store_id, session, position, tables)


def encode_acked_reply(reply: AckedReply) -> bytes:
    return _ACKED_REPLY.pack(*reply)


def decode_acked_reply(body: bytes) -> AckedReply:
    return AckedReply(*PayloadReader(body).fields(_ACKED_REPLY))


@checked_encode
def encode_read_snapshot(request: ReadSnapshot) -> bytes:
    epoch, store_id, session, position, offset, max_bytes = request
    return _READ_SNAPSHOT.pack(epoch, session, position, offset, max_bytes) + text(store_id)


def decode_read_snapshot(body: bytes) -> ReadSnapshot:
    reader = PayloadReader(body)
    epoch, session, position, offset, max_bytes = reader.fields(_READ_SNAPSHOT)
    return ReadSnapshot(epoch, reader.text(), session, position, offset, max_bytes)


@checked_encode
def encode_ask_timers(request: TimerCheckPointRequest) -> bytes:
    return _ASK_TIMERS.pack(request.epoch, request.session) + text(request.store_id)


def decode_ask_timers(body: bytes) -> TimerCheckPointRequest:
    reader = PayloadReader(body)
    epoch, session = reader.fields(_ASK_TIMERS)
    return TimerCheckPointRequest(epoch, reader.text(), session)


def encode_master_timers(timers: MasterTimers) -> bytes:
    return _TIMERS.pack(*timers)


def decode_master_timers(body: bytes) -> MasterTimers:
    return MasterTimers(*PayloadReader(body).fields(_TIMERS))
