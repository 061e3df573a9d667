"""What the operator asks of a cluster itself: who leads and who is in sync, hand-overs, drains.

The controllers are asked over frames, the administration service on the proxies' port.  No answer
is None or a `DataPlaneUnavailable`; nothing is concluded from it.
"""

import asyncio
from collections.abc import Mapping
from typing import Protocol, TypeVar

from google.protobuf.message import DecodeError, Message

from popmq.common.drain_remainder import drain_remainder, remainder_text
from popmq.common.errors import PopmqError
from popmq.common.protocol.frame_port import FramePort, call
from popmq.common.protocol.frames import Hello, ProcessRole
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.wire import admin_pb2 as admin
from popmq.common.wire import controller_pb2 as pb
from popmq.operator.cluster.observed import DrainState, GroupHealth
from popmq.operator.kube.admin_client import AdminClient, DataPlaneUnavailable
from popmq.operator.model.spec import ClusterSpec

LIST_MS, FAILOVER_MS = 2_000, 8_000

R = TypeVar("R", bound=Message)


class DataPlane(Protocol):
    """Of any cluster: the spec says which."""

    async def health(self, spec: ClusterSpec) -> Mapping[str, GroupHealth] | None: ...
    async def hand_over(self, spec: ClusterSpec, group: str, to: str) -> None: ...
    async def drain(
        self, spec: ClusterSpec, group: str, trusted: bytes | None, *, undo: bool
    ) -> None: ...
    async def drain_state(
        self, spec: ClusterSpec, group: str, trusted: bytes | None
    ) -> DrainState: ...


class NetworkDataPlane:
    """The data plane over the network. The addresses replace those of the cluster's Services."""

    def __init__(self, controller_address: str = "", proxy_address: str = "") -> None:
        self._controller_address = controller_address
        self._proxy_address = proxy_address

    async def health(self, spec: ClusterSpec) -> Mapping[str, GroupHealth] | None:
        """As the controller with the most to tell says; None when none answers."""
        body = pb.ListReplicasRequest(cluster=spec.name).SerializeToString()
        asked = [self._ask(spec, at, Kind.LIST_REPLICAS, body) for at in self._controllers(spec)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        found = []
        for answer in answers:
            if isinstance(answer, bytes):
                reply = pb.ListReplicasReply.FromString(answer)
                found.append(
                    (_heard(reply), {one.group: health_of(reply, one) for one in reply.groups})
                )
            elif not isinstance(answer, PopmqError | OSError | TimeoutError | DecodeError):
                raise answer
        return max(found, key=lambda one: one[0])[1] if found else None

    async def hand_over(self, spec: ClusterSpec, group: str, to: str) -> None:
        request = pb.FailoverRequest(cluster=spec.name, group=group, node=to)
        refusal = "no controller is known"
        for address in self._controllers(spec):
            try:
                await self._ask(spec, address, Kind.FAILOVER, request.SerializeToString())
            except (PopmqError, OSError, TimeoutError) as error:
                refusal = str(error)
            else:
                return
        raise DataPlaneUnavailable(refusal)

    async def drain(
        self, spec: ClusterSpec, group: str, trusted: bytes | None, *, undo: bool
    ) -> None:
        request = admin.DrainRequest(group=group, undo=undo)
        await self._admin(spec, "Drain", request, admin.DrainReply, trusted)

    async def drain_state(self, spec: ClusterSpec, group: str, trusted: bytes | None) -> DrainState:
        """What is left; FIFO topics of which nothing is are given to other groups on the way."""
        request = admin.DrainRequest(group=group, look=True)
        told = await self._admin(spec, "Drain", request, admin.DrainReply, trusted)
        topics = await self._admin(
            spec, "ListTopics", admin.ListTopicsRequest(), admin.ListTopicsReply, trusted
        )
        lag = await self._admin(spec, "Lag", admin.LagRequest(), admin.LagReply, trusted)
        rest, free = drain_remainder(group, lag, topics.topics, told)
        for topic in free:
            others = [one for one in topic.brokers if one != group] or _other_groups(spec, group)
            altered = admin.AlterTopicRequest(topic=admin.Topic(name=topic.name, brokers=others))
            await self._admin(spec, "AlterTopic", altered, admin.TopicReply, trusted)
        return DrainState(rest.is_drained, remainder_text(group, rest))

    def _controllers(self, spec: ClusterSpec) -> list[str]:
        given = self._controller_address
        return [given] if given else spec.controller_addresses

    async def _ask(self, spec: ClusterSpec, address: str, kind: Kind, body: bytes) -> bytes:
        hello = Hello(role=ProcessRole.TOOL, name="popmq-operator", cluster=spec.name, epoch=0)
        port = FramePort(address, hello, peer_name=f"controller {address}")
        port.start()
        limit_ms = LIST_MS if kind is Kind.LIST_REPLICAS else FAILOVER_MS
        try:
            async with asyncio.timeout(limit_ms / 1000 + 1):
                return await call(port, kind, body, limit_ms)
        finally:
            await port.close()

    async def _admin(
        self,
        spec: ClusterSpec,
        method: str,
        request: Message,
        reply: type[R],
        trusted: bytes | None,
    ) -> R:
        def asked() -> R:
            with AdminClient(spec, self._proxy_address, trusted) as port:
                return port.ask(method, request, reply)

        return await asyncio.to_thread(asked)


def _other_groups(spec: ClusterSpec, group: str) -> list[str]:
    names = [spec.names.group(index) for index in range(spec.brokers.groups)]
    return [name for name in names if name != group]


def _heard(reply: pb.ListReplicasReply) -> tuple[int, int]:
    """Brokers that are alive, and the newest epoch: two controllers may not know the same."""
    alive = sum(member.alive for state in reply.groups for member in state.members)
    return alive, max((state.record.epoch for state in reply.groups), default=0)


def health_of(reply: pb.ListReplicasReply, state: pb.GroupState) -> GroupHealth:
    recorded = state.HasField("record")
    names = {one.broker.store_id: one.broker.node or state.group for one in state.members}
    alive = frozenset(names[one.broker.store_id] for one in state.members if one.alive)
    solo = not recorded and bool(state.members) and all(m.replicas <= 1 for m in state.members)
    leaders = [
        one
        for one in state.members
        if one.alive
        and (one.broker.store_id == state.record.leader if recorded else solo)
        and (solo or one.role in (pb.MASTER, pb.HANDING_OVER))
    ]
    in_sync = (
        frozenset(names[one] for one in state.record.sync_state_set if one in names) & alive
        if recorded
        else (alive if solo else frozenset())
    )
    return GroupHealth(
        master=names[leaders[0].broker.store_id] if leaders else "",
        epoch=state.record.epoch,
        in_sync=in_sync,
        alive=alive,
        trouble=state.trouble,
        draining=any(one.broker.draining for one in leaders),
        solo=solo,
        owner=reply.owner == state.group,
    )
