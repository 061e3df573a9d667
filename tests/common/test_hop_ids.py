"""Ids of topics and groups in requests: peers from before them send none, and pass over them."""

import struct

import pytest

from popmq.common.protocol.messaging_payloads import (
    AckRequest,
    ChangeRequest,
    PopRequest,
    PutEntry,
    PutRequest,
    decode_ack,
    decode_change,
    decode_pop,
    decode_put,
    encode_ack,
    encode_change,
    encode_pop,
    encode_put,
)

ENTRIES = [PutEntry(1, b"head", b"properties", message_id="m"), PutEntry(2, b"", b"")]
IDS = (0, 1, 70, (1 << 32) - 1)


@pytest.mark.parametrize("number", IDS)
def test_ids_travel_with_every_request_that_names_a_topic_or_a_group(number: int) -> None:
    put = PutRequest("orders", ENTRIES, True, number)
    assert decode_put(encode_put(put)) == put
    pop = PopRequest("orders", "g", "c", 8, 1_000, 500, topic_id=number, group_id=number // 2)
    assert decode_pop(encode_pop(pop)) == pop
    ack = AckRequest("orders", "g", [b"one", b"two"], number)
    assert decode_ack(encode_ack(ack)) == ack
    change = ChangeRequest("orders", "g", b"handle", 1_000, number)
    assert decode_change(encode_change(change)) == change


def test_a_request_without_an_id_has_the_bytes_of_before() -> None:
    """What a peer from before ids sends, and how far it reads."""
    put = encode_put(PutRequest("orders", ENTRIES, topic_id=70))
    ack = encode_ack(AckRequest("orders", "g", [b"one"], 70))
    change = encode_change(ChangeRequest("orders", "g", b"handle", 1_000, 70))
    assert put[:-4] == encode_put(PutRequest("orders", ENTRIES))
    assert ack[:-4] == encode_ack(AckRequest("orders", "g", [b"one"]))
    assert change[:-4] == encode_change(ChangeRequest("orders", "g", b"handle", 1_000))
    named = PopRequest("orders", "g", "c", 8, 1_000, 500, topic_id=70, group_id=9)
    pop, plain = encode_pop(named), encode_pop(named._replace(topic_id=0, group_id=0))
    # limit, poll_ms, invisible_ms, reply_bytes, -, queue_id, flags, filter_type, -
    before = struct.Struct(">HIQIIiBBI")
    ours, theirs = list(before.unpack_from(pop)), list(before.unpack_from(plain))
    assert (ours[4], ours[8], theirs[4], theirs[8]) == (70, 9, 0, 0)
    ours[4] = ours[8] = 0
    assert ours == theirs
    assert pop[before.size :] == plain[before.size :]
