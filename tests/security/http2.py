"""A client that speaks HTTP/2 as it likes, over a real socket."""

import socket
import struct
from collections.abc import Iterable
from typing import Self

from hpack import Decoder, Encoder
from proxy.lean.peer import WHOLE, decoded, request_headers

from popmq.proxy.transport.lean import frames

WAIT_S = 60.0
LARGE_WINDOW = (1 << 31) - 1


class RawClient:
    """Sends what it is told, as far as the server's windows let it, and reads answers."""

    def __init__(self, address: tuple[str, int], source: str = "127.0.0.1") -> None:
        self.statuses: list[str] = []  # of calls that ended, in the order of their ends
        self.content = bytearray()  # of all answers, as they came
        self.closed = False
        self._ended: set[int] = set()
        self._socket = socket.create_connection(address, WAIT_S, (source, 0))
        self._encoder, self._decoder = Encoder(), Decoder()
        self._reader = frames.Http2FrameReader(frames.LARGEST_FRAME_BYTES)
        self._stream = -1
        self._window = self._stream_window = frames.DEFAULT_WINDOW
        self._initial = frames.DEFAULT_WINDOW
        wide = frames.settings({frames.INITIAL_WINDOW_SIZE: LARGE_WINDOW})
        more = frames.window_update(0, LARGE_WINDOW - frames.DEFAULT_WINDOW)
        self._socket.sendall(frames.PREFACE + wide + more)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def open(self, path: str, extra: Iterable[tuple[str, str]] = ()) -> int:
        self._stream += 2
        block = self._encoder.encode([*request_headers(path), *extra])
        self._stream_window = self._initial
        self._send(frames.frame(frames.HEADERS, WHOLE, self._stream, block))
        return self._stream

    def data(self, content: bytes, flags: int = 0) -> None:
        """On the stream that was opened last; nothing more once the server has ended it."""
        at = 0
        while at < len(content) and self._stream not in self._ended and not self.closed:
            size = min(16_384, len(content) - at, self._window, self._stream_window)
            if size <= 0:
                self._read()
                continue
            last = flags if at + size == len(content) else 0
            part = content[at : at + size]
            self._send(frames.frame(frames.DATA, last, self._stream, part))
            self._window -= size
            self._stream_window -= size
            at += size

    def until_answered(self, count: int) -> None:
        """Read until so many calls have ended, or the connection has."""
        while len(self.statuses) < count and not self.closed:
            self._read()

    def until_ended(self, stream: int) -> None:
        while stream not in self._ended and not self.closed:
            self._read()

    def _send(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except OSError:
            self.closed = True

    def _read(self) -> None:
        try:
            data = self._socket.recv(1 << 16)
        except ConnectionError:
            data = b""
        if not data:
            self.closed = True
            return
        for kind, flags, stream_id, payload in self._reader.feed(data):
            self._frame(kind, flags, stream_id, payload)

    def _frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if kind == frames.WINDOW_UPDATE:
            more = int.from_bytes(payload, "big")
            if stream_id == 0:
                self._window += more
            elif stream_id == self._stream:
                self._stream_window += more
        elif kind == frames.SETTINGS and not flags & frames.ACK:
            for at in range(0, len(payload), 6):
                name, value = struct.unpack_from(">HI", payload, at)
                if name == frames.INITIAL_WINDOW_SIZE:
                    self._stream_window += value - self._initial
                    self._initial = value
            self._send(frames.SETTINGS_ACK)
        elif kind == frames.PING and not flags & frames.ACK:
            self._send(frames.ping(payload, ack=True))
        elif kind == frames.HEADERS:
            headers = decoded(self._decoder, payload)
            if "grpc-status" in headers:
                self.statuses.append(headers["grpc-status"])
                self._ended.add(stream_id)
        elif kind == frames.DATA:
            self.content += payload
        elif kind == frames.GOAWAY:
            self.closed = True
