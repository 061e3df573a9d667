"""Topics and consumer groups of a cluster, over the administration service of its proxies.

All changes of a look go over one connection; each has an answer of its own.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Protocol

from google.protobuf.message import Message

from popmq.common.errors import Code
from popmq.common.signing import Signer
from popmq.common.wire import admin_pb2 as admin
from popmq.operator.declared.declared_resources import (
    Change,
    ChangeKind,
    ClusterMetadata,
    Settings,
    Value,
)
from popmq.operator.kube.admin_client import AdminClient, DataPlaneUnavailable, on_thread
from popmq.operator.model.manifest import TOPIC
from popmq.operator.model.spec import ClusterSpec

MISSING = (Code.TOPIC_NOT_FOUND, Code.CONSUMER_GROUP_NOT_FOUND, Code.NOT_FOUND)


@dataclass(frozen=True, slots=True)
class ProxyAccess:
    """`trusted` signed the proxies' certificate (PEM); `signer` is the user that calls them."""

    trusted: bytes | None = None
    signer: Signer = field(default_factory=Signer)


class MetadataClient(Protocol):
    """Of any cluster: the spec says which."""

    async def found(self, spec: ClusterSpec, access: ProxyAccess) -> ClusterMetadata: ...
    async def change(
        self, spec: ClusterSpec, access: ProxyAccess, changes: Sequence[Change]
    ) -> list[str]: ...


class NetworkMetadataClient:
    """`proxy_address` replaces that of the cluster's Service; calls wait on `threads`."""

    def __init__(self, proxy_address: str = "", threads: Executor | None = None) -> None:
        self._proxy_address = proxy_address
        self._threads = threads

    async def found(self, spec: ClusterSpec, access: ProxyAccess) -> ClusterMetadata:
        """Raises DataPlaneUnavailable."""

        def asked() -> ClusterMetadata:
            with AdminClient(spec, self._proxy_address, access.trusted, access.signer) as port:
                topics = port.ask("ListTopics", admin.ListTopicsRequest(), admin.ListTopicsReply)
                groups = port.ask("ListGroups", admin.ListGroupsRequest(), admin.ListGroupsReply)
            return ClusterMetadata(
                {topic.name: topic_settings(topic) for topic in topics.topics},
                {group.name: group_settings(group) for group in groups.groups},
            )

        return await on_thread(self._threads, asked)

    async def change(
        self, spec: ClusterSpec, access: ProxyAccess, changes: Sequence[Change]
    ) -> list[str]:
        """Why each was refused, or nothing.  Done again, a change is no error."""

        def asked() -> list[str]:
            with AdminClient(spec, self._proxy_address, access.trusted, access.signer) as port:
                return [_refusal(port, change) for change in changes]

        return await on_thread(self._threads, asked) if changes else []


def _refusal(port: AdminClient, change: Change) -> str:
    try:
        method, request = request_of(change)
    except ValueError as error:  # a value that no message can hold harms this change alone
        return f"{change.name}: {error}"
    reply = admin.TopicReply if change.kind == TOPIC else admin.GroupReply
    fine = MISSING if change.act is ChangeKind.DELETE else ()
    try:
        port.ask(method, request, reply, fine=fine)
    except DataPlaneUnavailable as error:
        return str(error)
    return ""


def topic_settings(topic: admin.Topic) -> Settings:
    return {
        "type": topic.type,
        "queues": topic.queues,
        "permission": topic.permission,
        "durability": topic.durability,
        "retention": topic.retention_ms,
        "liteTtl": topic.lite_ttl_ms,
    }


def group_settings(group: admin.Group) -> Settings:
    """An exponential back-off, which nobody can declare, is no list of steps."""
    steps: tuple[int, ...] = () if group.retry == "exponential" else tuple(group.back_off_ms)
    return {
        "type": group.type,
        "maxAttempts": group.max_attempts,
        "startAt": group.start_at,
        "checkPoints": group.check_points,
        "backOff": steps,
    }


def request_of(change: Change) -> tuple[str, Message]:
    """The method, and what it is asked; an alteration leaves empty what stays."""
    settings = change.settings
    if change.kind == TOPIC:
        if change.act is ChangeKind.DELETE:
            return "DeleteTopic", admin.DeleteTopicRequest(name=change.name)
        topic = _topic(change.name, settings)
        if change.act is ChangeKind.CREATE:
            return "CreateTopic", admin.CreateTopicRequest(topic=topic)
        return "AlterTopic", admin.AlterTopicRequest(topic=topic)
    if change.act is ChangeKind.DELETE:
        return "DeleteGroup", admin.DeleteGroupRequest(name=change.name)
    group = _group(change.name, settings)
    if change.act is ChangeKind.CREATE:
        return "CreateGroup", admin.CreateGroupRequest(group=group)
    return "AlterGroup", admin.AlterGroupRequest(group=group)


def _topic(name: str, settings: Settings) -> admin.Topic:
    topic = admin.Topic(
        name=name,
        type=_text(settings, "type"),
        permission=_text(settings, "permission"),
        durability=_text(settings, "durability"),
        queues=_number(settings, "queues"),
    )
    if "retention" in settings:
        topic.retention_ms = _number(settings, "retention") or -1  # back to the store's
    if "liteTtl" in settings:
        topic.lite_ttl_ms = _number(settings, "liteTtl") or -1  # back to the brokers'
    return topic


def _group(name: str, settings: Settings) -> admin.Group:
    steps: Value = settings.get("backOff", ())
    assert isinstance(steps, tuple), "a back-off is a list of waits"
    return admin.Group(
        name=name,
        type=_text(settings, "type"),
        max_attempts=_number(settings, "maxAttempts"),
        start_at=_text(settings, "startAt"),
        check_points=_text(settings, "checkPoints"),
        back_off_ms=steps,
    )


def _text(settings: Mapping[str, Value], key: str) -> str:
    return str(settings.get(key, ""))


def _number(settings: Mapping[str, Value], key: str) -> int:
    value = settings.get(key, 0)
    assert isinstance(value, int), f"{key} is a number"
    return value
