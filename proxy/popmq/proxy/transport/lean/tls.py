"""TLS of one connection as a core: bytes in, bytes out (`ssl.SSLObject` between two buffers).

A client says HTTP/2 by ALPN; whoever says nothing, or something else, is refused once it has
shown what it speaks (docs/concepts/transport.md, "TLS").
"""

import ssl
from contextlib import suppress

HANDSHAKE = 0x16  # the first byte of a TLS connection (RFC 8446, section 5.1); of HTTP, a letter
ALPN = "h2"
RECORD_BYTES = 16_384
# A fatal alert, as TLS 1.2 and later read it: handshake_failure(40).
NO_TLS_HERE = bytes((0x15, 3, 3, 0, 2, 2, 40))


class TlsFault(Exception):
    """The handshake or a record is broken; an alert may wait in `take`."""


class TlsSession:
    """The server's side of one connection. Whatever `feed` leaves is in `take`."""

    __slots__ = ("_incoming", "_outgoing", "_session", "ended", "established")

    def __init__(self, context: ssl.SSLContext) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._session = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self.established = False
        self.ended = False  # the client said that it sends nothing more

    @property
    def protocol(self) -> str | None:
        """What ALPN agreed on."""
        return self._session.selected_alpn_protocol()

    def feed(self, data: bytes) -> bytes:
        """What the client said within TLS. Raises TlsFault, and is over then."""
        self._incoming.write(data)
        try:
            if not self.established:
                self._session.do_handshake()
                self.established = True
            return self._read()
        except ssl.SSLWantReadError:
            return b""
        except ssl.SSLError as error:
            raise TlsFault(error.reason or str(error)) from error

    def take(self) -> bytes:
        """Bytes for the client's socket."""
        return self._outgoing.read()

    def seal(self, data: bytes) -> bytes:
        """`data` as TLS records; nothing before the handshake is over. Raises TlsFault."""
        if not self.established:
            return b""
        view = memoryview(data)
        try:
            while view:
                view = view[self._session.write(view) :]
        except ssl.SSLError as error:
            raise TlsFault(error.reason or str(error)) from error
        return self.take()

    def close(self) -> bytes:
        """What tells the client that nothing was cut off."""
        if self.established:
            with suppress(ssl.SSLError):  # it has not said so itself, and need not
                self._session.unwrap()
        return self.take()

    def _read(self) -> bytes:
        parts = []
        try:
            while part := self._session.read(RECORD_BYTES):
                parts.append(part)
            self.ended = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self.ended = True
        return b"".join(parts)
