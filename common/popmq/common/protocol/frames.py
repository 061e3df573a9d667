"""Length-prefixed frames between processes of ours: the codec and one end of a connection.

Below the codec nothing waits: `FrameReader` turns any split of the byte stream into the same
frames.  `FrameConnection` is what both ends share: HELLO and PROOF that open it, one write per tick
of the event loop, and closing with a reason.  `frame_server` answers, `frame_port` asks
(ARCHITECTURE D5).
"""

import asyncio
import json
import logging
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum

from popmq.common.address import format_address, is_loopback
from popmq.common.errors import Code, ConfigError, PopmqError, Refused
from popmq.common.loop_iteration import LoopIteration
from popmq.common.protocol.cluster_secret import (
    ClusterSecret,
    Side,
    load_cluster_secret,
    new_challenge,
)
from popmq.common.protocol.frame_tls import FrameTls, TlsChannel, TlsRefused
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.protocol.payload import decode_error, encode_error
from popmq.common.settings.settings import Settings

logger = logging.getLogger(__name__)

VERSION = 1
HELLO_BYTES = 64 << 10  # until HELLO was accepted no frame may be longer
TLS_RECORD = 0x1603  # how a TLS connection begins; a HELLO is too short for it
LINGER_MS = 1_000  # how long a closed connection may take to hand over its last bytes

# A frame, big-endian; the length counts what follows it:
#
#   0       4         5      6            14                  18
#   | length | version | kind | request id | timeout_ms         | body ...
#                                          (kinds >= 16 only)
#
# Request id 0 belongs to the connection: HELLO, and the ERROR that says why it is closed.
FRAME_HEADER = struct.Struct(">IBBQ")
REQUEST_HEADER = struct.Struct(">IBBQI")
_PREFIX = struct.Struct(">IB")
_U32 = struct.Struct(">I")
FRAME_OVERHEAD = FRAME_HEADER.size - 4
REQUEST_OVERHEAD = REQUEST_HEADER.size - 4
FIRST_REQUEST_KIND = 16

# Plain ints: an attribute of an enum class is a slow look-up on the path of every message.
HELLO, REPLY, ERROR, CANCEL, PROOF = map(
    int, (Kind.HELLO, Kind.REPLY, Kind.ERROR, Kind.CANCEL, Kind.PROOF)
)

Frame = tuple[int, int, int, bytes]  # kind, request id, timeout_ms (0 if none), body


class FrameError(Refused):
    """The peer broke the protocol, or is not one we talk to; the connection is closed."""


class ProcessRole(StrEnum):
    PROXY = "proxy"
    BROKER = "broker"
    CONTROLLER = "controller"
    TOOL = "tool"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Who is at one end. `protocol` is the newest frame version that end speaks; a `challenge`
    asks the other end for a PROOF, and promises one.  `group` is a broker's own broker group;
    releases without the field send none."""

    role: ProcessRole
    name: str
    cluster: str
    epoch: int = 0
    features: tuple[str, ...] = ()
    credentials: str = field(default="", repr=False)  # always empty: older peers read the field
    protocol: int = VERSION
    challenge: str = ""
    group: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameSettings:
    """Section `frames` of the configuration, and what is asked of peers.

    With a `secret`, both ends prove that they hold it; `secret_required` refuses a peer that
    offers no proof.  Without a secret, a server listens off loopback only if none is required.
    With `tls`, frames over TCP are encrypted.
    """

    max_frame_bytes: int = 64 << 20
    max_buffered_bytes: int = 64 << 20  # written by us, not yet read by the peer
    max_stalled_ms: int = 10_000  # without reading anything, with that much unread
    max_in_flight: int = 4_096  # requests of one connection but pops, at the server
    max_pending: int = 65_536  # requests of one port but pops, at the asker
    max_waiting: int = 100_000  # pops of one connection, which wait for messages
    max_connections: int = 1_024
    connect_timeout_ms: int = 3_000  # connecting, HELLO and PROOF together
    secret: ClusterSecret | None = field(default=None, repr=False)
    secret_required: bool = True
    tls: FrameTls | None = None

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if type(value) is int and value < 1:
                raise ConfigError(f"frames.{name} must be at least 1, not {value}")

    @staticmethod
    def of(settings: Settings) -> "FrameSettings":
        """Raises ConfigError when the cluster's secret or certificate cannot be used."""
        frames, cluster = settings.frames, settings.cluster
        return FrameSettings(
            max_frame_bytes=frames.max_frame_bytes,
            max_buffered_bytes=frames.max_buffered_bytes,
            max_in_flight=frames.max_in_flight,
            secret=load_cluster_secret(cluster.secret_file) if cluster.secret_file else None,
            secret_required=cluster.secret_required,
            tls=FrameTls.of(cluster),
        )


