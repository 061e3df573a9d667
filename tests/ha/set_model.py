"""A small world around SyncState that is walked through whole: every order of acks, requests that
land late or never, and reads of the record.

It holds one epoch: elections may come at any moment, so the question asked in each state is
whether every store that could be elected has all that was acknowledged.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from popmq.broker.ha.sync_state import AlterSyncStateSet, SyncState

MASTER = "a"


@dataclass(frozen=True, slots=True)
class World:
    """What there is: stores' fsynced positions, the record, requests on their way, the master."""

    fsynced: tuple[int, ...]
    record: frozenset[str]
    record_version: int
    sent: frozenset[AlterSyncStateSet]
    members: frozenset[str]
    version: int
    pending: frozenset[str]
    confirmed: int
    acked: tuple[tuple[str, int], ...]
    end: int
    thin: bool = False  # something was confirmed while the record had too few members


@dataclass(frozen=True, slots=True)
class Bounds:
    stores: str = "abc"
    first_set: str = "ab"
    min_in_sync: int = 1
    epoch_start: int = 0  # below it lies what an older master may have acknowledged
    acknowledged: int = 0  # by it
    fsynced: tuple[int, ...] = (0, 0, 0)
    end: int = 2
    versions: int = 3
    checks_version: bool = True  # the controller hands on what the master expects (R4)
    states: int = 400_000


class Broken(AssertionError):
    """An acknowledged record is missing where it must not be; the text has the way there."""


def walk(bounds: Bounds, kind: type[SyncState] = SyncState) -> int:
    """Visit every world; returns how many there are. Raises Broken with the shortest way."""
    first = World(
        fsynced=bounds.fsynced,
        record=frozenset(bounds.first_set),
        record_version=1,
        sent=frozenset(),
        members=frozenset(bounds.first_set),
        version=1,
        pending=frozenset(),
        confirmed=0,
        acked=(),
        end=max(bounds.epoch_start, *bounds.fsynced),
    )
    came_from: dict[World, tuple[World, str] | None] = {first: None}
    level = [first]
    while level:
        following = []
        for world in level:
            for what, there in _next(world, bounds, kind):
                if there in came_from:
                    continue
                came_from[there] = (world, what)
                complaint = _wrong(there, bounds)
                if complaint:
                    raise Broken(f"{complaint}: {'; '.join(_way(there, came_from))}")
                following.append(there)
        assert len(came_from) <= bounds.states, "the bounds are too wide for a test"
        level = following
    return len(came_from)


def _way(world: World, came_from: dict[World, tuple[World, str] | None]) -> list[str]:
    steps = []
    before = came_from[world]
    while before is not None:
        steps.append(before[1])
        before = came_from[before[0]]
    return steps[::-1]


def _wrong(world: World, bounds: Bounds) -> str:
    acknowledged = max(world.confirmed, bounds.acknowledged)
    for store, fsynced in zip(bounds.stores, world.fsynced, strict=True):
        if store in world.record and fsynced < acknowledged:
            return f"{store} may be elected and lacks {acknowledged - fsynced} of what is confirmed"
    if world.thin:
        return "confirmed with fewer than min_in_sync electable copies"
    if len(bounds.first_set) >= bounds.min_in_sync > len(world.record):
        return "the set is smaller than min_in_sync"
    return ""


def _next(world: World, bounds: Bounds, kind: type[SyncState]) -> Iterator[tuple[str, World]]:
    yield from _stores_move(world, bounds)
    yield from _requests_land(world, bounds)
    for store in bounds.stores:
        at = world.fsynced[bounds.stores.index(store)]
        if dict(world.acked).get(store, -1) < at:
            yield f"ack {store} {at}", _acks(world, bounds, kind, store, at)
    if world.record_version > world.version:
        state = _state(world, bounds, kind)
        state.on_record(epoch=1, version=world.record_version, members=world.record)
        yield "learn", _after(world, bounds, state, None)
    if world.record_version < bounds.versions:
        yield from _proposals(world, bounds, kind)


def _stores_move(world: World, bounds: Bounds) -> Iterator[tuple[str, World]]:
    if world.end < bounds.end:
        yield "append", replace(world, end=world.end + 1)
    for number, store in enumerate(bounds.stores):
        if world.fsynced[number] < world.end:
            fsynced = list(world.fsynced)
            fsynced[number] += 1
            yield f"fsync {store}", replace(world, fsynced=tuple(fsynced))


def _requests_land(world: World, bounds: Bounds) -> Iterator[tuple[str, World]]:
    for alter in world.sent:
        if alter.expected_version == world.record_version or not bounds.checks_version:
            if world.record_version >= bounds.versions:
                continue
            name = f"lands {''.join(sorted(alter.sync_state_set))} v{alter.expected_version}"
            yield (
                name,
                replace(
                    world,
                    record=alter.sync_state_set,
                    record_version=world.record_version + 1,
                    sent=world.sent if not bounds.checks_version else world.sent - {alter},
                ),
            )


def _acks(world: World, bounds: Bounds, kind: type[SyncState], store: str, at: int) -> World:
    state = _state(world, bounds, kind)
    state.on_fsynced(store, at)
    return _after(world, bounds, state, None)


def _proposals(world: World, bounds: Bounds, kind: type[SyncState]) -> Iterator[tuple[str, World]]:
    wishes = itertools.product(("shrink", "expand"), bounds.stores)
    for wish, store in (*wishes, ("cancel", "")):
        state = _state(world, bounds, kind)
        match wish:
            case "shrink":
                alter = state.shrink(store)
            case "expand":
                alter = state.expand(store)
            case _:
                alter = state.cancel()
        there = _after(world, bounds, state, alter)
        if there != world:
            yield f"{wish} {store}", there


def _state(world: World, bounds: Bounds, kind: type[SyncState]) -> SyncState:
    state = kind(
        MASTER,
        epoch=1,
        epoch_start=bounds.epoch_start,
        members=world.members,
        version=world.version,
        min_in_sync=bounds.min_in_sync,
        confirmed=world.confirmed,
    )
    state.pending = world.pending
    state.acked = dict(world.acked)
    return state


def _after(
    world: World, bounds: Bounds, state: SyncState, alter: AlterSyncStateSet | None
) -> World:
    copies = sum(
        1
        for store, at in zip(bounds.stores, world.fsynced, strict=True)
        if store in world.record and at >= state.confirmed
    )
    moved = state.confirmed > world.confirmed
    return replace(
        world,
        sent=world.sent | ({alter} if alter else set()),
        members=state.members,
        version=state.version,
        pending=state.pending,
        confirmed=state.confirmed,
        acked=tuple(sorted(state.acked.items())),
        thin=world.thin or (moved and copies < bounds.min_in_sync),
    )
