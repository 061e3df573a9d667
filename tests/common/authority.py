"""A CA of a test, and what it signs: certificates as files, good ones and others."""

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


@dataclass
class Authority:
    """`certificate` is the file that peers trust."""

    folder: Path
    name: str = "ca"
    _key: ec.EllipticCurvePrivateKey = field(default_factory=_new_key)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        usage = x509.BasicConstraints(ca=True, path_length=0)
        builder = self._builder(self.name, self._key.public_key(), 365)
        built = builder.add_extension(usage, critical=True).sign(self._key, hashes.SHA256())
        self.certificate = self.folder / f"{self.name}.pem"
        self.certificate.write_bytes(built.public_bytes(serialization.Encoding.PEM))

    def sign(
        self, file_name: str, dns_name: str = "popmq", *, days: float = 30, client: bool = True
    ) -> tuple[str, str]:
        """(certificate, key), which end in `days` days; `client`: also for the asking side."""
        key = _new_key()
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH]
        if client:
            purposes.append(ExtendedKeyUsageOID.CLIENT_AUTH)
        certificate = (
            self._builder(file_name, key.public_key(), days)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(dns_name)]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        paths = self.folder / f"{file_name}.pem", self.folder / f"{file_name}.key"
        paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        paths[1].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return str(paths[0]), str(paths[1])

    def _builder(
        self, name: str, public_key: ec.EllipticCurvePublicKey, days: float
    ) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(_name(name))
            .issuer_name(_name(self.name))
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=60))
            .not_valid_after(now + timedelta(days=days))
        )
