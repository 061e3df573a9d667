"""What the brokers of a group tell each other survives its encoding, and bad bytes are refused."""

from collections.abc import Callable

import pytest

from popmq.common.errors import PopmqError
from popmq.common.protocol import replication_payloads as replication
from popmq.common.protocol.replication_payloads import EpochEntry

STORE = "a" * 32
LARGE = (1 << 64) - 1

CASES: list[tuple[Callable[..., bytes], Callable[[bytes], object], object]] = [
    (
        replication.encode_handshake,
        replication.decode_handshake,
        replication.Handshake(7, STORE, "node-1", "b" * 32, LARGE, LARGE),
    ),
    (
        replication.encode_handshake_reply,
        replication.decode_handshake_reply,
        replication.HandshakeReply(
            7, STORE, LARGE, "", 1, 2, 3, 4, 5, [EpochEntry(1, 0), EpochEntry(7, LARGE)]
        ),
    ),
    (
        replication.encode_fetch,
        replication.decode_fetch,
        replication.Fetch(7, STORE, 1, LARGE, 1 << 20, LARGE - 1, 500, LARGE - 2),
    ),
    (
        replication.encode_block,
        replication.decode_block,
        replication.Block(7, 6, 100, 200, 150, LARGE, b"\x00records", LARGE - 2),
    ),
    (
        replication.encode_acked,
        replication.decode_acked,
        replication.Acked(7, STORE, LARGE, LARGE),
    ),
    (
        replication.encode_acked_reply,
        replication.decode_acked_reply,
        replication.AckedReply(7, LARGE),
    ),
    (
        replication.encode_read_snapshot,
        replication.decode_read_snapshot,
        replication.ReadSnapshot(7, STORE, 1, 2, 3, 1 << 20),
    ),
    (
        replication.encode_ask_timers,
        replication.decode_ask_timers,
        replication.TimerCheckPointRequest(7, STORE, 1),
    ),
    (
        replication.encode_master_timers,
        replication.decode_master_timers,
        replication.MasterTimers(7, 1_700_000_000_000, LARGE, LARGE),
    ),
]


@pytest.mark.parametrize(("encode", "decode", "value"), CASES, ids=lambda item: type(item).__name__)
def test_what_is_sent_is_what_arrives(
    encode: Callable[[object], bytes], decode: Callable[[bytes], object], value: object
) -> None:
    assert decode(encode(value)) == value


@pytest.mark.parametrize(("encode", "decode", "value"), CASES, ids=lambda item: type(item).__name__)
def test_a_payload_that_ends_early_is_refused(
    encode: Callable[[object], bytes], decode: Callable[[bytes], object], value: object
) -> None:
    whole = encode(value)
    header = len(whole) - len(value.data) if isinstance(value, replication.Block) else len(whole)
    for size in range(header):
        with pytest.raises(PopmqError):
            decode(whole[:size])


def test_a_name_that_no_field_can_hold_is_a_bad_request() -> None:
    with pytest.raises(PopmqError, match="no frame can hold"):
        replication.encode_handshake(replication.Handshake(1, "x" * 70_000, "", "", 0, 0))


def test_an_ack_without_a_mark_is_what_older_brokers_send_and_read() -> None:
    plain = replication.encode_acked(replication.Acked(7, STORE, 1, 2))
    marked = replication.encode_acked(
        replication.Acked(7, STORE, 1, 2, replication.TablesMark.COMPARE)
    )
    assert marked[:-1] == plain
    assert replication.decode_acked(plain).tables is replication.TablesMark.EQUAL
    assert replication.decode_acked(marked).tables is replication.TablesMark.COMPARE


def test_a_handshake_has_its_features_behind_what_releases_without_them_read() -> None:
    plain = replication.Handshake(7, STORE, "node-1", "b" * 32, 1, 2)
    new = plain._replace(features=replication.SIGNING_KEYS)
    assert replication.encode_handshake(new)[:-1] == replication.encode_handshake(plain)
    assert replication.decode_handshake(replication.encode_handshake(new)) == new
    assert replication.decode_handshake(replication.encode_handshake(plain)) == plain
