"""A share of the fuzzing of tests/proxy/auth_fuzz.py, another one each day; and what it found."""

import datetime
from base64 import b64decode, b64encode
from pathlib import Path

import pytest
import sim_seeds
from proxy.auth_fuzz import run

from popmq.common.errors import ConfigError
from popmq.common.settings.settings import ProxySettings
from popmq.proxy.transport.lean.self_signed import ALWAYS, certificates_of, kept_in

OUTCOMES = {
    "header read",
    "header refused",
    "date read",
    "date refused",
    "user decided",
    "user refused",
    "certificate good",
    "certificate refused",
    "name taken",
    "name refused",
}


@pytest.mark.more
def test_ten_thousand_inputs_of_the_day_are_read_right_or_refused() -> None:
    (day, *_) = sim_seeds.of_the_day(1)
    outcomes = run(day * 1_000, 10_000)
    assert set(outcomes) >= OUTCOMES
    assert min(outcomes[name] for name in OUTCOMES) > 20


def test_a_name_that_no_certificate_can_have_is_refused_with_its_setting(tmp_path: Path) -> None:
    settings = ProxySettings(advertise="bücher.example:8081", tls="auto")
    with pytest.raises(ConfigError, match=r"bücher.example.*xn--.*proxy.advertise"):
        certificates_of(settings, tmp_path)


@pytest.mark.parametrize(
    ("old", "new"),
    [(b"\x55\x1d\x13", b"\x55\x1d\x11"), (b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x07")],
    ids=["an extension twice", "version 8"],
)
def test_a_damaged_certificate_of_our_own_is_made_again(
    tmp_path: Path, old: bytes, new: bytes
) -> None:
    now = datetime.datetime(2026, 1, 31, tzinfo=datetime.UTC)
    path = Path(kept_in(tmp_path, (), now)[0])
    content = b64decode(b"".join(path.read_bytes().splitlines()[1:-1]))
    assert content.count(old) == 1
    damaged = b64encode(content.replace(old, new))
    path.write_bytes(b"-----BEGIN CERTIFICATE-----\n" + damaged + b"\n-----END CERTIFICATE-----\n")
    kept_in(tmp_path, ALWAYS, now)
    before = path.read_bytes()
    assert damaged not in before
    kept_in(tmp_path, ALWAYS, now)
    assert path.read_bytes() == before
