"""The simulated nemesis: the nemesis' clients and checker on simulated broker groups.

One seed is one run. The cluster is `popmq.testing.groups_world`, its proxies are the product's.

    cd tests && ../.venv/bin/python -m cluster.groups --seed 7 --trace
    cd tests && ../.venv/bin/python -m cluster.groups --seeds 50     # and what was allowed
    cd tests && ../.venv/bin/python -m cluster.groups --lanes off    # each call by itself
"""

import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from typing import TypeVar

from e2e.nemesis.checker import BOUNDS, Op, Verdict, check
from e2e.nemesis.workload import GROUPS, CommandFailed, DoneBefore, History, Workload
from e2e.raw_client import ApiClient, NoAnswer
from google.protobuf.message import Message as Protobuf

from popmq.common.errors import Code
from popmq.common.wire import admin_pb2 as admin
from popmq.testing.cluster_world.faults import ClusterFaults
from popmq.testing.cluster_world.sometimes_states import NetSometimes
from popmq.testing.groups_world.faults import HALVES_MS, GroupFaults
from popmq.testing.groups_world.late_frames import Change
from popmq.testing.groups_world.proxy import CallFailed, SimCall
from popmq.testing.groups_world.sometimes_states import GroupsSometimes
from popmq.testing.groups_world.world import GroupsWorld
from popmq.testing.harness.sometimes import StateCounts
from popmq.testing.oracle.client_history import Violation
from popmq.testing.sim.lives import SeedResult, broken
from popmq.testing.sim.seed_runs import run_command, seed_options

REPLAY = "cd tests && ../.venv/bin/python -m cluster.groups --seed {seed} --trace"
SLACK_MS = 120  # wall clocks differ by up to 70 ms, and what a process does takes time
UNDER_WAY_MS = 25_000  # after a fault: what it took may come again so much later
SEEN_AGAIN_MS = 5_000  # by every proxy and group, when the owner of the topics is in reach again
COMMAND_MS = 6_000
DRAIN_MS = 180_000
INVISIBLE_MS = (2_000, 5_000, 9_000)
HALVES = 0.25
_GAPS_MS = (200, 1_000, 3_000)

Reply = TypeVar("Reply", bound=Protobuf)


class SimClient(ApiClient):
    """A client whose calls reach one of the proxies."""

    def __init__(self, world: GroupsWorld, name: str, proxy: int) -> None:
        self._world = world
        self._name = name
        self._proxy = proxy
        self._rng = random.Random(f"{name} {world.seed}")

    def _call(self, method: str, request: bytes, timeout_s: float) -> SimCall:
        node = self._world.proxy_nodes[self._proxy]
        return node.call(self._world.client, self._name, method, request, int(timeout_s * 1_000))

    async def call(self, method: str, request: bytes, timeout_s: float) -> bytes:
        try:
            return await self._call(method, request, timeout_s).unary()
        except CallFailed as error:
            raise NoAnswer(f"{method}: {error}") from error

    async def stream(self, method: str, request: bytes, timeout_s: float) -> AsyncIterator[bytes]:
        try:
            async for part in self._call(method, request, timeout_s).parts():
                yield part
        except CallFailed as error:
            raise NoAnswer(f"{method}: {error}") from error

    def attempt_id(self) -> str:
        return f"{self._rng.getrandbits(64):016x}"

    def born_ms(self) -> int:
        return self._world.client.clock.wall_ms()


