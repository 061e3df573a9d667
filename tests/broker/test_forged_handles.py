"""Handles that a client made up or changed, with a check that is right: nothing comes of them."""

import random
import struct
from base64 import urlsafe_b64decode, urlsafe_b64encode
from pathlib import Path
from typing import cast

import pytest
from crc32c import crc32c

from popmq.broker.node.broker_process import BrokerProcess
from popmq.common.errors import Code, PopmqError
from popmq.common.protocol.messaging_payloads import Delivery
from popmq.common.settings.settings import BrokerSettings, Settings
from popmq.common.topics import CheckPoints, GroupType, MessageType
from popmq.testing.disk.lying_disk import LyingDisk
from popmq.testing.harness.core_broker import CoreBroker

KINDS = [
    (GroupType.NORMAL, CheckPoints.DURABLE),
    (GroupType.NORMAL, CheckPoints.BUFFERED),
    (GroupType.FIFO, CheckPoints.DURABLE),
]
MEMBER = struct.Struct(">QB")  # queue offset, member; behind it the check
kinds = pytest.mark.parametrize(("type", "check_points"), KINDS)


def raw(handle: bytes) -> bytearray:
    return bytearray(urlsafe_b64decode(handle + b"=" * (-len(handle) % 4)))


def checked(data: bytearray) -> bytes:
    """As text, with the check that belongs to it."""
    data[-4:] = crc32c(bytes(data[:-4])).to_bytes(4, "big")
    return urlsafe_b64encode(data).rstrip(b"=")


def renamed(handle: bytes, offset: int, member: int) -> bytes:
    data = raw(handle)
    data[-4 - MEMBER.size : -4] = MEMBER.pack(offset, member)
    return checked(data)


def delivered(type: GroupType, check_points: CheckPoints) -> tuple[CoreBroker, list[Delivery]]:
    """A broker, and messages 5, 6 and 7 of a queue in flight; those before are acked."""
    core = CoreBroker(disk=LyingDisk())
    core.topic("orders", queues=1, type=MessageType.MIXED)
    core.group("g", type=type, check_points=check_points)
    for number in range(8):
        core.send("orders", b"%d" % number, message_group="k" if type is GroupType.FIFO else "")
    before = core.receive("orders", "g", limit=5)
    core.ack("orders", "g", *(delivery.handle for delivery in before))
    got = core.receive("orders", "g")
    assert [delivery.head for delivery in got] == [b"5", b"6", b"7"]
    return core, got


def refused(core: CoreBroker, handle: bytes) -> None:
    (result,) = core.ack("orders", "g", handle)
    assert result.code == Code.INVALID_RECEIPT_HANDLE
    assert core.reject("orders", "g", handle).code == Code.INVALID_RECEIPT_HANDLE
    with pytest.raises(PopmqError) as error_info:
        core.change("orders", "g", handle, 1_000)
    assert error_info.value.code == Code.INVALID_RECEIPT_HANDLE


@kinds
def test_a_handle_that_names_another_offset_or_member_is_refused_and_nothing_is_written(
    type: GroupType, check_points: CheckPoints
) -> None:
    core, got = delivered(type, check_points)
    end = core.broker.store.end
    for member, delivery in enumerate(got):
        for offset in (0, 4, 5, 6, 7, 8, 69, 1 << 40, (1 << 64) - 1):
            if offset != 5 + member:
                refused(core, renamed(delivery.handle, offset, member))
        for other in (3, 40, 63, 64, 255):
            refused(core, renamed(delivery.handle, 5 + member, other))
            refused(core, renamed(delivery.handle, 5 + other, other))
    assert core.broker.store.end == end
    for delivery in got:
        assert core.ack("orders", "g", delivery.handle)[0].code == Code.OK
    cast(LyingDisk, core.disk).restore_power()
    core.start()
    core.advance(120_000)
    assert core.receive("orders", "g") == []


@kinds
def test_a_handle_of_another_group_or_topic_is_refused_and_still_good_for_its_own(
    type: GroupType, check_points: CheckPoints
) -> None:
    core, got = delivered(type, check_points)
    core.group("other", type=type, check_points=check_points)
    core.topic("elsewhere", queues=1)
    own = core.receive("orders", "other", limit=1)[0].handle
    end = core.broker.store.end
    for topic, group, handle in (
        ("orders", "other", got[0].handle),
        ("orders", "g", own),
        ("elsewhere", "g", got[0].handle),
    ):
        assert core.ack(topic, group, handle)[0].code == Code.INVALID_RECEIPT_HANDLE
        assert core.reject(topic, group, handle).code == Code.INVALID_RECEIPT_HANDLE
        with pytest.raises(PopmqError) as refusal:
            core.change(topic, group, handle, 1_000)
        assert refusal.value.code == Code.INVALID_RECEIPT_HANDLE
    assert core.broker.store.end == end
    assert core.ack("orders", "g", got[0].handle)[0].code == Code.OK
    assert core.ack("orders", "other", own)[0].code == Code.OK


@kinds
def test_a_handle_with_any_bit_changed_and_a_check_that_fits_is_refused(
    type: GroupType, check_points: CheckPoints
) -> None:
    """Its topic, group, queue, attempt, check point, offset and member: none can be made up."""
    core, got = delivered(type, check_points)
    handles = {delivery.handle for delivery in got}
    end = core.broker.store.end
    for at in range(2, len(raw(got[0].handle)) - 4):
        for bit in range(8):
            changed = raw(got[0].handle)
            changed[at] ^= 1 << bit
            handle = checked(changed)
            assert handle not in handles
            (result,) = core.ack("orders", "g", handle)
            assert result.code == Code.INVALID_RECEIPT_HANDLE, (at, bit)
    assert core.broker.store.end == end


async def test_keys_and_ids_come_from_the_system_and_visible_choices_from_elsewhere(
    tmp_path: Path,
) -> None:
    """Whoever sees which queues come first may know the whole state of that generator."""
    process = BrokerProcess(Settings(broker=BrokerSettings(data=str(tmp_path))))
    try:
        await process.start()
        keys, choices = process.broker.rng, process.broker.pop.service._rng
        assert isinstance(keys, random.SystemRandom)
        assert not isinstance(choices, random.SystemRandom)
        assert len(process.broker.registry.signing_keys.newest.secret) == 32
    finally:
        await process.stop()


async def test_two_brokers_have_different_keys_although_their_generators_are_equal(
    tmp_path: Path,
) -> None:
    """The generator of the module `random`, which any library may use and show."""
    secrets = set()
    for name in ("a", "b"):
        random.seed(1)
        process = BrokerProcess(Settings(broker=BrokerSettings(data=str(tmp_path / name))))
        try:
            await process.start()
            secrets.add(process.broker.registry.signing_keys.newest.secret)
        finally:
            await process.stop()
    assert len(secrets) == 2
