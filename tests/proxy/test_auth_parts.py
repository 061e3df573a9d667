"""The parts of the check of a caller: sealing, headers, clocks, policies, the table of rights."""

import os
import stat
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from popmq.common.errors import Code, ConfigError, PopmqError
from popmq.common.users import PolicyEntry, UserConfig, parse_clock_offset
from popmq.common.wire import admin_pb2, report_pb2
from popmq.proxy.api import admin_pb2 as public_admin_pb2
from popmq.proxy.api import service_pb2
from popmq.proxy.auth.clock_offsets import Fresh, judge, zones_that_step_back
from popmq.proxy.auth.gate import rights_of
from popmq.proxy.auth.policy import EVERY, SOME, Need, Policy, group_need, topic_need
from popmq.proxy.auth.rights import RIGHTS
from popmq.proxy.auth.sealing import CannotUnseal, check_private, load_sealing_keys, make_key_file
from popmq.proxy.auth.signature import parse_authorization, parse_stamp
from popmq.proxy.transport.interface import Method, MethodType

MINUTE = 60_000
NOW = int(datetime(2026, 1, 15, 12, 0, tzinfo=UTC).timestamp()) * 1_000


# -- sealing


def test_a_secret_opens_for_its_own_user_id_and_cluster_alone(tmp_path: Path) -> None:
    path = str(tmp_path / "auth.key")
    make_key_file(path)
    keys = load_sealing_keys(path)
    sealed = keys.seal(b"secret of ann", cluster="c", user="ann", secret_id="s1")
    assert b"secret of ann" not in sealed.sealed
    assert keys.unseal(sealed, cluster="c", user="ann") == b"secret of ann"
    for other, cluster, user in (
        (sealed, "c", "bob"),
        (sealed, "d", "ann"),
        (replace(sealed, id="s2"), "c", "ann"),
        (replace(sealed, key="k9"), "c", "ann"),
        (replace(sealed, sealed=b"x" * 40), "c", "ann"),
    ):
        with pytest.raises(CannotUnseal):
            keys.unseal(other, cluster=cluster, user=user)


def test_an_older_sealing_key_opens_what_it_has_sealed(tmp_path: Path) -> None:
    path = tmp_path / "auth.key"
    make_key_file(str(path))
    sealed = load_sealing_keys(str(path)).seal(b"s", cluster="c", user="ann", secret_id="s1")
    path.write_text(f"k2 {'ab' * 32}\n{path.read_text()}")
    keys = load_sealing_keys(str(path))
    assert keys.unseal(sealed, cluster="c", user="ann") == b"s"
    assert keys.seal(b"s", cluster="c", user="ann", secret_id="s2").key == "k2"


@pytest.mark.parametrize(
    ("mode", "owner", "is_refused"),
    [(0o440, 0, False), (0o444, 0, True), (0o460, 0, True), (0o440, 10001, True)],
)
def test_a_file_of_root_may_be_read_by_its_group_as_kubernetes_mounts_secrets(
    monkeypatch: pytest.MonkeyPatch, mode: int, owner: int, is_refused: bool
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 10001)
    status = os.stat_result((stat.S_IFREG | mode, 1, 1, 1, owner, owner, 1, 0, 0, 0))
    refused = pytest.raises(ConfigError, match="others may open it")
    with refused if is_refused else nullcontext():
        check_private(status, "auth.key_file", "/etc/popmq-users/keys")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_key_file_that_others_may_open_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "auth.key"
    make_key_file(str(path))
    assert path.stat().st_mode & 0o777 == 0o600
    os.chmod(path, mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_sealing_keys(str(path))


@pytest.mark.parametrize("content", ["", "k1 abc", f"k1 {'ab' * 32}\nk1 {'cd' * 32}", "ab" * 32])
def test_what_is_no_key_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "auth.key"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=r"auth\.key_file"):
        load_sealing_keys(str(path))


# -- headers


