"""TablesCheck: what a broker knows of its own tables, over epochs, leads and restarts."""

from popmq.broker.ha.tables_check import TablesCheck
from popmq.broker.persistence.state_hashes import Compared
from popmq.common.protocol.replication_payloads import TablesMark
from popmq.testing.disk.lying_disk import LyingDisk

OWN, MASTERS = 0xA, 0xB


class Store:
    """One store's tables through its epochs."""

    def __init__(self) -> None:
        self.disk = LyingDisk()
        self.epoch = 1
        self.restart()

    def restart(self) -> None:
        self.check = TablesCheck(self.disk, "data/divergence", lambda: self.epoch)

    def equal(self, position: int) -> None:
        self.check.compared(Compared(position, self.epoch, OWN, OWN))

    def differ(self, position: int, own: int = OWN) -> None:
        self.check.compared(Compared(position, self.epoch, own, MASTERS))


def test_a_store_that_differed_is_compared_again_after_it_led() -> None:
    store = Store()
    store.differ(100)
    store.epoch = 2
    store.check.leads()
    assert not store.check.differs, "the others are compared with it"
    store.restart()
    store.epoch = 3
    assert (store.check.differs, store.check.mark) == (True, TablesMark.COMPARE)
    store.equal(200)
    assert (store.check.differs, store.check.mark) == (False, TablesMark.EQUAL)


def test_a_store_whose_attempt_to_lead_failed_is_still_suspect() -> None:
    store = Store()
    store.differ(100)
    store.epoch = 2
    store.check.leads()
    store.epoch = 3  # another leads before this one served
    assert store.check.mark is TablesMark.COMPARE
    assert not store.check.wants_rebuild, "the new master's tables are not known"


def test_a_store_that_was_rebuilt_and_led_is_not_rebuilt_a_second_time() -> None:
    store = Store()
    store.differ(100)
    store.check.begin_rebuild(because_of_tables=True)
    store.check.wiped()
    store.epoch = 2
    store.check.leads()
    store.epoch = 3
    store.differ(200)
    assert store.check.kept
    assert not store.check.wants_rebuild


def test_replicas_that_differ_name_the_same_position_though_one_missed_a_comparison() -> None:
    store, other = Store(), Store()
    store.differ(100)  # the other one's snapshot of 100 was not made
    for item in (store, other):
        item.differ(200, own=0xC)
    assert store.check.newest == other.check.newest == (200, 0xC)


def test_a_rebuild_and_its_snapshots_go_by_the_first_position_of_a_difference() -> None:
    store = Store()
    store.differ(100)
    store.differ(200)
    store.restart()
    assert store.check.known.differs_at == 100
    assert store.check.newest == (200, OWN)
