"""Receipt handles: what they say, and what is not believed."""

import hmac
import random
from base64 import urlsafe_b64decode, urlsafe_b64encode

import pytest
from crc32c import crc32c

from popmq.common.errors import InvalidReceiptHandle, Refused
from popmq.common.record.receipt import (
    ReceiptHandle,
    ReceiptReader,
    broker_of,
    encode_member,
    sign_check_point,
)
from popmq.common.record.signing_keys import LIVE_LIMIT, SigningKey, SigningKeys
from popmq.common.record.transaction_id import TransactionId

KEY = bytes(range(32))
KEYS = SigningKeys.of(KEY)
HANDLE = ReceiptHandle("broker-a", 64, 7, 3, 1 << 40, 17, 5, 1 << 50, 63)


def raw(handle: bytes) -> bytes:
    return urlsafe_b64decode(handle + b"=" * (-len(handle) % 4))


def text(data: bytes) -> bytes:
    return urlsafe_b64encode(data).rstrip(b"=")


def test_a_handle_says_what_it_was_made_of() -> None:
    rng = random.Random(1)
    reader = ReceiptReader()
    for _ in range(200):
        handle = ReceiptHandle(
            "b" * rng.randrange(1, 200),
            rng.getrandbits(32),
            rng.getrandbits(32),
            rng.getrandbits(32),
            rng.getrandbits(64),
            rng.getrandbits(16),
            rng.getrandbits(32),
            rng.getrandbits(56),
            rng.randrange(64),
        )
        encoded = handle.encode(KEY)
        assert reader.decode(encoded, KEYS) == handle
        assert broker_of(encoded) == handle.broker
        assert not set(encoded) & set(b"+/= \n")


def test_one_signature_serves_all_messages_of_a_receive() -> None:
    common = sign_check_point(KEY, "broker-a", 64, 7, 3, 17, 5, 1 << 50)
    assert encode_member(common, HANDLE.queue_offset, HANDLE.member) == HANDLE.encode(KEY)


@pytest.mark.parametrize("known", [False, True], ids=["new", "signature known"])
def test_a_handle_with_any_byte_changed_is_refused(known: bool) -> None:
    data = raw(HANDLE.encode(KEY))
    reader = ReceiptReader()
    if known:
        reader.decode(HANDLE.encode(KEY), KEYS)
    for at in range(len(data)):
        for bit in (0, 3, 7):
            changed = bytearray(data)
            changed[at] ^= 1 << bit
            with pytest.raises(InvalidReceiptHandle):
                reader.decode(text(bytes(changed)), KEYS)


@pytest.mark.parametrize("known", [False, True], ids=["new", "signature known"])
def test_a_check_point_that_was_made_up_is_refused_whatever_its_check_says(known: bool) -> None:
    reader = ReceiptReader()
    if known:
        reader.decode(HANDLE.encode(KEY), KEYS)
    data = raw(HANDLE.encode(KEY))
    signed = len(data) - 13  # before offset, member and check
    for at in range(2, signed):
        changed = bytearray(data[:-4])
        changed[at] ^= 1
        forged = bytes(changed) + crc32c(bytes(changed)).to_bytes(4, "big")
        with pytest.raises(InvalidReceiptHandle, match="signature does not match"):
            reader.decode(text(forged), KEYS)


def test_a_handle_of_another_key_is_refused_even_if_that_signature_is_known() -> None:
    reader = ReceiptReader()
    reader.decode(HANDLE.encode(KEY), KEYS)
    with pytest.raises(InvalidReceiptHandle, match="made by another cluster"):
        reader.decode(HANDLE.encode(KEY), SigningKeys.of(b"x" * 32))
    with pytest.raises(InvalidReceiptHandle, match="made by another cluster"):
        reader.decode(HANDLE.encode(b"x" * 32), KEYS)


def test_signatures_that_are_remembered_are_bounded() -> None:
    reader = ReceiptReader()
    for sequence in range(ReceiptReader._REMEMBERED + 10):
        handle = ReceiptHandle("b", 1, 1, 0, 0, 1, 1, sequence, 0)
        assert reader.decode(handle.encode(KEY), KEYS) == handle
    assert len(reader._right) <= ReceiptReader._REMEMBERED


