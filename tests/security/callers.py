"""A cluster whose callers must be users, and calls of it as any caller makes them."""

import hmac
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message

from popmq.cli.client import Client
from popmq.common.signing import Signer
from popmq.common.wire import admin_pb2 as own
from popmq.proxy.api import definition_pb2 as pb
from popmq.testing.running_broker import RunningBroker

OK, UNAUTHORIZED, FORBIDDEN, TOPIC_NOT_FOUND = 20000, 40100, 40300, 40402
REFUSALS = (UNAUTHORIZED, FORBIDDEN)

M = "/apache.rocketmq.v2.MessagingService/"
P = "/apache.rocketmq.v2.Admin/"
A = "/popmq.admin.v1.Admin/"
R = "/popmq.report.v1.Reports/"

TOPIC, GROUP = pb.Resource(name="orders"), pb.Resource(name="billing")
QUEUE = pb.MessageQueue(topic=TOPIC, id=-1, permission=pb.READ_WRITE)
HANDLE = "no handle that a broker made"


Needs = Sequence[tuple[str, tuple[str, ...]]]


@dataclass
class Row:
    """A call, and what its caller needs: (resource, actions); none: any user may."""

    path: str
    request: Message
    reply: type[Message]
    needs: Needs = ()
    stream: bool = False

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


T, G, C = "topic:orders", "group:billing", "cluster"
PUB, SUB, GET, LIST = ("pub",), ("sub",), ("get",), ("list",)
UPDATE, CREATE, DELETE = ("update",), ("create",), ("delete",)
CONSUMES = [(G, SUB), (T, SUB)]


IDS = count(1)  # one that was sent before is a resend


def message(topic: str = "orders") -> pb.Message:
    system = pb.SystemProperties(
        message_id=f"{next(IDS):034X}", body_encoding=pb.IDENTITY, queue_id=0
    )
    return pb.Message(topic=pb.Resource(name=topic), system_properties=system, body=b"x")


@dataclass
class Caller:
    """Headers of one kind of caller."""

    access_key: str | None = None  # None: no header at all
    secret: str = ""
    shift_s: int = 0  # of the date against now
    signed: str = ""  # another date than the one that is sent

    def headers(self) -> list[tuple[str, str]]:
        date = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(time.time() + self.shift_s))
        fields = [("x-mq-client-id", "matrix@1"), ("x-mq-date-time", date)]
        if self.access_key is not None:
            signature = hmac.digest(self.secret.encode(), (self.signed or date).encode(), "sha1")
            parts = f"Credential={self.access_key}, SignedHeaders=x-mq-date-time"
            text = f"MQv2-HMAC-SHA1 {parts}, Signature={signature.hex().upper()}"
            fields.append(("authorization", text))
        return fields


class Cluster:
    """A broker whose callers must be users, a Super user's client, and raw calls."""

    def __init__(self, broker: RunningBroker, folder: Path) -> None:
        self.broker = broker
        first = json.loads((folder / "admin.json").read_text())
        self.admin = Caller(first["access_key"], first["secret"])
        self.client = Client(broker.endpoint, signer=Signer(**first))
        # Its stubs know no calls of raw bytes.
        self.channel: Any = grpc.insecure_channel(broker.endpoint)
        self.users: dict[str, Caller] = {}
        self.threads = ThreadPoolExecutor(4)
        self.waited = 0

    def close(self) -> None:
        self.client.close()
        self.channel.close()
        self.threads.shutdown()

    def user(self, name: str, *entries: own.UserEntry, networks: list[str] | None = None) -> Caller:
        """That user, made at the first call."""
        if name not in self.users:
            secret = f"secret-of-{name}-{'x' * 16}"
            request = own.CreateUserRequest(
                name=name, secret=secret, entries=entries, networks=networks or []
            )
            self.client.call_admin(request, own.UserReply)
            self.users[name] = Caller(name, secret)
        return self.users[name]

    def code(self, row: Row, caller: Caller, extra: list[tuple[str, str]] | None = None) -> int:
        """Of the first answer that has a status; 0: of none."""
        metadata = [*caller.headers(), *(extra or [])]
        body = row.request.SerializeToString()
        if row.stream:
            answers = list(self.channel.unary_stream(row.path)(body, metadata=metadata, timeout=30))
        else:
            answers = [self.channel.unary_unary(row.path)(body, metadata=metadata, timeout=30)]
        for answer in answers:
            reply: Any = row.reply.FromString(answer)
            if reply.HasField("status"):
                return int(reply.status.code)
        return 0

    def waiting(self) -> int:
        """Receives that wait at the proxy."""
        return self.broker._running().proxy._proxy.metrics.waiting_receives

    def log_end(self) -> int:
        store = self.broker._running().broker.broker.store
        return int(store.end)


def entry(resource: str, *actions: str, deny: bool = False) -> own.UserEntry:
    return own.UserEntry(resources=[resource], actions=actions, deny=deny)
