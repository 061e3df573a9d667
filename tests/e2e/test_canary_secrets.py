"""Secrets that are planted in a cluster of processes with users, and looked for where none may be.

Logs at debug level, the audit log, metrics, refusals, what commands print, stores and snapshots,
and the command lines and environments of the processes.
"""

import base64
import hmac
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import grpc
import pytest
from e2e.processes import Role, role_environment
from e2e.raw_client import SERVICE
from e2e.replicated import ReplicatedGroup
from security.test_remoting_users import Caller, Peer, Row

from popmq.cli.client import Client
from popmq.common.protocol.cluster_secret import make_cluster_secret
from popmq.common.signing import Signer
from popmq.common.wire import admin_pb2 as own
from popmq.proxy.api import admin_pb2 as api
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service
from popmq.proxy.auth.sealing import make_key_file

pytestmark = pytest.mark.heavy

MESSAGES, BODY_BYTES = 300, 4_096  # enough for snapshots
HEARTBEAT = service.HeartbeatRequest(client_type=pb.PRODUCER).SerializeToString()


@dataclass
class Canaries:
    """Secrets by what they are; each is looked for in the forms that a program may write it in."""

    secrets: dict[str, bytes] = field(default_factory=dict)

    def plant(self, what: str, secret: str | bytes) -> str:
        raw = secret.encode() if isinstance(secret, str) else secret
        assert len(raw) >= 16, what
        self.secrets[what] = raw
        return raw.decode(errors="replace")

    def found_in(self, content: bytes) -> list[str]:
        lower = content.lower()
        return [
            what
            for what, raw in self.secrets.items()
            if raw in content
            or raw.hex().encode() in lower
            or any(base64.b64encode(raw[at:])[:-4] in content for at in range(3))
        ]


class Commands:
    """The command line as a user of a context: its secret is in a file for that user alone."""

    def __init__(self, folder: Path, endpoint: str, credentials: Path) -> None:
        self._environ = role_environment({"POPMQ_CONFIG": "", "HOME": str(folder)})
        del self._environ["POPMQ_CONFIG"]
        self._environ.pop("XDG_CONFIG_HOME", None)
        access_key = json.loads(credentials.read_text())["access_key"]
        named = ("--access-key", access_key, "--secret-file", str(credentials))
        self.run("context", "add", "here", "--endpoint", endpoint, *named)
        self.run("context", "use", "here")

    def run(self, *arguments: str, fails: bool = False) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "popmq.cli", *arguments],
            env=self._environ,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode != 0) is fails, done.stderr
        return done.stdout + done.stderr

    def start(self, *arguments: str) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [sys.executable, "-m", "popmq.cli", *arguments],
            env=self._environ,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


@pytest.mark.timeout(180)
def test_no_planted_secret_is_found_where_none_may_be(tmp_path: Path) -> None:
    canaries = Canaries()
    seen: dict[str, bytes] = {}
    secret_file, key_file = tmp_path / "cluster.secret", tmp_path / "auth.key"
    make_cluster_secret(str(secret_file))
    make_key_file(str(key_file))
    canaries.plant("the cluster's secret", secret_file.read_text().strip())
    sealing = key_file.read_text().split()[1]
    canaries.plant("the sealing key as text", sealing)
    canaries.plant("the sealing key", bytes.fromhex(sealing))
    settings = {
        "POPMQ_CLUSTER_SECRET_FILE": str(secret_file),
        "POPMQ_STORE_SNAPSHOT_BYTES": "256KiB",
    }
    group = ReplicatedGroup(tmp_path, proxies=2, settings=settings)
    credentials = tmp_path / "admin.json"
    for proxy in group.proxies:
        proxy.settings["POPMQ_AUTH_KEY_FILE"] = str(key_file)
        proxy.settings["POPMQ_AUTH_ADMIN_FILE"] = str(credentials)
    with group:
        _use(group, tmp_path, credentials, canaries, seen)
        for role in (group.controller, *group.brokers, *group.proxies):
            seen[f"metrics of {role.name}"] = _page(role)
            for name in ("cmdline", "environ"):
                path = Path(f"/proc/{role.pid}/{name}")
                seen[f"{name} of {role.name}"] = path.read_bytes()
    for path in _files(tmp_path, but={secret_file, key_file, credentials}):
        seen[str(path.relative_to(tmp_path))] = path.read_bytes()
    assert any("snapshot" in name for name in seen)
    assert any(b"would be refused" in text or b'"refused"' in text for text in seen.values())
    # The search finds what is there.
    assert canaries.found_in(credentials.read_bytes()) == ["the first user's secret"]
    assert canaries.found_in(base64.b64encode(bytes.fromhex(sealing))) == ["the sealing key"]
    leaks = {name: canary for name, text in seen.items() if (canary := canaries.found_in(text))}
    size = sum(map(len, seen.values()))
    print(f"\n{len(canaries.secrets)} secrets in {len(seen)} places, {size >> 20} MiB: {leaks}")
    assert leaks == {}


