"""The disks of all replicas are full, and the master changes: nobody ends, and nothing is lost."""

import asyncio
from contextlib import ExitStack
from pathlib import Path

import pytest
from e2e.replicated import GroupClient, ReplicatedGroup, put
from e2e.small_disks import filled_up, small_disk

from popmq.common.errors import Code, PopmqError
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.wire import admin_pb2 as admin
from popmq.testing.harness.core_broker import pop

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(240)]

TOPIC, READERS = "full-disk", "full-disk-group"
MESSAGES = 60
SETTINGS = {
    "POPMQ_STORE_SEGMENT_BYTES": "4MiB",
    "POPMQ_STORE_SNAPSHOT_BYTES": "1MiB",
    "POPMQ_MESSAGE_MAX_BODY_BYTES": "1MiB",
    "POPMQ_TIMER_LOG_SEGMENT_BYTES": "1MiB",
    "POPMQ_TIMER_WHEEL_SLOTS": "3600",
}


@pytest.mark.parametrize("change", ["kill -9", "failover", "SIGTERM"])
def test_a_change_of_masters_on_full_disks_ends_nobody_and_loses_nothing(
    tmp_path: Path, change: str
) -> None:
    with ExitStack() as stack:
        for number in (1, 2, 3):
            stack.enter_context(small_disk(tmp_path / f"data-{number}", "size=96m"))
        group = stack.enter_context(
            ReplicatedGroup(tmp_path, settings=SETTINGS, own_segments=False)
        )
        asyncio.run(_drive(group, change))


async def _drive(group: ReplicatedGroup, change: str) -> None:
    sent, got = set[bytes](), set[bytes]()
    async with GroupClient(group.address) as client:
        await client.in_sync(3)
        await _make(client)
        for number in range(MESSAGES):
            body = b"%04d" % number + bytes(3_000)
            assert await _put(client, body) == Code.OK
            sent.add(body[:4])
        with ExitStack() as full:
            for broker in group.brokers:
                full.enter_context(filled_up(group.data(broker)))
            await _until_refused(client)
            await _receive_and_ack(client, got)
            await _change_masters(group, client, change)
            for _ in range(4):
                await _receive_and_ack(client, got)
        await _until_sent(client, sent)
        await client.in_sync(3)
        while not sent <= got:
            await _receive_and_ack(client, got)
    for broker in group.brokers:
        assert '"level": "critical"' not in broker.log.read_text(encoding="utf-8")


async def _make(client: GroupClient) -> None:
    topic = admin.Topic(name=TOPIC, queues=2, type="normal")
    request = admin.CreateTopicRequest(topic=topic).SerializeToString()
    await client.ask(Kind.CREATE_TOPIC, request)
    readers = admin.Group(name=READERS, type="normal", max_attempts=90, start_at="oldest")
    await client.ask(Kind.CREATE_GROUP, admin.CreateGroupRequest(group=readers).SerializeToString())


async def _change_masters(group: ReplicatedGroup, client: GroupClient, change: str) -> None:
    master = group.master(await client.state())
    if change == "failover":
        await client.hand_over()
        return
    if change == "SIGTERM":
        master.terminate()  # insists on exit code 0
    else:
        master.kill9()
    master.restart()


async def _put(client: GroupClient, body: bytes) -> int:
    """The code of the answer."""
    try:
        (result,) = hop.decode_put_reply(await client.ask(Kind.PUT, put(TOPIC, body)))
    except PopmqError as refusal:
        return refusal.code
    return result.code


async def _until_refused(client: GroupClient) -> None:
    """The disk is looked at each second, and segments are allocated ahead."""
    async with asyncio.timeout(30):
        while True:
            if await _put(client, bytes(3_000)) == Code.TOO_MANY_REQUESTS:
                return
            await asyncio.sleep(0.2)


async def _until_sent(client: GroupClient, sent: set[bytes]) -> None:
    async with asyncio.timeout(15):
        while True:
            if await _put(client, b"last" + bytes(100)) == Code.OK:
                sent.add(b"last")
                return
            await asyncio.sleep(0.2)


async def _receive_and_ack(client: GroupClient, got: set[bytes]) -> None:
    body = pop(TOPIC, READERS, limit=4, invisible_ms=20_000, poll_ms=1_000)
    reply = hop.decode_pop_reply(await client.ask(Kind.POP, body))
    handles = [delivery.handle for delivery in reply.deliveries]
    if not handles:
        return
    answer = await client.ask(Kind.ACK, hop.encode_ack(hop.AckRequest(TOPIC, READERS, handles)))
    assert {result.code for result in hop.decode_ack_reply(answer)} == {Code.OK}
    got |= {bytes(delivery.head[:4]) for delivery in reply.deliveries}
