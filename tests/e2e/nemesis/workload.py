"""The clients under the nemesis. They write what they did into a history, and judge nothing."""

import asyncio
import hashlib
import json
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Protocol

from e2e.raw_client import ApiClient, NoAnswer, Received, Refused

INVISIBLE_MS = (4_000, 8_000, 15_000)
KEYS = 6
PAUSE_S = 0.05
BURSTS = (1, 1, 1, 4)  # of messages that are sent at once
PACES = {"few": 5}  # how much slower a topic gets its messages
TOPICS = {
    "orders": "normal",
    "steps": "fifo",
    "later": "delay",
    "deals": "transaction",
    "few": "normal",  # read again from the start at each reset
    "fleeting": "normal",  # deleted and made again, as is its group
}
# group -> topic, options
GROUPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "plain": ("orders", ()),
    "buffered": ("orders", ("--check-points", "buffered")),
    "ordered": ("steps", ("--type", "fifo")),
    "delayed": ("later", ()),
    "settled": ("deals", ()),
    "dying": ("orders", ("--max-attempts", "2")),  # its dead letters are redriven
    "rewound": ("few", ()),  # and this one is reset
    "brief": ("fleeting", ()),
}
ANSWER_S = 4.0  # a creation or a deletion is answered after 3 s at most
DROPPED = 0.05  # of the messages, which come back
DROPPED_BY_DYING = 0.3


class CommandFailed(Exception):
    """Perhaps it was done, or done at some of the broker groups."""


class DoneBefore(CommandFailed):
    """To delete what is not there, or to create what is: an earlier try has done it."""


class Access(Protocol):
    """How clients and operators reach a cluster, and the clock that they write times of."""

    def wall_ms(self) -> int: ...

    async def client(self, stack: AsyncExitStack, name: str, at: int) -> ApiClient:
        """A client of the proxy number `at`, open for as long as the stack."""
        ...

    # All of these raise CommandFailed.
    async def create_topic(self, topic: str, kind: str) -> None: ...

    async def delete_topic(self, topic: str) -> None: ...

    async def create_group(self, group: str, options: tuple[str, ...]) -> None: ...

    async def delete_group(self, group: str) -> None: ...

    async def reset(self, group: str, topic: str) -> None:
        """To the oldest message, without its retries."""
        ...

    async def redrive(self, group: str) -> None:
        """All dead letters."""
        ...


class History:
    """JSON lines (checker.py has their format)."""

    def __init__(self, wall_ms: Callable[[], int], write: Callable[[str], object]) -> None:
        self._wall_ms = wall_ms
        self._write = write

    def add(self, op: str, begun: int, **fields: Any) -> None:
        line = {"op": op, "begun": begun, "ended": self._wall_ms(), **fields}
        self._write(json.dumps(line) + "\n")