def _files(folder: Path, *, but: set[Path]) -> Iterator[Path]:
    """Logs, stores, snapshots, and what processes left elsewhere; not the contexts of commands."""
    for path in folder.rglob("*"):
        if path.is_file() and path not in but and "home" not in path.relative_to(folder).parts:
            yield path


def _page(role: Role) -> bytes:
    with urlopen(role.ready.metrics, timeout=10) as reply:
        content: bytes = reply.read()
    return content


def _use(
    group: ReplicatedGroup,
    folder: Path,
    credentials: Path,
    canaries: Canaries,
    seen: dict[str, bytes],
) -> None:
    """Users, their secrets and every kind of refusal; `seen` gets what was printed and answered."""
    (folder / "home").mkdir()
    until = time.monotonic() + 30
    while not credentials.exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    first = json.loads(credentials.read_text())
    canaries.plant("the first user's secret", first["secret"])
    endpoint = group.endpoints[0]
    commands = Commands(folder / "home", endpoint, credentials)
    created = json.loads(_one_line(commands.run("user", "create", "ann", "-o", "json")))
    canaries.plant("a user's secret", created["secret"])
    chosen = canaries.plant("a secret that was chosen", "canary-chosen-by-a-tool-0123456789")
    too_long = canaries.plant("a secret that is too long", "canary-too-long-" + "0123456789" * 30)
    with Client(endpoint, signer=Signer(**first)) as client, ExitStack() as stack:
        admin = stack.enter_context(_channel(group.endpoints[1]))
        client.topic(own.CreateTopicRequest(topic=own.Topic(name="orders")))
        client.group(own.CreateGroupRequest(group=own.Group(name="g")))
        client.call_admin(own.CreateUserRequest(name="bob", secret=chosen), own.UserReply)
        entry = own.UserEntry(resources=["topic:orders"], actions=["pub"])
        client.call_admin(own.GrantRequest(name="bob", entries=[entry]), own.UserReply)
        renewed = canaries.plant("a secret after a rotation", "canary-renewed-9876543210-abcdef")
        change = own.AlterUserRequest(name="bob", secret=renewed, retire_ms=60_000)
        seen["reply of AlterUser"] = client.call_admin(change, own.UserReply).SerializeToString()
        with pytest.raises(Exception, match="characters") as refused:
            client.call_admin(own.AlterUserRequest(name="bob", secret=too_long), own.UserReply)
        seen["refusal of a secret"] = str(refused.value).encode()
        request = own.DescribeSettingsRequest()
        reply = client.call_admin(request, own.DescribeSettingsReply)
        assert len(reply.processes) >= 3
        seen["reply of DescribeSettings"] = reply.SerializeToString()
        _log_at_debug_level(group.endpoints, Signer(**first))
        _send(client)
        for name, headers in _bad_headers(canaries, renewed).items():
            heartbeat: Any = admin.unary_unary(f"{SERVICE}/Heartbeat")
            seen[f"answer to {name}"] = heartbeat(HEARTBEAT, metadata=headers, timeout=30)
    seen["answers to Remoting"] = _over_remoting(endpoint, canaries)
    follower = commands.start("recv", "orders", "--group", "g", "--follow")
    try:
        _until_running(follower.pid)
        for name in ("cmdline", "environ"):
            seen[f"{name} of a command"] = Path(f"/proc/{follower.pid}/{name}").read_bytes()
    finally:
        follower.terminate()
        follower.wait(10)
    for arguments in (
        ("user", "list", "-o", "json"),
        ("user", "show", "bob", "-o", "yaml"),
        ("keys", "rotate", "-o", "json"),
        ("status",),
        ("config", "explain", "auth.key_file"),
        ("message", "show", "--json", "--topic", "rmq_sys_meta", *_ALL),
        ("context", "list", "-o", "json"),
    ):
        seen[f"popmq {' '.join(arguments)}"] = commands.run(*arguments).encode()