DEFAULT_SETTINGS = FrameSettings()


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens: `host:port`, or `unix:` and the path of a socket."""

    host: str
    port: int
    path: str = ""

    @staticmethod
    def parse(text: str) -> "Address":
        if text.startswith("unix:"):
            if path := text.removeprefix("unix:"):
                return Address("", 0, path)
        else:
            host, _, port = text.rpartition(":")
            if host and port.isascii() and port.isdigit() and int(port) < 1 << 16:
                return Address(host.removeprefix("[").removesuffix("]"), int(port))
        raise ConfigError(f"address {text!r} is neither HOST:PORT nor unix:PATH")

    @property
    def is_local(self) -> bool:
        """Whether only processes of this machine reach it."""
        return bool(self.path) or is_loopback(self.host)

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return format_address(self.host, self.port)


class FrameReader:
    """Cuts a byte stream into frames; a frame in n pieces is copied a fixed number of times."""

    __slots__ = ("_need", "_partial", "max_frame_bytes")

    def __init__(self, max_frame_bytes: int) -> None:
        self.max_frame_bytes = max_frame_bytes
        self._partial = bytearray()
        self._need = 0

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that `data` completes, to be read to the end before the next call.

        Raises FrameError behind the last good one. `max_frame_bytes` may change in between.
        """
        if self._partial:
            self._partial += data
            if len(self._partial) < self._need:
                return
            data = bytes(self._partial)
            self._partial.clear()
        start, end = 0, len(data)
        while end - start >= FRAME_HEADER.size:
            size, version, kind, request_id = FRAME_HEADER.unpack_from(data, start)
            if version != VERSION or not FRAME_OVERHEAD <= size <= self.max_frame_bytes:
                raise self._refusal(size, version)
            stop = start + 4 + size
            if stop > end:
                break
            if kind < FIRST_REQUEST_KIND:
                yield kind, request_id, 0, data[start + FRAME_HEADER.size : stop]
            elif size < REQUEST_OVERHEAD:
                raise FrameError(Code.BAD_REQUEST, f"a request of {size} bytes has no timeout")
            else:
                (timeout_ms,) = _U32.unpack_from(data, start + FRAME_HEADER.size)
                yield kind, request_id, timeout_ms, data[start + REQUEST_HEADER.size : stop]
            start = stop
        if start < end:
            self._keep(data[start:])

    def _keep(self, rest: bytes) -> None:
        """Length and version are judged as soon as they are there: a frame of a version we do
        not know may be shorter than our header."""
        self._partial += rest
        self._need = _PREFIX.size
        if len(rest) < _PREFIX.size:
            return
        size, version = _PREFIX.unpack_from(rest)
        if version != VERSION or not FRAME_OVERHEAD <= size <= self.max_frame_bytes:
            raise self._refusal(size, version)
        self._need = 4 + size

    def _refusal(self, size: int, version: int) -> FrameError:
        if size >> 16 == TLS_RECORD:
            return FrameError(
                Code.FORBIDDEN, "the peer uses TLS, this end does not (cluster.tls_*)"
            )
        if version != VERSION:
            return FrameError(
                Code.VERSION_UNSUPPORTED,
                f"frame version {version} is not known here; this end speaks version {VERSION}",
            )
        if size < FRAME_OVERHEAD:
            return FrameError(Code.BAD_REQUEST, f"a frame of {size} bytes has no header")
        return FrameError(
            Code.PAYLOAD_TOO_LARGE,
            f"a frame of {size} bytes is over the limit of {self.max_frame_bytes} bytes "
            f"(frames.max_frame_bytes; {HELLO_BYTES} before HELLO)",
        )


