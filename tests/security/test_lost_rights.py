"""Polls and streams of users that lose a right, grants, and the modes, on both transports."""

import json
import time
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from security.callers import (
    FORBIDDEN,
    GROUP,
    OK,
    TOPIC_NOT_FOUND,
    UNAUTHORIZED,
    C,
    Caller,
    Cluster,
    M,
    Row,
    T,
    entry,
    message,
)

from popmq.cli.client import CallRefused, Client
from popmq.common.signing import Signer
from popmq.common.wire import admin_pb2 as own
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service
from popmq.proxy.auth.sealing import make_key_file
from popmq.testing.running_broker import RunningBroker


def telemetry(topic: str) -> bytes:
    settings = pb.Settings(
        client_type=pb.PRODUCER, publishing=pb.Publishing(topics=[pb.Resource(name=topic)])
    )
    return service.TelemetryCommand(settings=settings).SerializeToString()


@pytest.mark.parametrize(
    ("name", "topic", "code"),
    [
        ("known", "orders", FORBIDDEN),
        ("publisher", "orders", OK),
        ("publisher", "secret", FORBIDDEN),
    ],
)
def test_a_stream_may_name_what_its_user_may_use(
    cluster: Cluster, name: str, topic: str, code: int
) -> None:
    cluster.user("publisher", entry(T, "pub"))
    cluster.user("known")
    stream = cluster.channel.stream_stream(M + "Telemetry")(
        iter([telemetry(topic)]), metadata=cluster.users[name].headers(), timeout=30
    )
    answers = [service.TelemetryCommand.FromString(answer) for answer in stream]
    assert [answer.status.code for answer in answers][:1] == [code]


def test_a_stream_of_a_stranger_ends_with_the_reason(cluster: Cluster) -> None:
    stream = cluster.channel.stream_stream(M + "Telemetry")(
        iter([]), metadata=Caller("mallory", "x" * 20).headers(), timeout=30
    )
    answers = [service.TelemetryCommand.FromString(answer) for answer in stream]
    assert [answer.status.code for answer in answers] == [UNAUTHORIZED]


def polling(cluster: Cluster, user: Caller) -> Any:
    """A receive that waits, in a thread of its own: its answer is the future's."""
    cluster.waited = cluster.waiting()
    request = service.ReceiveMessageRequest(
        group=pb.Resource(name="pollers"),
        message_queue=pb.MessageQueue(topic=pb.Resource(name="polls"), id=-1),
        batch_size=1,
        filter_expression=pb.FilterExpression(type=pb.TAG, expression="*"),
        invisible_duration=Duration(seconds=60),
        long_polling_timeout=Duration(seconds=20),
    )
    call = cluster.channel.unary_stream(M + "ReceiveMessage")
    metadata = [("x-mq-client-id", f"poll@{user.access_key}"), *user.headers()[1:]]
    answers = call(request.SerializeToString(), metadata=metadata, timeout=60)
    answered = cluster.threads.submit(lambda: list(answers))
    until_waiting(cluster, answered)
    return answered


def until_waiting(cluster: Cluster, answered: "Future[list[bytes]]") -> None:
    """Until one receive more waits at the proxy."""
    until = time.monotonic() + 30
    while cluster.waiting() <= cluster.waited:
        if answered.done():
            raise AssertionError(f"it was answered: {status_codes(answered.result())}")
        assert time.monotonic() < until
        time.sleep(0.01)


def status_codes(answers: list[bytes]) -> list[int]:
    replies = map(service.ReceiveMessageResponse.FromString, answers)
    return [reply.status.code for reply in replies if reply.HasField("status")]


ROUNDS = 20


def test_a_poll_whose_user_lost_the_right_ends_and_no_other_is_touched(cluster: Cluster) -> None:
    entries = [entry("topic:polls", "sub"), entry("group:pollers", "sub")]
    losing, keeping = cluster.user("losing", *entries), cluster.user("keeping", *entries)
    kept = polling(cluster, keeping)
    took_s = []
    for _ in range(ROUNDS):
        lost = polling(cluster, losing)
        began_s = time.monotonic()
        revoked = own.RevokeRequest(name="losing", entries=entries[:1])
        cluster.client.call_admin(revoked, own.UserReply)
        assert status_codes(lost.result(30)) == [FORBIDDEN]
        took_s.append(time.monotonic() - began_s)
        cluster.client.call_admin(
            own.GrantRequest(name="losing", entries=entries[:1]), own.UserReply
        )
    assert not kept.done()
    print(f"slowest of {ROUNDS}: {max(took_s):.3f} s")
    cluster.client.send(message("polls"))
    assert status_codes(kept.result(30)) in ([OK], [])


