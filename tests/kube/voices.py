"""A controller for an operator that is a process of its own: real frames, simulated brokers."""

import asyncio
import base64
from collections.abc import Callable

from kube.clusters import read
from kube.control_plane import ControlPlane, LivePods
from kube.world import Brokers

from popmq.common.errors import Code, PopmqError, Refused
from popmq.common.protocol.cluster_secret import parse_cluster_secret
from popmq.common.protocol.frame_server import FrameServer
from popmq.common.protocol.frames import FrameSettings, Hello, ProcessRole
from popmq.common.protocol.messaging_payloads import Kind, OnReply
from popmq.common.wire import controller_pb2 as pb
from popmq.operator.cluster.observed import GroupHealth
from popmq.operator.kube.admin_client import DataPlaneUnavailable
from popmq.operator.model.spec import ClusterSpec
from popmq.testing.loop_thread import ThreadServer

WITHOUT_SECRET = FrameSettings(secret_required=False)
SECRET_PAUSE_S = 0.1


class Voice(ThreadServer):
    """Of the controllers of one cluster, entered at `address`.  A broker is as its pod is
    (kube.world.Brokers), or as `brokers` say.  `looks` counts those that asked.  `fault` may say of
    a hand-over "drop": it is not done, and the asker is told so if it is still there."""

    def __init__(
        self,
        plane: ControlPlane,
        namespace: str,
        name: str,
        brokers: Brokers | None = None,
        *,
        listen: str = "127.0.0.1:0",
    ) -> None:
        super().__init__("voice")
        self._listen = listen
        self.brokers = brokers or Brokers(LivePods(plane))
        self.looks = 0
        self.fault: Callable[[], str] = lambda: ""
        self.address = ""
        self._plane = plane
        self._path = f"/apis/popmq.io/v1beta1/namespaces/{namespace}/brokerclusters/{name}"
        self._secret_path = f"/api/v1/namespaces/{namespace}/secrets/{name}-cluster-secret"
        self._frames: FrameServer | None = None
        self._hello = Hello(role=ProcessRole.CONTROLLER, name="controller", cluster=name)

    async def _open(self) -> None:
        self._frames = FrameServer(self, self._hello, settings=WITHOUT_SECRET)
        self.address = await self._frames.listen(self._listen)
        self._secret_reader = asyncio.get_running_loop().create_task(self._read_secret())

    async def _read_secret(self) -> None:
        """As soon as the operator has made it: pods wait for their volumes, too."""
        assert self._frames is not None
        stored = None
        while stored is None:
            await asyncio.sleep(SECRET_PAUSE_S)
            stored = await asyncio.to_thread(self._plane.get, self._secret_path)
        text = base64.b64decode(stored["data"]["secret"])
        secret = parse_cluster_secret(text, self._secret_path)
        self._frames.settings = FrameSettings(secret=secret)

    async def _close(self) -> None:
        assert self._frames is not None
        self._secret_reader.cancel()
        await self._frames.stop()

    def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: OnReply) -> int:
        """hop.Port"""
        try:
            on_reply(self._answer(kind, body))
        except PopmqError as error:
            on_reply(error)
        except ConnectionError as error:
            on_reply(Refused(Code.HA_NOT_AVAILABLE, str(error)))
        return 0

    def cancel(self, request_id: int) -> None:
        """Nothing waits here."""

    def _answer(self, kind: Kind, body: bytes) -> bytes:
        spec = self._spec()
        if kind is Kind.LIST_REPLICAS:
            self.looks += 1
            groups = [
                _state(name, self.brokers.look_at(spec, name))
                for name in map(spec.names.group, range(spec.brokers.groups))
            ]
            return pb.ListReplicasReply(groups=groups, owner="broker-0").SerializeToString()
        asked = pb.FailoverRequest.FromString(body)
        if self.fault() == "drop":
            raise Refused(Code.HA_NOT_AVAILABLE, "as the test wants it")
        try:
            self.brokers.give_way(spec, asked.group, asked.node)
        except DataPlaneUnavailable as error:
            raise Refused(Code.HA_NOT_AVAILABLE, str(error)) from error
        return pb.FailoverReply(handed_over=True).SerializeToString()

    def _spec(self) -> ClusterSpec:
        plane = self._plane.get(self._path)
        if plane is None:
            raise Refused(Code.HA_NOT_AVAILABLE, "the API server does not say which brokers")
        return read(plane)


def _state(name: str, health: GroupHealth) -> pb.GroupState:
    """Store ids are the names of the nodes: nobody here has a disk."""
    record = pb.GroupRecord(leader=health.master, epoch=1, sync_state_set=sorted(health.in_sync))
    members = [
        pb.Member(
            broker=pb.BrokerAddress(broker=name, node=node, store_id=node),
            role=pb.MASTER if node == health.master else pb.SLAVE,
            alive=True,
            replicas=3,
        )
        for node in sorted(health.alive)
    ]
    return pb.GroupState(group=name, record=record, members=members)
