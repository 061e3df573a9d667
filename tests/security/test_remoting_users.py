"""Every request of the Remoting protocol, as every kind of caller; the answers are written by hand.

The signature is that of RocketMQ's AclClientRPCHook: HMAC-SHA1, in base64, over the values of the
fields in the order of their names, and the body.
"""

import base64
import hmac
import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pytest

from popmq.cli.client import Client
from popmq.common.signing import Signer
from popmq.common.wire import admin_pb2 as own
from popmq.proxy.auth.sealing import make_key_file
from popmq.proxy.remoting.frames import ONE_WAY, Command, FrameReader, encode
from popmq.testing.running_broker import RunningBroker

pytestmark = pytest.mark.more

NO_PERMISSION, TOPIC_NOT_EXIST, SYSTEM_BUSY = 16, 17, 2
T, G = "topic:orders", "group:billing"
PUB, SUB, GET = ("pub",), ("sub",), ("get",)
Needs = Sequence[tuple[str, tuple[str, ...]]]
CONSUMES: Needs = [(G, SUB), (T, SUB)]
TOPIC = {"topic": "orders"}
BOTH = {"topic": "orders", "consumerGroup": "billing"}
V2 = {"a": "producers", "b": "orders", "e": "0"}
IN_BODY = {"topic": "orders", "consumerGroup": "billing"}
HEARTBEAT = {
    "clientID": "me@1",
    "consumerDataSet": [
        {"groupName": "billing", "subscriptionDataSet": [{"topic": "orders", "subString": "*"}]}
    ],
}
CHECKED = {"clientId": "me@1", "group": "billing", "subscriptionData": TOPIC}
LOCKED = {"clientId": "me@1", "consumerGroup": "billing", "mqSet": [{"topic": "orders"}]}


@dataclass
class Row:
    name: str
    code: int
    needs: Needs
    fields: Mapping[str, str] = field(default_factory=dict)
    content: object = None  # of the body, as JSON


ROWS = [
    Row("GET_ROUTEINFO_BY_TOPIC", 105, [(T, GET)], TOPIC),
    Row("SEND_MESSAGE", 10, [(T, PUB)], TOPIC),
    Row("SEND_MESSAGE_V2", 310, [(T, PUB)], V2),
    Row("SEND_BATCH_MESSAGE", 320, [(T, PUB)], V2),
    Row("SEND_REPLY_MESSAGE", 324, [(T, PUB)], TOPIC),
    Row("SEND_REPLY_MESSAGE_V2", 325, [(T, PUB)], V2),
    Row("QUERY_MESSAGE", 12, [(T, SUB)], {**TOPIC, "key": "k"}),
    Row("GET_EARLIEST_MSG_STORETIME", 32, [(T, GET)], TOPIC),
    Row("GET_CONSUMER_RUNNING_INFO", 307, [(G, GET)], {"consumerGroup": "billing"}),
    Row("PULL_MESSAGE", 11, CONSUMES, BOTH),
    Row("LITE_PULL_MESSAGE", 361, CONSUMES, BOTH),
    Row("POP_MESSAGE", 200050, CONSUMES, BOTH),
    Row("ACK_MESSAGE", 200051, CONSUMES, BOTH),
    Row("CHANGE_MESSAGE_INVISIBLETIME", 200053, CONSUMES, BOTH),
    Row("QUERY_ASSIGNMENT", 400, CONSUMES, {}, IN_BODY),
    Row("SET_MESSAGE_REQUEST_MODE", 401, CONSUMES, {}, IN_BODY),
    Row("QUERY_CONSUMER_OFFSET", 14, [(G, GET)], BOTH),
    Row("UPDATE_CONSUMER_OFFSET", 15, [(T, SUB), (G, ("sub", "update"))], BOTH),
    Row("SEARCH_OFFSET_BY_TIMESTAMP", 29, [(T, GET)], TOPIC),
    Row("GET_MAX_OFFSET", 30, [(T, GET)], TOPIC),
    Row("GET_MIN_OFFSET", 31, [(T, GET)], TOPIC),
    Row("CHECK_CLIENT_CONFIG", 46, CONSUMES, {}, CHECKED),
    Row("LOCK_BATCH_MQ", 41, CONSUMES, {}, LOCKED),
    Row("UNLOCK_BATCH_MQ", 42, CONSUMES, {}, LOCKED),
    Row("CONSUMER_SEND_MSG_BACK", 36, CONSUMES, {"group": "billing", "originTopic": "orders"}),
    Row("VIEW_MESSAGE_BY_ID", 33, [("topic:*", SUB)], {"offset": "0"}),
    Row("GET_CONSUMER_LIST_BY_GROUP", 38, [(G, GET)], {"consumerGroup": "billing"}),
    Row("RECALL_MESSAGE", 370, [(T, PUB)], {**TOPIC, "recallHandle": "x"}),
    Row("END_TRANSACTION", 37, [("topic:*", PUB)], {"transactionId": "x"}),
    Row("END_TRANSACTION with a topic", 37, [(T, PUB)], {"transactionId": "x", **TOPIC}),
    Row("HEART_BEAT", 34, CONSUMES, {}, HEARTBEAT),
    Row("UNREGISTER_CLIENT", 35, [], {"clientID": "me@1"}),
]


