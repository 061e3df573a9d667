"""What a Service of Kubernetes does to connections: each new one goes to one of those that are
ready, in turn, and stays there until one of its ends closes it."""

import asyncio
import contextlib
import itertools

from e2e.processes import LOCAL, free_port

from popmq.common.listener_close import stop_listening
from popmq.testing.loop_thread import ThreadServer

_PIECE = 64 << 10


class Balancer(ThreadServer):
    """Listens at `address` while entered; `ready` may be changed at any time."""

    def __init__(self, *ready: str) -> None:
        super().__init__("balancer")
        self.ready = list(ready)
        self.address = f"{LOCAL}:{free_port()}"
        self.accepted = 0
        self._turn = itertools.count()
        self._server: asyncio.Server | None = None
        self._carrying: set[asyncio.Task[None]] = set()

    async def _open(self) -> None:
        host, port = self.address.rsplit(":", 1)
        self._server = await asyncio.start_server(self._accept, host, int(port))

    async def _close(self) -> None:
        assert self._server is not None
        await stop_listening(self._server)
        for task in list(self._carrying):
            task.cancel()
        await asyncio.gather(*self._carrying, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        task = asyncio.get_running_loop().create_task(self._carry(reader, writer))
        self._carrying.add(task)
        task.add_done_callback(self._carrying.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there: asyncio.StreamWriter | None = None
        try:
            target = self.ready[next(self._turn) % len(self.ready)]
            host, port = target.rsplit(":", 1)
            from_there, there = await asyncio.open_connection(host, int(port))
            await asyncio.gather(_pour(reader, there), _pour(from_there, writer))
        except OSError:
            pass  # the client connects again
        finally:
            for stream_writer in (writer, there):
                if stream_writer is not None:
                    stream_writer.close()
                    with contextlib.suppress(OSError):
                        await stream_writer.wait_closed()


async def _pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(_PIECE):
        writer.write(piece)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
