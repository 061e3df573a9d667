"""Answers are compressed only for a client that can read them, and if a setting wants it."""

import gzip
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest
from proxy.lean.peer import Peer, echo

from popmq.common.settings.lean_settings import LeanSettings
from popmq.proxy.transport.interface import Method, MethodType
from popmq.proxy.transport.lean.server import LeanTransport

LONG = b"again and " * 100
CAN = (("grpc-accept-encoding", "identity, deflate, gzip"),)


@pytest.mark.parametrize("path", ["/s/echo", "/s/talk"])
def test_a_long_answer_is_compressed_for_who_can_read_it(path: str) -> None:
    peer = Peer(compress_bytes=500)
    answer = peer.answers[peer.call(path, LONG, extra=CAN)]
    assert answer.headers[0]["grpc-encoding"] == "gzip"
    assert answer.data[0] == 1
    assert gzip.decompress(answer.messages[0]) == LONG
    assert len(answer.messages[0]) < len(LONG)


@pytest.mark.parametrize(
    ("compress_bytes", "extra", "body"),
    [
        (0, CAN, LONG),
        (500, (), LONG),
        (500, (("grpc-accept-encoding", "identity,deflate"),), LONG),
        (500, CAN, b"short"),
        (10, CAN, bytes(range(100))),  # gets no shorter
    ],
)
def test_every_other_answer_is_sent_as_it_is(
    compress_bytes: int, extra: tuple[tuple[str, str], ...], body: bytes
) -> None:
    peer = Peer(compress_bytes=compress_bytes)
    for path in ("/s/echo", "/s/talk"):
        answer = peer.answers[peer.call(path, body, extra=extra)]
        assert answer.data[0] == 0
        assert answer.messages == [body]


async def test_a_real_client_reads_compressed_answers() -> None:
    limits = replace(LeanSettings(), compress_bytes=100)
    methods = [Method("/s/echo", MethodType.UNARY, start=echo)]
    transport = LeanTransport(methods, "127.0.0.1", 0, limits=limits)
    port = await transport.start()
    client: Any = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    async with client:
        for body in (LONG, b"short", LONG * 1_000):
            assert await client.unary_unary("/s/echo")(body) == body
    await transport.stop(0)
