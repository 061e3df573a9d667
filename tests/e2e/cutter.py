"""A way between two processes that a test can cut: a TCP proxy that stops to carry bytes.

What was on its way is not lost but late, as with packets that are dropped and sent again: it
arrives when the way is whole again, in order, and so does a connection's end.
"""

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import Self

from e2e.processes import LOCAL, free_port

from popmq.common.listener_close import stop_listening


@dataclass(slots=True)
class Cutter:
    """Listens at `address` and carries to `target`, while entered; both directions are open."""

    target: str
    address: str = field(default_factory=lambda: f"{LOCAL}:{free_port()}")
    _forth: asyncio.Event = field(default_factory=asyncio.Event)
    _back: asyncio.Event = field(default_factory=asyncio.Event)
    _server: asyncio.Server | None = None
    _carrying: set["asyncio.Task[None]"] = field(default_factory=set)
    _writers: list[asyncio.StreamWriter] = field(default_factory=list)

    def cut(self, *, forth: bool = True, back: bool = True) -> None:
        """Carry nothing to the target, or nothing from it, until `mend`."""
        for gate, closes in ((self._forth, forth), (self._back, back)):
            if closes:
                gate.clear()

    def mend(self) -> None:
        self._forth.set()
        self._back.set()

    async def __aenter__(self) -> Self:
        self.mend()
        host, port = self.address.rsplit(":", 1)
        self._server = await asyncio.start_server(self._accept, host, int(port))
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        server, self._server = self._server, None
        await stop_listening(server)
        for task in list(self._carrying):
            task.cancel()
        await asyncio.gather(*self._carrying, return_exceptions=True)
        for writer in self._writers:
            writer.transport.abort()  # what nobody took by now
        await asyncio.sleep(0)  # they close with the next turn

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._server is None:  # accepted just before the end: no task would come to close it
            writer.transport.abort()
            return
        self._writers.append(writer)
        task = asyncio.create_task(self._carry(reader, writer))
        self._carrying.add(task)
        task.add_done_callback(self._carrying.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there: asyncio.StreamWriter | None = None
        try:
            # A handshake of TCP needs both directions.
            await self._forth.wait()
            await self._back.wait()
            host, port = self.target.rsplit(":", 1)
            from_there, there = await asyncio.open_connection(host, int(port))
            self._writers.append(there)
            async with asyncio.TaskGroup() as ways:
                ways.create_task(_pump(reader, there, self._forth))
                ways.create_task(_pump(from_there, writer, self._back))
        except* OSError:
            pass  # either end is gone, and then the other one hears of it
        finally:
            for stream_writer in (writer, there):
                if stream_writer is not None:
                    stream_writer.close()


async def _pump(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: asyncio.Event
) -> None:
    while data := await reader.read(1 << 16):
        await gate.wait()
        writer.write(data)
        await writer.drain()
    await gate.wait()
    with contextlib.suppress(OSError):
        writer.write_eof()
