"""A broker group of several processes with a controller, and a client of its frames.

With no proxy in between, what a test sees is what the brokers said.
"""

import asyncio
import contextlib
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from e2e.processes import LOCAL, Role, free_port, run_command

from popmq.common.errors import Code, DeadlineExceeded, PopmqError, Unavailable
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.frame_port import FramePort, call
from popmq.common.protocol.frames import DEFAULT_SETTINGS, FrameSettings, Hello
from popmq.common.protocol.frames import ProcessRole as HelloRole
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.topics import MessageType
from popmq.common.wire import controller_pb2 as pb
from popmq.common.wire.replication_pb2 import DescribeRoleReply

GROUP = "group-a"
TIME_S = 30.0


class ReplicatedGroup:
    """A controller, `replicas` brokers and some proxies, each a process; entered, all of them run.
    Clients of frames need no proxy."""

    def __init__(
        self,
        folder: Path,
        *,
        replicas: int = 3,
        proxies: int = 0,
        settings: Mapping[str, str] | None = None,
        own_segments: bool = True,
    ) -> None:
        common = {"POPMQ_HTTP_LISTEN": f"{LOCAL}:0", **(settings or {})}
        self.address = f"{LOCAL}:{free_port()}"
        self.folder = folder
        self.controller = Role(
            "controller",
            ["controller"],
            folder=folder,
            settings={
                **common,
                "POPMQ_CONTROLLER_LISTEN": self.address,
                # One that starts again knows who leads.
                "POPMQ_CONTROLLER_STORE": "file",
                "POPMQ_CONTROLLER_DATA": str(folder / "controller-data"),
            },
        )
        self.brokers = [
            Role(
                f"node-{number}",
                ["broker"],
                folder=folder,
                settings={
                    **common,
                    "POPMQ_CONTROLLER_ADDRESSES": self.address,
                    "POPMQ_BROKER_NAME": GROUP,
                    "POPMQ_BROKER_NODE": f"node-{number}",
                    "POPMQ_BROKER_DATA": str(folder / f"data-{number}"),
                    "POPMQ_BROKER_LISTEN": f"{LOCAL}:{free_port()}",
                    "POPMQ_REPLICATION_REPLICAS": str(replicas),
                    **({"POPMQ_STORE_SEGMENT_BYTES": "64MiB"} if own_segments else {}),
                    "POPMQ_TOPIC_AUTO_CREATE": "true",
                },
            )
            for number in range(1, replicas + 1)
        ]
        self.proxies = [
            Role(
                f"proxy-{number}",
                ["proxy"],
                folder=folder,
                settings={
                    **common,
                    "POPMQ_CONTROLLER_ADDRESSES": self.address,
                    "POPMQ_PROXY_LISTEN": f"{LOCAL}:0",
                },
            )
            for number in range(1, proxies + 1)
        ]
        self._stack = ExitStack()

    @property
    def endpoints(self) -> list[str]:
        return [proxy.ready.endpoint for proxy in self.proxies]

    def popmq(self, *arguments: str) -> str:
        """Run the command line against the first proxy; return what it printed."""
        return run_command(self.endpoints[0], self.folder, *arguments)

    def create(self, *, topic: str, groups: list[str]) -> None:
        self.popmq("topic", "create", topic)
        for group in groups:
            self.popmq("group", "create", group)

    def data(self, broker: Role) -> Path:
        return self.folder / f"data-{broker.name[-1]}"

    def master(self, state: pb.GroupState) -> Role:
        (leader,) = (
            member for member in state.members if member.broker.store_id == state.record.leader
        )
        return self.of_node(leader.broker.node)

    def of_node(self, node: str) -> Role:
        return next(broker for broker in self.brokers if broker.name == node)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for role in (self.controller, *self.brokers, *self.proxies):
                stack.enter_context(role)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._stack.__exit__(*raised)


