"""gRPC calls over one blocking HTTP/2 connection: all that a command needs, which is one at a time.

grpcio would take longer to import than a command takes to run, and writes log lines of its own to
the terminal (docs/decisions/0012-dependencies.md).  Every failure is a `ChannelError` that names
the address and what is wrong there.
"""

import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from popmq.cli.terminal.contexts import OVER_TLS, TLS_CA_VARIABLE, UNIX
from popmq.common.address import parse_address
from popmq.common.errors import Code, ConfigError, PopmqError

if TYPE_CHECKING:
    import ssl

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS = 0, 1, 3, 4
PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 6, 7, 8, 9
ACK = END_STREAM = 0x1
END_HEADERS, PADDED, PRIORITIZED = 0x4, 0x8, 0x20
HEADER_TABLE_SIZE, ENABLE_PUSH, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = 1, 2, 4, 5
DEFAULT_WINDOW, MAX_WINDOW = 65_535, (1 << 31) - 1
TOP_UP_BYTES = 1 << 29
READ_BYTES = 1 << 16
CONNECT_S = 3.0

#   0        3      4       5           9
#   | length | kind | flags | stream id | payload ...      (big-endian, RFC 9113 section 4.1)
_FRAME = struct.Struct(">HBBBI")
#   0            1        5
#   | compressed | length | message ...                    (the framing of gRPC)
_MESSAGE = struct.Struct(">BI")
# gRPC's numbers of what can go wrong, as far as servers answer them.
STATUS_NAMES = (
    *("OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND"),
    *("ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION"),
    *("ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"),
    "UNAUTHENTICATED",
)

# The trailers `grpc-status: 0` as popmq writes them, so that hpack is imported for others only.
_OK_BLOCK = b"\x00\x0bgrpc-status\x010"

Fields = list[tuple[str, str]]
OnMessage = Callable[[bytes], None]


class ChannelError(PopmqError):
    """There was no answer: nobody listens, it is not popmq that does, or the time ran out.

    `sent`: the request had left, so it may have been done.  `connected`: a process listens there.
    """

    code = Code.HA_NOT_AVAILABLE

    def __init__(self, message: str, *, sent: bool = False, connected: bool = True) -> None:
        super().__init__(message)
        self.sent = sent
        self.connected = connected


class StatusError(PopmqError):
    """The server ended the call with another gRPC status than OK."""

    def __init__(self, number: int, details: str) -> None:
        super().__init__(details)
        self.number = number
        self.name = STATUS_NAMES[number] if number < len(STATUS_NAMES) else str(number)