def test_a_stream_and_a_poll_of_a_disabled_user_end(cluster: Cluster) -> None:
    user = cluster.user(
        "leaving", entry("topic:polls", "pub", "sub"), entry("group:pollers", "sub")
    )
    poll = polling(cluster, user)
    commands: SimpleQueue[bytes | None] = SimpleQueue()
    commands.put(telemetry("polls"))
    stream = cluster.channel.stream_stream(M + "Telemetry")(
        iter(commands.get, None), metadata=user.headers(), timeout=60
    )
    assert service.TelemetryCommand.FromString(next(stream)).status.code == OK
    change = own.AlterUserRequest(name="leaving", state="disabled")
    cluster.client.call_admin(change, own.UserReply)
    assert status_codes(poll.result(30)) == [UNAUTHORIZED]
    rest = [service.TelemetryCommand.FromString(answer).status.code for answer in stream]
    assert rest == [UNAUTHORIZED]
    commands.put(None)


def test_a_poll_ends_with_the_secret_that_signed_it(cluster: Cluster) -> None:
    entries = [entry("topic:polls", "sub"), entry("group:pollers", "sub")]
    user = cluster.user("rotated", *entries)
    poll = polling(cluster, user)
    change = own.AlterUserRequest(name="rotated", secret="the-next-secret-of-it", retire_ms=0)
    cluster.client.call_admin(change, own.UserReply)
    assert status_codes(poll.result(30)) == [UNAUTHORIZED]


def test_what_a_revoked_poll_would_have_got_goes_to_others(cluster: Cluster) -> None:
    entries = [entry("topic:polls", "sub"), entry("group:pollers", "sub")]
    losing = cluster.user("unlucky", *entries)
    lost = polling(cluster, losing)
    cluster.client.call_admin(own.RevokeRequest(name="unlucky", all=True), own.UserReply)
    assert status_codes(lost.result(30)) == [FORBIDDEN]
    cluster.client.send(message("polls"))
    lucky = cluster.user("lucky", *entries)
    assert lucky.access_key is not None
    with Client(
        cluster.broker.endpoint, signer=Signer(lucky.access_key or "", lucky.secret)
    ) as client:
        queue = pb.MessageQueue(topic=pb.Resource(name="polls"), id=-1)
        received = client.receive("pollers", queue, limit=8, wait_ms=20_000, invisible_ms=60_000)
    assert len(received) == 1


def test_while_the_mode_observes_nothing_is_refused_and_all_is_counted(cluster: Cluster) -> None:
    proxy = cluster.broker._running().proxy._proxy
    stranger = Caller("mallory", "x" * 20)
    request = service.HeartbeatRequest(group=GROUP, client_type=pb.SIMPLE_CONSUMER)
    heartbeat = Row(M + "Heartbeat", request, service.HeartbeatResponse)
    cluster.client.call_admin(own.SetAuthModeRequest(mode="observe"), own.AuthModeReply)
    before = proxy.metrics.auth_observed.copy()
    assert cluster.code(heartbeat, stranger) == OK
    assert cluster.code(heartbeat, Caller()) == OK
    observed = proxy.metrics.auth_observed - before
    assert observed == {"unknown": 1, "anonymous": 1}
    cluster.client.call_admin(own.SetAuthModeRequest(mode="on"), own.AuthModeReply)
    refused = proxy.metrics.auth_refused.copy()
    assert cluster.code(heartbeat, stranger) == UNAUTHORIZED
    assert proxy.metrics.auth_refused - refused == {"unknown": 1}