class GroupClient:
    """Asks the group's master, whoever that is; a refusal of one that is not is no answer."""

    def __init__(self, controller: str, frames: FrameSettings = DEFAULT_SETTINGS) -> None:
        self._hello = Hello(role=HelloRole.PROXY, name="a-test", cluster="popmq")
        self._frames = frames
        self._controller = self._port(controller)
        self._ports: dict[str, FramePort] = {}
        self._master = ""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._controller.close()
        for port in self._ports.values():
            await port.close()

    async def ask(self, kind: Kind, body: bytes, *, timeout_s: float = TIME_S) -> bytes:
        """The master's answer. A request whose outcome is not known is made again: DeadlineExceeded
        says that none was ever known."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            try:
                return await call(await self.master(), kind, body, 2_000)
            except PopmqError as error:
                if error.code not in (
                    Code.NOT_MASTER,
                    Code.HA_NOT_AVAILABLE,
                    Code.PROXY_TIMEOUT,
                ):
                    raise
                self._master = ""
                await asyncio.sleep(0.02)
        raise DeadlineExceeded(f"no answer to {kind.name} within {timeout_s} s")

    async def once(self, kind: Kind, body: bytes) -> bytes:
        """One try; PopmqError when nobody knows what became of it."""
        try:
            return await call(await self.master(), kind, body, 5_000)
        except PopmqError:
            self._master = ""
            raise

    async def master(self) -> FramePort:
        if not self._master:
            request = pb.RoutesRequest(known_version=0, wait_ms=0).SerializeToString()
            reply = await call(self._controller, Kind.ROUTES, request, 2_000)
            routes = pb.RoutesReply.FromString(reply).brokers
            self._master = next((route.address for route in routes if route.broker == GROUP), "")
        if not self._master:
            raise Unavailable("there is no route yet")
        return self.port(self._master)

    def port(self, address: str) -> FramePort:
        if address not in self._ports:
            self._ports[address] = self._port(address)
        return self._ports[address]

    async def state(self) -> pb.GroupState:
        request = pb.ListReplicasRequest(group=GROUP).SerializeToString()
        reply = await call(self._controller, Kind.LIST_REPLICAS, request, 2_000)
        groups = pb.ListReplicasReply.FromString(reply).groups
        return groups[0] if groups else pb.GroupState()

    async def hand_over(self) -> None:
        """Another broker leads when this returns; PopmqError when none could."""
        request = pb.FailoverRequest(group=GROUP).SerializeToString()
        await call(self._controller, Kind.FAILOVER, request, 5_000)
        self._master = ""

    async def role_of(self, address: str) -> DescribeRoleReply:
        # A proxy may not ask for it: a controller does.
        hello = replace(self._hello, role=HelloRole.CONTROLLER)
        port = FramePort(address, hello, settings=self._frames, peer_name=address)
        port.start()
        try:
            reply = await call(port, Kind.DESCRIBE_ROLE, b"", 2_000)
        finally:
            await port.close()
        return DescribeRoleReply.FromString(reply)

    async def in_sync(self, count: int, *, within_s: float = TIME_S) -> pb.GroupState:
        """Wait until a master serves and so many are in the SyncStateSet."""
        async with asyncio.timeout(within_s):
            while True:
                with contextlib.suppress(PopmqError):
                    state = await self.state()
                    alive = {member.broker.store_id for member in state.members if member.alive}
                    if len(alive & set(state.record.sync_state_set)) >= count:
                        await self.master()
                        return state
                await asyncio.sleep(0.05)

    def _port(self, address: str) -> FramePort:
        port = FramePort(address, self._hello, settings=self._frames, peer_name=address)
        port.start()
        return port


def put(topic: str, body: bytes) -> bytes:
    entry = hop.PutEntry(MessageType.NORMAL, body, b"")
    return hop.encode_put(hop.PutRequest(topic, [entry], auto_create=True))


async def agree(
    group: ReplicatedGroup, client: GroupClient, *, may_have_differed: bool = False
) -> None:
    """All logs end at the same position with equal state hashes.  Unless an earlier version was
    among them (`may_have_differed`), no broker has ever found tables that differ, nor failed."""
    async with asyncio.timeout(30):
        while True:
            state = await client.in_sync(3)
            try:
                replies = [await client.role_of(member.broker.address) for member in state.members]
            except Unavailable:  # a broker whose role changes closes its connections
                await asyncio.sleep(0.1)
                continue
            ends = {(reply.end, reply.confirmed) for reply in replies}
            # One that did not make its newest snapshot itself knows no hash of it; one that was
            # down at a mark has made none there.
            known = [reply for reply in replies if int(reply.state_hash, 16)]
            hashes = {(reply.state_hash_position, reply.state_hash) for reply in known}
            assert len(hashes) == len({position for position, _ in hashes}), hashes
            if len(ends) == 1:
                break
            await asyncio.sleep(0.1)
    if may_have_differed:
        return
    for broker in group.brokers:
        assert not broker.log.read_text().count("the tables are not the master's")
        assert broker.log.read_text().count('"level": "critical"') == 0


async def agree_on_tables(
    group: ReplicatedGroup, client: GroupClient, topic: str, *, may_have_differed: bool = False
) -> None:
    """The logs agree, and all three have the same state hash of a position behind their end.

    Messages are sent to `topic` until the master begins a snapshot there; who did not make its
    newest snapshot itself, or was away at its mark, has one to compare after the next.
    """
    await agree(group, client, may_have_differed=may_have_differed)
    state = await client.in_sync(3)
    end = max([(await client.role_of(member.broker.address)).end for member in state.members])
    async with asyncio.timeout(2 * TIME_S):
        while True:
            for _ in range(32):
                await client.ask(Kind.PUT, put(topic, bytes(16_384)))
            await agree(group, client, may_have_differed=may_have_differed)
            replies = [await client.role_of(member.broker.address) for member in state.members]
            known = {(reply.state_hash_position, reply.state_hash) for reply in replies}
            position, state_hash = next(iter(known))
            if len(known) == 1 and position > end and int(state_hash, 16):
                return
