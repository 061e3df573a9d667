"""A broker that holds the cluster's secret speaks for itself alone: for its group and its node."""

import asyncio
from collections.abc import Callable

import pytest
from common.frame_peers import LONG_MS, SECONDS, Handler, asking

from popmq.common.errors import Code, PopmqError
from popmq.common.protocol import replication_payloads as replication
from popmq.common.protocol.cluster_secret import ClusterSecret
from popmq.common.protocol.frame_port import call
from popmq.common.protocol.frame_server import FrameServer
from popmq.common.protocol.frames import FrameSettings, Hello, ProcessRole
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.wire import controller_pb2 as pb

OURS = FrameSettings(secret=ClusterSecret((b"a" * 32,)))
MASTER = Hello(role=ProcessRole.BROKER, name="a-0", cluster="blue", group="a")
CONTROLLER = Hello(role=ProcessRole.CONTROLLER, name="controller", cluster="blue")
PEER = Hello(role=ProcessRole.BROKER, name="a-1", cluster="blue", group="a")
STRANGER = Hello(role=ProcessRole.BROKER, name="b-0", cluster="blue", group="b")
EARLIER = Hello(role=ProcessRole.BROKER, name="b-0", cluster="blue")  # names no group
REPLICATION = (
    Kind.HANDSHAKE,
    Kind.FETCH,
    Kind.ACKED,
    Kind.READ_SNAPSHOT,
    Kind.TIMER_CHECK_POINT,
)


def handshake(group: str, node: str) -> bytes:
    return replication.encode_handshake(replication.Handshake(1, "store", node, "", 0, 1 << 20))


def register(group: str, node: str) -> bytes:
    broker = pb.BrokerAddress(broker=group, node=node)
    return pb.RegisterRequest(broker=broker).SerializeToString()


def alter(group: str, node: str) -> bytes:
    return pb.AlterSyncStateSetRequest(group=group).SerializeToString()


def watch(group: str, node: str) -> bytes:
    return pb.WatchGroupRequest(group=group).SerializeToString()


def failover(group: str, node: str) -> bytes:
    return pb.FailoverRequest(group=group, node="a-2").SerializeToString()


async def answers(server: Hello, peer: Hello, *requests: tuple[Kind, bytes]) -> list[str]:
    """Empty for a request that reached the handler, else why it was refused."""
    handler = Handler()
    frames = FrameServer(handler, server, settings=OURS)
    address = await frames.listen("127.0.0.1:0")
    texts = []
    async with asyncio.timeout(SECONDS), asking(address, peer, settings=OURS) as port:
        for kind, body in requests:
            try:
                await call(port, kind, body, LONG_MS)
                texts.append("")
            except PopmqError as refusal:
                texts.append(str(refusal) if refusal.code is Code.FORBIDDEN else repr(refusal))
    await frames.stop()
    assert handler.asked.qsize() == texts.count("")
    assert frames.forbidden == len(texts) - texts.count("")
    return texts


async def test_a_broker_of_another_group_copies_nothing_of_a_log() -> None:
    requests = [(kind, b"") for kind in REPLICATION]
    requests[0] = (Kind.HANDSHAKE, handshake("b", "b-0"))
    for text in await answers(MASTER, STRANGER, *requests):
        assert text == "broker b-0 of broker group b may not copy the log of broker group a"
    between_groups = [(Kind.COPY_META, b""), (Kind.TAKE_TIMERS, b"")]
    assert await answers(MASTER, STRANGER, *between_groups) == ["", ""]


async def test_a_slave_acknowledges_in_its_own_name_alone() -> None:
    """ACKED names a session, which the handshake of that node began."""
    as_other, as_itself = (
        (Kind.HANDSHAKE, handshake("a", "a-2")),
        (Kind.HANDSHAKE, handshake("a", "a-1")),
    )
    refused, served = await answers(MASTER, PEER, as_other, as_itself)
    assert refused == "broker a-1 of broker group a may not send HANDSHAKE as node a-2"
    assert served == ""


@pytest.mark.parametrize(
    ("kind", "request_of"),
    [
        (Kind.REGISTER, register),
        (Kind.ALTER_SYNC_STATE_SET, alter),
        (Kind.WATCH_GROUP, watch),
        (Kind.FAILOVER, failover),
    ],
)
async def test_a_broker_asks_controllers_for_its_own_group_alone(
    kind: Kind, request_of: Callable[[str, str], bytes]
) -> None:
    foreign, own = (kind, request_of("a", "b-0")), (kind, request_of("b", "b-0"))
    refused, served = await answers(CONTROLLER, STRANGER, foreign, own)
    expected = f"broker b-0 of broker group b may not send {kind.name} for broker group a"
    assert (refused, served) == (expected, "")


async def test_a_broker_registers_as_the_node_that_it_proved_to_be() -> None:
    requests = [(Kind.REGISTER, register("a", node)) for node in ("a-2", "a-1")]
    expected = "broker a-1 of broker group a may not send REGISTER as node a-2"
    assert await answers(CONTROLLER, PEER, *requests) == [expected, ""]


async def test_requests_that_cannot_be_read_are_left_to_their_handler() -> None:
    assert await answers(CONTROLLER, PEER, (Kind.REGISTER, b"\xff")) == [""]
    assert await answers(MASTER, PEER, (Kind.HANDSHAKE, b"\xff")) == [""]


async def test_brokers_of_releases_that_name_no_group_are_served_as_before() -> None:
    requests = [(Kind.HANDSHAKE, handshake("", "x")), (Kind.FETCH, b"")]
    assert await answers(MASTER, EARLIER, *requests) == ["", ""]
    assert await answers(CONTROLLER, EARLIER, (Kind.REGISTER, register("a", "x"))) == [""]