_ALL = ("--queue", "0", "--offset", "0", "--limit", "64")


def _log_at_debug_level(endpoints: list[str], signer: Signer) -> None:
    request = api.ChangeLogLevelRequest(level=api.ChangeLogLevelRequest.Level.DEBUG)
    path = "/apache.rocketmq.v2.Admin/ChangeLogLevel"
    for endpoint in endpoints:
        with Client(endpoint, signer=signer) as client:
            answers: list[bytes] = []
            client._ask_admin(path, request.SerializeToString(), answers.append, 10)
        reply = api.ChangeLogLevelResponse.FromString(answers[0])
        assert "DEBUG" in reply.remark.upper(), reply


def _one_line(printed: str) -> str:
    return next(line for line in printed.splitlines() if line.startswith("{"))


def _channel(endpoint: str) -> Any:
    return grpc.insecure_channel(endpoint)


def _send(client: Client) -> None:
    for number in range(MESSAGES):
        system = pb.SystemProperties(message_id=f"{number:034X}", body_encoding=pb.IDENTITY)
        message = pb.Message(
            topic=pb.Resource(name="orders"),
            system_properties=system,
            body=os.urandom(BODY_BYTES),
        )
        client.send(message)


def _bad_headers(canaries: Canaries, secret: str) -> Mapping[str, list[tuple[str, str]]]:
    """What clients send that are set up wrongly: a secret where none belongs."""
    date = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    signature = hmac.digest(secret.encode(), date.encode(), "sha1")
    canaries.plant("a signature", signature)
    bare = canaries.plant("a token without a scheme", "canary-bare-token-without-a-scheme-123")
    session = canaries.plant("a session token", "canary-session-token-abcdefghijklmnop")
    as_hex = canaries.plant("a secret in place of a signature", "canary-secret-as-signature-12345")
    parts = "SignedHeaders=x-mq-date-time"
    values = {
        "a header of another user": f"Credential=ann, {parts}, Signature={signature.hex()}",
        "a good header": f"Credential=bob, {parts}, Signature={signature.hex()}",
        "a secret as signature": f"Credential=ann, {parts}, Signature={as_hex}",
        "a secret as header to sign": f"Credential=ann, SignedHeaders={bare}, Signature=00",
    }
    signed = {name: f"MQv2-HMAC-SHA1 {value}" for name, value in values.items()}
    signed |= {"a bare token": bare, "a bearer": f"Bearer {bare}", "a key": f"Credential={bare}"}
    return {
        name: [
            ("x-mq-client-id", "canary@1"),
            ("x-mq-date-time", bare if name == "a key" else date),
            ("x-mq-session-token", session),
            ("authorization", value),
        ]
        for name, value in signed.items()
    }


def _over_remoting(endpoint: str, canaries: Canaries) -> bytes:
    token = canaries.plant("a Remoting session token", "canary-remoting-token-0123456789")
    wrong = canaries.plant("a wrong secret", "canary-wrong-secret-0123456789-abc")
    peer, answers = Peer(endpoint), []
    for caller in (Caller("bob", wrong), Caller("ann", wrong), Caller()):
        for code in (10, 11, 105, 34):
            row = Row("", code, [], {"topic": "orders", "SecurityToken": token})
            answers.append(repr(peer.ask(row, caller)))
    peer.close()
    return "\n".join(answers).encode()


def _until_running(pid: int) -> None:
    """Until the command has read its context: it holds a socket."""
    until = time.monotonic() + 30
    while not any("socket:" in os.readlink(path) for path in _descriptors(pid)):
        assert time.monotonic() < until
        time.sleep(0.02)


def _descriptors(pid: int) -> list[str]:
    folder = f"/proc/{pid}/fd"
    return [f"{folder}/{name}" for name in os.listdir(folder)]
