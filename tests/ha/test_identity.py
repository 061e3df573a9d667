"""Identity: what must not be forgotten over a crash (R6, R9)."""

import random

import pytest

from popmq.broker.ha.identity import Identity
from popmq.common.errors import StoreDamaged
from popmq.testing.disk import LyingDisk

PATH = "data/identity"


def identity(disk: LyingDisk, seed: int = 1) -> Identity:
    return Identity(disk, PATH, random.Random(seed))


def test_a_store_keeps_its_id_over_a_power_cut() -> None:
    disk = LyingDisk()
    store_id = identity(disk).store_id
    disk.restore_power()
    again = identity(disk, seed=2)
    assert again.store_id == store_id
    assert not again.is_new


def test_a_new_or_wiped_store_has_an_id_of_its_own() -> None:
    first, second = identity(LyingDisk(), seed=1), identity(LyingDisk(), seed=2)
    assert first.is_new
    assert len(first.store_id) == 32
    assert first.store_id != second.store_id


def test_an_accepted_epoch_is_never_forgotten() -> None:
    disk = LyingDisk()
    identity(disk).accept(7)
    disk.restore_power()
    assert identity(disk).epoch == 7


def test_an_older_epoch_is_not_accepted() -> None:
    store = identity(LyingDisk())
    store.accept(7)
    with pytest.raises(AssertionError, match="epoch 6 after epoch 7"):
        store.accept(6)
    store.accept(7)
    assert store.epoch == 7


def test_a_store_that_is_rebuilt_is_another_one_but_obeys_no_older_order() -> None:
    disk = LyingDisk()
    store = identity(disk)
    store.accept(7)
    before = store.store_id
    store.renew(copying=True)
    disk.restore_power()
    again = identity(disk)
    assert again.store_id != before
    assert (again.epoch, again.copying) == (7, True)


def test_a_copy_that_is_whole_stays_so() -> None:
    disk = LyingDisk()
    store = identity(disk)
    store.renew(copying=True)
    store.copied()
    disk.restore_power()
    again = identity(disk)
    assert (again.store_id, again.copying) == (store.store_id, False)


def test_a_damaged_identity_stops_the_start() -> None:
    disk = LyingDisk()
    identity(disk)
    disk.open(PATH).write(b"X", 40)
    with pytest.raises(StoreDamaged, match="data/identity is damaged"):
        identity(disk)
