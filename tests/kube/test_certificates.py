"""The cluster's own CA: what is good stays, what ends is renewed, nobody is cut off."""

import base64
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from kube.clusters import cluster, read

from popmq.operator.cluster.cluster_certificates import certificate_objects
from popmq.operator.model.certificates import authority, end_of, serving
from popmq.operator.model.spec import SpecError

NOW = datetime(2030, 1, 1, tzinfo=UTC)
NAMES = ["proxy.apps.svc", "10.0.0.7"]


def loaded(data: dict[str, str], key: str) -> list[x509.Certificate]:
    return x509.load_pem_x509_certificates(base64.b64decode(data[key]))


def test_what_is_good_is_left_alone() -> None:
    ca = authority(None, "demo", NOW)
    served = serving(None, ca, NAMES, NOW)
    later = NOW + timedelta(days=59)
    assert authority(ca, "demo", later) == ca
    assert serving(served, ca, NAMES, later) == served


def test_a_certificate_is_renewed_a_month_before_its_end() -> None:
    ca = authority(None, "demo", NOW)
    served = serving(None, ca, NAMES, NOW)
    later = NOW + timedelta(days=61)
    renewed = serving(served, ca, NAMES, later)
    assert renewed["tls.crt"] != served["tls.crt"]
    assert end_of(renewed) == later + timedelta(days=90)


def test_a_served_certificate_holds_the_names_and_is_signed_by_the_ca() -> None:
    ca = authority(None, "demo", NOW)
    served = serving(None, ca, NAMES, NOW)
    (certificate,) = loaded(served, "tls.crt")
    certificate.verify_directly_issued_by(loaded(ca, "tls.crt")[0])
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["proxy.apps.svc"]
    assert [str(value) for value in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.7"]


def test_other_names_make_another_certificate() -> None:
    ca = authority(None, "demo", NOW)
    served = serving(None, ca, NAMES, NOW)
    assert serving(served, ca, [*NAMES, "more"], NOW)["tls.crt"] != served["tls.crt"]


def test_a_new_ca_signs_anew_and_the_old_one_stays_trusted() -> None:
    old = authority(None, "demo", NOW)
    served = serving(None, old, NAMES, NOW)
    later = NOW + timedelta(days=3650 - 300)
    new = authority(old, "demo", later)
    assert new["tls.crt"] != old["tls.crt"]
    assert loaded(new, "ca.crt") == [*loaded(new, "tls.crt"), *loaded(old, "tls.crt")]
    signed = serving(served, new, NAMES, NOW)
    (certificate,) = loaded(signed, "tls.crt")
    certificate.verify_directly_issued_by(loaded(new, "tls.crt")[0])


@pytest.mark.parametrize("damage", [{"tls.key": "AAAA"}, {"tls.crt": "AAAA"}])
def test_a_damaged_secret_is_made_again(damage: dict[str, str]) -> None:
    ca = authority(None, "demo", NOW)
    assert authority({**ca, **damage}, "demo", NOW)["tls.crt"] not in (ca["tls.crt"], "AAAA")


def test_a_key_that_is_not_the_certificates_is_made_again() -> None:
    ca, other = authority(None, "demo", NOW), authority(None, "demo", NOW)
    assert authority({**ca, "tls.key": other["tls.key"]}, "demo", NOW)["tls.crt"] != ca["tls.crt"]


def test_only_a_cluster_with_an_own_ca_gets_secrets() -> None:
    assert len(certificate_objects(read(cluster()), {}, NOW)) == 3
    assert certificate_objects(read(cluster(tls={"mode": "Disabled"})), {}, NOW) == []


def test_a_name_beyond_ascii_is_encoded_as_certificates_have_it() -> None:
    spec = read(cluster(tls={"names": ["münchen.de", "*.example", "203.0.113.7", "2001:db8::1"]}))
    assert spec.tls.names == ("xn--mnchen-3ya.de", "*.example", "203.0.113.7", "2001:db8::1")
    secrets = certificate_objects(spec, {}, NOW)
    assert len(secrets) == 3


@pytest.mark.parametrize("name", ["a b", "", "ü" * 80, "a/b"])
def test_a_name_that_no_certificate_can_have_is_refused(name: str) -> None:
    with pytest.raises(SpecError, match=r"tls\.names"):
        read(cluster(tls={"names": [name]}))
