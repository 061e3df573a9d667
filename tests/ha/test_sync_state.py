"""SyncState: rules R13 to R20, and each way to break them that a model checker found."""

import itertools

import pytest
from ha.set_model import Bounds, Broken, walk

from popmq.broker.ha.sync_state import AlterSyncStateSet, SyncState


def state(
    members: str = "ab",
    *,
    min_in_sync: int = 1,
    version: int = 5,
    epoch_start: int = 0,
    confirmed: int = 0,
) -> SyncState:
    return SyncState(
        "a",
        epoch=3,
        epoch_start=epoch_start,
        members=set(members),
        version=version,
        min_in_sync=min_in_sync,
        confirmed=confirmed,
    )


def learned(sync: SyncState, members: str, *, version: int = 6, epoch: int = 3) -> bool:
    return sync.on_record(epoch=epoch, version=version, members=set(members))


# -- R13: what a new master begins with


def test_a_new_master_knows_no_acks_and_confirms_what_it_knew_as_a_slave() -> None:
    sync = state(confirmed=40)
    assert (sync.confirmed, sync.acked, sync.pending) == (40, {}, frozenset())
    assert sync.on_fsynced("a", 100) is False
    assert sync.confirmed == 40


# -- R15, R16: confirming


def test_all_of_the_set_confirm_and_not_a_majority() -> None:
    sync = state("abc")
    sync.on_fsynced("a", 100)
    sync.on_fsynced("b", 100)
    assert sync.confirmed == 0
    assert sync.on_fsynced("c", 70) is True
    assert sync.confirmed == 70


def test_the_master_counts_with_what_it_has_fsynced() -> None:
    sync = state("ab")
    sync.on_fsynced("b", 100)
    assert sync.confirmed == 0
    sync.on_fsynced("a", 60)
    assert sync.confirmed == 60


def test_a_late_ack_takes_nothing_back() -> None:
    sync = state("ab")
    sync.on_fsynced("a", 100)
    sync.on_fsynced("b", 100)
    assert sync.on_fsynced("b", 50) is False
    assert (sync.confirmed, sync.acked["b"]) == (100, 100)


def test_who_is_not_in_the_set_is_not_waited_for() -> None:
    sync = state("ab")
    sync.on_fsynced("c", 10)
    sync.on_fsynced("a", 100)
    sync.on_fsynced("b", 100)
    assert sync.confirmed == 100


def test_nothing_is_confirmed_while_the_set_is_too_small() -> None:
    sync = state("a", min_in_sync=2)
    sync.on_fsynced("a", 100)
    assert (sync.has_quorum, sync.confirmed) == (False, 0)
    sync.on_fsynced("b", 100)
    sync.expand("b")
    assert (sync.has_quorum, sync.confirmed) == (False, 0)  # who is being added does not count
    assert learned(sync, "ab") is True
    assert (sync.has_quorum, sync.confirmed) == (True, 100)


def test_records_of_older_epochs_are_confirmed_like_all_others() -> None:
    sync = state("ab", epoch_start=500)
    sync.on_fsynced("a", 500)
    sync.on_fsynced("b", 300)
    assert sync.confirmed == 300


# -- R18: shrink


def test_a_laggard_is_waited_for_until_the_smaller_set_is_known() -> None:
    sync = state("abc")
    sync.on_fsynced("a", 100)
    sync.on_fsynced("b", 100)
    assert sync.shrink("c") == AlterSyncStateSet(3, 5, frozenset("ab"))
    sync.on_fsynced("a", 101)
    assert sync.confirmed == 0
    assert learned(sync, "ab") is True
    assert sync.confirmed == 100


@pytest.mark.parametrize(("members", "least"), [("ab", 2), ("abc", 3), ("a", 1)])
def test_the_set_is_not_made_smaller_than_min_in_sync(members: str, least: int) -> None:
    sync = state(members, min_in_sync=least)
    assert not sync.can_shrink()
    assert [sync.shrink(store) for store in members] == [None] * len(members)


def test_a_master_never_leaves_its_own_set() -> None:
    assert state("ab").shrink("a") is None


