"""The cluster's own CA, the certificate of its proxies and that between its processes, made and
renewed in time.

Processes read a certificate again when it changes, so a renewal restarts nothing.  A CA that is
replaced stays in `ca.crt` beside the new one: peers go on trusting what was signed before.
"""

import base64
import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_DAYS, AUTHORITY_RENEW_DAYS = 3650, 365
SERVING_DAYS, SERVING_RENEW_DAYS = 90, 30
# A node's clock may be behind ours.
EARLY = timedelta(hours=1)

CERTIFICATE, KEY, TRUSTED = "tls.crt", "tls.key", "ca.crt"
SecretData = Mapping[str, str]  # of a Secret: base64


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key, as PEM."""

    certificate: bytes
    key: bytes


def authority(secret: SecretData | None, cluster: str, now: datetime) -> dict[str, str]:
    """The Secret of the CA: as it is while it is good for long enough, else a new one."""
    old = _pair(secret)
    if old is not None and _good(old, now, AUTHORITY_RENEW_DAYS):
        return dict(secret or {})
    pair = _make_authority(cluster, now)
    trusted = [pair.certificate]
    if old is not None and _good(old, now, 0):
        trusted.append(old.certificate)
    return _encoded(pair, b"".join(trusted))


def serving(
    secret: SecretData | None, ca: SecretData, names: Iterable[str], now: datetime
) -> dict[str, str]:
    """The Secret of the proxies: as it is while it is good for `names` and signed by `ca`."""
    desired = sorted(set(names))
    signer = _pair(ca)
    assert signer is not None, "a CA was made before"
    trusted = base64.b64decode(ca[TRUSTED])
    old = _pair(secret)
    if (
        old is not None
        and _good(old, now, SERVING_RENEW_DAYS)
        and _names_in(old.certificate) == desired
        and _signed_by(old, signer.certificate)
    ):
        return _encoded(old, trusted)
    new = _make_signed(signer, "popmq proxy", desired, [ExtendedKeyUsageOID.SERVER_AUTH], now)
    return _encoded(new, trusted)


def between_processes(
    secret: SecretData | None, ca: SecretData, name: str, now: datetime
) -> dict[str, str]:
    """The Secret of all processes.  A certificate that a CA of before signed stays until it ends
    soon: by then every process trusts the new CA, which pods are told one after the other."""
    signer = _pair(ca)
    assert signer is not None, "a CA was made before"
    trusted = base64.b64decode(ca[TRUSTED])
    old = _pair(secret)
    if (
        old is not None
        and _good(old, now, SERVING_RENEW_DAYS)
        and _names_in(old.certificate) == [name]
        and _signed_by(old, trusted)
    ):
        return _encoded(old, trusted)
    purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    return _encoded(_make_signed(signer, "popmq process", [name], purposes, now), trusted)


def end_of(data: SecretData) -> datetime | None:
    """When the certificate ends; None for one that is missing or damaged."""
    try:
        certificate = base64.b64decode(data[CERTIFICATE])
        return x509.load_pem_x509_certificate(certificate).not_valid_after_utc
    except (KeyError, ValueError):
        return None


def names_in(data: SecretData) -> list[str]:
    """What the proxies' certificate is for; nothing for one that is missing or damaged."""
    try:
        return _names_in(base64.b64decode(data[CERTIFICATE]))
    except (KeyError, ValueError):
        return []


def _encoded(pair: Pair, trusted: bytes) -> dict[str, str]:
    parts = {CERTIFICATE: pair.certificate, KEY: pair.key, TRUSTED: trusted}
    return {name: base64.b64encode(part).decode() for name, part in parts.items()}


def _pair(data: SecretData | None) -> Pair | None:
    """None for what is missing or damaged: it is made again."""
    if not data or CERTIFICATE not in data or KEY not in data or TRUSTED not in data:
        return None
    try:
        pair = Pair(base64.b64decode(data[CERTIFICATE]), base64.b64decode(data[KEY]))
        certificate = x509.load_pem_x509_certificate(pair.certificate)
        key = serialization.load_pem_private_key(pair.key, None)
    except ValueError:
        return None
    return pair if key.public_key() == certificate.public_key() else None


def _good(pair: Pair, now: datetime, days: int) -> bool:
    certificate = x509.load_pem_x509_certificate(pair.certificate)
    return certificate.not_valid_after_utc - now > timedelta(days=days)


def _names_in(pem: bytes) -> list[str]:
    certificate = x509.load_pem_x509_certificate(pem)
    try:
        alternative_name = certificate.extensions.get_extension_for_class(
            x509.SubjectAlternativeName
        ).value
    except x509.ExtensionNotFound:
        return []
    addresses = [str(address) for address in alternative_name.get_values_for_type(x509.IPAddress)]
    return sorted([*alternative_name.get_values_for_type(x509.DNSName), *addresses])


def _signed_by(pair: Pair, authorities: bytes) -> bool:
    """By one of them."""
    certificate = x509.load_pem_x509_certificate(pair.certificate)
    for signer in x509.load_pem_x509_certificates(authorities):
        try:
            certificate.verify_directly_issued_by(signer)
        except (ValueError, TypeError, InvalidSignature):
            continue
        return True
    return False


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _make_authority(cluster: str, now: datetime) -> Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(f"popmq {cluster} {now:%Y-%m-%d}")
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        _builder(name, name, key.public_key(), now, AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return _as_pem(certificate, key)


def _make_signed(
    signer: Pair,
    subject: str,
    names: list[str],
    purposes: list[x509.ObjectIdentifier],
    now: datetime,
) -> Pair:
    by = x509.load_pem_x509_certificate(signer.certificate)
    signing_key = serialization.load_pem_private_key(signer.key, None)
    assert isinstance(signing_key, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    own_id = by.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    certificate = (
        _builder(_name(subject), by.subject, key.public_key(), now, SERVING_DAYS)
        .add_extension(
            x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own_id), critical=False
        )
        .sign(signing_key, hashes.SHA256())
    )
    return _as_pem(certificate, key)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public_key: ec.EllipticCurvePublicKey,
    now: datetime,
    days: int,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLY)
        .not_valid_after(now + timedelta(days=days))
    )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _as_pem(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Pair:
    return Pair(
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )
