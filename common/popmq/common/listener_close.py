"""The end of a listening socket.

Between `accept` and `connection_made` asyncio needs two turns of the loop.  A server that is closed
in between loses the connection: its socket stays open, unknown to anybody, until the garbage
collector comes by (CPython 3.11: `Server._attach` of a closed server is an AssertionError).
"""

import asyncio

_TURNS = 3


async def stop_listening(server: asyncio.Server) -> None:
    """Accept nothing more, let what was accepted reach its protocol, and close the sockets.

    Connections stay: whoever made them hears of the last ones before this returns.
    """
    loop = server.get_loop()
    for sock in server.sockets:
        loop.remove_reader(sock.fileno())
    for _ in range(_TURNS):
        turned = loop.create_future()
        loop.call_soon(turned.set_result, None)
        await turned
    server.close()
