"""A certificate of our own making, for clients that speak TLS without asking whose it is.

The official Java client does so by default.  Who wants to be sure whom it talks to sets
`proxy.tls_certificate`, or trusts the file that `popmq up` keeps (docs/how-to/data-directory.md).
"""

import datetime
import ipaddress
import os
import ssl
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from popmq.common.errors import ConfigError
from popmq.common.settings.settings import ProxySettings, parse_address
from popmq.common.tls.certificates import Certificates, load_pair
from popmq.common.tls.session import ALPN

if TYPE_CHECKING:
    from cryptography.x509 import GeneralName

CERTIFICATE, KEY = "certificate.pem", "key.pem"
VALID_DAYS = 365
RENEW_DAYS = 30
ALWAYS = ("localhost", "127.0.0.1", "::1")


def certificates_of(settings: ProxySettings, folder: Path | None) -> Certificates | None:
    """None with `proxy.tls = off`. Raises ConfigError when a file that is needed is no good."""
    if settings.tls == "off":
        return None
    if settings.tls_certificate:
        return Certificates.of_files(settings.tls_certificate, settings.tls_key)
    if folder is None:
        now = datetime.datetime.now(datetime.UTC)
        load = partial(load_one_of_the_process, hosts=_own_names(settings), now=now)
        return Certificates(load)
    return Certificates.of_files(*own_certificate(settings, folder))


def own_certificate(settings: ProxySettings, folder: Path) -> tuple[str, str]:
    """(certificate, key) of our own making, kept in `folder`, for the names that we know."""
    return kept_in(folder, _own_names(settings), datetime.datetime.now(datetime.UTC))


def kept_in(folder: Path, hosts: Iterable[str], now: datetime.datetime) -> tuple[str, str]:
    """(certificate, key) in `folder`, made unless a pair is there that is good for `hosts`.

    Raises ConfigError when the folder cannot be written.
    """
    certificate, key = folder / CERTIFICATE, folder / KEY
    requested = {*ALWAYS, *hosts}
    try:
        if not key.exists() or not _is_good(certificate, requested, now):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            chain, secret = make(requested, now)
            # The key first: a certificate says that both are there.
            _write(key, secret)
            _write(certificate, chain)
    except OSError as error:
        raise ConfigError(f"cannot keep a certificate in {folder}: {error.strerror}") from error
    return str(certificate), str(key)


def load_one_of_the_process(
    context: ssl.SSLContext, hosts: Iterable[str], now: datetime.datetime
) -> None:
    """A pair that nobody can find later: for a process that has no folder of its own."""
    context.set_alpn_protocols([ALPN])
    with TemporaryDirectory(prefix="popmq-tls-") as folder:
        load_pair(context, *kept_in(Path(folder), hosts, now))


def make(hosts: Iterable[str], now: datetime.datetime) -> tuple[bytes, bytes]:
    """(certificate, key) as PEM, for these names and addresses."""
    # Here, as it takes tens of milliseconds and most processes never need it.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "popmq")])
    public = key.public_key()
    identifier = x509.SubjectKeyIdentifier.from_public_key(public)
    chain = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
        .add_extension(x509.SubjectAlternativeName(map(_general, sorted(hosts))), False)
        # Its key lies beside it: whoever trusts the certificate must not trust what the key signs.
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False)
        .add_extension(identifier, False)
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return chain.public_bytes(serialization.Encoding.PEM), secret


def _general(host: str) -> "GeneralName":
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise ConfigError(
            f"no certificate can be made for the name {host[:100]!r}, which is not ASCII: write it "
            "as xn--... (proxy.advertise, proxy.listen)"
        ) from error


def _own_names(settings: ProxySettings) -> set[str]:
    """What clients may call this proxy; who listens everywhere says so by `proxy.advertise`."""
    addresses = filter(None, (settings.listen, settings.advertise))
    return {parse_address(address)[0] for address in addresses} - {"0.0.0.0", "::"}


def _is_good(certificate: Path, requested: set[str], now: datetime.datetime) -> bool:
    from cryptography import x509

    try:
        found_certificate = x509.load_pem_x509_certificate(certificate.read_bytes())
        names = found_certificate.extensions.get_extension_for_class(
            x509.SubjectAlternativeName
        ).value
        basic = found_certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
    except (
        FileNotFoundError,
        ValueError,
        x509.ExtensionNotFound,
        x509.DuplicateExtension,
        x509.InvalidVersion,
        x509.UnsupportedGeneralNameType,
    ):
        return False
    known = {*names.get_values_for_type(x509.DNSName)}
    known |= {str(address) for address in names.get_values_for_type(x509.IPAddress)}
    until = found_certificate.not_valid_after_utc - datetime.timedelta(days=RENEW_DAYS)
    return requested <= known and now < until and not basic.ca  # popmq made some that were


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all, and for the owner's eyes only."""
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    with open(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