@pytest.mark.parametrize(
    ("handle", "message"),
    [
        (b"", "0 bytes, which no popmq handle has"),
        (b"####", "not base64|bytes, which no popmq handle has"),
        (b"abcde", "not base64"),
        (HANDLE.encode(KEY)[:-4], "bytes, which no popmq handle has"),
        (text(b"\x01" + raw(HANDLE.encode(KEY))[1:]), "unknown version 1"),
    ],
    ids=["empty", "no alphabet", "no length", "cut", "version"],
)
def test_what_is_no_handle_is_told_apart(handle: bytes, message: str) -> None:
    with pytest.raises(InvalidReceiptHandle, match=message):
        ReceiptReader().decode(handle, KEYS)
    with pytest.raises(InvalidReceiptHandle, match=message):
        broker_of(handle)


def test_the_signature_is_hmac_sha256_for_keys_of_any_length() -> None:
    for size in (0, 1, 32, 63, 64, 65, 200):
        key = bytes(range(size))
        signed = sign_check_point(key, "broker-a", 64, 7, 3, 17, 5, 1 << 50)
        assert signed[-16:] == hmac.digest(key, signed[:-16], "sha256")[:16]


# Made by the release before keys had ids.
OLD_HANDLE = (
    b"Aghicm9rZXItYQAAAEAAAAAHAAAAAwARAAAABQAEAAAAAAAAqdinroZ88Eto1NSxkpGYVgAAAQAAAAAAP386yLM"
)
OLD_TRANSACTION = "AQhicm9rZXItYQAAAEAAAAAAAAAAB4Olyj-XduoA0_MTf9owzaM="


def test_handles_and_transaction_ids_of_the_release_before_are_those_of_key_0() -> None:
    assert HANDLE.encode(KEY) == OLD_HANDLE
    assert TransactionId("broker-a", 64, 7).encode(KEY, "m-1") == OLD_TRANSACTION
    assert ReceiptReader().decode(OLD_HANDLE, KEYS) == HANDLE
    assert TransactionId.decode(OLD_TRANSACTION, KEYS, "m-1") == ("broker-a", 64, 7)


def test_each_key_verifies_what_it_signed_until_its_time_is_over() -> None:
    now_ms = [1_000]
    keys = SigningKeys(lambda: now_ms[0], [SigningKey(0, KEY)])
    reader, transaction = ReceiptReader(), TransactionId("broker-a", 64, 7)
    made = []
    for number in range(12):
        key = keys.newest
        assert key.id == number
        made.append(
            (HANDLE.encode(key.secret, key.id), transaction.encode(key.secret, "m", key.id))
        )
        assert HANDLE.encode(key.secret, 200) != made[-1][0]
        keys.replace(keys.rotated(bytes([number]) * 32, life_ms=500))
        now_ms[0] += 100
    live = made[-5:]
    for handle, transaction_id in live:
        assert reader.decode(handle, keys) == HANDLE
        assert TransactionId.decode(transaction_id, keys, "m") == transaction
    for handle, transaction_id in made[:-5]:
        with pytest.raises(InvalidReceiptHandle, match="key is unknown or over"):
            reader.decode(handle, keys)
        with pytest.raises(Refused, match=r"key that is unknown or over"):
            TransactionId.decode(transaction_id, keys, "m")
    assert len(list(keys)) == 7  # the one that ended since the last rotation, too


def test_more_live_keys_than_the_limit_are_refused() -> None:
    keys = SigningKeys(lambda: 1_000, [SigningKey(0, KEY)])
    for number in range(LIVE_LIMIT - 1):
        keys.replace(keys.rotated(bytes([number]) * 32, life_ms=500_000))
    with pytest.raises(Refused, match=r"64 keys still verify.*ends in 500 s"):
        keys.rotated(KEY, life_ms=500_000)


def test_an_id_that_was_used_before_the_last_256_rotations_is_used_again() -> None:
    now_ms = [1_000]
    keys = SigningKeys(lambda: now_ms[0], [SigningKey(0, KEY)])
    for number in range(257):
        now_ms[0] += 1_000
        keys.replace(keys.rotated(number.to_bytes(2, "big") * 16, life_ms=500))
    assert keys.newest.id == 1
    handle = HANDLE.encode(keys.newest.secret, keys.newest.id)
    assert ReceiptReader().decode(handle, keys) == HANDLE