def encode_hello(hello: Hello) -> bytes:
    fields = {name: getattr(hello, name) for name in Hello.__slots__}
    return json.dumps(fields, separators=(",", ":")).encode()


def decode_hello(body: bytes) -> Hello:
    """Unknown fields are those of a newer peer and are passed over."""
    try:
        fields = json.loads(body)
        hello = Hello(
            role=ProcessRole(fields["role"]),
            name=fields["name"],
            cluster=fields["cluster"],
            epoch=fields["epoch"],
            features=tuple(fields["features"]),
            credentials=fields["credentials"],
            protocol=fields["protocol"],
            challenge=fields.get("challenge", ""),
            group=fields.get("group", ""),
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FrameError(Code.BAD_REQUEST, "HELLO cannot be read") from error
    names = (hello.name, hello.cluster, hello.group)
    texts = (*names, hello.credentials, hello.challenge, *hello.features)
    numbers = (hello.epoch, hello.protocol)
    if not all(type(value) is str for value in texts) or not all(
        type(value) is int for value in numbers
    ):
        raise FrameError(Code.BAD_REQUEST, "HELLO has a field of the wrong type")
    return hello


def read_error(body: bytes) -> PopmqError:
    if len(body) < _U32.size:
        return Refused(Code.INTERNAL_ERROR, "the peer gave no reason")
    return decode_error(body)


def peer_name(peer: Hello | None) -> str:
    return f"{peer.role} {peer.name}" if peer else "a peer before its HELLO"


class FrameConnection(asyncio.Protocol):
    """One end of a connection. A subclass says what its side does with frames.

    The asker's HELLO comes first.  A server answers with its own HELLO, and the asker's is
    accepted: at once, or after both PROOFs where both ends hold a secret.
    """

    side: Side = "asker"

    def __init__(
        self,
        hello: Hello,
        settings: FrameSettings,
        turn: LoopIteration | None = None,
        *,
        plain: bool = False,
    ) -> None:
        """`plain`: without TLS, whatever the settings say."""
        self.hello = hello
        self.settings = settings
        self.no_tls = False  # the other end has no TLS
        self._tls = None if plain else settings.tls
        self._channel: TlsChannel | None = None  # of a connection over TLS, or that may become one
        self.peer: Hello | None = None
        self.closing = False
        self.paused = False  # the peer left more than `max_buffered_bytes` unread
        self.unsent = 0  # bytes written in this tick
        self._own_hello = b""
        self._peer_hello = b""
        self._unproved: Hello | None = None  # the peer's HELLO while its PROOF is not here
        self._parts: list[bytes] = []
        self._reader = FrameReader(HELLO_BYTES)
        self._loop = asyncio.get_running_loop()
        self._turn = turn or LoopIteration()
        self._transport: asyncio.Transport | None = None
        self._linger: asyncio.TimerHandle | None = None
        self._written = 0  # bytes handed to the transport so far
        self.lost: asyncio.Future[None] = self._loop.create_future()

    def on_hello(self, peer: Hello) -> None:
        """The peer was accepted: its HELLO, and its PROOF where one is needed."""
        raise NotImplementedError

    def frame(self, kind: int, request_id: int, timeout_ms: int, body: bytes) -> None:
        """A frame after HELLO."""
        raise NotImplementedError

    def on_connection_lost(self, reason: str) -> None:
        """Called once: from now on nothing is read or sent."""
        raise NotImplementedError

    def send(self, kind: int, request_id: int, body: bytes) -> None:
        """Leave `body` for the one write of this tick."""
        size = FRAME_OVERHEAD + len(body)
        self._append(FRAME_HEADER.pack(size, VERSION, kind, request_id), body)

    def send_request(self, kind: int, request_id: int, timeout_ms: int, body: bytes) -> None:
        size = REQUEST_OVERHEAD + len(body)
        self._append(REQUEST_HEADER.pack(size, VERSION, kind, request_id, timeout_ms), body)

    def _append(self, header: bytes, body: bytes) -> None:
        if self.closing:
            return
        parts = self._parts
        if not parts:
            self._turn.call_at_end(self._flush)
        parts.append(header)
        parts.append(body)
        self.unsent += len(header) + len(body)
        if self.unsent > self.settings.max_buffered_bytes:
            self._flush()

    def _flush(self) -> None:
        channel = self._channel
        if self._parts and self._transport is not None and (channel is None or channel.ready):
            data = b"".join(self._parts)
            self._parts.clear()
            self.unsent = 0
            try:
                self._write(data if channel is None else channel.seal(data))
            except TlsRefused as refused:
                self.abort(str(refused))

    def _write(self, data: bytes) -> None:
        if data and self._transport is not None:
            self._written += len(data)
            self._transport.write(data)

    def refuse(self, error: FrameError) -> None:
        """Tell the peer why, and close: only our half at first, as closing a socket with
        unread bytes resets it and the reason would be lost."""
        logger.warning(
            "closed a frame connection", extra={"peer": peer_name(self.peer), "why": str(error)}
        )
        self.send(ERROR, 0, encode_error(error))
        self.close(str(error), only_half=True)

    def close(self, reason: str, *, only_half: bool = False) -> None:
        """Close once what was written has left, but soon; `only_half`: ours first, if it can be."""
        self._flush()
        if self._transport is not None:
            if only_half and self._transport.can_write_eof():
                self._transport.write_eof()
            else:
                self._transport.close()
            if self._linger is None and not self.lost.done():
                self._linger = self._loop.call_later(LINGER_MS / 1000, self._transport.abort)
        self._end(reason)

    def abort(self, reason: str) -> None:
        if self._transport is not None:
            self._transport.abort()
        self._end(reason)

    def _end(self, reason: str) -> None:
        if not self.closing:
            self.closing = True
            self._parts.clear()
            self.on_connection_lost(reason)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        limit = self.settings.max_buffered_bytes
        transport.set_write_buffer_limits(high=limit, low=limit)
        notice_dead_peer(transport)
        if self._tls is not None and not _is_unix(transport):
            self._channel = TlsChannel(self._tls, asks=self.side == "asker")
            self._write(self._channel.take())
        if self.closing:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._linger is not None:
            self._linger.cancel()
        try:
            self._end(str(exc) if exc else "closed by the peer")
        finally:
            if not self.lost.done():
                self.lost.set_result(None)

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False

    def data_received(self, data: bytes) -> None:
        if self.closing:
            return
        try:
            if self._channel is not None:
                data = self._opened(self._channel, data)
            for kind, request_id, timeout_ms, body in self._reader.feed(data):
                if self.peer is None:
                    self._opening_frame(kind, request_id, body)
                else:
                    self.frame(kind, request_id, timeout_ms, body)
                if self.closing:
                    return
        except FrameError as error:
            self.refuse(error)

    def _opened(self, channel: TlsChannel, data: bytes) -> bytes:
        """The frames' bytes; what TLS has to say, and what waited for its handshake, leaves."""
        try:
            data = channel.opened(data)
        except TlsRefused as refused:
            self.no_tls = refused.no_tls
            raise FrameError(Code.FORBIDDEN, str(refused)) from refused
        finally:
            self._write(channel.take())
        if channel.session is None:
            self._channel = None
        else:
            self._flush()
        return data

    def send_hello(self) -> None:
        challenge = new_challenge() if self.settings.secret is not None else ""
        self._own_hello = encode_hello(replace(self.hello, challenge=challenge))
        self.send(HELLO, 0, self._own_hello)

    def _opening_frame(self, kind: int, request_id: int, body: bytes) -> None:
        if kind == ERROR and request_id == 0:
            why = str(read_error(body))
            logger.warning("the peer refused a frame connection", extra={"why": why})
            self.close(f"refused by the peer: {why}")
        elif self._unproved is not None:
            self._check_proof(self._unproved, kind, body)
        elif kind != HELLO:
            raise FrameError(Code.BAD_REQUEST, f"the first frame must be HELLO, not kind {kind}")
        else:
            self._peer_hello = body
            self._check_hello(decode_hello(body))

    def _check_hello(self, peer: Hello) -> None:
        own, secret = self.hello, self.settings.secret
        if peer.cluster != own.cluster:
            raise FrameError(
                Code.FORBIDDEN,
                f"{peer.role} {peer.name!r} belongs to cluster {peer.cluster!r}, "
                f"but {own.role} {own.name!r} to cluster {own.cluster!r}",
            )
        if secret is not None and not peer.challenge and self.settings.secret_required:
            raise FrameError(
                Code.FORBIDDEN,
                f"{peer_name(peer)} offers no proof of the cluster's secret: give it the same "
                "cluster.secret_file (or none is required: cluster.secret_required = false)",
            )
        if self.side == "server":
            self.send_hello()
        if secret is None or not peer.challenge:
            self._accept(peer)
            return
        self._unproved = peer
        if self.side == "server":
            self._send_proof(secret)

    def _check_proof(self, peer: Hello, kind: int, body: bytes) -> None:
        secret = self.settings.secret
        assert secret is not None, "only a holder of a secret waits for a proof"
        if kind != PROOF:
            raise FrameError(
                Code.FORBIDDEN,
                f"frame kind {kind} before the proof of the cluster's secret (cluster.secret_file)",
            )
        other: Side = "asker" if self.side == "server" else "server"
        if not secret.proves(body, other, *self._hellos()):
            raise FrameError(
                Code.FORBIDDEN,
                f"{peer_name(peer)} holds another cluster secret than {self.hello.role} "
                f"{self.hello.name} (cluster.secret_file)",
            )
        if self.side == "asker":
            self._send_proof(secret)
        self._accept(peer)

    def _send_proof(self, secret: ClusterSecret) -> None:
        self.send(PROOF, 0, secret.proof(self.side, *self._hellos()))

    def _hellos(self) -> tuple[bytes, bytes]:
        """The asker's, the server's."""
        own, peer = self._own_hello, self._peer_hello
        return (own, peer) if self.side == "asker" else (peer, own)

    def _accept(self, peer: Hello) -> None:
        self.peer, self._unproved = peer, None
        self._reader.max_frame_bytes = self.settings.max_frame_bytes
        self.on_hello(peer)

    def other_frame(self, kind: int, request_id: int, body: bytes) -> None:
        """What both sides do with a frame that their side has no use for."""
        if kind in (HELLO, PROOF):
            raise FrameError(Code.BAD_REQUEST, f"{Kind(kind).name} came twice")
        if kind == ERROR and request_id == 0:
            self.close(f"refused by the peer: {read_error(body)}")
        elif kind not in (REPLY, ERROR, CANCEL):  # those are late answers, to be passed over
            unknown = Refused(Code.UNSUPPORTED, f"frame kind {kind} is not known here")
            self.send(ERROR, request_id, encode_error(unknown))


def notice_dead_peer(
    transport: asyncio.Transport, *, idle_s: int = 5, interval_s: int = 2, give_up_ms: int = 10_000
) -> None:
    """TCP alone takes a quarter of an hour to give up on a host that vanished.

    `give_up_ms` also ends a connection whose peer is alive and reads nothing for so long.
    (TCP_NODELAY is set by asyncio.)
    """
    sock = transport.get_extra_info("socket")
    if sock is None or _is_unix(transport):
        return
    options = {
        "TCP_KEEPIDLE": idle_s,
        "TCP_KEEPINTVL": interval_s,
        "TCP_USER_TIMEOUT": give_up_ms,
    }
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in options.items():
            if option := getattr(socket, name, None):  # each system knows some of them
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
    except OSError:  # the peer is gone already, and `connection_lost` will come
        return


def _is_unix(transport: asyncio.BaseTransport) -> bool:
    sock = transport.get_extra_info("socket")
    return sock is not None and sock.family == socket.AF_UNIX
