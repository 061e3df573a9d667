"""A Remoting client in bytes: what it sends to a proxy's core, and what comes back."""

import asyncio
import json
import struct
from itertools import count
from typing import Any

from popmq.proxy.proxy import Proxy
from popmq.proxy.remoting.frames import ONE_WAY, Command, FrameReader, encode
from popmq.proxy.transport.interface import Opening

LOCAL = ("127.0.0.1", 8081)


class RemotingClient:
    def __init__(self, proxy: Proxy, client_id: str = "", broker_group: str = "") -> None:
        """`broker_group`: the one that the port stands for to which it is connected."""
        opening = Opening("10.0.0.9:999", LOCAL, self._wake)
        self.connection = proxy.remoting.open(opening, broker_group)
        self.pushed: list[Command] = []  # requests of the server
        self._reader = FrameReader()
        self._answers: dict[int, Command] = {}
        self._changed = asyncio.Event()
        self._opaque = count(1)
        self._now_ms = 0
        self._client_id = client_id

    async def ask(
        self, code: int, fields: dict[str, object] | None = None, body: bytes = b"", **more: Any
    ) -> Command:
        return await self.answer(self.send(code, fields, body, **more))

    def send(
        self, code: int, fields: dict[str, object] | None = None, body: bytes = b"", **more: Any
    ) -> int:
        opaque = next(self._opaque)
        texts = {name: _text(value) for name, value in (fields or {}).items()}
        self.write(encode(Command(code, opaque, fields=texts, body=body, **more)))
        return opaque

    def write(self, data: bytes) -> None:
        self.connection.receive(data, self._now_ms)

    def respond(self, command: Command, code: int = 0, body: bytes = b"") -> None:
        """To a request of the server."""
        self.write(command.answer(code, body=body, remark="" if code == 0 else "I refuse"))

    async def answer(self, opaque: int) -> Command:
        async with asyncio.timeout(20):
            while opaque not in self._answers:
                self._changed.clear()
                await self._changed.wait()
        return self._answers.pop(opaque)

    def one_way(self, code: int, fields: dict[str, object], body: bytes = b"") -> int:
        return self.send(code, fields, body, flag=ONE_WAY)

    def tick(self, now_ms: int) -> None:
        self._now_ms = now_ms
        self.connection.tick(now_ms)

    async def heartbeat(self, *groups: dict[str, Any]) -> Command:
        content = {"clientID": self._client_id, "consumerDataSet": groups, "producerDataSet": []}
        return await self.ask(34, body=json.dumps(content).encode())

    def answered(self) -> int:
        """How many answers nobody has taken."""
        return len(self._answers)

    def _wake(self) -> None:
        if not self.connection.outbox.has_output:
            return
        for command in self._reader.feed(self.connection.outbox.take()):
            if command.is_response:
                self._answers[command.opaque] = command
            else:
                self.pushed.append(command)
        self._changed.set()


def send_fields(topic: str, properties: str = "", **more: object) -> dict[str, object]:
    """Of SEND_MESSAGE_V2."""
    plain = {"a": "makers", "b": topic, "c": "TBW102", "d": 4, "e": 0, "f": 0, "g": 1, "h": 0}
    return {**plain, "i": properties, "j": 0, "k": False, "m": False, **more}


def batch_member(body: bytes, properties: str) -> bytes:
    text = properties.encode()
    content = struct.pack(">iiii", 0, 0, 0, len(body)) + body
    content += struct.pack(">h", len(text)) + text
    return struct.pack(">i", len(content) + 4) + content


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
