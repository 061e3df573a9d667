"""Length-prefixed gRPC messages out of the content of DATA frames, and their decompression."""

import zlib
from collections import deque
from collections.abc import Callable
from typing import Protocol

from popmq.proxy.transport.interface import GrpcStatus
from popmq.proxy.transport.lean.replies import MESSAGE_PREFIX, PREFIX_BYTES

_WINDOW_BITS = {b"gzip": 31, b"deflate": 15}
TURN_BYTES = 1 << 20  # inflated in one turn of the loop, of all connections
_PIECE_BYTES = 64 << 10
ENCODINGS = frozenset({b"", b"identity", *_WINDOW_BITS})


def names_gzip(accepted: bytes) -> bool:
    """`accepted` is a client's grpc-accept-encoding."""
    return any(name.strip() == b"gzip" for name in accepted.split(b","))


def compressed(message: bytes) -> bytes:
    """As gzip, at the level that costs the least."""
    packer = zlib.compressobj(1, zlib.DEFLATED, _WINDOW_BITS[b"gzip"])
    return packer.compress(message) + packer.flush()


class MessageRefused(Exception):
    """Ends the call with `status`; `bound` names the limit that was passed, if it was one."""

    def __init__(self, status: GrpcStatus, detail: str, bound: str = "") -> None:
        super().__init__(detail)
        self.status = status
        self.bound = bound


class InflationTurns:
    """Shares the decompression of all connections among the turns of the loop.

    In one turn at most `TURN_BYTES` are inflated; what is left goes on in the next one, in the
    order in which it began to wait.
    """

    __slots__ = ("_left", "_next_turn", "_scheduled", "_waiting")

    def __init__(self, next_turn: Callable[[Callable[[], None]], None]) -> None:
        """`next_turn` calls back in the next turn of the loop."""
        self._next_turn = next_turn
        self._left = TURN_BYTES
        self._scheduled = False
        self._waiting: deque[Callable[[], None]] = deque()

    @property
    def left(self) -> int:
        """How many bytes may still be inflated in this turn."""
        return self._left

    def spend(self, size: int) -> None:
        self._left -= size
        self._schedule()

    def wait(self, resume: Callable[[], None]) -> None:
        """`resume` is called when there is something left."""
        self._waiting.append(resume)
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._next_turn(self._begin)

    def _begin(self) -> None:
        self._scheduled = False
        self._left = TURN_BYTES
        while self._waiting and self._left > 0:
            self._waiting.popleft()()
        if self._waiting:
            self._schedule()


