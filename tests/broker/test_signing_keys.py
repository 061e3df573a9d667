"""Keys of receipt handles and transaction ids: rotated, kept by logs and snapshots, and over."""

import random
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import cast

import pytest
from crc32c import crc32c

from popmq.common.errors import Code, PopmqError
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.record.signing_keys import SigningKey
from popmq.common.wire import admin_pb2 as admin
from popmq.testing.disk.lying_disk import LyingDisk
from popmq.testing.harness.core_broker import CoreBroker

HOUR_MS = 3_600_000


def rotate(core: CoreBroker, *, look: bool = False) -> list[admin.SigningKeyState]:
    request = admin.RotateKeysRequest(look=look).SerializeToString()
    reply = admin.RotateKeysReply.FromString(core.reply(Kind.ROTATE_KEYS, request))
    return list(reply.keys)


def secrets_of(core: CoreBroker) -> list[SigningKey]:
    return list(core.broker.registry.signing_keys)


def with_messages(count: int) -> CoreBroker:
    core = CoreBroker(disk=LyingDisk())
    core.topic("orders", queues=1)
    core.group("g")
    for number in range(count):
        core.send("orders", b"%d" % number)
    return core


def test_handles_of_every_key_are_good_while_they_live_also_after_a_crash() -> None:
    core = with_messages(12)
    handles = []
    for _ in range(11):
        (delivery,) = core.receive("orders", "g", limit=1, invisible_ms=HOUR_MS)
        handles.append(delivery.handle)
        rotate(core)
    assert len({key.secret for key in secrets_of(core)}) == 12
    cast(LyingDisk, core.disk).restore_power()
    core.start()
    for handle in handles[:5]:
        assert core.ack("orders", "g", handle)[0].code == Code.OK
    changed = core.change("orders", "g", handles[5], HOUR_MS)
    assert core.ack("orders", "g", changed)[0].code == Code.OK
    for handle in handles[6:]:
        assert core.ack("orders", "g", handle)[0].code == Code.OK


def test_a_key_is_over_when_nothing_that_it_signed_can_live_and_gone_at_the_next_rotation() -> None:
    core = with_messages(2)
    (delivery,) = core.receive("orders", "g", limit=1)
    first = secrets_of(core)[0]
    signing, until_ms = [(key.id, key.until_ms) for key in rotate(core)], 0
    assert [key_id for key_id, _ in signing] == [0, 1]
    assert signing[1][1] == 0
    until_ms = signing[0][1]
    settings = core.broker.settings
    assert until_ms - core.broker.store.log_ms() >= settings.transaction.keep_ms
    assert until_ms - core.broker.store.log_ms() >= settings.pop.invisible_max_ms
    while core.broker.store.log_ms() <= until_ms:
        core.advance(6 * HOUR_MS)
        core.send("orders", b"time passes")
    (result,) = core.ack("orders", "g", delivery.handle)
    assert result.code == Code.INVALID_RECEIPT_HANDLE
    assert [key.id for key in rotate(core)] == [1, 2]
    assert first.secret not in [key.secret for key in secrets_of(core)]


def test_a_look_changes_nothing_and_no_reply_shows_a_secret() -> None:
    core = with_messages(0)
    end = core.broker.store.end
    assert [(key.broker, key.id, key.until_ms) for key in rotate(core, look=True)] == [
        (core.broker.settings.broker.name, 0, 0)
    ]
    assert core.broker.store.end == end
    reply = core.reply(Kind.ROTATE_KEYS, b"")
    assert not any(key.secret in reply for key in secrets_of(core))


def test_a_handle_under_another_keys_id_is_refused() -> None:
    core = with_messages(1)
    (delivery,) = core.receive("orders", "g", limit=1)
    rotate(core)
    forged = _with_key_id(delivery.handle, 1)
    (result,) = core.ack("orders", "g", forged)
    assert result.code == Code.INVALID_RECEIPT_HANDLE
    assert core.ack("orders", "g", delivery.handle)[0].code == Code.OK


def _with_key_id(handle: bytes, key_id: int) -> bytes:
    data = bytearray(urlsafe_b64decode(handle + b"=" * (-len(handle) % 4)))
    data[2 + data[1] + 18] = key_id  # behind topic, group, queue, attempt and epoch
    data[-4:] = crc32c(bytes(data[:-4])).to_bytes(4, "big")
    return urlsafe_b64encode(data).rstrip(b"=")


def test_keys_are_in_a_snapshot_as_they_were_rotated() -> None:
    core = with_messages(0)
    for _ in range(3):
        rotate(core)
    before = secrets_of(core)
    table = core.broker.registry
    pieces = [content for content, _ in table.begin_snapshot()]
    table.signing_keys.replace([])
    for content in pieces:
        table.restore(content)
    assert secrets_of(core) == before


@pytest.mark.parametrize("seed", range(5))
def test_no_bit_of_a_handle_can_change_whatever_the_number_of_keys(seed: int) -> None:
    print(f"seed {seed}")
    dice = random.Random(seed)
    core = with_messages(1)
    for _ in range(dice.randrange(8)):
        rotate(core)
    (delivery,) = core.receive("orders", "g", limit=1)
    for key_id in range(256):
        handle = _with_key_id(delivery.handle, key_id)
        if handle != delivery.handle:
            with pytest.raises(PopmqError):
                core.change("orders", "g", handle, 1_000)
