"""What the operator asks of a cluster itself: who leads and who is in sync, hand-overs, drains.

The controllers are asked over frames, the administration service on the proxies' port.  No answer
is None or a `DataPlaneUnavailable`; nothing is concluded from it.
"""

import asyncio
from collections.abc import Mapping
from concurrent.futures import Executor
from typing import Protocol, TypeVar

from google.protobuf.message import DecodeError, Message

from popmq.common.errors import PopmqError
from popmq.common.protocol.drain_remainder import drain_remainder, remainder_text
from popmq.common.protocol.frame_port import FramePort, call
from popmq.common.protocol.frames import Hello, ProcessRole
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.wire import admin_pb2 as admin
from popmq.common.wire import controller_pb2 as pb
from popmq.operator.cluster.cluster_secrets import PlaneAccess
from popmq.operator.cluster.observed import DrainState, GroupHealth
from popmq.operator.kube.admin_client import AdminClient, DataPlaneUnavailable, on_thread
from popmq.operator.kube.look_slots import outside_slot
from popmq.operator.model.spec import ClusterSpec

LIST_MS, FAILOVER_MS = 2_000, 8_000

R = TypeVar("R", bound=Message)


class DataPlane(Protocol):
    """Of any cluster: the spec says which."""

    async def health(
        self, spec: ClusterSpec, access: PlaneAccess
    ) -> Mapping[str, GroupHealth] | None: ...
    async def hand_over(
        self, spec: ClusterSpec, group: str, to: str, access: PlaneAccess
    ) -> None: ...
    async def drain(
        self, spec: ClusterSpec, group: str, access: PlaneAccess, *, undo: bool
    ) -> None: ...
    async def drain_state(
        self, spec: ClusterSpec, group: str, access: PlaneAccess
    ) -> DrainState: ...
    async def keep_mode(self, spec: ClusterSpec, access: PlaneAccess) -> str: ...