def test_who_is_not_a_member_is_not_taken_out() -> None:
    assert state("ab").shrink("c") is None


# -- R19: expand


def test_who_is_being_added_counts_before_the_request_leaves() -> None:
    sync = state("a")
    sync.on_fsynced("b", 0)
    assert sync.expand("b") == AlterSyncStateSet(3, 5, frozenset("ab"))
    sync.on_fsynced("a", 100)
    assert sync.confirmed == 0
    sync.on_fsynced("b", 100)
    assert sync.confirmed == 100


def test_a_store_that_said_nothing_in_this_epoch_is_not_added() -> None:
    assert state("a").expand("b") is None


def test_a_store_behind_the_confirmed_position_is_not_added() -> None:
    sync = state("a")
    sync.on_fsynced("a", 100)
    sync.on_fsynced("b", 99)
    assert sync.confirmed == 100
    assert sync.expand("b") is None
    sync.on_fsynced("b", 100)
    assert sync.expand("b") is not None


def test_a_store_behind_the_epochs_start_is_not_added() -> None:
    sync = state("a", epoch_start=50)  # an older master may have confirmed up to here
    sync.on_fsynced("b", 49)
    assert sync.expand("b") is None
    sync.on_fsynced("b", 50)
    assert sync.expand("b") is not None


def test_a_member_and_one_that_is_being_added_are_not_added_again() -> None:
    sync = state("ab")
    for store in "abc":
        sync.on_fsynced(store, 100)
    assert sync.expand("b") is None
    assert sync.expand("c") is not None
    assert sync.expand("c") is None


# -- R20: who is being added stays so until the record says otherwise


def test_an_expansion_is_over_when_a_newer_record_is_read_whatever_it_says() -> None:
    for members, confirmed in (("ab", 0), ("a", 100)):
        sync = state("a")
        sync.on_fsynced("b", 0)
        sync.expand("b")
        sync.on_fsynced("a", 100)
        learned(sync, members)
        assert (sync.pending, sync.proposal, sync.confirmed) == (frozenset(), None, confirmed)


@pytest.mark.parametrize(("version", "epoch"), [(5, 3), (4, 3), (6, 2), (6, 4)])
def test_an_old_record_and_one_of_another_epoch_say_nothing(version: int, epoch: int) -> None:
    sync = state("a")
    sync.on_fsynced("b", 0)
    sync.expand("b")
    assert learned(sync, "a", version=version, epoch=epoch) is False
    assert (sync.version, sync.pending) == (5, frozenset("b"))


def test_a_cancel_is_the_same_set_under_the_next_version_and_proves_nothing_by_itself() -> None:
    sync = state("a")
    sync.on_fsynced("b", 0)
    sync.expand("b")
    assert sync.cancel() == AlterSyncStateSet(3, 5, frozenset("a"))
    sync.on_fsynced("a", 100)
    assert sync.confirmed == 0
    learned(sync, "a")
    assert sync.confirmed == 100


def test_there_is_nothing_to_cancel_when_nobody_is_being_added() -> None:
    assert state("ab").cancel() is None


# -- all of it, in every order

WORLDS = [
    Bounds(stores="ab", first_set="ab", fsynced=(0, 0)),
    Bounds(stores="ab", first_set="a", fsynced=(1, 0)),
    Bounds(stores="ab", first_set="a", min_in_sync=2, fsynced=(0, 0)),
    # An older master acknowledged what only members of the set have; the new one knows 0.
    Bounds(stores="ab", first_set="a", epoch_start=1, acknowledged=1, fsynced=(1, 0), end=3),
    Bounds(first_set="abc", min_in_sync=2, end=1),
    Bounds(first_set="ab", end=1),
]


@pytest.mark.parametrize(
    "bounds",
    [
        pytest.param(
            bounds, id=str(bounds), marks=[pytest.mark.more] if len(bounds.stores) > 2 else []
        )
        for bounds in WORLDS
    ],
)
def test_every_electable_store_has_all_that_was_confirmed_in_every_order(bounds: Bounds) -> None:
    assert walk(bounds) > 100


class ShrinksEarly(SyncState):
    """Confirms with the smaller set before the alter is known to have succeeded."""

    def shrink(self, store_id: str) -> AlterSyncStateSet | None:
        alter = super().shrink(store_id)
        if alter is not None:
            self.members = alter.sync_state_set
        return alter


class WaitsAfterTheAlter(SyncState):
    """Waits for a new member only once the alter is known to have succeeded."""

    def expand(self, store_id: str) -> AlterSyncStateSet | None:
        alter = super().expand(store_id)
        self.pending = frozenset()
        return alter


class AddsAtAnyPosition(SyncState):
    def may_join(self, store_id: str) -> bool:
        return store_id in self.acked


class AddsAtTheConfirmedPosition(SyncState):
    """Without a look at the epoch's start."""

    def may_join(self, store_id: str) -> bool:
        return self.acked.get(store_id, -1) >= self.confirmed


class TakesTimeoutForFailure(SyncState):
    """Gives up on who is being added without a word."""

    def cancel(self) -> AlterSyncStateSet | None:
        self.pending = frozenset()
        return None


class MajorityConfirms(SyncState):
    def _confirm(self) -> bool:
        acked = sorted(self.acked.get(store, 0) for store in self.maximal_set)
        self.confirmed = max(self.confirmed, acked[(len(acked) - 1) // 2])
        return True


class ShrinksBelowTheLeast(SyncState):
    def can_shrink(self) -> bool:
        return True


class CountsWhoIsBeingAdded(SyncState):
    @property
    def has_quorum(self) -> bool:
        return len(self.maximal_set) >= self.min_in_sync


class IgnoresTheLeast(SyncState):
    @property
    def has_quorum(self) -> bool:
        return True


class BelievesOldRecords(SyncState):
    """What was read is taken, whatever its version."""

    def on_record(self, *, epoch: int, version: int, members: object) -> bool:
        self.pending = frozenset()
        return super().on_record(epoch=epoch, version=version, members=members)  # type: ignore[arg-type]


UNSAFE = [
    ShrinksEarly,
    WaitsAfterTheAlter,
    AddsAtAnyPosition,
    AddsAtTheConfirmedPosition,
    TakesTimeoutForFailure,
    MajorityConfirms,
    ShrinksBelowTheLeast,
    CountsWhoIsBeingAdded,
    IgnoresTheLeast,
]


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(variant, id=variant.__name__, marks=[pytest.mark.more] if number % 4 else [])
        for number, variant in enumerate(UNSAFE)
    ],
)
def test_every_unsafe_variant_loses_something_in_some_order(variant: type[SyncState]) -> None:
    for bounds in WORLDS:
        try:
            walk(bounds, variant)
        except Broken:
            return
    pytest.fail(f"{variant.__name__} was not found")


def test_a_controller_that_does_not_compare_versions_loses_something() -> None:
    with pytest.raises(Broken):
        walk(Bounds(stores="ab", first_set="a", fsynced=(0, 0), versions=4, checks_version=False))


def test_a_read_of_an_old_record_does_not_end_an_expansion() -> None:
    for variant, waits in ((SyncState, True), (BelievesOldRecords, False)):
        sync = variant("a", epoch=3, epoch_start=0, members={"a"}, version=5, min_in_sync=1)
        sync.on_fsynced("b", 0)
        sync.expand("b")
        learned(sync, "a", version=5)
        sync.on_fsynced("a", 100)
        assert (sync.confirmed == 0) is waits


def test_without_a_cancel_a_dead_candidate_would_stop_everything() -> None:
    """From every world in which somebody is being added the master gets on by itself."""
    for lost, order in itertools.product((True, False), repeat=2):
        sync = state("a")
        sync.on_fsynced("b", 0)
        asked = sync.expand("b")
        cancelled = sync.cancel()
        assert asked is not None
        assert cancelled is not None
        winner = cancelled if lost or order else asked
        sync.on_record(epoch=3, version=6, members=winner.sync_state_set)
        if "b" in sync.members:  # then it is a laggard like any other
            gone = sync.shrink("b")
            assert gone is not None
            sync.on_record(epoch=3, version=7, members=gone.sync_state_set)
        sync.on_fsynced("a", 100)
        assert sync.confirmed == 100
