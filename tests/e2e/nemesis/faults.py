"""What the nemesis does to the cluster: one fault at a time, and each is undone again."""

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable

from e2e.nemesis.cluster import NemesisCluster, wall_ms
from e2e.nemesis.workload import History
from e2e.processes import Role, RoleFailed

_HOLD_S = (0.5, 2.0, 5.0)
_REST_S = (0.5, 1.5, 3.0)


class Nemesis:
    def __init__(self, cluster: NemesisCluster, history: History, rng: random.Random) -> None:
        self._cluster = cluster
        self._history = history
        self._rng = rng
        self._faults: list[Callable[[], Awaitable[str]]] = [
            self._kill_broker,
            self._kill_broker_group,
            self._kill_proxy,
            self._stop_process,
            self._cut_way,
            self._hand_over,
            self._lose_controllers,
            self._roll,
        ]

    async def run(self, seconds: float) -> None:
        """Each kind once, in an order of the seed, and then again, until the time is over."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            for fault in self._rng.sample(self._faults, len(self._faults)):
                if time.monotonic() > end_s:
                    return
                await self._do(fault)
                await asyncio.sleep(self._rng.choice(_REST_S))

    async def _do(self, fault: Callable[[], Awaitable[str]]) -> None:
        begun = wall_ms()
        what = await fault()
        # Whoever was killed or cut off may have taken buffered check points with it.
        self._history.add("fault", begun, what=what, crash=True)

    async def _kill(self, *roles: Role) -> None:
        for role in roles:
            role.kill9()
        await asyncio.sleep(self._rng.choice(_HOLD_S))
        for role in roles:
            await asyncio.to_thread(role.restart)

    async def _kill_broker(self) -> str:
        await self._kill(self._rng.choice(self._cluster.brokers))
        return "kill -9 of a broker"

    async def _kill_broker_group(self) -> str:
        name = self._rng.choice(self._cluster.names)
        await self._kill(
            *(broker for broker in self._cluster.brokers if broker.name.startswith(name))
        )
        return "kill -9 of all brokers of a group"

    async def _kill_proxy(self) -> str:
        await self._kill(self._rng.choice(self._cluster.proxies))
        return "kill -9 of a proxy"

    async def _stop_process(self) -> str:
        role = self._rng.choice(self._cluster.roles)
        os.kill(role.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(self._rng.choice((1.0, 4.0, 6.0)))
        finally:
            os.kill(role.pid, signal.SIGCONT)
        return f"SIGSTOP of a {role.name.partition('-')[0].replace('group', 'broker')}"

    async def _cut_way(self) -> str:
        way = self._rng.choice(list(self._cluster.ways.values()))
        forth, back, what = self._rng.choice(
            (
                (True, False, "nothing reaches a broker"),
                (False, True, "nothing of a broker's answers arrives"),
                (True, True, "both ways to a broker are cut"),
            )
        )
        way.cut(forth=forth, back=back)
        try:
            await asyncio.sleep(self._rng.choice((1.0, 4.0, 6.0)))
        finally:
            way.mend()
        return what

    async def _hand_over(self) -> str:
        try:
            group = self._rng.choice(self._cluster.names)
            await self._cluster.popmq("failover", group, "--yes")
        except RoleFailed:  # nobody could take over just then
            return "planned failover, refused"
        return "planned failover"

    async def _lose_controllers(self) -> str:
        lost = self._rng.choice((self._cluster.controllers, self._cluster.controllers[:1]))
        await self._kill(*lost)
        return "kill -9 of both controllers" if len(lost) > 1 else "kill -9 of a controller"

    async def _roll(self) -> str:
        """Each broker of a group ends cleanly and starts again, one after the other."""
        name = self._rng.choice(self._cluster.names)
        for role in [broker for broker in self._cluster.brokers if broker.name.startswith(name)]:
            await asyncio.to_thread(role.terminate)
            await asyncio.to_thread(role.restart)
        return "rolling restart of a group"