class SimAccess:
    """`workload.Access` on a simulated cluster: operators ask the admin service of a proxy."""

    def __init__(self, world: GroupsWorld) -> None:
        self._world = world
        self._rng = random.Random(f"operators {world.seed}")

    def wall_ms(self) -> int:
        return self._world.client.clock.wall_ms()

    async def client(self, stack: AsyncExitStack, name: str, at: int) -> SimClient:
        return SimClient(self._world, name, at % len(self._world.proxies))

    async def ask(self, method: str, request: Protobuf, reply: type[Reply]) -> Reply:
        node = self._rng.choice(self._world.proxy_nodes)
        data = request.SerializeToString()
        try:
            answer = await node.call(
                self._world.client, "operator", method, data, COMMAND_MS
            ).unary()
        except CallFailed as error:
            raise CommandFailed(f"{method}: {error}") from error
        decoded = reply.FromString(answer)
        status, incomplete = decoded.status, getattr(decoded, "incomplete", "")  # type: ignore[attr-defined]
        if status.code != Code.OK:
            known = any(text in status.message for text in ("exists already", "does not exist"))
            raise (DoneBefore if known else CommandFailed)(f"{method}: {status.message}")
        if incomplete:
            raise CommandFailed(f"{method}: {incomplete}")
        return decoded

    async def create_topic(self, topic: str, kind: str) -> None:
        made = admin.Topic(name=topic, queues=4, type=kind)
        await self.ask("CreateTopic", admin.CreateTopicRequest(topic=made), admin.TopicReply)

    async def delete_topic(self, topic: str) -> None:
        await self.ask("DeleteTopic", admin.DeleteTopicRequest(name=topic), admin.TopicReply)

    async def create_group(self, group: str, options: tuple[str, ...]) -> None:
        made = admin.Group(name=group)
        for option, value in zip(options[::2], options[1::2], strict=True):
            match option:
                case "--max-attempts":
                    made.max_attempts = int(value)
                case "--type":
                    made.type = value
                case "--check-points":
                    made.check_points = value
        await self.ask("CreateGroup", admin.CreateGroupRequest(group=made), admin.GroupReply)

    async def delete_group(self, group: str) -> None:
        await self.ask("DeleteGroup", admin.DeleteGroupRequest(name=group), admin.GroupReply)

    async def reset(self, group: str, topic: str) -> None:
        request = admin.ResetOffsetRequest(group=group, topic=topic, oldest=True, skip_retries=True)
        await self.ask("ResetOffset", request, admin.ResetOffsetReply)

    async def redrive(self, group: str) -> None:
        """Each broker group's, in pieces, as `popmq dlq redrive` does."""
        whole = admin.RedriveRequest(group=group, dry_run=True, limit=1)
        plan = await self.ask("Redrive", whole, admin.RedriveReply)
        for part in plan.progress:
            piece = admin.RedriveRequest(
                group=group, broker=part.broker, end_offset=part.end_offset, limit=32
            )
            while piece.from_offset < part.end_offset:
                reply = await self.ask("Redrive", piece, admin.RedriveReply)
                if not reply.progress or reply.progress[0].next_offset <= piece.from_offset:
                    break
                piece.from_offset = reply.progress[0].next_offset

    async def drain(self, group: str, *, undo: bool) -> int:
        """Returns how many timers others have taken from it."""
        request = admin.DrainRequest(group=group, undo=undo)
        return (await self.ask("Drain", request, admin.DrainReply)).moved

    async def left(self) -> int:
        """Messages and dead letters that no consumer has finished."""
        reply = await self.ask("Lag", admin.LagRequest(), admin.LagReply)
        left = sum(
            lag.ready + lag.in_flight + lag.blocked + lag.delayed
            for lag in reply.lags
            if lag.group in GROUPS
        )
        return left + sum(item.stored - item.redriven for item in reply.dead_letters)


