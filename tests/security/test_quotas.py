"""Quotas of a user, on both transports; over Remoting in test_remoting_users.py."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
from security.callers import OK, Caller, Cluster, M, Row, entry, message

from popmq.cli.client import CallRefused, Client, check_status
from popmq.common.signing import Signer
from popmq.common.wire import admin_pb2 as own
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service

pytestmark = pytest.mark.more

TOO_MANY, FORBIDDEN = 42900, 40300
SEND = entry("topic:orders", "pub")
HEARTBEAT = Row(
    M + "Heartbeat",
    service.HeartbeatRequest(client_type=pb.PRODUCER),
    service.HeartbeatResponse,
)


def set_quota(cluster: Cluster, name: str, **quotas: int) -> None:
    request = own.AlterUserRequest(name=name, quotas=quotas)
    cluster.client.call_admin(request, own.UserReply)


@contextmanager
def client_of(cluster: Cluster, user: Caller) -> Iterator[Client]:
    signer = Signer(user.access_key or "", user.secret)
    with Client(cluster.broker.endpoint, signer=signer) as client:
        yield client


def test_calls_over_the_quota_of_a_second_are_refused_and_others_are_not(cluster: Cluster) -> None:
    busy, other = cluster.user("busy"), cluster.user("other")
    set_quota(cluster, "busy", calls=5)
    codes = [cluster.code(HEARTBEAT, busy) for _ in range(40)]
    assert set(codes) == {OK, TOO_MANY}
    assert codes[:5] == [OK] * 5
    assert cluster.code(HEARTBEAT, other) == OK
    set_quota(cluster, "busy", calls=0)
    assert [cluster.code(HEARTBEAT, busy) for _ in range(40)] == [OK] * 40


def test_bytes_over_the_quota_are_owed_and_repaid_with_time(cluster: Cluster) -> None:
    sender = cluster.user("heavy", SEND)
    set_quota(cluster, "heavy", bytes=20_000)
    large = message()
    large.body = bytes(30_000)
    sends = Row(
        M + "SendMessage",
        service.SendMessageRequest(messages=[large]),
        service.SendMessageResponse,
    )
    assert cluster.code(sends, sender) == OK
    began_s = time.monotonic()
    assert cluster.code(HEARTBEAT, sender) == TOO_MANY
    while cluster.code(HEARTBEAT, sender) == TOO_MANY:
        assert time.monotonic() < began_s + 20
    assert time.monotonic() > began_s + 0.3  # of the half second that is owed


def test_a_refusal_names_the_value_and_what_sets_it(cluster: Cluster) -> None:
    user = cluster.user("told")
    set_quota(cluster, "told", calls=1)
    call = cluster.channel.unary_unary(HEARTBEAT.path)
    body = HEARTBEAT.request.SerializeToString()
    answers = [call(body, metadata=user.headers(), timeout=30) for _ in range(3)]
    status = service.HeartbeatResponse.FromString(answers[-1]).status
    assert status.code == TOO_MANY
    assert "popmq user alter told --quota calls=1" in status.message


def test_connections_over_the_quota_are_refused_until_others_close(cluster: Cluster) -> None:
    """Over grpcio, which does not list its connections, none is refused."""
    is_grpcio = cluster.broker._running().proxy._settings.proxy.transport == "grpcio"
    refused = nullcontext() if is_grpcio else pytest.raises(CallRefused, match="connections=2")
    user = cluster.user("linked")
    set_quota(cluster, "linked", connections=2)
    with client_of(cluster, user) as first, client_of(cluster, user) as second:
        for client in (first, second, first):
            heartbeat(client)
        with client_of(cluster, user) as third, refused:
            heartbeat(third)
        heartbeat(first)
    until = time.monotonic() + 30
    while True:
        with client_of(cluster, user) as third:
            try:
                heartbeat(third)
                break
            except CallRefused:
                assert time.monotonic() < until


def heartbeat(client: Client) -> None:
    status = client._call(HEARTBEAT.path, HEARTBEAT.request, service.HeartbeatResponse).status
    check_status(status)


def test_topics_queues_and_groups_count_for_the_user_that_created_them(cluster: Cluster) -> None:
    every = ("create", "update", "delete", "get")
    team = cluster.user("team", entry("topic:team-*", *every), entry("group:team-*", *every))
    set_quota(cluster, "team", topics=2, groups=1, queues=10)
    with client_of(cluster, team) as client:
        create(client, "team-a", 6)
        with pytest.raises(CallRefused, match=r"created 6 queues.*--quota queues=10"):
            create(client, "team-b", 5)
        create(client, "team-b", 4)
        with pytest.raises(CallRefused, match=r"created 2 topics.*--quota topics=2"):
            create(client, "team-c", 1)
        with pytest.raises(CallRefused, match="--quota queues=10"):
            client.topic(own.AlterTopicRequest(topic=own.Topic(name="team-b", queues=5)))
        client.topic(own.DeleteTopicRequest(name="team-a"))
        create(client, "team-c", 1)
        client.group(own.CreateGroupRequest(group=own.Group(name="team-g")))
        with pytest.raises(CallRefused, match=r"created 1 groups.*--quota groups=1"):
            client.group(own.CreateGroupRequest(group=own.Group(name="team-h")))
    # In another user's name nothing is created.
    request = own.CreateTopicRequest(topic=own.Topic(name="team-d", queues=1), created_by="team")
    cluster.client.topic(request)
    with client_of(cluster, team) as client, pytest.raises(CallRefused, match="created 2 topics"):
        create(client, "team-e", 1)


def create(client: Client, name: str, queues: int) -> None:
    client.topic(own.CreateTopicRequest(topic=own.Topic(name=name, queues=queues)))


def test_only_a_super_user_changes_quotas(cluster: Cluster) -> None:
    deputy = cluster.user("quota-deputy", entry("cluster", "get", "update"))
    cluster.user("known")
    with client_of(cluster, deputy) as client, pytest.raises(CallRefused) as refused:
        client.call_admin(own.AlterUserRequest(name="known", quotas={"calls": 1}), own.UserReply)
    assert refused.value.number == FORBIDDEN
    for quotas in ({"lakes": 1}, {"calls": 1 << 41}):
        request = own.AlterUserRequest(name="known", quotas=quotas)
        with pytest.raises(CallRefused, match=r"quota"):
            cluster.client.call_admin(request, own.UserReply)