class NetworkDataPlane:
    """The data plane over the network. The addresses replace those of the cluster's Services."""

    def __init__(
        self,
        controller_address: str = "",
        proxy_address: str = "",
        threads: Executor | None = None,
    ) -> None:
        self._threads = threads
        self._controller_address = controller_address
        self._proxy_address = proxy_address

    async def health(
        self, spec: ClusterSpec, access: PlaneAccess
    ) -> Mapping[str, GroupHealth] | None:
        """As the controller with the most to tell says; None when none answers."""
        body = pb.ListReplicasRequest(cluster=spec.name).SerializeToString()
        asked = [
            self._ask(spec, at, Kind.LIST_REPLICAS, body, access) for at in self._controllers(spec)
        ]
        async with outside_slot():
            answers = await asyncio.gather(*asked, return_exceptions=True)
        group_healths = []
        for answer in answers:
            if isinstance(answer, bytes):
                reply = pb.ListReplicasReply.FromString(answer)
                group_healths.append(
                    (
                        _heard(reply),
                        {group.group: health_of(reply, group) for group in reply.groups},
                    )
                )
            elif not isinstance(answer, PopmqError | OSError | TimeoutError | DecodeError):
                raise answer
        return max(group_healths, key=lambda health: health[0])[1] if group_healths else None

    async def hand_over(self, spec: ClusterSpec, group: str, to: str, access: PlaneAccess) -> None:
        request = pb.FailoverRequest(cluster=spec.name, group=group, node=to)
        refusal = "no controller is known"
        for address in self._controllers(spec):
            try:
                body = request.SerializeToString()
                async with outside_slot():
                    await self._ask(spec, address, Kind.FAILOVER, body, access)
            except (PopmqError, OSError, TimeoutError) as error:
                refusal = str(error)
            else:
                return
        raise DataPlaneUnavailable(refusal)

    async def drain(
        self, spec: ClusterSpec, group: str, access: PlaneAccess, *, undo: bool
    ) -> None:
        request = admin.DrainRequest(group=group, undo=undo)
        await self._admin(spec, "Drain", request, admin.DrainReply, access)

    async def drain_state(self, spec: ClusterSpec, group: str, access: PlaneAccess) -> DrainState:
        """What is left; FIFO topics of which nothing is are given to other groups on the way."""
        request = admin.DrainRequest(group=group, look=True)
        reply = await self._admin(spec, "Drain", request, admin.DrainReply, access)
        topics = await self._admin(
            spec, "ListTopics", admin.ListTopicsRequest(), admin.ListTopicsReply, access
        )
        lag = await self._admin(spec, "Lag", admin.LagRequest(), admin.LagReply, access)
        rest, free = drain_remainder(group, lag, topics.topics, reply)
        for topic in free:
            others = [broker for broker in topic.brokers if broker != group] or _other_groups(
                spec, group
            )
            altered = admin.AlterTopicRequest(topic=admin.Topic(name=topic.name, brokers=others))
            await self._admin(spec, "AlterTopic", altered, admin.TopicReply, access)
        return DrainState(rest.is_drained, remainder_text(group, rest))

    async def keep_mode(self, spec: ClusterSpec, access: PlaneAccess) -> str:
        """auth.mode as it is afterwards, with the Super user that may change it."""
        known = await self._admin(
            spec, "ListUsers", admin.ListUsersRequest(), admin.ListUsersReply, access
        )
        wished = spec.auth_mode.lower() or known.mode
        signer = access.signer
        if all(user.name != signer.access_key for user in known.users):
            created = admin.CreateUserRequest(
                name=signer.access_key, type="super", secret=signer.secret
            )
            await self._admin(spec, "CreateUser", created, admin.UserReply, access)
        if known.mode != wished:
            change = admin.SetAuthModeRequest(mode=wished)
            await self._admin(spec, "SetAuthMode", change, admin.AuthModeReply, access)
        return wished

    def _controllers(self, spec: ClusterSpec) -> list[str]:
        given = self._controller_address
        return [spec.address_of(given)] if given else spec.controller_addresses

    async def _ask(
        self, spec: ClusterSpec, address: str, kind: Kind, body: bytes, access: PlaneAccess
    ) -> bytes:
        hello = Hello(role=ProcessRole.TOOL, name="popmq-operator", cluster=spec.name, epoch=0)
        name = f"controller {address}"
        port = FramePort(address, hello, settings=access.frames, peer_name=name)
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
        access: PlaneAccess,
    ) -> R:
        def asked() -> R:
            with AdminClient(spec, self._proxy_address, access.trusted, access.signer) as port:
                return port.ask(method, request, reply)

        return await on_thread(self._threads, asked)


def _other_groups(spec: ClusterSpec, group: str) -> list[str]:
    names = [spec.names.group(index) for index in range(spec.brokers.groups)]
    return [name for name in names if name != group]


def _heard(reply: pb.ListReplicasReply) -> tuple[int, int]:
    """Brokers that are alive, and the newest epoch: two controllers may not know the same."""
    alive = sum(member.alive for state in reply.groups for member in state.members)
    return alive, max((state.record.epoch for state in reply.groups), default=0)


def health_of(reply: pb.ListReplicasReply, state: pb.GroupState) -> GroupHealth:
    recorded = state.HasField("record")
    names = {member.broker.store_id: member.broker.node or state.group for member in state.members}
    alive = frozenset(names[member.broker.store_id] for member in state.members if member.alive)
    solo = not recorded and bool(state.members) and all(m.replicas <= 1 for m in state.members)
    leaders = [
        member
        for member in state.members
        if member.alive
        and (member.broker.store_id == state.record.leader if recorded else solo)
        and (solo or member.role in (pb.MASTER, pb.HANDING_OVER))
    ]
    in_sync = (
        frozenset(names[member] for member in state.record.sync_state_set if member in names)
        & alive
        if recorded
        else (alive if solo else frozenset())
    )
    return GroupHealth(
        master=names[leaders[0].broker.store_id] if leaders else "",
        epoch=state.record.epoch,
        in_sync=in_sync,
        alive=alive,
        trouble=state.trouble,
        draining=any(leader.broker.draining for leader in leaders),
        solo=solo,
        owner=reply.owner == state.group,
    )