class GrpcChannel:
    """A connection that is made by the first call; `close` may be called at any time."""

    def __init__(self, endpoint: str, tls_ca: str = "") -> None:
        self.endpoint = endpoint
        self._tls_ca = tls_ca
        self._socket: socket.socket | None = None
        self._buffer = b""
        self._next_id = 1
        self._answered = False
        self._peer_window = DEFAULT_WINDOW  # of the connection
        self._initial_window = DEFAULT_WINDOW  # of each stream
        self._stream_window = DEFAULT_WINDOW
        self._frame_bytes = 16_384
        self._taken = 0

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def __del__(self) -> None:
        """A client that is dropped without `close` leaves no connection open."""
        self.close()

    def is_usable(self) -> bool:
        """Whether another call may use the connection: the server did not end it meanwhile."""
        if self._socket is None or self._buffer:
            return False
        readable = select.poll()  # select() takes no descriptor above 1,023
        readable.register(self._socket, select.POLLIN)
        return not readable.poll(0)  # what comes between two calls is mostly the end

    def call(
        self, path: str, request: bytes, fields: Fields, timeout_s: float, on_message: OnMessage
    ) -> None:
        """Ask and give each message of the answer to `on_message`.

        Raises ChannelError, or StatusError for another status than OK.
        """
        deadline_s = time.monotonic() + timeout_s
        try:
            if self._socket is None:
                self._connect(timeout_s)
            self._exchange(path, request, fields, deadline_s, on_message)
        except TimeoutError:
            self.close()
            text = f"{self.endpoint} did not answer within {timeout_s:g} s"
            raise ChannelError(text, sent=True) from None
        except OSError as error:
            self.close()
            raise self._broken(error) from error
        except BaseException:
            # What is left of the answer would be taken for that of the next call.
            self.close()
            raise

    # -- connection

    def _connect(self, timeout_s: float) -> None:
        timeout_s = min(CONNECT_S, timeout_s)
        if self.endpoint.startswith(UNIX):
            self._socket = self._to_unix(timeout_s)
        else:
            self._socket = self._to_network(timeout_s)
        self._buffer, self._next_id, self._answered = b"", 1, False
        self._peer_window = self._initial_window = DEFAULT_WINDOW
        settings = struct.pack(
            ">HIHIHI", HEADER_TABLE_SIZE, 0, ENABLE_PUSH, 0, INITIAL_WINDOW_SIZE, MAX_WINDOW
        )
        grown = struct.pack(">I", MAX_WINDOW - DEFAULT_WINDOW)
        self._socket.sendall(
            PREFACE + _frame(SETTINGS, 0, 0, settings) + _frame(WINDOW_UPDATE, 0, 0, grown)
        )

    def _to_network(self, timeout_s: float) -> socket.socket:
        host, port = parse_address(self.endpoint.removeprefix(OVER_TLS))
        context = self._tls_context() if self.endpoint.startswith(OVER_TLS) else None
        try:
            connection = socket.create_connection((host, port), timeout=timeout_s)
        except socket.gaierror as error:
            text = f"{self.endpoint}: no host is called {host}"
            raise ChannelError(text, connected=False) from error
        except TimeoutError as error:
            text = f"{self.endpoint} did not take a connection in time"
            raise ChannelError(text, connected=False) from error
        except OSError as error:
            text = f"no popmq at {self.endpoint}: start one with `popmq up`"
            raise ChannelError(text, connected=False) from error
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection if context is None else self._over_tls(context, connection, host)

    def _to_unix(self, timeout_s: float) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(timeout_s)
        try:
            connection.connect(self.endpoint.removeprefix(UNIX))
        except PermissionError as error:
            connection.close()
            text = (
                f"{self.endpoint} is for the user that runs popmq: run the command as that user, "
                "or start popmq with --admin-port (proxy.admin_listen)"
            )
            raise ChannelError(text, connected=False) from error
        except OSError as error:
            connection.close()
            text = f"no popmq at {self.endpoint} on this machine: {error.strerror}"
            raise ChannelError(text, connected=False) from error
        return connection

    def _tls_context(self) -> "ssl.SSLContext":
        import ssl

        if not self._tls_ca:
            context = ssl.create_default_context()
        else:
            try:
                context = ssl.create_default_context(cafile=self._tls_ca)
            except ssl.SSLError as error:
                raise ConfigError(f"{TLS_CA_VARIABLE} = {self._tls_ca}: no certificates") from error
            except OSError as error:
                raise ConfigError(
                    f"{TLS_CA_VARIABLE} = {self._tls_ca}: {error.strerror}"
                ) from error
        context.set_alpn_protocols(["h2"])
        return context

    def _over_tls(
        self, context: "ssl.SSLContext", result: socket.socket, host: str
    ) -> socket.socket:
        import ssl

        try:
            return context.wrap_socket(result, server_hostname=host)
        except ssl.SSLCertVerificationError as error:
            result.close()
            raise ChannelError(
                f"the certificate of {self.endpoint} is not trusted ({error.verify_message}): "
                f"{TLS_CA_VARIABLE}, or `popmq context add --tls-ca`, names a file with one"
            ) from error
        except OSError as error:
            result.close()
            plain = self.endpoint.removeprefix(OVER_TLS)
            raise ChannelError(f"{plain} speaks no TLS: write {plain}") from error

    def _broken(self, error: OSError) -> ChannelError:
        if self._answered:
            return ChannelError(f"lost the connection to {self.endpoint}: {error}", sent=True)
        return ChannelError(f"{self.endpoint} closed the connection at once: it is no popmq")

    # -- one call

    def _exchange(
        self, path: str, request: bytes, fields: Fields, deadline_s: float, on_message: OnMessage
    ) -> None:
        stream, self._next_id = self._next_id, self._next_id + 2
        self._stream_window = self._initial_window
        scheme = "https" if self.endpoint.startswith(OVER_TLS) else "http"
        is_unix = self.endpoint.startswith(UNIX)
        authority = "localhost" if is_unix else self.endpoint.removeprefix(OVER_TLS)
        head = [
            (":method", "POST"),
            (":scheme", scheme),
            (":path", path),
            (":authority", authority),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            ("grpc-timeout", f"{max(1, round((deadline_s - time.monotonic()) * 1000))}m"),
        ]
        block = b"".join(_literal(name, value) for name, value in (*head, *fields))
        self._send(_frame(HEADERS, END_HEADERS, stream, block), deadline_s)
        answer = _Answer(self.endpoint, on_message)
        frames = self._frames(deadline_s)
        body = _MESSAGE.pack(0, len(request)) + request
        self._send_body(stream, body, deadline_s, frames, answer)
        while not answer.ended:
            self._take(stream, answer, *next(frames), deadline_s)
        answer.check()

    def _send_body(
        self,
        stream: int,
        body: bytes,
        deadline_s: float,
        frames: Iterator[tuple[int, int, int, bytes]],
        answer: "_Answer",
    ) -> None:
        sent = 0
        while sent < len(body) and not answer.ended:
            room = min(self._frame_bytes, self._peer_window, self._stream_window)
            if room <= 0:
                self._take(stream, answer, *next(frames), deadline_s)
                continue
            piece = body[sent : sent + room]
            sent += len(piece)
            self._peer_window -= len(piece)
            self._stream_window -= len(piece)
            last = END_STREAM if sent == len(body) else 0
            self._send(_frame(DATA, last, stream, piece), deadline_s)

    def _take(
        self,
        stream: int,
        answer: "_Answer",
        kind: int,
        flags: int,
        of: int,
        payload: bytes,
        deadline_s: float,
    ) -> None:
        self._answered = True
        match kind:
            case 0:  # DATA
                self._top_up(len(payload), deadline_s)
                if of == stream:
                    answer.data(flags, payload)
            case 1 | 9 if of == stream:  # HEADERS, CONTINUATION
                answer.headers(flags, payload, begins=kind == HEADERS)
            case 3 if of == stream:  # RST_STREAM
                raise ChannelError(
                    f"{self.endpoint} reset the call: {int.from_bytes(payload)}", sent=True
                )
            case 4 if not flags & ACK:  # SETTINGS
                self._on_settings(payload)
                self._send(_frame(SETTINGS, ACK, 0, b""), deadline_s)
            case 6 if not flags & ACK:  # PING
                self._send(_frame(PING, ACK, 0, payload), deadline_s)
            case 7:  # GOAWAY: of a server that ends, or that takes TLS only
                last, _ = struct.unpack_from(">II", payload)
                if last < stream or not answer.began:
                    raise self._refused(payload[8:].decode("utf-8", "replace"))
            case 8:  # WINDOW_UPDATE
                grown = int.from_bytes(payload) & MAX_WINDOW
                if of == 0:
                    self._peer_window += grown
                elif of == stream:
                    self._stream_window += grown

    def _refused(self, why: str) -> ChannelError:
        if "TLS only" in why:
            return ChannelError(f"{self.endpoint} takes TLS only: write {OVER_TLS}{self.endpoint}")
        return ChannelError(f"{self.endpoint} ended the connection: {why or 'no reason given'}")

    def _on_settings(self, payload: bytes) -> None:
        for place in range(0, len(payload) - 5, 6):
            name, value = struct.unpack_from(">HI", payload, place)
            if name == INITIAL_WINDOW_SIZE:
                self._stream_window += value - self._initial_window
                self._initial_window = value
            elif name == MAX_FRAME_SIZE:
                self._frame_bytes = min(value, 1 << 20)

    def _top_up(self, size: int, deadline_s: float) -> None:
        """Streams have more room than an answer may be long; the connection is used again."""
        self._taken += size
        if self._taken > TOP_UP_BYTES:
            grown = struct.pack(">I", self._taken)
            self._send(_frame(WINDOW_UPDATE, 0, 0, grown), deadline_s)
            self._taken = 0

    # -- bytes

    def _send(self, data: bytes, deadline_s: float) -> None:
        assert self._socket is not None, "a call has a connection"
        self._socket.settimeout(_left(deadline_s))
        self._socket.sendall(data)

    def _frames(self, deadline_s: float) -> Iterator[tuple[int, int, int, bytes]]:
        """Kind, flags, stream and payload of each; ends only with an exception."""
        while True:
            head = self._read(9, deadline_s)
            high, low, kind, flags, stream = _FRAME.unpack(head)
            if not self._answered and kind != SETTINGS:
                raise ChannelError(f"{self.endpoint} is no popmq proxy{_guess(head)}")
            payload = self._read(high << 8 | low, deadline_s)
            yield kind, flags, stream & MAX_WINDOW, payload

    def _read(self, size: int, deadline_s: float) -> bytes:
        assert self._socket is not None, "a call has a connection"
        pieces, have = [self._buffer], len(self._buffer)
        while have < size:
            self._socket.settimeout(_left(deadline_s))
            piece = self._socket.recv(max(READ_BYTES, size - have))
            if not piece:
                raise ConnectionResetError("the server closed it")
            if not self._answered and have + len(piece) < 9 and piece[:4] in (b"HTTP", b"\x15\x03"):
                raise ChannelError(f"{self.endpoint} is no popmq proxy{_guess(piece)}")
            pieces.append(piece)
            have += len(piece)
        data = b"".join(pieces)
        self._buffer = data[size:]
        return data[:size]


