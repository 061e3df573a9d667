"""Length-prefixed gRPC messages out of the content of DATA frames, and their decompression."""

import zlib
from collections.abc import Iterator

from popmq.proxy.transport.interface import GrpcStatus
from popmq.proxy.transport.lean.replies import MESSAGE_PREFIX, PREFIX_BYTES

_WINDOW_BITS = {b"gzip": 31, b"deflate": 15}
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


class GrpcMessageReader:
    """The messages of one stream, whatever frames they came in."""

    __slots__ = ("_encoding", "_max_bytes", "_max_inflated_bytes", "_need", "_parts", "held_bytes")

    def __init__(self, encoding: bytes, max_bytes: int, max_inflated_bytes: int) -> None:
        self._encoding = encoding
        self._max_bytes = max_bytes
        self._max_inflated_bytes = max_inflated_bytes
        self._parts: list[bytes] = []
        self._need = 0  # bytes that must be there before looking again
        self.held_bytes = 0

    def feed(self, content: bytes) -> Iterator[bytes]:
        """The messages that `content` completes; raises MessageRefused behind the last good one."""
        if self._parts:
            self._parts.append(content)
            self.held_bytes += len(content)
            if self.held_bytes < self._need:
                return
            content = b"".join(self._parts)
            self._parts.clear()
            self.held_bytes = 0
        start, end = 0, len(content)
        self._need = PREFIX_BYTES
        while end - start >= PREFIX_BYTES:
            coded, size = MESSAGE_PREFIX.unpack_from(content, start)
            self._check(coded, size)
            stop = start + PREFIX_BYTES + size
            if stop > end:
                self._need = stop - start
                break
            message = content[start + PREFIX_BYTES : stop]
            yield self._inflated(message) if coded else message
            start = stop
        if start < end:
            self._parts.append(content[start:])
            self.held_bytes = end - start

    def _check(self, coded: int, size: int) -> None:
        if size > self._max_bytes:
            raise MessageRefused(
                GrpcStatus.RESOURCE_EXHAUSTED,
                f"a message of {size} bytes is over the limit of {self._max_bytes} "
                "(lean.max_message_bytes)",
                "message_bytes",
            )
        if coded > 1:
            raise MessageRefused(GrpcStatus.INTERNAL, f"compressed-flag {coded} is neither 0 nor 1")
        if coded and self._encoding not in _WINDOW_BITS:
            raise MessageRefused(
                GrpcStatus.INTERNAL, "a compressed message without a grpc-encoding"
            )

    def _inflated(self, message: bytes) -> bytes:
        inflater = zlib.decompressobj(_WINDOW_BITS[self._encoding])
        try:
            plain = inflater.decompress(message, self._max_inflated_bytes + 1)
        except zlib.error as error:
            raise MessageRefused(
                GrpcStatus.INTERNAL, "a message that cannot be decompressed"
            ) from error
        if len(plain) > self._max_inflated_bytes:
            raise MessageRefused(
                GrpcStatus.RESOURCE_EXHAUSTED,
                f"a message is over the limit of {self._max_inflated_bytes} bytes when it is "
                "decompressed (lean.max_inflated_bytes)",
                "message_bytes",
            )
        if not inflater.eof:
            raise MessageRefused(GrpcStatus.INTERNAL, "a compressed message that ends too early")
        return plain
