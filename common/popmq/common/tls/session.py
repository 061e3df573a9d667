"""TLS of one connection as a core: bytes in, bytes out (`ssl.SSLObject` between two buffers).

A client says HTTP/2 by ALPN; whoever says nothing, or something else, is refused once it has
shown what it speaks (docs/concepts/transport.md, "TLS").
"""

import ssl
from contextlib import suppress
from typing import Any

HANDSHAKE = 0x16  # the first byte of a TLS connection (RFC 8446, section 5.1); of HTTP, a letter
ALPN = "h2"
RECORD_BYTES = 16_384
# A fatal alert, as TLS 1.2 and later read it: handshake_failure(40).
NO_TLS_HERE = bytes((0x15, 3, 3, 0, 2, 2, 40))


class TlsFault(Exception):
    """The handshake or a record is broken; an alert may wait in `take`.

    `no_tls`: the peer answered with plain text, or with `NO_TLS_HERE`."""

    def __init__(self, error: ssl.SSLError) -> None:
        verify_message = getattr(error, "verify_message", "")  # of a certificate
        super().__init__(verify_message or error.reason or str(error))
        self.no_tls = error.reason in ("WRONG_VERSION_NUMBER", *_HANDSHAKE_FAILURES)


# As different versions of OpenSSL call alert 40.
_HANDSHAKE_FAILURES = ("SSLV3_ALERT_HANDSHAKE_FAILURE", "SSL/TLS_ALERT_HANDSHAKE_FAILURE")


class TlsSession:
    """One side of one connection: the server's, or with `server_name` that of the client, who
    checks that the certificate is for this name. Whatever `feed` leaves is in `take`."""

    __slots__ = ("_incoming", "_outgoing", "_session", "ended", "established")

    def __init__(self, context: ssl.SSLContext, server_name: str = "") -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._session = context.wrap_bio(
            self._incoming,
            self._outgoing,
            server_side=not server_name,
            server_hostname=server_name or None,
        )
        self.established = False
        self.ended = False  # the peer said that it sends nothing more

    @property
    def protocol(self) -> str | None:
        """What ALPN agreed on."""
        return self._session.selected_alpn_protocol()

    @property
    def peer_names(self) -> list[str]:
        """DNS names in the peer's certificate, if it was asked for one and it was verified."""
        certificate = self._session.getpeercert() or {}
        names: Any = certificate.get("subjectAltName", ())
        return [str(name[1]) for name in names if name[0] == "DNS"]

    def feed(self, data: bytes) -> bytes:
        """What the peer said within TLS. Raises TlsFault, and is over then. A client begins with
        no data."""
        self._incoming.write(data)
        try:
            if not self.established:
                self._session.do_handshake()
                self.established = True
            return self._read()
        except ssl.SSLWantReadError:
            return b""
        except ssl.SSLError as error:
            raise TlsFault(error) from error

    def take(self) -> bytes:
        """Bytes for the peer's socket."""
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
            raise TlsFault(error) from error
        return self.take()

    def close(self) -> bytes:
        """What tells the peer that nothing was cut off."""
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
