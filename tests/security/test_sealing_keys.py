"""The keys that seal users' secrets: replaced while users call, and no caller notices."""

import secrets
import time
from pathlib import Path

import pytest
from security.callers import OK, Caller, Cluster, M, Row, entry, message
from security.test_lost_rights import polling, status_codes

from popmq.cli.client import CallRefused
from popmq.common.wire import admin_pb2 as own
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service
from popmq.proxy.auth.sealing import make_key_file
from popmq.testing.running_broker import RunningBroker

pytestmark = pytest.mark.more

USERS = 120  # more than one call seals anew
HEARTBEAT = Row(
    M + "Heartbeat",
    service.HeartbeatRequest(client_type=pb.PRODUCER),
    service.HeartbeatResponse,
)


def replace_keys(path: Path, *lines: str) -> None:
    """As Kubernetes does: another file in its place."""
    new = path.with_suffix(".new")
    new.write_text("".join(f"{line}\n" for line in lines))
    new.chmod(0o600)
    new.rename(path)


def keys_of(cluster: Cluster) -> set[str]:
    reply = cluster.client.call_admin(own.ListUsersRequest(), own.ListUsersReply)
    return {secret.key for user in reply.users for secret in user.secrets}


def reseal(cluster: Cluster) -> own.ResealSecretsReply:
    return cluster.client.call_admin(own.ResealSecretsRequest(), own.ResealSecretsReply)


def test_sealing_keys_are_replaced_while_users_call_and_polls_go_on(tmp_path: Path) -> None:
    path = tmp_path / "auth.key"
    make_key_file(str(path))
    settings = {"auth.key_file": str(path), "auth.admin_file": str(tmp_path / "admin.json")}
    with RunningBroker(settings=settings) as broker:
        cluster = Cluster(broker, tmp_path)
        cluster.client.topic(own.CreateTopicRequest(topic=own.Topic(name="polls")))
        cluster.client.group(own.CreateGroupRequest(group=own.Group(name="pollers")))
        reader = cluster.user("reader", entry("topic:polls", "sub"), entry("group:pollers", "sub"))
        for number in range(USERS):
            cluster.user(f"user-{number}")
        # Two secrets of one user, which end when they did.
        change = own.AlterUserRequest(name="user-0", secret="x" * 20, retire_ms=3_600_000)
        cluster.client.call_admin(change, own.UserReply)
        ends = _ends(cluster)
        poll = polling(cluster, reader)
        old = path.read_text().strip()
        for number in (2, 3):
            new = f"k{number} {secrets.token_hex(32)}"
            replace_keys(path, new, old)
            rounds = [reseal(cluster)]
            while rounds[-1].left:
                rounds.append(reseal(cluster))
            assert sum(reply.resealed for reply in rounds) == USERS + 3  # reader, admin, a second
            assert len(rounds) > 2
            assert keys_of(cluster) == {f"k{number}"}
            replace_keys(path, new)
            assert reseal(cluster).resealed == 0
            for caller in (reader, cluster.users["user-0"], cluster.users["user-7"]):
                assert cluster.code(HEARTBEAT, caller) == OK
            assert cluster.code(HEARTBEAT, Caller("user-0", "x" * 20)) == OK
            old = new
        assert _ends(cluster) == ends
        assert not poll.done()
        cluster.client.send(message("polls"))
        assert status_codes(poll.result(30)) in ([OK], [])
        cluster.close()


def _ends(cluster: Cluster) -> list[tuple[str, int]]:
    request = own.DescribeUserRequest(name="user-0")
    user = cluster.client.call_admin(request, own.UserReply).user
    return [(secret.id, secret.until_ms) for secret in user.secrets]


def test_a_key_file_that_cannot_be_used_leaves_the_keys_before_and_a_lost_key_is_named(
    tmp_path: Path,
) -> None:
    path = tmp_path / "auth.key"
    make_key_file(str(path))
    settings = {"auth.key_file": str(path), "auth.admin_file": str(tmp_path / "admin.json")}
    with RunningBroker(settings=settings) as broker:
        cluster = Cluster(broker, tmp_path)
        user = cluster.user("ann")
        old = path.read_text().strip()
        replace_keys(path, "no key")
        assert reseal(cluster).key == "k1"
        assert cluster.code(HEARTBEAT, user) == OK
        replace_keys(path, f"k2 {secrets.token_hex(32)}", old)
        until = time.monotonic() + 30
        gate = broker._running().proxy._proxy.access
        while gate.users.keys is None or gate.users.keys.first != "k2":  # by its tick
            assert time.monotonic() < until
            time.sleep(0.02)
        assert cluster.code(HEARTBEAT, user) == OK
        replace_keys(path, f"k3 {secrets.token_hex(32)}", f"k2 {secrets.token_hex(32)}")
        with pytest.raises(CallRefused, match=r"access key is unknown|sealed with key 'k1'"):
            reseal(cluster)  # the second if the proxy has not looked at the file before
        cluster.close()
