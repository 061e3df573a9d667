"""Identity: what must not be forgotten over a crash (R6, R9)."""

import random

import pytest
from crc32c import crc32c

from popmq.broker.ha.identity import Identity, stored_cluster
from popmq.common.disk import write_atomically
from popmq.common.errors import ConfigError, StoreDamaged
from popmq.common.settings.cluster_settings import ClusterSettings
from popmq.testing.disk.lying_disk import LyingDisk

PATH = "data/identity"


def identity(
    disk: LyingDisk, seed: int = 1, *, cluster: str = "shop", formerly: str = ""
) -> Identity:
    settings = ClusterSettings(name=cluster, formerly=formerly)
    return Identity(disk, PATH, random.Random(seed), cluster=settings)


def content(disk: LyingDisk) -> bytes:
    file = disk.open(PATH)
    return file.read(file.size(), 0)


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
    for slot_at in (0, 4_096):
        disk.open(PATH).write(b"X", slot_at + 40)
    with pytest.raises(StoreDamaged, match="data/identity is damaged"):
        identity(disk)


def test_a_store_of_another_cluster_is_refused_and_stays_as_it_is() -> None:
    disk = LyingDisk()
    identity(disk, cluster="shop").accept(7)
    before = content(disk)
    for formerly in ("", "store"):
        with pytest.raises(ConfigError) as refused:
            identity(disk, cluster="bank", formerly=formerly)
        assert str(refused.value) == (
            "data directory data belongs to cluster shop, and cluster.name is bank: set "
            "cluster.name to shop, or name another directory (broker.data, --data); or, for bank "
            "to take it over for good, as after a restore under another name, set "
            "cluster.formerly to shop"
        )
    assert content(disk) == before


def test_a_store_that_another_cluster_took_over_is_its_own_from_then_on() -> None:
    disk = LyingDisk()
    store = identity(disk, cluster="shop")
    store.accept(7)
    taken = identity(disk, cluster="bank", formerly="shop")
    assert (taken.store_id, taken.epoch) == (store.store_id, 7)
    disk.restore_power()
    assert stored_cluster(disk, PATH) == "bank"
    assert identity(disk, cluster="bank").store_id == store.store_id
    assert identity(disk, cluster="bank", formerly="shop").epoch == 7
    with pytest.raises(ConfigError, match="belongs to cluster bank"):
        identity(disk, cluster="shop")


def test_a_store_of_an_older_version_gets_the_name_of_its_next_start() -> None:
    disk = LyingDisk()
    store_id = "0123456789abcdef" * 2
    text = f"store_id {store_id}\nepoch 7\ncopying 0\n".encode()
    write_atomically(disk, PATH, f"popmq identity 1 {crc32c(text):08x}\n".encode() + text)
    assert stored_cluster(disk, PATH) == ""
    adopted = identity(disk, cluster="bank")
    assert (adopted.store_id, adopted.epoch) == (store_id, 7)
    disk.restore_power()
    with pytest.raises(ConfigError, match="belongs to cluster bank"):
        identity(disk, cluster="shop")


def test_the_name_stays_when_epoch_and_id_change() -> None:
    disk = LyingDisk()
    store = identity(disk)
    store.accept(3)
    store.renew(copying=True)
    store.copied()
    disk.restore_power()
    assert stored_cluster(disk, PATH) == "shop"