def test_one_grants_only_what_one_has_and_leaves_super_users_alone(cluster: Cluster) -> None:
    deputy = cluster.user("deputy", entry(C, "get", "update"), entry("topic:team-*", "pub"))
    cluster.user("pupil")
    cluster.user("known")
    assert deputy.access_key is not None
    with Client(
        cluster.broker.endpoint, signer=Signer(deputy.access_key or "", deputy.secret)
    ) as client:
        mine = own.GrantRequest(name="pupil", entries=[entry("topic:team-a", "pub")])
        client.call_admin(mine, own.UserReply)
        refused = [
            own.GrantRequest(name="pupil", entries=[entry("topic:*", "pub")]),
            own.GrantRequest(name="deputy", entries=[entry("topic:*", "sub")]),
            own.GrantRequest(name="admin", entries=[entry("topic:team-a", "pub")]),
            own.CreateUserRequest(name="root", type="super", secret="x" * 20),
            own.AlterUserRequest(name="admin", secret="x" * 20),
            own.AlterUserRequest(name="known", type="super"),
            own.DeleteUserRequest(name="admin"),
            own.SetAuthModeRequest(mode="off"),
        ]
        for request in refused:
            reply = own.AuthModeReply if "Mode" in type(request).__name__ else own.UserReply
            with pytest.raises(CallRefused) as refusal:
                client.call_admin(request, reply)
            assert refusal.value.number == FORBIDDEN, request


def test_the_last_super_user_stays_while_the_mode_is_on(cluster: Cluster) -> None:
    for request in (
        own.DeleteUserRequest(name="admin"),
        own.AlterUserRequest(name="admin", state="disabled"),
        own.AlterUserRequest(name="admin", type="normal"),
    ):
        with pytest.raises(CallRefused, match="last Super user"):
            cluster.client.call_admin(request, own.UserReply)


def test_a_call_creates_a_topic_only_for_a_user_that_may_create_it(
    tmp_path: Path,
) -> None:
    make_key_file(str(tmp_path / "auth.key"))
    settings = {
        "topic.auto_create": True,
        "auth.key_file": str(tmp_path / "auth.key"),
        "auth.admin_file": str(tmp_path / "admin.json"),
    }
    with RunningBroker(settings=settings) as broker:
        cluster = Cluster(broker, tmp_path)
        using = cluster.user("using", entry("topic:*", "pub", "sub"))
        making = cluster.user("making", entry("topic:*", "pub", "create"))
        sends = Row(
            M + "SendMessage",
            service.SendMessageRequest(messages=[message("fresh")]),
            service.SendMessageResponse,
        )
        routes = Row(
            M + "QueryRoute",
            service.QueryRouteRequest(topic=pb.Resource(name="fresh")),
            service.QueryRouteResponse,
        )
        assert cluster.code(routes, using) == OK  # which creates nothing
        assert cluster.code(sends, using) == TOPIC_NOT_FOUND
        assert cluster.client.topics(system=False) == []
        assert cluster.code(sends, making) == OK
        assert cluster.code(sends, using) == OK
        cluster.close()


def test_the_admin_port_asks_who_calls_too(tmp_path: Path) -> None:
    make_key_file(str(tmp_path / "auth.key"))
    settings = {
        "auth.key_file": str(tmp_path / "auth.key"),
        "auth.admin_file": str(tmp_path / "admin.json"),
    }
    with RunningBroker(settings=settings) as broker:
        address = broker._running().proxy.admin_listens
        assert address.startswith("unix:")
        first = json.loads((tmp_path / "admin.json").read_text())
        for signer, code in ((Signer(), UNAUTHORIZED), (Signer(**first), OK)):
            with Client(broker.endpoint, admin_endpoint=address, signer=signer) as client:
                try:
                    client.topics(system=False)
                    answered = OK
                except CallRefused as refused:
                    answered = refused.number
            assert answered == code


def test_a_change_of_a_user_is_no_conflict_with_the_clock_that_a_proxy_learns(
    cluster: Cluster,
) -> None:
    request = service.HeartbeatRequest(group=GROUP, client_type=pb.SIMPLE_CONSUMER)
    users = {f"clock-{number}": cluster.user(f"clock-{number}") for number in range(40)}
    heartbeat = cluster.channel.unary_unary(M + "Heartbeat")
    for name, user in users.items():
        first = heartbeat.future(request.SerializeToString(), metadata=user.headers(), timeout=30)
        change = own.AlterUserRequest(name=name, state="disabled")
        cluster.client.call_admin(change, own.UserReply)
        first.result()
