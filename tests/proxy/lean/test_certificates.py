"""Where a certificate comes from: files of the operator, or of our own making."""

import datetime
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from popmq.common.errors import ConfigError
from popmq.common.settings.settings import ProxySettings
from popmq.common.tls import session as tls
from popmq.common.tls.certificates import Certificates
from popmq.proxy.transport.lean import self_signed

NOW = datetime.datetime.now(datetime.UTC)


def pair(folder: Path) -> tuple[str, str]:
    return self_signed.kept_in(folder, [], NOW)


def test_our_own_certificate_is_made_once_and_for_the_owner_only(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "tls"
    certificate, key = self_signed.kept_in(folder, ["mq.example", "10.0.0.7"], NOW)
    before = Path(certificate).read_bytes(), Path(key).read_bytes()
    later = NOW + datetime.timedelta(days=330)
    assert self_signed.kept_in(folder, ["mq.example"], later) == (certificate, key)
    assert (Path(certificate).read_bytes(), Path(key).read_bytes()) == before
    assert stat.S_IMODE(os.stat(key).st_mode) == 0o600
    assert sorted(path.name for path in folder.iterdir()) == ["certificate.pem", "key.pem"]


@pytest.mark.parametrize(
    ("hosts", "days", "harm"),
    [
        (["new.example"], 0, ""),
        ([], self_signed.VALID_DAYS - self_signed.RENEW_DAYS + 1, ""),
        ([], 0, "key.pem"),
        ([], 0, "certificate.pem"),
    ],
)
def test_it_is_made_anew_when_it_is_no_good_any_more(
    tmp_path: Path, hosts: list[str], days: int, harm: str
) -> None:
    certificate, key = self_signed.kept_in(tmp_path, [], NOW)
    before = Path(certificate).read_bytes()
    if harm:
        (tmp_path / harm).unlink()
    self_signed.kept_in(tmp_path, hosts, NOW + datetime.timedelta(days=days))
    assert Path(certificate).read_bytes() != before
    Certificates.of_files(certificate, key)


def test_the_key_beside_the_certificate_can_sign_no_other(tmp_path: Path) -> None:
    certificate, _ = self_signed.kept_in(tmp_path, [], NOW)
    made = x509.load_pem_x509_certificate(Path(certificate).read_bytes())
    constraints = made.extensions.get_extension_for_class(x509.BasicConstraints).value
    usage = made.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert not constraints.ca
    assert list(usage) == [ExtendedKeyUsageOID.SERVER_AUTH]
    assert made.not_valid_after_utc - NOW <= datetime.timedelta(days=366)


def refusal(certificate: Path, key: Path) -> str:
    settings = ProxySettings(transport="lean", tls_certificate=str(certificate), tls_key=str(key))
    with pytest.raises(ConfigError) as caught:
        self_signed.certificates_of(settings, None)
    return str(caught.value)


def test_files_that_cannot_be_used_are_named_with_their_setting(tmp_path: Path) -> None:
    certificate, key = map(Path, pair(tmp_path / "one"))
    other = Path(pair(tmp_path / "two")[1])
    absent, garbage = tmp_path / "absent.pem", tmp_path / "garbage.pem"
    garbage.write_text("nothing")
    assert refusal(absent, key) == f"proxy.tls_certificate = {absent}: No such file or directory"
    assert refusal(certificate, absent) == f"proxy.tls_key = {absent}: No such file or directory"
    assert "belongs to another certificate" in refusal(certificate, other)
    assert "no usable PEM pair" in refusal(garbage, key)
    assert "no usable PEM pair" in refusal(certificate, garbage)


def test_a_key_with_a_passphrase_is_refused_and_nobody_is_asked_for_it(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    certificate, key = map(Path, pair(tmp_path))
    loaded = serialization.load_pem_private_key(key.read_bytes(), None)
    key.write_bytes(
        loaded.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    assert refusal(certificate, key).endswith("give a key without a passphrase")


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"tls_key": "k.pem"}, "proxy.tls_certificate = : needed, as proxy.tls_key is set"),
        ({"tls_certificate": "c.pem"}, "proxy.tls_key = : needed, as proxy.tls_certificate"),
        ({"transport": "grpcio", "tls": "only"}, "proxy.transport = grpcio: serves plain text"),
        ({"transport": "grpcio", "workers": 2}, "proxy.workers = 2: more than one needs"),
        ({"tls": "maybe"}, "proxy.tls = maybe: one of auto, off, only"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    given: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        ProxySettings(**{"transport": "lean", **given})
    assert str(caught.value).startswith(complaint)


def test_without_files_a_certificate_is_made_when_the_first_client_asks(tmp_path: Path) -> None:
    certificate = self_signed.certificates_of(ProxySettings(transport="lean"), None)
    assert certificate is not None
    session = tls.TlsSession(certificate.context())
    assert not session.established
    assert self_signed.certificates_of(ProxySettings(tls="off"), tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_each_change_of_the_files_is_looked_at_once(tmp_path: Path) -> None:
    certificate, key = pair(tmp_path / "live")
    good = Path(key).read_bytes()
    certificates = Certificates.of_files(certificate, key)
    before = certificates.context()
    counts = []
    for content in (None, b"broken", good):
        if content is not None:
            Path(key).write_bytes(content)
            os.utime(key, ns=(len(content), len(content)))  # a clock may be coarse
        for _ in range(3):
            certificates.refresh()
            counts.append((certificates.refused, certificates.reloaded))
        assert (certificates.context() is before) == (content is not good)
    assert counts == [(0, 0)] * 3 + [(1, 0)] * 3 + [(1, 1)] * 3
