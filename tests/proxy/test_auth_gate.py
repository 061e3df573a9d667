"""The gate before handlers: inert while the mode is off, and what it refuses without looking."""

import hmac
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from popmq.common.errors import Code
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.protocol.user_records import secret_record
from popmq.common.settings.auth_settings import AuthSettings
from popmq.common.settings.settings import TopicSettings
from popmq.common.wire.meta_pb2 import ChangeUserRequest, FollowUsersReply, FollowUsersRequest
from popmq.proxy.api import service_pb2 as service
from popmq.proxy.auth.failure_waits import SOURCES_KEPT, FailureWaits
from popmq.proxy.auth.gate import AuthGate
from popmq.proxy.auth.sealing import load_sealing_keys, make_key_file
from popmq.proxy.brokers.broker_ports import StaticBrokers
from popmq.proxy.brokers.metadata_cache import MetadataCache
from popmq.proxy.rpc.metrics import ProxyMetrics
from popmq.proxy.rpc.request_limits import bounded
from popmq.proxy.transport.interface import Call, Method, MethodType
from popmq.testing.harness.core_broker import SMALL, CoreBroker

HEARTBEAT = "/apache.rocketmq.v2.MessagingService/Heartbeat"
SECRET = "secret of ann, of forty characters or so"
MINUTE = 60_000


@dataclass
class Bench:
    """A gate that follows a real broker, when the test lets it, and a handler behind it."""

    folder: Path
    make_call: Callable[..., Any]
    keys: bool = True
    broker: CoreBroker = field(default_factory=CoreBroker)
    handled: list[Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        path = str(self.folder / "auth.key")
        make_key_file(path)
        self.sealing = load_sealing_keys(path)
        settings = replace(SMALL, auth=AuthSettings(key_file=path if self.keys else ""))
        brokers = StaticBrokers({"broker-a": self.broker.server})
        clock, self.metrics = self.broker.clock, ProxyMetrics()
        topics = MetadataCache(brokers, clock, TopicSettings())
        self.gate = AuthGate(settings, brokers, clock, self.metrics, topics)
        method = Method(
            HEARTBEAT, MethodType.UNARY, start=lambda call, _: self.handled.append(call)
        )
        (bound,) = bounded([method], {}, self.metrics, self.gate)
        assert bound.start is not None
        self.start = bound.start

    def change(self, **fields: Any) -> None:
        change = ChangeUserRequest(**fields)
        assert self.broker.ask(Kind.CHANGE_USER, change.SerializeToString()).body is not None

    def follow(self) -> None:
        answer = self.broker.ask(Kind.FOLLOW_USERS, FollowUsersRequest().SerializeToString())
        assert answer.body is not None
        self.gate._answered(self.gate.users.apply(FollowUsersReply.FromString(answer.body)))

    def with_ann(self, mode: str = "on", **fields: Any) -> "Bench":
        sealed = self.sealing.seal(
            SECRET.encode(), cluster=SMALL.cluster.name, user="ann", secret_id="s1"
        )
        kind = ChangeUserRequest.CREATE
        self.change(kind=kind, name="ann", secret=secret_record(sealed), **fields)
        self.change(kind=ChangeUserRequest.SET_MODE, mode=mode)
        self.follow()
        return self

    def offsets(self) -> tuple[int, ...]:
        user = self.broker.broker.registry.users.user("ann")
        return user.clock_offsets

    def call(
        self,
        peer: str = "127.0.0.1:5",
        *,
        ahead_ms: int = 0,
        encrypted: bool = False,
        user: str = "ann",
        secret: str = SECRET,
    ) -> Any:
        moment = datetime.fromtimestamp((self.broker.clock.wall_ms() + ahead_ms) / 1_000, UTC)
        date = moment.strftime("%Y%m%dT%H%M%SZ")
        signature = hmac.digest(secret.encode(), date.encode(), "sha1").hex()
        header = (
            f"MQv2-HMAC-SHA1 Credential={user}, SignedHeaders=x-mq-date-time, Signature={signature}"
        )
        call = self.make_call(
            metadata={"x-mq-client-id": "me", "authorization": header, "x-mq-date-time": date}
        )
        call.peer, call.encrypted = peer, encrypted
        return call

    def code(self, call: Any) -> int:
        """Of the refusal; 0 when the handler got the call."""
        before = len(self.handled)
        self.start(call, b"")
        self.broker.run_until_idle()
        if len(self.handled) > before:
            return 0
        return int(service.HeartbeatResponse.FromString(call.sent[0]).status.code)


@pytest.fixture
def make(tmp_path: Path, make_call: Callable[..., Any]) -> Callable[..., Bench]:
    return lambda **fields: Bench(tmp_path, make_call, **fields)


def test_while_the_mode_is_off_nothing_of_a_call_is_looked_at(make: Callable[..., Bench]) -> None:
    bench = make(keys=False)

    class Unreadable:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"{name} was looked at")

    bench.start(Unreadable(), b"")
    bench.follow()
    bench.start(Unreadable(), b"")
    assert len(bench.handled) == 2


