"""The peers' protocols as their servers speak them, from bytes that are cut anywhere."""

import json
import socket
import struct
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.peers import nats, rabbitmq, redis
from popmq.cli.load.reactor import LoadError, Reactor


@pytest.fixture
def listening() -> Iterator[tuple[str, int]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        yield str(host), int(port)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted(cut % (len(data) + 1) for cut in cuts)
    return [
        data[start:stop] for start, stop in zip([0, *places], [*places, len(data)], strict=True)
    ]


CUTS = st.lists(st.integers(0, 500), max_size=5)
EACH = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)


@EACH
@given(CUTS)
def test_redis_answers_are_read_in_their_order(listening: tuple[str, int], cuts: list[int]) -> None:
    reactor = Reactor()
    channel = redis.RespChannel(reactor, listening)
    values: list[object] = []
    for _ in range(5):
        channel.command([b"X"], lambda value, asked_s: values.append(value))
    answer = b"$3\r\n1-0\r\n:7\r\n*2\r\n$1\r\na\r\n*1\r\n:1\r\n$-1\r\n-ERR no\r\n"
    try:
        for piece in pieces(answer, cuts):
            channel.received(piece)
    finally:
        reactor.close()
    assert values[:4] == [b"1-0", 7, [b"a", [1]], None]
    assert isinstance(values[4], LoadError)


@EACH
@given(CUTS)
def test_nats_acks_of_the_stream_are_told_from_errors(
    listening: tuple[str, int], cuts: list[int]
) -> None:
    reactor = Reactor()
    channel = nats.NatsChannel(reactor, listening)
    lane = nats.NatsLane(channel, 64)
    sent: list[str] = []
    lane.put(1.0, lambda lane, asked_s, why: sent.append(why))
    lane.put(2.0, lambda lane, asked_s, why: sent.append(why))
    inboxes = [data.split()[2] for data in channel.out if data.startswith(b"PUB")]
    good = b'{"stream":"bench","seq":1}'
    bad = json.dumps({"error": {"code": 503}, "stream": "bench", "seq": 0}).encode()
    answer = b"PING\r\n" + b"".join(
        b"MSG %b 1 %d\r\n%b\r\n" % (inbox, len(text), text)
        for inbox, text in zip(inboxes, (good, bad), strict=True)
    )
    try:
        for piece in pieces(answer, cuts):
            channel.received(piece)
        assert b"PONG\r\n" in channel.out
    finally:
        reactor.close()
    assert sent[0] == ""
    assert "503" in sent[1]


@EACH
@given(CUTS)
def test_rabbitmq_confirms_one_or_all_up_to_a_number(
    listening: tuple[str, int], cuts: list[int]
) -> None:
    reactor = Reactor()
    channel = rabbitmq.AmqpChannel(reactor, listening)
    lane = rabbitmq.RabbitLane(channel, 64)
    sent: list[tuple[float, str]] = []
    for number in range(4):
        lane.put(float(number), lambda lane, asked_s, why: sent.append((asked_s, why)))
    answer = b"".join(
        rabbitmq.frame(rabbitmq.METHOD, 1, struct.pack(">HHQ?", *method, tag, many))
        for method, tag, many in (
            (rabbitmq.ACK, 2, False),
            (rabbitmq.ACK, 3, True),
            (rabbitmq.NACK, 4, False),
        )
    )
    try:
        for piece in pieces(answer, cuts):
            channel.received(piece)
    finally:
        reactor.close()
    assert sent == [(1.0, ""), (0.0, ""), (2.0, ""), (3.0, "basic.nack")]