class GroupsRun:
    """Faults under the load of the nemesis; then all heals and consumers finish what is left."""

    def __init__(self, seed: int, *, lanes: bool = True) -> None:
        world = self.world = GroupsWorld(seed, lanes=lanes)
        rng = self.rng = world.rng
        self.ops: list[Op] = []
        self.verdict = Verdict()
        self.access = SimAccess(world)
        self.history = History(self.access.wall_ms, self._write)
        self.workload = Workload(
            self.access,
            self.history,
            random.Random(f"load {seed}"),
            delays=not world.far,
            invisible_ms=INVISIBLE_MS,
        )
        self.of_groups = GroupFaults(world)
        self.faults = ClusterFaults(world, self.of_groups.kinds)
        self._made = self._ended = False
        self._left = -1
        self._draining = False
        self._tasks: list[asyncio.Task[None]] = []
        records = world.records.manners
        records.silent = rng.choice((0.0, 0.05))
        records.late = rng.choice((0.0, 0.5, 1.0))
        records.stale = rng.choice((0.0, 0.1))

    def _write(self, line: str) -> None:
        op: Op = json.loads(line)
        self.ops.append(op)
        if op["op"] == "recreate":
            self.world.tally.hit(
                GroupsSometimes.TOPIC_AGAIN if "topic" in op else GroupsSometimes.GROUP_AGAIN
            )
            self.world.late.happened(Change.INCARNATION)
            self.world.late.happened(Change.VERSION)
        self.world.trace_line(line.rstrip())

    def run(self) -> SeedResult:
        world = self.world
        violations = world.violations
        try:
            self._run()
        except Exception as error:
            violations.append(broken(error))
        if not violations:
            wall_ms = self.access.wall_ms() - world.time.now_ms
            for at_ms in world.elections_ms:
                at_ms += wall_ms
                fields = {"what": "another master", "crash": True, "ended": at_ms}
                self.history.add("fault", at_ms, **fields)
            self.history.add("clocks", 0, slack_ms=SLACK_MS)
            for since_ms, until_ms in world.owner.away:
                until_ms += SEEN_AGAIN_MS
                self.history.add("owner away", wall_ms + since_ms, ended=wall_ms + until_ms)
            self.verdict = check(self.ops)
            violations += [Violation("nemesis", text, ()) for text in self.verdict.violations]
        for violation in violations:
            world.trace_line(str(violation))
        result = SeedResult(world.seed, violations, world.trace, world.tally)
        result.replay = REPLAY if world.settings.lean.lanes else f"{REPLAY} --lanes off"
        return result

    @property
    def calls_by_path(self) -> Counter[tuple[str, str]]:
        """Of the methods that have lanes, by what served them."""
        nodes = self.world.proxy_nodes
        return sum((node.calls_by_path for node in nodes), Counter[tuple[str, str]]())

    def _run(self) -> None:
        world = self.world
        world.start()
        self._spawn(self._make)
        assert world.go_until(lambda: self._made, 60_000), "topics and groups were not made"
        world.begin_faults()
        self._spawn(self._load)
        self._spawn(self._drain_groups)
        world.go(3_000)
        self._first_act()
        for _ in range(self.rng.choice((4, 8, 14))):
            if world.violations:
                return
            begun = self.access.wall_ms()
            what = self.faults.one()
            self.history.add("fault", begun, what=what, crash=True, ended=begun + UNDER_WAY_MS)
            world.go(self.rng.choice(_GAPS_MS))
        world.heal()
        if not world.go_until(lambda: world.all_lead, 30_000) and not world.violations:
            world.report_violation("progress", "not every group has one master and all its brokers")
        self.workload.sending = False
        self._spawn(self._look)
        world.go_until(lambda: self._left == 0 and self._all_is_back, DRAIN_MS)
        self.workload.draining = True
        world.go_until(lambda: self._ended, 20_000)
        self.history.add("lag", 0, left=self._left)
        world.go(3_000)
        world.compare_tables()

    def _first_act(self) -> None:
        """Some seeds begin with this, and nothing else is wrong meanwhile."""
        world = self.world
        if world.replicas == 1 or self.rng.random() > HALVES:
            return
        begun = self.access.wall_ms()
        if self.of_groups.owner_in_two_halves():
            world.go(HALVES_MS)
            what = "old master of the owner beside the new one"
            ended = begun + HALVES_MS + UNDER_WAY_MS
            self.history.add("fault", begun, what=what, crash=True, ended=ended)

    def _spawn(self, work: Callable[[], Coroutine[object, object, None]]) -> None:
        """A task on the clients' loop."""
        world = self.world

        def begin() -> None:
            task = world.client.loop.create_task(work())
            self._tasks.append(task)
            task.add_done_callback(self._task_ended)

        world.client.post(begin)

    def _task_ended(self, task: "asyncio.Task[None]") -> None:
        if (error := task.exception()) is not None:
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            self.world.client_failed(error)

    async def _make(self) -> None:
        await self.workload.make()
        self._made = True

    async def _load(self) -> None:
        await self.workload.run()
        self._ended = True

    @property
    def _all_is_back(self) -> bool:
        return not self.workload.operating and not self._draining

    async def _drain_groups(self) -> None:
        """A group that does not own the topics takes no messages for a while; timers leave it."""
        world, rng = self.world, random.Random(f"drains {self.world.seed}")
        while self.workload.sending:
            await asyncio.sleep(rng.choice((3, 8, 15)))
            group = rng.choice(world.names[1:])
            self._draining = True
            with suppress(CommandFailed):
                await self.access.drain(group, undo=False)
                world.tally.hit(GroupsSometimes.DRAINED)
            await asyncio.sleep(rng.choice((2, 5)))
            while self._draining:
                await asyncio.sleep(0.2)
                with suppress(CommandFailed):
                    moved = await self.access.drain(group, undo=True)
                    world.tally.hit(GroupsSometimes.TIMERS_MOVED, moved)
                    self._draining = False

    async def _look(self) -> None:
        while not self.workload.draining:
            await asyncio.sleep(2)
            await self.workload.redrive()
            if not self._all_is_back:
                continue
            try:
                self._left = await self.access.left()
            except CommandFailed:
                continue


def run_groups_seed(seed: int) -> SeedResult:
    return GroupsRun(seed).run()


def main(arguments: list[str]) -> int:
    parser = seed_options("cluster.groups", seeds=20)
    parser.add_argument("--lanes", choices=("on", "off"), default="on", help="of the proxies")
    chosen = parser.parse_args(arguments)
    allowed, operations, served = Counter[str](), Counter[str](), Counter[str]()

    def run(seed: int) -> SeedResult:
        one_run = GroupsRun(seed, lanes=chosen.lanes == "on")
        result = one_run.run()
        allowed.update(one_run.verdict.allowed)
        operations.update(one_run.verdict.operations)
        served.update(f"{method} {path}" for method, path in one_run.calls_by_path.elements())
        return result

    status = run_command(chosen, run, StateCounts(GroupsSometimes, NetSometimes))
    for what in BOUNDS:
        print(f"allowed: {what}: {allowed[what]:,}")
    for what, count in sorted(operations.items()):
        print(f"calls: {what}: {count:,}")
    for what, count in sorted(served.items()):
        print(f"served: {what}: {count:,}")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