def test_a_proxy_with_keys_serves_nobody_before_it_knows_the_users(
    make: Callable[..., Bench],
) -> None:
    bench = make()
    assert bench.code(bench.call()) == Code.HA_NOT_AVAILABLE
    bench.follow()
    assert bench.code(bench.call()) == 0


def test_a_proxy_without_keys_refuses_every_call_while_the_mode_is_on(
    make: Callable[..., Bench],
) -> None:
    bench = make(keys=False).with_ann()
    assert bench.code(bench.call()) == Code.HA_NOT_AVAILABLE
    assert bench.metrics.auth_refused == {"no_key": 1}


def test_credentials_in_plain_text_over_the_network_are_refused_unread(
    make: Callable[..., Bench],
) -> None:
    bench = make().with_ann()
    assert bench.code(bench.call("192.0.2.7:5")) == Code.UNAUTHORIZED
    assert bench.gate.identity.checks == 0
    assert bench.metrics.auth_refused == {"plain_text": 1}
    assert bench.code(bench.call("192.0.2.7:5", encrypted=True)) == 0
    # Also a header that was verified on another connection.
    assert bench.code(bench.call("192.0.2.7:5")) == Code.UNAUTHORIZED
    assert bench.code(bench.call("[::1]:5")) == 0
    assert bench.code(bench.call("uid-0:77")) == 0  # a unix socket


def test_a_repeated_header_is_verified_once_until_its_date_or_its_user_changes(
    make: Callable[..., Bench],
) -> None:
    bench = make().with_ann(add_offsets=[0])
    header = bench.call()
    for _ in range(5):
        assert bench.code(header) == 0
        header.sent.clear()
    assert bench.gate.identity.checks == 1
    bench.change(kind=ChangeUserRequest.ALTER, name="ann", state="disabled")
    bench.follow()
    assert bench.code(header) == Code.UNAUTHORIZED
    bench.change(kind=ChangeUserRequest.ALTER, name="ann", state="enabled")
    bench.follow()
    bench.broker.clock.advance(2 * MINUTE + 1_000)
    late = bench.make_call(metadata=header.metadata)
    late.peer = header.peer
    assert bench.code(late) == Code.UNAUTHORIZED


@pytest.mark.parametrize("minutes", [0, 345, 480, -210, 630])
def test_the_first_call_that_succeeds_sets_the_clock_and_old_headers_are_worth_nothing(
    make: Callable[..., Bench], minutes: int
) -> None:
    bench = make().with_ann()
    local = minutes * MINUTE
    assert bench.code(bench.call(ahead_ms=local)) == 0
    assert bench.offsets() == (minutes,)
    bench.follow()
    for late in (3, 30, 60):
        assert bench.code(bench.call(ahead_ms=local - late * MINUTE)) == Code.UNAUTHORIZED, late
    assert bench.code(bench.call(ahead_ms=local)) == 0


def test_a_refused_call_sets_no_clock(make: Callable[..., Bench]) -> None:
    bench = make().with_ann(networks=["192.0.2.0/24"])
    assert bench.code(bench.call(ahead_ms=345 * MINUTE)) == Code.FORBIDDEN
    assert bench.offsets() == ()


def test_summer_time_that_begins_is_taken_at_once(make: Callable[..., Bench]) -> None:
    bench = make().with_ann(add_offsets=[60])
    assert bench.code(bench.call(ahead_ms=120 * MINUTE)) == 0
    assert bench.offsets() == (120,)
    bench.follow()
    # The header of an hour ago shows the offset before.
    assert bench.code(bench.call(ahead_ms=60 * MINUTE)) == Code.UNAUTHORIZED


def test_a_refusal_of_the_clock_names_the_command_that_helps(make: Callable[..., Bench]) -> None:
    bench = make().with_ann(add_offsets=[0])
    call = bench.call(ahead_ms=345 * MINUTE)
    assert bench.code(call) == Code.UNAUTHORIZED
    text = service.HeartbeatResponse.FromString(call.sent[0]).status.message
    assert "popmq user clock ann --add +05:45" in text
    assert SECRET not in text


