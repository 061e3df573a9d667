"""The cluster under the nemesis: every role is a process, and the way to each broker can be cut."""

import asyncio
import random
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any, Self

from e2e.cutter import Cutter
from e2e.nemesis.workload import CommandFailed, DoneBefore
from e2e.processes import LOCAL, Role, RoleFailed, free_port, run_command, wait_for_owner
from e2e.raw_client import RawClient


def wall_ms() -> int:
    return time.time_ns() // 1_000_000


class NemesisCluster:
    """`groups` broker groups of `replicas`, two controllers with one store, two proxies.

    Whatever a proxy, a controller or another broker sends to a broker passes its `ways`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        groups: int,
        replicas: int,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        addresses = [f"{LOCAL}:{free_port()}" for _ in range(2)]
        common = {
            "POPMQ_HTTP_LISTEN": f"{LOCAL}:0",
            "POPMQ_CONTROLLER_ADDRESSES": ",".join(addresses),
            "POPMQ_TOPIC_AUTO_CREATE": "false",
            **(settings or {}),
        }
        self.names = [f"group-{chr(ord('a') + number)}" for number in range(groups)]
        self.controllers = [
            Role(
                f"controller-{number}",
                ["controller"],
                folder=folder,
                settings={
                    **common,
                    "POPMQ_CONTROLLER_LISTEN": address,
                    "POPMQ_CONTROLLER_STORE": "file",
                    "POPMQ_CONTROLLER_DATA": str(folder / "controller-data"),
                },
            )
            for number, address in enumerate(addresses, 1)
        ]
        self.ways: dict[str, Cutter] = {}
        self.brokers: list[Role] = []
        for name in self.names:
            for number in range(1, replicas + 1):
                self.brokers.append(self._broker(name, number, replicas, common))
        self.proxies = [
            Role(
                f"proxy-{number}",
                ["proxy"],
                folder=folder,
                settings={**common, "POPMQ_PROXY_LISTEN": f"{LOCAL}:{free_port()}"},
            )
            for number in (1, 2)
        ]
        self._stack = ExitStack()

    def _broker(self, group: str, number: int, replicas: int, common: Mapping[str, str]) -> Role:
        name, listen = f"{group}-{number}", f"{LOCAL}:{free_port()}"
        self.ways[name] = Cutter(listen)
        return Role(
            name,
            ["broker"],
            folder=self.folder,
            settings={
                **common,
                "POPMQ_BROKER_NAME": group,
                "POPMQ_BROKER_NODE": name,
                "POPMQ_BROKER_DATA": str(self.folder / f"data-{name}"),
                "POPMQ_BROKER_LISTEN": listen,
                "POPMQ_BROKER_ADVERTISE": self.ways[name].address,
                "POPMQ_REPLICATION_REPLICAS": str(replicas),
                "POPMQ_STORE_SEGMENT_BYTES": "16MiB",
                "POPMQ_STORE_SNAPSHOT_BYTES": "256KiB",
            },
        )

    @property
    def endpoints(self) -> list[str]:
        return [proxy.settings["POPMQ_PROXY_LISTEN"] for proxy in self.proxies]

    @property
    def roles(self) -> list[Role]:
        return [*self.controllers, *self.brokers, *self.proxies]

    async def popmq(self, *arguments: str) -> str:
        """Run the command line against one of the proxies."""
        endpoint = random.choice(self.endpoints)
        return await asyncio.to_thread(run_command, endpoint, self.folder, *arguments)

    async def __aenter__(self) -> Self:
        with ExitStack() as stack:
            for way in self.ways.values():
                await way.__aenter__()
            for role in self.roles:
                await asyncio.to_thread(stack.enter_context, role)
            for endpoint in self.endpoints:
                await asyncio.to_thread(wait_for_owner, endpoint)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *raised: Any) -> None:
        await asyncio.to_thread(self._stack.__exit__, *raised)
        for way in self.ways.values():
            await way.__aexit__(None, None, None)


class CommandAccess:
    """`workload.Access`: clients over gRPC, operators by the command line."""

    def __init__(self, cluster: NemesisCluster) -> None:
        self._cluster = cluster

    def wall_ms(self) -> int:
        return wall_ms()

    async def client(self, stack: AsyncExitStack, name: str, at: int) -> RawClient:
        endpoints = self._cluster.endpoints
        return await stack.enter_async_context(RawClient(endpoints[at % len(endpoints)], name))

    async def create_topic(self, topic: str, kind: str) -> None:
        await self._do("topic", "create", topic, "--type", kind, done="exists already")

    async def delete_topic(self, topic: str) -> None:
        await self._do("topic", "delete", topic, "--yes", done="does not exist")

    async def create_group(self, group: str, options: tuple[str, ...]) -> None:
        await self._do("group", "create", group, *options, done="exists already")

    async def delete_group(self, group: str) -> None:
        await self._do("group", "delete", group, "--yes", done="does not exist")

    async def reset(self, group: str, topic: str) -> None:
        options = ("--group", group, "--topic", topic, "--to", "oldest")
        await self._do("reset-offset", *options, "--skip-retries", "--yes")

    async def redrive(self, group: str) -> None:
        await self._do("dlq", "redrive", group)

    async def _do(self, *command: str, done: str = "") -> None:
        """`done`: what a refusal says that means that it was done before."""
        try:
            await self._cluster.popmq(*command)
        except RoleFailed as error:
            kind = DoneBefore if done and done in str(error) else CommandFailed
            raise kind(str(error)) from error
