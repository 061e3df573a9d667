"""AuditLog: one line for each administrative change: when, from where, what, before and after.

Its logger has a level of its own, so no log level turns it off, ChangeLogLevel included, which is
audited itself (docs/reference/log-lines.md, "The audit log").  A refused change is a line too; a
dry run is none.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from google.protobuf.json_format import MessageToJson
from google.protobuf.message import DecodeError, Message

from popmq.common.errors import Code, PopmqError
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.wire import admin_pb2 as own
from popmq.proxy.admin import admin_service
from popmq.proxy.api import admin_pb2 as api
from popmq.proxy.auth.calls import AuthorizedCall
from popmq.proxy.brokers.broker_ports import BrokerPorts
from popmq.proxy.rpc.metrics import ProxyMetrics
from popmq.proxy.transport.interface import Call, GrpcStatus, Method

audit = logging.getLogger("popmq.audit")
audit.setLevel(logging.INFO)

BEFORE_MS = 2_000  # for what was there before; the change goes on without it
_TEXT_LIMIT = 2_000
_LEFT = "the client left before the answer: perhaps it was done"
# What a request may name, in the order in which it is shown.
_NAMES = ("name", "topic", "group", "broker", "node", "queue_id", "message_id", "key", "level")


@dataclass(frozen=True, slots=True)
class _Change:
    request: type[Message]
    reply: type[Message]
    before: tuple[Kind, type[Message]] | None = None  # what describes it, and the description


_TOPIC = (Kind.DESCRIBE_TOPIC, own.TopicReply)
_GROUP = (Kind.DESCRIBE_GROUP, own.GroupReply)
CHANGES: Mapping[str, _Change] = {
    admin_service.SERVICE + "CreateTopic": _Change(own.CreateTopicRequest, own.TopicReply),
    admin_service.SERVICE + "AlterTopic": _Change(own.AlterTopicRequest, own.TopicReply, _TOPIC),
    admin_service.SERVICE + "DeleteTopic": _Change(own.DeleteTopicRequest, own.TopicReply, _TOPIC),
    admin_service.SERVICE + "CreateGroup": _Change(own.CreateGroupRequest, own.GroupReply),
    admin_service.SERVICE + "AlterGroup": _Change(own.AlterGroupRequest, own.GroupReply, _GROUP),
    admin_service.SERVICE + "DeleteGroup": _Change(own.DeleteGroupRequest, own.GroupReply, _GROUP),
    admin_service.SERVICE + "RotateKeys": _Change(own.RotateKeysRequest, own.RotateKeysReply),
    admin_service.SERVICE + "ResealSecrets": _Change(
        own.ResealSecretsRequest, own.ResealSecretsReply
    ),
    admin_service.SERVICE + "Drain": _Change(own.DrainRequest, own.DrainReply),
    admin_service.SERVICE + "Unpark": _Change(own.UnparkRequest, own.UnparkReply),
    admin_service.SERVICE + "ResetOffset": _Change(own.ResetOffsetRequest, own.ResetOffsetReply),
    admin_service.SERVICE + "Redrive": _Change(own.RedriveRequest, own.RedriveReply),
    admin_service.SERVICE + "Recall": _Change(own.RecallRequest, own.RecallReply),
    admin_service.SERVICE + "Reschedule": _Change(own.RescheduleRequest, own.RescheduleReply),
    admin_service.SERVICE + "Failover": _Change(own.FailoverRequest, own.FailoverReply),
    admin_service.SERVICE + "CreateUser": _Change(own.CreateUserRequest, own.UserReply),
    admin_service.SERVICE + "AlterUser": _Change(own.AlterUserRequest, own.UserReply),
    admin_service.SERVICE + "DeleteUser": _Change(own.DeleteUserRequest, own.UserReply),
    admin_service.SERVICE + "Grant": _Change(own.GrantRequest, own.UserReply),
    admin_service.SERVICE + "Revoke": _Change(own.RevokeRequest, own.UserReply),
    admin_service.SERVICE + "SetUserClock": _Change(own.SetUserClockRequest, own.UserReply),
    admin_service.SERVICE + "SetAuthMode": _Change(own.SetAuthModeRequest, own.AuthModeReply),
    "/apache.rocketmq.v2.Admin/ResetGroupOffset": _Change(
        api.ResetGroupOffsetRequest, api.ResetGroupOffsetResponse
    ),
    "/apache.rocketmq.v2.Admin/ChangeLogLevel": _Change(
        api.ChangeLogLevelRequest, api.ChangeLogLevelResponse
    ),
}


class AuditLog:
    def __init__(self, brokers: BrokerPorts, metrics: ProxyMetrics) -> None:
        self._brokers = brokers
        self._metrics = metrics

    def audited(self, methods: Sequence[Method]) -> list[Method]:
        return [
            replace(method, start=partial(self._start, method.path, method.start))
            if method.path in CHANGES and method.start is not None
            else method
            for method in methods
        ]

    def _start(
        self, path: str, start: Callable[[Call, bytes], None], call: Call, data: bytes
    ) -> None:
        change = CHANGES[path]
        try:
            request = change.request.FromString(data)
        except DecodeError:
            start(call, data)  # which refuses it
            return
        if getattr(request, "dry_run", False) or getattr(request, "look", False):
            start(call, data)
            return
        name = path.rpartition("/")[2]
        self._metrics.admin_changes[name] += 1
        audited = AuditedCall(call, name, _named(request), change.reply)
        if change.before is None:
            start(audited, data)
        else:
            self._describe(change.before, request, audited, partial(start, audited, data))

    def _describe(
        self,
        before: tuple[Kind, type[Message]],
        request: Message,
        audited: "AuditedCall",
        then: Callable[[], None],
    ) -> None:
        kind, description = before
        if kind is Kind.DESCRIBE_TOPIC:
            body = own.DescribeTopicRequest(name=_changed(request, "topic")).SerializeToString()
        else:
            body = own.DescribeGroupRequest(name=_changed(request, "group")).SerializeToString()

        def answered(answer: bytes | PopmqError) -> None:
            if isinstance(answer, bytes):
                audited.before = _text(description, answer)
            if not audited.over:
                then()

        try:
            port = self._brokers.port(self._brokers.owner())
        except PopmqError:
            then()
            return
        port.request(kind, body, BEFORE_MS, answered)


class AuditedCall(AuthorizedCall):
    """A call whose end is a line of the audit log."""

    def __init__(self, call: Call, name: str, resource: str, reply: type[Message]) -> None:
        known = (call.user, call.entry) if isinstance(call, AuthorizedCall) else ("", "")
        super().__init__(call, *known)
        self._name = name
        self._resource = resource
        self._reply = reply
        self._answer = b""
        self.over = False  # its line is written
        self.before = ""
        call.on_cancelled(self._left)

    def send(self, message: bytes) -> None:
        self._answer = message
        super().send(message)

    def finish(self, status: GrpcStatus = GrpcStatus.OK, detail: str = "") -> None:
        if status is GrpcStatus.OK:
            code, why = _outcome(self._reply, self._answer)
            self._write(code, why, _text(self._reply, self._answer) if code == Code.OK else "")
        else:
            self._write(Code.INTERNAL_ERROR, detail, "")
        super().finish(status, detail)

    def _left(self) -> None:
        self._write(Code.REQUEST_TIMEOUT, _LEFT, "")

    def _write(self, code: int, why: str, after: str) -> None:
        if self.over:
            return
        self.over = True
        extra = {
            "address": self._call.peer,
            "user": self.user,
            "entry": self.entry,
            "client": self._call.metadata.get("x-mq-client-id", "")[:_TEXT_LIMIT],
            "call": self._name,
            "resource": self._resource,
            "before": self.before,
            "after": after,
            "code": int(code),
            "why": why,
        }
        audit.info("administrative change", extra=extra)


def _outcome(reply: type[Message], answer: bytes) -> tuple[int, str]:
    """Replies without a status have no refusals."""
    status = getattr(reply.FromString(answer), "status", None)
    if status is None or status.code == Code.OK:
        return Code.OK, ""
    return status.code, status.message[:_TEXT_LIMIT]


def _text(kind: type[Message], content: bytes) -> str:
    message = kind.FromString(content)
    if "status" in message.DESCRIPTOR.fields_by_name:
        message.ClearField("status")
    text = MessageToJson(message, preserving_proto_field_name=True, indent=None)
    return text if len(text) <= _TEXT_LIMIT else f"{text[:_TEXT_LIMIT]}..."


def _named(request: Message) -> str:
    """What the request is about, as words."""
    words = []
    for name in _NAMES:
        if value := _name_in(request, name):
            words.append(f"{name}={value}"[:_TEXT_LIMIT])
    return " ".join(words)


def _changed(request: Message, field: str) -> str:
    """A deletion has the name of what it deletes alone."""
    return _name_in(request, field) or _name_in(request, "name")


def _name_in(request: Message, field: str) -> str:
    """The text of a field, or the name in it."""
    value = getattr(request, field, "")
    return str((getattr(value, "name", "") if isinstance(value, Message) else value) or "")