class GrpcMessageReader:
    """The messages of one stream, whatever frames they came in.

    `feed` takes content; `next` returns the messages one by one. None is either the end of what
    is complete or, with `waits`, of what may be inflated in this turn.
    """

    __slots__ = (
        "_content",
        "_encoding",
        "_inflater",
        "_max_bytes",
        "_max_inflated_bytes",
        "_need",
        "_packed",
        "_packed_at",
        "_parts",
        "_parts_bytes",
        "_plain",
        "_plain_bytes",
        "_start",
        "fed_bytes",
        "waits",
    )

    def __init__(self, encoding: bytes, max_bytes: int, max_inflated_bytes: int) -> None:
        self._encoding = encoding
        self._max_bytes = max_bytes
        self._max_inflated_bytes = max_inflated_bytes
        self._parts: list[bytes] = []
        self._parts_bytes = 0
        self._need = PREFIX_BYTES  # bytes that must be there before looking again
        self._content = b""  # joined parts; what is before `_start` was returned
        self._start = 0
        self._inflater: _Inflater | None = None
        self._packed = memoryview(b"")  # of the message that is being inflated
        self._packed_at = 0
        self._plain: list[bytes] = []
        self._plain_bytes = 0
        self.fed_bytes = 0
        self.waits = False

    @property
    def held_bytes(self) -> int:
        """What it keeps: content that is not returned, and a message as far as it is inflated."""
        return self._parts_bytes + len(self._content) - self._start + self._plain_bytes

    @property
    def is_empty(self) -> bool:
        """Nothing was begun that is not complete."""
        return not self.held_bytes and self._inflater is None

    def feed(self, content: bytes) -> None:
        self._parts.append(content)
        self._parts_bytes += len(content)
        self.fed_bytes += len(content)

    def next(self, turns: InflationTurns) -> bytes | None:
        """Raises MessageRefused, and is over then."""
        self.waits = False
        if self._inflater is None and not self._begin():
            return None
        if self._inflater is not None:
            return self._inflated(self._inflater, turns)
        stop = self._start + self._need
        message = self._content[self._start + PREFIX_BYTES : stop]
        self._passed(stop)
        return message

    def _begin(self) -> bool:
        """Whether the next message is complete; one that is compressed then begins."""
        if not self._has(PREFIX_BYTES):
            return False
        coded, size = MESSAGE_PREFIX.unpack_from(self._content, self._start)
        self._check(coded, size)
        self._need = PREFIX_BYTES + size
        if not self._has(self._need):
            return False
        if coded:
            stop = self._start + self._need
            self._packed = memoryview(self._content)[self._start + PREFIX_BYTES : stop]
            self._packed_at = 0
            self._inflater = zlib.decompressobj(_WINDOW_BITS[self._encoding])
        return True

    def _has(self, size: int) -> bool:
        """Whether so many bytes are there; joins the parts when they are needed and suffice."""
        there = len(self._content) - self._start
        if there < size and there + self._parts_bytes >= max(size, self._need):
            self._content = b"".join((self._content[self._start :], *self._parts))
            self._start = 0
            self._parts.clear()
            self._parts_bytes = 0
            there = len(self._content)
        return there >= size

    def _passed(self, stop: int) -> None:
        self._start = stop
        self._need = PREFIX_BYTES
        if stop == len(self._content):
            self._content, self._start = b"", 0

    def _check(self, coded: int, size: int) -> None:
        if size > self._max_bytes:
            raise MessageRefused(
                GrpcStatus.RESOURCE_EXHAUSTED,
                f"a message of {size} bytes is over the limit of {self._max_bytes} of this method "
                "(at most lean.max_message_bytes)",
                "message_bytes",
            )
        if coded > 1:
            raise MessageRefused(GrpcStatus.INTERNAL, f"compressed-flag {coded} is neither 0 nor 1")
        if coded and self._encoding not in _WINDOW_BITS:
            raise MessageRefused(
                GrpcStatus.INTERNAL, "a compressed message without a grpc-encoding"
            )

    def _inflated(self, inflater: "_Inflater", turns: InflationTurns) -> bytes | None:
        """The whole message, or None when there is no more to spend in this turn."""
        while not inflater.eof:
            if turns.left <= 0:
                self.waits = True
                return None
            packed = inflater.unconsumed_tail or self._next_packed()
            most = min(turns.left, self._max_inflated_bytes + 1 - self._plain_bytes)
            try:
                piece = inflater.decompress(packed, most)
            except zlib.error as error:
                raise MessageRefused(
                    GrpcStatus.INTERNAL, "a message that cannot be decompressed"
                ) from error
            if not (packed or piece or inflater.eof):
                raise MessageRefused(
                    GrpcStatus.INTERNAL, "a compressed message that ends too early"
                )
            # Bytes in cost too, also where none come out.
            turns.spend(max(len(piece), len(packed) - len(inflater.unconsumed_tail)))
            self._plain.append(piece)
            self._plain_bytes += len(piece)
            if self._plain_bytes > self._max_inflated_bytes:
                raise MessageRefused(
                    GrpcStatus.RESOURCE_EXHAUSTED,
                    f"a message is over the limit of {self._max_inflated_bytes} bytes of this "
                    "method when it is decompressed (at most lean.max_inflated_bytes)",
                    "message_bytes",
                )
        message = self._plain[0] if len(self._plain) == 1 else b"".join(self._plain)
        stop = self._start + PREFIX_BYTES + len(self._packed)
        self._inflater, self._packed = None, memoryview(b"")
        self._plain, self._plain_bytes = [], 0
        self._passed(stop)
        return message

    def _next_packed(self) -> memoryview:
        """In pieces, as zlib copies what it did not consume."""
        piece = self._packed[self._packed_at : self._packed_at + _PIECE_BYTES]
        self._packed_at += len(piece)
        return piece


class _Inflater(Protocol):
    """zlib's decompressor, whose type has no public name."""

    @property
    def eof(self) -> bool: ...
    @property
    def unconsumed_tail(self) -> bytes: ...
    def decompress(self, data: bytes | memoryview, max_length: int, /) -> bytes: ...