@dataclass
class Caller:
    access_key: str = ""  # "": the request has neither field
    secret: str = ""
    wrong_body: bytes = b""

    def fields(self, fields: Mapping[str, str], body: bytes) -> dict[str, str]:
        if not self.access_key:
            return dict(fields)
        signed = {**fields, "AccessKey": self.access_key}
        text = "".join(signed[name] for name in sorted(signed)).encode()
        digest = hmac.digest(self.secret.encode(), text + (self.wrong_body or body), "sha1")
        return {**signed, "Signature": base64.b64encode(digest).decode()}


class Peer:
    """A Remoting client on a real socket."""

    def __init__(self, endpoint: str) -> None:
        host, port = endpoint.rsplit(":", 1)
        self._socket = socket.create_connection((host, int(port)), 30)
        self._reader, self._opaque = FrameReader(), count(1)
        self.pushed: list[int] = []  # codes of the server's own requests

    def close(self) -> None:
        self._socket.close()

    def one_way(self, row: Row, caller: Caller) -> None:
        self._send(row, caller, ONE_WAY)

    def _send(self, row: Row, caller: Caller, flag: int = 0) -> int:
        body = b"" if row.content is None else json.dumps(row.content).encode()
        opaque = next(self._opaque)
        fields = caller.fields(row.fields, body)
        command = Command(row.code, opaque, flag, fields=fields, body=body)
        self._socket.sendall(encode(command))
        return opaque

    def ask(self, row: Row, caller: Caller) -> Command:
        opaque = self._send(row, caller)
        answer: Command | None = None
        while True:
            data = self._socket.recv(65_536)
            assert data, "the connection is closed"
            for command in self._reader.feed(data):
                if not command.is_response:
                    self.pushed.append(command.code)
                elif command.opaque == opaque:
                    answer = command
            if answer is not None:
                return answer


@dataclass
class Cluster:
    broker: RunningBroker
    client: Client
    peer: Peer
    users: dict[str, Caller] = field(default_factory=dict)

    def user(self, name: str, *entries: own.UserEntry, networks: Sequence[str] = ()) -> Caller:
        if name not in self.users:
            secret = f"secret-of-{name}-{'x' * 16}"
            request = own.CreateUserRequest(
                name=name, secret=secret, entries=entries, networks=networks
            )
            self.client.call_admin(request, own.UserReply)
            self.users[name] = Caller(name, secret)
        return self.users[name]

    def log_end(self) -> int:
        return int(self.broker._running().broker.broker.store.end)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder: Path = tmp_path_factory.mktemp("users")
    make_key_file(str(folder / "auth.key"))
    settings = {
        "topic.auto_create": True,
        "auth.key_file": str(folder / "auth.key"),
        "auth.admin_file": str(folder / "admin.json"),
        "auth.failure_wait_ms": 0,  # one address is every stranger here
    }
    with RunningBroker(settings=settings) as broker:
        first = json.loads((folder / "admin.json").read_text())
        with Client(broker.endpoint, signer=Signer(**first)) as client:
            client.topic(own.CreateTopicRequest(topic=own.Topic(name="orders")))
            client.group(own.CreateGroupRequest(group=own.Group(name="billing")))
            cluster = Cluster(broker, client, Peer(broker.endpoint))
            yield cluster
            cluster.peer.close()


def entry(resource: str, *actions: str, deny: bool = False) -> own.UserEntry:
    return own.UserEntry(resources=[resource], actions=actions, deny=deny)


def test_no_stranger_gets_anything_but_no_permission(cluster: Cluster) -> None:
    known = cluster.user("known")
    disabled = cluster.user("disabled")
    change = own.AlterUserRequest(name="disabled", state="disabled")
    cluster.client.call_admin(change, own.UserReply)
    callers = {
        "no fields": Caller(),
        "unknown user": Caller("mallory", "x" * 20),
        "wrong secret": Caller("known", "x" * 20),
        "another body": Caller("known", known.secret, wrong_body=b"another"),
        "disabled": disabled,
        "another network": cluster.user("elsewhere", networks=["192.0.2.0/24"]),
    }
    before, wrong = cluster.log_end(), []
    for row in ROWS:
        for name, caller in callers.items():
            if (answer := cluster.peer.ask(row, caller)).code != NO_PERMISSION:
                wrong.append((row.name, name, answer.code, answer.remark))
    assert not wrong
    assert cluster.log_end() == before


