"""The certificate that one side of connections shows, loaded again when its files change.

Kubernetes replaces the files of a Secret while processes run; a connection keeps the certificate
that it began with.
"""

import logging
import os
import ssl
from collections.abc import Callable

from popmq.common.errors import ConfigError
from popmq.common.tls.session import ALPN

logger = logging.getLogger(__name__)

Load = Callable[[ssl.SSLContext], None]


class Certificates:
    """`load` puts a chain and its key into a context; `files` are looked at for changes."""

    def __init__(
        self,
        load: Load,
        files: tuple[str, ...] = (),
        *,
        protocol: int = ssl.PROTOCOL_TLS_SERVER,
    ) -> None:
        self.reloaded = 0
        self.refused = 0  # changes that could not be used
        self._load = load
        self._files = files
        self._protocol = protocol
        self._seen = self._stamp()
        self._context: ssl.SSLContext | None = None

    @classmethod
    def of_files(cls, certificate: str, key: str) -> "Certificates":
        """Of a server of HTTP/2. Raises ConfigError when they cannot be used now."""

        def load(context: ssl.SSLContext) -> None:
            context.set_alpn_protocols([ALPN])
            load_pair(context, certificate, key)

        files = cls(load, (certificate, key))
        files.context()
        return files

    def context(self) -> ssl.SSLContext:
        """The one for a new connection; ConfigError when there is none yet and cannot be."""
        if self._context is None:
            self._context = self._made()
        return self._context

    def refresh(self) -> None:
        """Look at the files; a pair that does not fit leaves what was there, and is logged."""
        if self._context is None or (stamp := self._stamp()) == self._seen:
            return
        self._seen = stamp
        try:
            self._context = self._made()
        except ConfigError as error:
            self.refused += 1
            logger.error("the old certificate stays", extra={"why": str(error)})
            return
        self.reloaded += 1
        logger.info("loaded a new certificate", extra={"files": list(self._files)})

    def _made(self) -> ssl.SSLContext:
        context = ssl.SSLContext(self._protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # A client could have the dear half of a handshake done again and again.
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
        self._load(context)
        return context

    def _stamp(self) -> list[tuple[int, int, int] | None]:
        return [_stamp_of(path) for path in self._files]


def load_pair(
    context: ssl.SSLContext, certificate: str, key: str, *, section: str = "proxy"
) -> None:
    """Raises ConfigError with the setting and what is wrong."""
    certificate_setting, key_setting = f"{section}.tls_certificate", f"{section}.tls_key"
    for setting, path in ((certificate_setting, certificate), (key_setting, key)):
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            raise ConfigError(f"{setting} = {path}: {error.strerror}") from error

    def no_passphrase() -> str:
        raise ConfigError(f"{key_setting} = {key}: encrypted; give a key without a passphrase")

    try:
        context.load_cert_chain(certificate, key, password=no_passphrase)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            why = f"the key in {key} ({key_setting}) belongs to another certificate"
        else:
            why = f"no usable PEM pair with {key} ({key_setting}): {error.reason or 'not PEM'}"
        raise ConfigError(f"{certificate_setting} = {certificate}: {why}") from error


def _stamp_of(path: str) -> tuple[int, int, int] | None:
    try:
        file_status = os.stat(path)
    except OSError:
        return None
    return file_status.st_ino, file_status.st_mtime_ns, file_status.st_size