class _Answer:
    """The reply of one call, as its frames come."""

    def __init__(self, endpoint: str, on_message: OnMessage) -> None:
        self.ended = False
        self.began = False
        self._endpoint = endpoint
        self._on_message = on_message
        self._blocks: list[bytes] = []
        self._block = b""
        self._ends = False
        self._data = b""

    def data(self, flags: int, payload: bytes) -> None:
        if flags & PADDED:
            payload = payload[1 : len(payload) - payload[0]]
        self._data += payload
        self._cut_messages()
        self.ended = self.ended or bool(flags & END_STREAM)

    def _cut_messages(self) -> None:
        start = 0
        while len(self._data) - start >= 5:
            compressed, size = _MESSAGE.unpack_from(self._data, start)
            if compressed:
                raise ChannelError(f"{self._endpoint} compressed an answer, which was not asked")
            if len(self._data) < start + 5 + size:
                break
            self._on_message(self._data[start + 5 : start + 5 + size])
            start += 5 + size
        self._data = self._data[start:]

    def headers(self, flags: int, payload: bytes, *, begins: bool) -> None:
        if begins:
            self.began = True
            if flags & PADDED:
                payload = payload[1 : len(payload) - payload[0]]
            if flags & PRIORITIZED:
                payload = payload[5:]
            self._block, self._ends = b"", bool(flags & END_STREAM)
        self._block += payload
        if flags & END_HEADERS:
            self._blocks.append(self._block)
            self.ended = self.ended or self._ends

    def check(self) -> None:
        """Raises StatusError unless the call ended with OK."""
        if self._blocks and self._blocks[-1] == _OK_BLOCK:
            return
        fields = self._decoded()
        status = fields.get("grpc-status", "")
        if not status.isdecimal():
            raise ChannelError(
                f"{self._endpoint} is no popmq proxy: it answered HTTP "
                f"{fields.get(':status', 'without a status')}"
            )
        if int(status):
            from urllib.parse import unquote

            details = unquote(fields.get("grpc-message", "")) or "no details given"
            raise StatusError(int(status), details)

    def _decoded(self) -> dict[str, str]:
        from hpack import Decoder
        from hpack.exceptions import HPACKError

        # We told the server that there is no table, so that each block stands alone.
        fields: dict[str, str] = {}
        try:
            for block in self._blocks:
                fields |= {str(name): str(value) for name, value in Decoder().decode(block)}
        except HPACKError as error:
            raise ChannelError(f"{self._endpoint} sent headers that are none: {error}") from error
        return fields


def _guess(head: bytes) -> str:
    """What answers there, as far as its first bytes tell."""
    if head.startswith(b"HTTP"):
        return ": it speaks HTTP/1, as the port of the metrics does"
    if head.startswith(b"\x15\x03"):
        return f": it speaks TLS, write {OVER_TLS}HOST:PORT"
    return ""


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    size = len(payload)
    return _FRAME.pack(size >> 8, size & 0xFF, kind, flags, stream) + payload


def _literal(name: str, value: str) -> bytes:
    """A header field that is put into no table (RFC 7541, section 6.2.2), not Huffman coded."""
    return b"\x00" + _text(name.encode()) + _text(value.encode())


def _text(data: bytes) -> bytes:
    """Its length as an integer with a prefix of seven bits (RFC 7541, section 5.1), and itself."""
    if len(data) < 127:
        return bytes((len(data),)) + data
    rest, out = len(data) - 127, bytearray((127,))
    while rest >= 128:
        out.append(rest & 127 | 128)
        rest >>= 7
    out.append(rest)
    return bytes(out) + data


def _left(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s