@pytest.mark.parametrize(
    "header",
    [
        "MQv2-HMAC-SHA1 Credential=ann, SignedHeaders=x-mq-date-time, Signature=0a1B",
        "MQv2-HMAC-SHA1 Signature=0A1b,SignedHeaders=x-mq-date-time,Credential=ann",
        "MQv2-HMAC-SHA1 Credential=ann/eu/RocketMQ, Signature=0a1b, SignedHeaders=X-MQ-Date-Time",
        "MQv2-HMAC-SHA1   Credential = ann ,  Signature = 0A1B",
    ],
)
def test_the_parts_of_the_header_come_in_any_order_and_hex_in_any_case(header: str) -> None:
    credentials = parse_authorization(header)
    assert (credentials.access_key, credentials.signature) == ("ann", b"\x0a\x1b")


@pytest.mark.parametrize(
    "header", ["", "MQv2-HMAC-SHA1 Credential=, SignedHeaders=x-mq-date-time, Signature=ab"]
)
def test_no_header_and_an_empty_credential_are_anonymous(header: str) -> None:
    assert parse_authorization(header).is_anonymous


@pytest.mark.parametrize(
    "header",
    [
        "Bearer abc",
        "MQv2-HMAC-SHA1 Credential=ann, Credential=bob, Signature=ab",
        "MQv2-HMAC-SHA1 Credential=ann, Signature=xyz",
        "MQv2-HMAC-SHA1 Credential=ann, SignedHeaders=host, Signature=ab",
        "MQv2-HMAC-SHA1 ann",
        "MQv2-HMAC-SHA1 Credential=" + "a" * 3_000,
    ],
)
def test_a_header_that_cannot_be_read_is_refused(header: str) -> None:
    with pytest.raises(PopmqError) as refused:
        parse_authorization(header)
    assert refused.value.code == Code.UNAUTHORIZED


@pytest.mark.parametrize(
    "header",
    [
        "canary",
        "Bearer canary",
        "Credential=canary",
        "MQv2-HMAC-SHA1 Credential=ann, Signature=canary",
        "MQv2-HMAC-SHA1 Credential=ann, SignedHeaders=canary, Signature=00",
        "MQv2-HMAC-SHA1 canary",
    ],
)
def test_a_refusal_of_a_header_shows_nothing_of_it(header: str) -> None:
    with pytest.raises(PopmqError) as refused:
        parse_authorization(header)
    assert "canary" not in str(refused.value)


def test_both_forms_of_a_date_are_read() -> None:
    assert parse_stamp("20260115T120000Z").ms == NOW
    assert parse_stamp("2026-01-15T12:00:00Z").ms == NOW
    assert parse_stamp("2026-01-15T12:00:00.123456Z").ms == NOW
    assert not parse_stamp("20260115T120000Z").is_utc
    assert parse_stamp("2026-01-15T17:45:00+05:45").ms == NOW
    assert parse_stamp("2026-01-15T17:45:00+05:45").is_utc
    for text in (
        "",
        "20261315T120000Z",
        "2026-01-15",
        "20260115T120000",
        "x" * 20,
        "20260230T000000Z",
    ):
        with pytest.raises(PopmqError):
            parse_stamp(text)


# -- clocks


def verdict(
    ahead_minutes: float, offsets: tuple[int, ...], *, learns: bool = False, back: int = -1
) -> Fresh | None:
    return judge(
        int(ahead_minutes * MINUTE),
        offsets,
        learns=learns,
        now_ms=NOW,
        skew_ms=2 * MINUTE,
        steps_back=lambda now_ms, step: frozenset({back}),
    )


@pytest.mark.parametrize("minutes", [0, 345, 480, -210, 660, -720, 840])
def test_the_first_success_shows_the_offset_and_older_headers_are_worth_nothing_then(
    minutes: int,
) -> None:
    learned = verdict(minutes + 1.5, (), learns=True)
    assert learned is not None
    assert learned.learned == minutes
    assert verdict(minutes, (minutes,)) is not None
    for late in (3, 15, 30, 60, 24 * 60):
        assert verdict(minutes - late, (minutes,)) is None, late