class Workload:
    """`sending` ends first; then consumers finish what is left, and leave nothing unacked."""

    def __init__(
        self,
        access: Access,
        history: History,
        rng: random.Random,
        *,
        delays: bool = True,
        invisible_ms: tuple[int, ...] = INVISIBLE_MS,
    ) -> None:
        """`delays`: the brokers' wall clocks are right, so that delayed messages are sent."""
        self._invisible_ms = invisible_ms
        self._delays = delays
        self._access = access
        self._wall_ms = access.wall_ms
        self._history = history
        self._rng = rng
        self.sending = True
        self.draining = False
        # Until the last topic or group is there again, and the last reset is over.
        self._operators = 2

    @property
    def operating(self) -> bool:
        return self._operators > 0

    async def make(self) -> None:
        """The topics and groups."""
        for topic, kind in TOPICS.items():
            await self._until_done(partial(self._access.create_topic, topic, kind))
        for group in GROUPS:
            await self._until_done(partial(self._create_group, group))

    async def _create_group(self, group: str) -> None:
        await self._access.create_group(group, ("--max-attempts", "100", *GROUPS[group][1]))

    async def _until_done(self, command: Callable[[], Awaitable[None]]) -> None:
        """Returns after its answer, or so late that an answer that got lost had come."""
        while True:
            try:
                await command()
            except DoneBefore:
                await asyncio.sleep(ANSWER_S)
                return
            except CommandFailed:
                await asyncio.sleep(0.2)
            else:
                return

    async def run(self) -> None:
        for group, (topic, options) in GROUPS.items():
            fifo, buffered = "fifo" in options, "buffered" in options
            self._history.add("group", 0, group=group, topic=topic, fifo=fifo, buffered=buffered)
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
            for topic in TOPICS:
                clients = [await self._client(stack, f"send-{topic}-{at}", at) for at in (0, 1)]
                tasks.create_task(self._send(topic, clients))
            for group, (topic, _) in GROUPS.items():
                for at in (0, 1):
                    client = await self._client(stack, f"{group}-{at}", at)
                    tasks.create_task(self._consume(group, topic, client))

            client = await self._client(stack, "operator", 0)
            tasks.create_task(self._operate(client))
            tasks.create_task(self._recreate(client))

    async def _client(self, stack: AsyncExitStack, name: str, at: int) -> ApiClient:
        return await self._access.client(stack, name, at)

    # -- producers

    async def _send(self, topic: str, clients: list[ApiClient]) -> None:
        """One message after the other, so that the numbers of a key are its order; several at once
        where there is no order."""
        count, numbers = 0, defaultdict[str, int](int)
        kind = TOPICS[topic]
        while self.sending:
            client = self._rng.choice(clients)
            async with asyncio.TaskGroup() as burst:
                for _ in range(self._rng.choice(BURSTS) if kind == "normal" else 1):
                    count += 1
                    message_id = f"{topic}-{count}"
                    body = hashlib.sha256(message_id.encode()).digest() * self._rng.choice(
                        (1, 8, 64)
                    )
                    if kind == "transaction":
                        burst.create_task(self._transaction(client, topic, message_id, body))
                        continue
                    key = f"k{self._rng.randrange(KEYS)}" if kind == "fifo" else ""
                    numbers[key] += 1
                    burst.create_task(
                        self._send_one(client, topic, message_id, body, key, numbers[key])
                    )
            if kind != "transaction":
                await asyncio.sleep(PAUSE_S * PACES.get(topic, 1))

    async def _send_one(
        self, client: ApiClient, topic: str, message_id: str, body: bytes, key: str, number: int
    ) -> None:
        begun = self._wall_ms()
        due_ms = (
            begun + self._rng.choice((500, 3_000, 9_000, 13_000))
            if topic == "later" and self._delays
            else 0
        )
        handle, outcome = "", "ok"
        try:
            handle = await client.send(topic, message_id, body, key=key, due_ms=due_ms)
        except NoAnswer:
            outcome = "unknown"
        self._history.add(
            "send",
            begun,
            topic=topic,
            id=message_id,
            key=key,
            number=number,
            due_ms=due_ms,
            outcome=outcome,
        )
        if handle and self._rng.random() < 0.1:
            await self._recall(client, topic, message_id, handle)

    async def _transaction(
        self, client: ApiClient, topic: str, message_id: str, body: bytes
    ) -> None:
        """Two of three are committed; what has no transaction id is never ended."""
        begun, commit, outcome = self._wall_ms(), self._rng.random() < 0.7, "ok"
        try:
            transaction_id = await client.send(topic, message_id, body, half=True)
        except NoAnswer:
            commit, outcome = False, "unknown"
        else:
            try:
                await client.end(topic, message_id, transaction_id, commit=commit)
            except NoAnswer:
                outcome = "unknown"
        fields = {"topic": topic, "id": message_id, "key": "", "number": 0, "due_ms": 0}
        self._history.add("send" if commit else "rollback", begun, **fields, outcome=outcome)
        await asyncio.sleep(PAUSE_S)

    async def _recall(self, client: ApiClient, topic: str, message_id: str, handle: str) -> None:
        begun, outcome = self._wall_ms(), "ok"
        try:
            await client.recall(topic, handle)
        except NoAnswer:
            outcome = "unknown"
        self._history.add("recall", begun, id=message_id, outcome=outcome)

    # -- operators

    async def _operate(self, client: ApiClient) -> None:
        while self.sending:
            await asyncio.sleep(PAUSE_S * 100)
            await self._reset("rewound", "few", client)
            await self.redrive()
        self._operators -= 1

    async def _reset(self, group: str, topic: str, client: ApiClient) -> None:
        """What is in flight ends by it: an ack of that is refused afterwards."""
        held = await self._receive(group, topic, client, limit=1)
        reset = partial(self._access.reset, group, topic)
        outcome = await self._command("reset", group, reset)
        if outcome == "ok":
            for message in held:
                await self._ack("stale", group, topic, client, message)

    async def redrive(self) -> None:
        await self._command("redrive", "dying", partial(self._access.redrive, "dying"))

    async def _command(self, op: str, group: str, command: Callable[[], Awaitable[None]]) -> str:
        begun, outcome = self._wall_ms(), "ok"
        try:
            await command()
        except CommandFailed:
            outcome = "unknown"
        self._history.add(op, begun, group=group, outcome=outcome)
        return outcome

    async def _recreate(self, client: ApiClient) -> None:
        """Topic or group. Producers and consumers go on all the time. Handles of a group that was
        deleted are refused afterwards."""
        access = self._access
        while self.sending:
            await asyncio.sleep(self._rng.choice((1.0, 3.0, 6.0, 12.0)))
            held: list[Received] = []
            if self._rng.random() < 0.5:
                fields = {"topic": "fleeting"}
                delete = partial(access.delete_topic, "fleeting")
                create = partial(access.create_topic, "fleeting", TOPICS["fleeting"])
            else:
                held = await self._receive("brief", "fleeting", client, limit=2)
                fields = {"group": "brief"}
                delete = partial(access.delete_group, "brief")
                create = partial(self._create_group, "brief")
            begun = self._wall_ms()
            await self._until_done(delete)
            deleted = self._wall_ms()
            await asyncio.sleep(self._rng.choice((0.0, 0.0, 0.3)))
            creating = self._wall_ms()
            await self._until_done(create)
            times = {"deleted": deleted, "creating": creating}
            self._history.add("recreate", begun, **fields, **times, outcome="ok")
            for message in held:
                await self._ack("stale", "brief", "fleeting", client, message)
        self._operators -= 1

    # -- consumers

    async def _consume(self, group: str, topic: str, client: ApiClient) -> None:
        while not self.draining:
            received = await self._receive(group, topic, client, limit=8)
            if "fifo" in GROUPS[group][1]:
                for message in received:
                    await self._settle(group, topic, client, message)
                continue
            async with asyncio.TaskGroup() as together:
                for message in received:
                    together.create_task(self._settle(group, topic, client, message))

    async def _receive(
        self, group: str, topic: str, client: ApiClient, *, limit: int
    ) -> list[Received]:
        begun, invisible_ms = self._wall_ms(), self._rng.choice(self._invisible_ms)
        try:
            received = await client.receive(
                group, topic, limit=limit, invisible_ms=invisible_ms, poll_ms=1_000
            )
        except NoAnswer:
            await asyncio.sleep(0.2)
            return []
        if received:
            self._history.add(
                "receive",
                begun,
                group=group,
                topic=topic,
                invisible_ms=invisible_ms,
                whole=all(item.whole for item in received),
                messages=[[delivery.message_id, delivery.attempt] for delivery in received],
            )
        return received

    async def _settle(self, group: str, topic: str, client: ApiClient, message: Received) -> None:
        """Mostly an ack; while messages are sent, also a change and an ack with the old handle, or
        nothing, so that it comes back."""
        roll = self._rng.random() if self.sending else 1.0
        dropped = DROPPED_BY_DYING if group == "dying" else DROPPED
        if roll < dropped:
            return
        if roll < dropped + 0.07:
            changed = await self._change(group, topic, client, message)
            if changed is None:
                return
            await self._ack("stale", group, topic, client, message)
            message = changed
        await self._ack("ack", group, topic, client, message)

    async def _change(
        self, group: str, topic: str, client: ApiClient, message: Received
    ) -> Received | None:
        begun, invisible_ms = self._wall_ms(), self._rng.choice(self._invisible_ms)
        changed, outcome = None, "ok"
        try:
            changed = await client.change(group, topic, message, invisible_ms=invisible_ms)
        except Refused:
            outcome = "refused"
        except NoAnswer:
            outcome = "unknown"
        fields = {"group": group, "id": message.message_id, "invisible_ms": invisible_ms}
        self._history.add("change", begun, **fields, outcome=outcome)
        return changed

    async def _ack(
        self, op: str, group: str, topic: str, client: ApiClient, message: Received
    ) -> None:
        begun, outcome = self._wall_ms(), "ok"
        try:
            await client.ack(group, topic, message)
        except Refused:
            outcome = "refused"
        except NoAnswer:
            outcome = "unknown"
        self._history.add(op, begun, group=group, id=message.message_id, outcome=outcome)
