"""The serving end and peers that do not keep up with reading: bounds, patience and its end."""

import logging
from pathlib import Path

import pytest
from common.frame_peers import (
    BROKER,
    LONG_MS,
    PROXY,
    Handler,
    RecordingTransport,
    frame,
    raw_peer,
    serving,
)

from popmq.common.errors import Code
from popmq.common.protocol.frame_server import FrameServer
from popmq.common.protocol.frames import FrameSettings, encode_hello
from popmq.common.protocol.messaging_payloads import Kind


@pytest.mark.parametrize("kind", [Kind.PUT, 250], ids=["answers", "refusals"])
async def test_a_peer_that_asks_and_never_reads_is_closed(
    kind: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        handler = Handler()
        handler.on_put = lambda _: bytes(1 << 20)
        settings = FrameSettings(max_buffered_bytes=1 << 16, max_stalled_ms=20)
        address = f"unix:{tmp_path}/frames.sock"
        async with serving(handler, address, settings=settings) as bound, raw_peer(bound) as peer:
            await peer.greet()
            peer.writer.write(frame(Kind.POP, 1, b"", timeout_ms=LONG_MS))
            more = [frame(kind, number, b"", timeout_ms=LONG_MS) for number in range(2, 60_000)]
            peer.writer.write(b"".join(more))
            assert await handler.cancelled.get() == 101

    with caplog.at_level(logging.WARNING):
        await test()
    whys = [record.__dict__.get("why", "") for record in caplog.records]
    assert any("max_buffered_bytes) and read nothing for 20 ms" in why for why in whys)


async def test_answers_wait_for_a_busy_peer_and_new_requests_are_refused_until_it_has_read(
    tmp_path: Path,
) -> None:
    handler = Handler()
    settings = FrameSettings(max_buffered_bytes=1 << 16, max_stalled_ms=LONG_MS)
    address = f"unix:{tmp_path}/frames.sock"
    async with serving(handler, address, settings=settings) as bound, raw_peer(bound) as peer:
        await peer.greet()
        pops = range(1, 25)
        for number in pops:
            peer.writer.write(frame(Kind.POP, number, b"", timeout_ms=LONG_MS))
            await handler.asked.get()
        for on_reply in handler.waiting.values():
            on_reply(bytes(1 << 20))
        # It is seen long before 24 MiB were read: both ends take turns on one loop.
        peer.writer.write(frame(Kind.PUT, 25, b"x", timeout_ms=LONG_MS))
        for number in pops:
            assert await peer.read() == (Kind.REPLY, number, bytes(1 << 20))
        kind, request_id, body = await peer.read()
        assert (kind, request_id) == (Kind.ERROR, 25)
        assert int.from_bytes(body[:4], "big") == Code.TOO_MANY_REQUESTS
        assert b"has to read first (frames.max_buffered_bytes)" in body
        peer.writer.write(frame(Kind.PUT, 26, b"room again", timeout_ms=LONG_MS))
        assert await peer.read() == (Kind.REPLY, 26, b"room again")


async def test_a_slow_peer_may_take_its_time_as_long_as_it_reads() -> None:
    transport = RecordingTransport()
    settings = FrameSettings(max_stalled_ms=1)
    connection = FrameServer(Handler(), BROKER, settings=settings)._accept()
    connection.connection_made(transport)
    transport.unsent_sizes = iter([9_000, 8_999, 5_000, 5_000, 1])
    connection.pause_writing()
    await transport.aborted.wait()
    assert list(transport.unsent_sizes) == [1], "aborted at the first look without progress"


async def test_a_peer_that_goes_on_asking_without_reading_is_not_heard_until_it_reads() -> None:
    transport = RecordingTransport()
    settings = FrameSettings(max_in_flight=3)
    connection = FrameServer(Handler(), BROKER, settings=settings)._accept()
    connection.connection_made(transport)
    connection.data_received(frame(Kind.HELLO, 0, encode_hello(PROXY)))
    transport.unsent_sizes = iter([1 << 27])
    connection.pause_writing()
    for number, kind in enumerate((Kind.PUT, 250, Kind.POP), start=1):
        assert transport.reading
        connection.data_received(frame(kind, number, b"", timeout_ms=LONG_MS))
    assert not transport.reading
    connection.resume_writing()
    assert transport.reading
    connection.abort("the end of the test")
