"""TLS of frames: both ends show a certificate of the cluster's CA.

One port may take plain text beside it while a cluster is moved to TLS: a connection's first byte
says what it is.  0x16 begins TLS, a frame begins with 0 (docs/concepts/frames.md#encryption).
"""

import os
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from popmq.common.errors import ConfigError
from popmq.common.settings.cluster_settings import ClusterSettings
from popmq.common.tls.certificates import Certificates, load_pair
from popmq.common.tls.session import HANDSHAKE, TlsFault, TlsSession


class TlsRefused(Exception):
    """Why the connection ends; `no_tls`: the other end has no TLS."""

    def __init__(self, text: str, *, no_tls: bool = False) -> None:
        super().__init__(text)
        self.no_tls = no_tls


class FrameTls:
    """What a process shows, and what it asks for. A changed file counts from the next connection.

    A peer's certificate is signed by `authority` and names `name`; `required` refuses plain text.
    """

    def __init__(
        self,
        certificate: str,
        key: str,
        authority: str,
        *,
        name: str,
        required: bool = True,
        may_change: bool = True,
    ) -> None:
        """Raises ConfigError when a file cannot be used."""
        self.required = required
        self.name = name

        def load(context: ssl.SSLContext) -> None:
            context.verify_mode = ssl.CERT_REQUIRED
            load_pair(context, certificate, key, section="cluster")
            try:
                context.load_verify_locations(authority)
            except (OSError, ssl.SSLError) as error:  # the latter is one of the former
                why = error.strerror if not isinstance(error, ssl.SSLError) else "no certificates"
                raise ConfigError(f"cluster.tls_authority = {authority}: {why}") from error

        files = (certificate, key, authority) if may_change else ()
        self._server = Certificates(load, files, protocol=ssl.PROTOCOL_TLS_SERVER)
        self._client = Certificates(load, files, protocol=ssl.PROTOCOL_TLS_CLIENT)
        self._server.context()
        self._client.context()

    @staticmethod
    def of(cluster: ClusterSettings) -> "FrameTls | None":
        if not cluster.tls_certificate:
            return None
        return FrameTls(
            cluster.tls_certificate,
            cluster.tls_key,
            cluster.tls_authority,
            name=cluster.tls_name,
            required=cluster.tls_required,
        )

    @staticmethod
    def of_pem(
        certificate: bytes, key: bytes, authority: bytes, *, name: str, required: bool
    ) -> "FrameTls":
        """Of a process that has them in no files."""
        with ExitStack() as stack:
            paths = [stack.enter_context(_in_memory(pem)) for pem in (certificate, key, authority)]
            return FrameTls(*paths, name=name, required=required, may_change=False)

    def serving(self) -> TlsSession:
        self._server.refresh()
        return TlsSession(self._server.context())

    def asking(self) -> TlsSession:
        self._client.refresh()
        return TlsSession(self._client.context(), self.name)


class TlsChannel:
    """The TLS of one connection. Bytes for the other end are in `take` after each call."""

    def __init__(self, tls: FrameTls, *, asks: bool) -> None:
        self.session: TlsSession | None = tls.asking() if asks else None
        self._tls = tls
        self._is_open = asks  # it is known whether this is TLS
        self._failed = False
        if self.session is not None:
            self.session.feed(b"")

    @property
    def ready(self) -> bool:
        """Frames can be sent."""
        return not self._failed and (self.session is None or self.session.established)

    def opened(self, data: bytes) -> bytes:
        """The frames' bytes in `data`. Raises TlsRefused."""
        if not self._is_open:
            self._is_open = True
            self._decide(data[0])
        session = self.session
        if session is None:
            return data
        is_new = not session.established
        try:
            frames = session.feed(data)
            if is_new and session.established:
                self._check_name(session)
        except TlsFault as fault:
            self._failed = True
            raise TlsRefused(f"TLS failed: {fault}", no_tls=fault.no_tls) from fault
        return frames

    def seal(self, data: bytes) -> bytes:
        """Raises TlsRefused."""
        if self.session is None:
            return data
        try:
            return self.session.seal(data)
        except TlsFault as fault:
            self._failed = True
            raise TlsRefused(f"TLS failed: {fault}") from fault

    def take(self) -> bytes:
        return b"" if self.session is None else self.session.take()

    def _decide(self, first: int) -> None:
        if first == HANDSHAKE:
            self.session = self._tls.serving()
        elif self._tls.required:
            raise TlsRefused(
                "the peer does not use TLS: give it cluster.tls_certificate (or plain text is "
                "accepted, too: cluster.tls_required = false)"
            )

    def _check_name(self, session: TlsSession) -> None:
        """OpenSSL checks that of a server."""
        names, name = session.peer_names, self._tls.name
        if name.lower() not in map(str.lower, names):
            shown = ", ".join(names)[:200] or "nothing"
            raise TlsRefused(f"the peer's certificate names {shown}, not {name} (cluster.tls_name)")


@contextmanager
def _in_memory(pem: bytes) -> Iterator[str]:
    """A path for OpenSSL, which reads certificates from files alone; no disk has seen it."""
    descriptor = os.memfd_create("popmq-tls")
    try:
        os.write(descriptor, pem)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