def test_what_is_no_time_zone_is_not_learned() -> None:
    for minutes in (-13 * 60, 15 * 60, 7, -8):
        assert verdict(minutes, (), learns=True) is None, minutes


def test_a_step_forward_is_taken_at_once_and_ends_the_offset_before() -> None:
    for step in (30, 60):
        fresh = verdict(60 + step, (60,))
        assert fresh is not None
        assert (fresh.learned, fresh.instead_of) == (60 + step, 60)
    assert verdict(60 + 45, (60,)) is None


def test_a_step_back_is_taken_only_while_a_zone_steps_back() -> None:
    assert verdict(60, (120,)) is None
    fresh = verdict(60, (120,), back=120)
    assert fresh is not None
    assert (fresh.learned, fresh.instead_of) == (60, 120)


def test_the_zones_that_step_back_are_those_of_the_tz_database() -> None:
    """Berlin leaves summer time on 2026-10-25 at 01:00 UTC; Lord Howe steps by half an hour."""
    berlin = int(datetime(2026, 10, 25, 1, 30, tzinfo=UTC).timestamp()) * 1_000
    assert 120 in zones_that_step_back(berlin, 60)
    assert 120 not in zones_that_step_back(berlin + 2 * 3_600_000, 60)
    lord_howe = int(datetime(2026, 4, 4, 15, 15, tzinfo=UTC).timestamp()) * 1_000
    assert 660 in zones_that_step_back(lord_howe, 30)


def test_an_offset_is_written_with_its_sign_and_is_a_quarter_of_an_hour() -> None:
    assert parse_clock_offset("+05:45") == 345
    assert parse_clock_offset("-03:30") == -210
    for text in ("5:45", "+05:50", "+15:00", "-12:15", "+05:60"):
        with pytest.raises(PopmqError):
            parse_clock_offset(text)


# -- policies

PUB, SUB = ("pub",), ("sub",)


def allow(resource: str, *actions: str, networks: tuple[str, ...] = ()) -> PolicyEntry:
    return PolicyEntry((resource,), actions, networks)


def deny(resource: str, *actions: str) -> PolicyEntry:
    return PolicyEntry((resource,), actions, deny=True)


def policy(*entries: PolicyEntry, is_super: bool = False) -> Policy:
    return Policy(UserConfig("ann", is_super=is_super, entries=entries))


def allowed(of: Policy, need: Need, host: str = "10.0.0.1") -> bool:
    return of.decide(need, host).allowed


@pytest.mark.parametrize("wide", ["topic:orders", "topic:ord*", "topic:*"])
@pytest.mark.parametrize("narrow", ["topic:orders", "topic:o*", "topic:*"])
@pytest.mark.parametrize("deny_first", [False, True])
def test_a_deny_wins_wherever_it_stands_and_however_wide_it_is(
    wide: str, narrow: str, deny_first: bool
) -> None:
    entries = [allow(wide, "pub", "sub"), deny(narrow, "pub")]
    ann = policy(*(reversed(entries) if deny_first else entries))
    assert not allowed(ann, topic_need(PUB, "orders"))
    assert allowed(ann, topic_need(SUB, "orders"))
    assert allowed(ann, topic_need(("pub", "sub"), "orders"))


def test_no_match_refuses_and_a_super_user_is_bound_by_a_deny() -> None:
    assert not allowed(policy(), topic_need(PUB, "orders"))
    assert not allowed(policy(allow("topic:order", "pub")), topic_need(PUB, "orders"))
    assert not allowed(policy(allow("group:orders", "pub")), topic_need(PUB, "orders"))
    root = policy(deny("topic:secret", "sub"), is_super=True)
    assert allowed(root, topic_need(SUB, "orders"))
    assert not allowed(root, topic_need(SUB, "secret"))
    assert not allowed(root, Need(SUB, "topic", EVERY))