def test_a_user_gets_what_its_entries_allow_and_a_deny_wins(cluster: Cluster) -> None:
    wrong = []
    for number, row in enumerate(row for row in ROWS if row.needs):
        allowed = [entry(resource, *actions) for resource, actions in row.needs]
        resource, actions = row.needs[-1]
        denied = entry(f"{resource.partition(':')[0]}:*", *actions, deny=True)
        callers = {
            "no policy": cluster.user("known"),
            "part": cluster.user(f"part-{number}", *allowed[1:]),
            "deny last": cluster.user(f"last-{number}", *allowed, denied),
            "deny first": cluster.user(f"first-{number}", denied, *allowed),
        }
        before = cluster.log_end()
        for name, caller in callers.items():
            if (answer := cluster.peer.ask(row, caller)).code != NO_PERMISSION:
                wrong.append((row.name, name, answer.code, answer.remark))
        assert cluster.log_end() == before, row.name
        answer = cluster.peer.ask(row, cluster.user(f"yes-{number}", *allowed))
        if answer.code == NO_PERMISSION:
            wrong.append((row.name, "allowed", answer.code, answer.remark))
    assert not wrong


def test_a_field_that_older_clients_add_behind_the_signature_may_be_there(
    cluster: Cluster,
) -> None:
    """Its value is signed by clients from 4.9.4 on, and not by older ones."""
    row = next(row for row in ROWS if row.name == "QUERY_MESSAGE")
    user = cluster.user("reader", entry(T, "sub"))
    signed = user.fields(row.fields, b"")

    class Older(Caller):
        def fields(self, fields: Mapping[str, str], body: bytes) -> dict[str, str]:
            return {**signed, "_UNIQUE_KEY_QUERY": "true"}

    assert cluster.peer.ask(row, Older()).code != NO_PERMISSION
    newer = Row("newer", row.code, row.needs, {**row.fields, "_UNIQUE_KEY_QUERY": "true"})
    assert cluster.peer.ask(newer, user).code != NO_PERMISSION


def test_a_topic_that_is_missing_is_not_made_for_a_user_that_may_not(cluster: Cluster) -> None:
    using = cluster.user("using", entry("topic:*", "pub"))
    row = Row("route", 105, [], {"topic": "fresh"})
    assert cluster.peer.ask(row, using).code == TOPIC_NOT_EXIST
    cluster.client.topic(own.CreateTopicRequest(topic=own.Topic(name="fresh")))
    assert cluster.peer.ask(row, using).code == 0


def test_one_way_requests_of_strangers_write_no_line_each(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """They are summed in the audit log; a line each would let anybody fill the disk."""
    caplog.set_level("INFO")
    row = next(row for row in ROWS if row.name == "UPDATE_CONSUMER_OFFSET")
    for _ in range(50):
        cluster.peer.one_way(row, Caller("mallory", "x" * 20))
    assert cluster.peer.ask(row, Caller()).code == NO_PERMISSION
    lines = [record for record in caplog.records if "one-way" in record.getMessage()]
    assert lines == []


def test_every_code_that_is_served_is_in_the_matrix(cluster: Cluster) -> None:
    served = cluster.broker._running().proxy._proxy.remoting.handlers
    assert {row.code for row in ROWS} == set(served)


def test_calls_over_a_users_quota_are_busy_and_those_of_others_are_served(
    cluster: Cluster,
) -> None:
    row = Row("GET_ROUTEINFO_BY_TOPIC", 105, [(T, GET)], TOPIC)
    allowed = own.UserEntry(resources=[T], actions=["get"])
    busy, other = cluster.user("busy", allowed), cluster.user("calm", allowed)
    quota = own.AlterUserRequest(name="busy", quotas={"calls": 5})
    cluster.client.call_admin(quota, own.UserReply)
    answers = [cluster.peer.ask(row, busy) for _ in range(40)]
    assert {answer.code for answer in answers} == {0, SYSTEM_BUSY}
    assert "popmq user alter busy --quota calls=5" in answers[-1].remark
    assert cluster.peer.ask(row, other).code == 0


def test_an_address_with_bad_signatures_is_busy_for_strangers_alone(tmp_path: Path) -> None:
    make_key_file(str(tmp_path / "auth.key"))
    settings = {
        "auth.key_file": str(tmp_path / "auth.key"),
        "auth.admin_file": str(tmp_path / "admin.json"),
    }
    row = Row("UNREGISTER_CLIENT", 35, [], {"clientID": "me@1"})
    with RunningBroker(settings=settings) as broker:
        first = json.loads((tmp_path / "admin.json").read_text())
        known = Caller(first["access_key"], first["secret"])
        peer = Peer(broker.endpoint)
        assert peer.ask(row, known).code == 0
        codes = [peer.ask(row, Caller("mallory", "x" * 20)).code for _ in range(30)]
        assert codes[:4] == [NO_PERMISSION] * 4
        assert SYSTEM_BUSY in codes[5:]
        assert peer.ask(row, known).code == 0
        peer.close()
