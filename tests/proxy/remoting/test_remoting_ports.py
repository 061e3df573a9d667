"""Remoting on real sockets: on the public port, within TLS, and on a port of its own."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc.aio
import pytest
from e2e.processes import free_port

from popmq.common.settings.settings import Settings
from popmq.proxy.process import ProxyProcess
from popmq.proxy.remoting.frames import BadFrame, Command, FrameReader, encode


@asynccontextmanager
async def proxy(transport: str, tls_folder: Path, **groups: int) -> AsyncIterator[tuple[int, int]]:
    """Its public port and its further one, with a port for each of `groups`; no controller is
    there."""
    further, plain = free_port(), Settings()
    group_ports = tuple(f"{name}:{port}" for name, port in groups.items())
    settings = replace(
        plain,
        proxy=replace(plain.proxy, listen="127.0.0.1:0", transport=transport),
        remoting=replace(plain.remoting, listen=f"127.0.0.1:{further}", group_ports=group_ports),
    )
    made = ProxyProcess(
        settings, [], lambda name, address: pytest.fail("no broker"), tls_folder=tls_folder
    )
    endpoint = await made.listen()
    try:
        yield int(endpoint.rpartition(":")[2]), further
    finally:
        await made.stop()


async def answer(port: int, context: ssl.SSLContext | None = None) -> Command:
    """To a request whose code is not served."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        writer.write(encode(Command(4711, opaque=9)))
        frames = FrameReader()
        async with asyncio.timeout(20):
            while True:
                data = await reader.read(1 << 16)
                assert data, "the connection was closed"
                if answered := list(frames.feed(data)):
                    return answered[0]
    finally:
        writer.close()


def without_checks(*protocols: str) -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if protocols:
        context.set_alpn_protocols(list(protocols))
    return context


async def test_the_public_port_and_the_further_one_take_remoting_and_grpc(tmp_path: Path) -> None:
    async with proxy("lean", tmp_path) as ports:
        for port in ports:
            answered = await answer(port)
            assert (answered.code, answered.opaque) == (3, 9)
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                async with asyncio.timeout(20):
                    await channel.channel_ready()


async def test_a_client_that_offers_no_protocol_within_tls_may_speak_remoting(
    tmp_path: Path,
) -> None:
    async with proxy("lean", tmp_path) as (port, _):
        assert (await answer(port, without_checks())).code == 3


async def test_a_client_that_has_named_http_2_cannot_speak_remoting(tmp_path: Path) -> None:
    async with proxy("lean", tmp_path) as (port, _):
        with pytest.raises((AssertionError, BadFrame, ConnectionError)):
            await answer(port, without_checks("h2"))


async def test_with_grpcio_the_further_port_alone_takes_remoting(tmp_path: Path) -> None:
    async with proxy("grpcio", tmp_path) as (public, further):
        assert (await answer(further)).code == 3
        with pytest.raises((AssertionError, BadFrame, ConnectionError)):
            await answer(public)


async def test_each_broker_group_may_have_a_port(tmp_path: Path) -> None:
    first, second = free_port(), free_port()
    async with proxy("lean", tmp_path, a=first, b=second):
        for port in (first, second):
            assert (await answer(port)).code == 3