def test_dead_letters_and_retries_belong_to_their_group() -> None:
    ann = policy(allow("group:billing", "sub"))
    assert allowed(ann, topic_need(SUB, "%DLQ%billing"))
    assert allowed(ann, topic_need(SUB, "%RETRY%billing+orders"))
    assert not allowed(ann, topic_need(SUB, "%DLQ%shipping"))
    assert not allowed(policy(allow("topic:*", "sub")), topic_need(SUB, "%DLQ%billing"))


def test_a_namespace_has_its_topics_and_groups_and_no_others() -> None:
    ann = policy(allow("namespace:team", "pub"))
    assert allowed(ann, topic_need(PUB, "team%orders"))
    assert allowed(ann, group_need(PUB, "team%billing"))
    assert allowed(ann, topic_need(PUB, "%DLQ%team%billing"))
    for name in ("orders", "team", "teams%orders", "other%orders"):
        assert not allowed(ann, topic_need(PUB, name)), name
    assert not allowed(ann, Need(PUB, "cluster"))


def test_an_entry_for_networks_counts_for_callers_from_there() -> None:
    ann = policy(allow("topic:orders", "pub", networks=("10.0.0.0/8", "2001:db8::/32")))
    assert allowed(ann, topic_need(PUB, "orders"), "10.9.9.9")
    assert allowed(ann, topic_need(PUB, "orders"), "::ffff:10.9.9.9")
    assert allowed(ann, topic_need(PUB, "orders"), "[2001:db8::1]")
    assert not allowed(ann, topic_need(PUB, "orders"), "192.0.2.1")
    assert not allowed(ann, topic_need(PUB, "orders"), "")


def test_all_topics_and_any_topic_are_different_needs() -> None:
    some = policy(allow("topic:orders*", "get", "list"))
    assert allowed(some, Need(("list",), "topic", SOME))
    assert not allowed(some, Need(("list",), "topic", EVERY))
    everything = policy(allow("topic:*", "get"), deny("topic:secret", "get"))
    assert not allowed(everything, Need(("get",), "topic", EVERY))


def test_one_covers_only_what_one_has_in_whole() -> None:
    ann = policy(allow("topic:orders*", "pub", "sub"), deny("topic:orders-secret", "sub"))
    assert ann.covers(allow("topic:orders-a", "pub"))
    assert ann.covers(allow("topic:orders-*", "pub"))
    assert not ann.covers(allow("topic:*", "pub"))
    assert not ann.covers(allow("topic:orders*", "sub"))
    assert not ann.covers(allow("topic:orders-a", "delete"))
    assert not ann.covers(allow("namespace:team", "pub"))
    assert not policy(allow("topic:x", "pub", networks=("10.0.0.0/8",))).covers(
        allow("topic:x", "pub")
    )
    assert policy(is_super=True).covers(allow("cluster", "update"))


# -- the table


SERVICES = {
    "/apache.rocketmq.v2.MessagingService/": service_pb2.DESCRIPTOR,
    "/apache.rocketmq.v2.Admin/": public_admin_pb2.DESCRIPTOR,
    "/popmq.admin.v1.Admin/": admin_pb2.DESCRIPTOR,
    "/popmq.report.v1.Reports/": report_pb2.DESCRIPTOR,
}
METHODS = {
    prefix + method.name: method
    for prefix, file in SERVICES.items()
    for service in file.services_by_name.values()
    for method in service.methods
}


def test_every_method_of_every_service_has_a_row_and_no_other_has() -> None:
    assert set(RIGHTS) == set(METHODS)


def test_each_row_reads_the_request_of_its_method() -> None:
    for path, method in METHODS.items():
        rights = RIGHTS[path]
        assert rights.request.DESCRIPTOR is method.input_type, path
        if rights.reply is not None:
            assert rights.reply.DESCRIPTOR is method.output_type, path


def test_a_method_without_a_row_stops_the_start() -> None:
    with pytest.raises(ConfigError, match="no row in the table of rights"):
        rights_of(
            Method("/popmq.admin.v1.Admin/Explode", MethodType.UNARY, start=lambda c, d: None)
        )
