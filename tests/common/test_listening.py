"""A server that stops while somebody connects leaves no socket behind."""

import asyncio
import gc
import socket
import warnings

import pytest

from popmq.common.listener_close import stop_listening


@pytest.mark.parametrize("turns", range(6))
def test_a_connection_that_comes_while_the_server_stops_reaches_its_protocol_or_was_not_accepted(
    turns: int,
) -> None:
    transports: list[asyncio.BaseTransport] = []

    class Peer(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            transports.append(transport)

    async def run() -> None:
        server = await asyncio.get_running_loop().create_server(Peer, "127.0.0.1", 0)
        with socket.create_connection(server.sockets[0].getsockname()):
            for _ in range(turns):
                await asyncio.sleep(0)
            await stop_listening(server)
            assert server.sockets == ()
            known = list(transports)
            for _ in range(5):
                await asyncio.sleep(0)
            assert transports == known, "a connection came after the end"
            for transport in transports:
                assert isinstance(transport, asyncio.Transport)
                transport.abort()
            await asyncio.sleep(0)

    with warnings.catch_warnings(record=True) as reported_warnings:
        warnings.simplefilter("always")
        asyncio.run(run())
        gc.collect()
    assert [str(reported_warning.message) for reported_warning in reported_warnings] == []
    assert transports or turns < 3