async def test_a_proxy_that_cannot_follow_the_owner_for_long_refuses_every_call(
    make: Callable[..., Bench],
) -> None:
    bench = make().with_ann()
    bench.gate.start()
    bench.broker.run_until_idle()
    assert bench.code(bench.call()) == 0
    bench.broker.clock.advance(600_001)  # auth.stale_ms
    bench.gate._tick()
    assert bench.code(bench.call()) == Code.HA_NOT_AVAILABLE
    bench.gate.stop()


def test_each_bad_signature_of_a_source_doubles_its_wait_up_to_the_setting(
    make: Callable[..., Bench],
) -> None:
    bench = make().with_ann(add_offsets=[0])
    waits_ms = []
    for _ in range(16):
        assert bench.code(bench.call(secret="wrong" * 8)) == Code.UNAUTHORIZED
        before_ms = bench.broker.clock.boot_ms()
        while bench.code(bench.call()) == Code.TOO_MANY_REQUESTS:
            bench.broker.clock.advance(100)
        waits_ms.append(bench.broker.clock.boot_ms() - before_ms)
        bench.gate.identity._waits._verified.clear()  # or it would not wait again
        bench.gate.identity._verified.clear()
    assert waits_ms == [
        *(0, 0, 0, 0, 100, 200, 400, 800, 1_600, 3_200, 6_400, 12_800, 25_600),
        *(30_000, 30_000, 30_000),
    ]


def test_a_wait_is_for_one_source_and_not_for_users_that_were_verified_there(
    make: Callable[..., Bench],
) -> None:
    bench = make().with_ann(add_offsets=[0])
    assert bench.code(bench.call("10.0.0.1:1", encrypted=True)) == 0
    for peer in ("10.0.0.1:2", "10.0.0.2:2", "[2001:db8::1]:2"):
        for number in range(12):
            stranger = bench.call(peer, encrypted=True, user=f"guess-{number}", secret="x" * 20)
            bench.code(stranger)
        assert bench.code(stranger_at(bench, peer)) == Code.TOO_MANY_REQUESTS, peer
    checks = bench.gate.identity.checks
    refused = bench.call("10.0.0.2:3", encrypted=True, ahead_ms=1_000)
    assert bench.code(refused) == Code.TOO_MANY_REQUESTS
    assert "auth.failure_wait_ms: 30000" in str(
        service.HeartbeatResponse.FromString(refused.sent[0]).status.message
    )
    neighbour = bench.call("[2001:db8::ffff]:1", encrypted=True, ahead_ms=1_000)
    assert bench.code(neighbour) == Code.TOO_MANY_REQUESTS
    assert bench.gate.identity.checks == checks  # refused unread
    bench.broker.clock.advance(1_000)
    assert bench.code(bench.call("10.0.0.1:3", encrypted=True)) == 0
    assert bench.code(bench.call("10.0.0.3:3", encrypted=True)) == 0
    assert bench.code(bench.call("[2001:db8:0:1::1]:1", encrypted=True)) == 0


def stranger_at(bench: Bench, peer: str) -> Any:
    return bench.call(peer, encrypted=True, user="one-more", secret="x" * 20)


def test_a_client_with_an_old_secret_makes_no_other_client_of_its_user_wait(
    make: Callable[..., Bench],
) -> None:
    bench = make().with_ann(add_offsets=[0])
    assert bench.code(bench.call()) == 0
    for _ in range(20):
        bench.broker.clock.advance(1_000)
        assert bench.code(bench.call(secret="old" * 8)) == Code.UNAUTHORIZED
        assert bench.code(bench.call()) == 0


def test_while_the_mode_observes_nobody_waits(make: Callable[..., Bench]) -> None:
    bench = make().with_ann(mode="observe")
    for _ in range(20):
        assert bench.code(bench.call(secret="wrong" * 8)) == 0
    assert bench.metrics.auth_observed == {"signature": 20}


def test_the_table_of_waits_is_bounded() -> None:
    waits = FailureWaits(30_000)
    for number in range(SOURCES_KEPT + 100):
        waits.failed(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}", "x", 0)
        waits.succeeded(f"11.{number >> 16}.{number >> 8 & 255}.{number & 255}", "x", 0)
    assert len(waits._failures) == len(waits._verified) == SOURCES_KEPT
