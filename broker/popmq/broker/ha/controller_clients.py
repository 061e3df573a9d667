"""Controllers: heartbeats, the watch for orders, and requests to alter the SyncStateSet.

Any number of controllers, any of which may be away, old, or wrong: what they say is judged by
epochs and versions, so it does not matter who says it.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from google.protobuf.message import DecodeError

from popmq.broker.ha.controller_wire import alter_to_wire, view_from_wire
from popmq.broker.ha.role import GroupView
from popmq.broker.ha.sync_state import AlterSyncStateSet
from popmq.common.errors import Code, PopmqError
from popmq.common.protocol.group_record import GroupRecord
from popmq.common.protocol.messaging_payloads import Kind, OnReply, Port
from popmq.common.wire import controller_pb2 as pb

logger = logging.getLogger(__name__)

ANSWER_MS = 2_000
WATCH_MS = 10_000
AGAIN_MS = 200  # after a watch that failed
AWAY_MS = 3_000  # without an answer from any


class _Controller:
    """What is on its way to one of them."""

    def __init__(self, port: Port) -> None:
        self.port = port
        self.beat_due_ms = 0
        self.beating = False
        self.watch_due_ms = 0
        self.watching = False
        self.known_view = 0
        self.heard_ms = -AWAY_MS
        self.failed_ms = -1  # when it had no answer to an alter request
        self.refused: Code | None = None  # said once, not at every beat


class ControlledNode(Protocol):
    """The broker that speaks to controllers."""

    @property
    def store_id(self) -> str: ...

    def registration(self) -> bytes:
        """The content of a heartbeat."""
        ...

    def on_view(self, view: GroupView) -> None:
        """What the group looks like."""
        ...

    def on_record(self, record: GroupRecord) -> None:
        """What the record is."""
        ...

    def on_cluster(self, reply: pb.RegisterReply) -> None:
        """The answer to a heartbeat."""
        ...


class ControllerClients:
    def __init__(
        self,
        ports: Sequence[Port],
        node: ControlledNode,
        *,
        cluster: str,
        group: str,
        heartbeat_ms: int,
        watches: bool,
        now_ms: Callable[[], int],
    ) -> None:
        self._all = [_Controller(port) for port in ports]
        self._node = node
        self._cluster = cluster
        self._group = group
        self._heartbeat_ms = heartbeat_ms
        self._watches = watches
        self._now_ms = now_ms
        self._ended = False

    def add_ports(self, ports: Sequence[Port]) -> None:
        """More controllers to speak to."""
        self._all += [_Controller(port) for port in ports]

    @property
    def reachable(self) -> bool:
        """Whether one of them answered lately."""
        now_ms = self._now_ms()
        return any(now_ms - client.heard_ms < AWAY_MS for client in self._all)

    def step(self) -> int:
        now_ms = self._now_ms()
        for controller in self._all:
            if now_ms >= controller.beat_due_ms and not controller.beating:
                self._beat(controller, now_ms)
            if self._watches and now_ms >= controller.watch_due_ms and not controller.watching:
                self._watch(controller)
        return 0

    def heartbeat_now(self) -> None:
        """The role changed: tell them with the next step."""
        for controller in self._all:
            controller.beat_due_ms = 0

    def alter(self, alter: AlterSyncStateSet) -> None:
        """Ask one that answers; SetKeeper asks again if nothing comes of it, and then another."""
        lately = sorted(
            self._all, key=lambda controller: (controller.failed_ms, -controller.heard_ms)
        )
        if lately:
            names = {"cluster": self._cluster, "group": self._group}
            self._alter(lately[0], alter_to_wire(alter, **names, leader=self._node.store_id))

    def stop(self) -> None:
        self._ended = True

    def _ask(
        self, controller: _Controller, kind: Kind, body: bytes, timeout_ms: int, done: OnReply
    ) -> None:
        def answered(reply: bytes | PopmqError) -> None:
            if self._ended:
                return
            if not isinstance(reply, PopmqError):
                controller.heard_ms = self._now_ms()
            try:
                done(reply)
            except DecodeError:
                logger.error("a controller's answer cannot be read", extra={"kind": kind.name})

        controller.port.request(kind, body, timeout_ms, answered)

    # -- heartbeats

    def _beat(self, controller: _Controller, now_ms: int) -> None:
        controller.beating = True
        controller.beat_due_ms = now_ms + self._heartbeat_ms

        def done(reply: bytes | PopmqError) -> None:
            controller.beating = False
            if isinstance(reply, PopmqError):
                self._beat_failed(controller, reply)
                return
            controller.refused = None
            decoded_reply = pb.RegisterReply.FromString(reply)
            self._heartbeat_ms = decoded_reply.heartbeat_ms or self._heartbeat_ms
            self._node.on_cluster(decoded_reply)
            if decoded_reply.HasField("state"):
                self._node.on_view(view_from_wire(decoded_reply.state, self._now_ms()))

        self._ask(controller, Kind.REGISTER, self._node.registration(), ANSWER_MS, done)

    def _beat_failed(self, controller: _Controller, error: PopmqError) -> None:
        away = error.code in (Code.HA_NOT_AVAILABLE, Code.PROXY_TIMEOUT)
        if not away and error.code is not controller.refused:
            logger.warning("registration refused", extra={"reason": str(error)})
        controller.refused = None if away else error.code

    # -- orders

    def _watch(self, controller: _Controller) -> None:
        controller.watching = True
        body = pb.WatchGroupRequest(
            cluster=self._cluster,
            group=self._group,
            known_view=controller.known_view,
            wait_ms=WATCH_MS,
            store_id=self._node.store_id,
        ).SerializeToString()

        def done(reply: bytes | PopmqError) -> None:
            controller.watching = False
            if isinstance(reply, PopmqError):
                controller.watch_due_ms = self._now_ms() + AGAIN_MS
                return
            view = view_from_wire(pb.WatchGroupReply.FromString(reply).state, self._now_ms())
            controller.known_view = view.view
            self._node.on_view(view)

        self._ask(controller, Kind.WATCH_GROUP, body, WATCH_MS + ANSWER_MS, done)

    # -- the SyncStateSet

    def _alter(self, controller: _Controller, body: bytes) -> None:
        def done(reply: bytes | PopmqError) -> None:
            if isinstance(reply, PopmqError):
                controller.failed_ms = self._now_ms()
                logger.info("no answer to an alter request", extra={"reason": str(reply)})
                return
            decoded_reply = pb.AlterSyncStateSetReply.FromString(reply)
            if decoded_reply.outcome == pb.AlterSyncStateSetReply.UNKNOWN:
                controller.failed_ms = self._now_ms()
            if decoded_reply.HasField("record"):
                self._node.on_record(GroupRecord.from_wire(decoded_reply.record))

        self._ask(controller, Kind.ALTER_SYNC_STATE_SET, body, ANSWER_MS, done)
