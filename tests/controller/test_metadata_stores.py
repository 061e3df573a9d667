"""The three metadata stores: the same rules for all, and what each has to survive."""

import fcntl
import multiprocessing
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from controller.lease_api import LeaseApi

from popmq.common.errors import ConfigError
from popmq.common.protocol.group_record import GroupRecord
from popmq.controller import file_store
from popmq.controller.file_store import FileStore
from popmq.controller.lease_store import ApiServer, LeaseStore
from popmq.controller.metadata_store import (
    BlockingStore,
    MemoryStore,
    MetadataStoreUnavailable,
    WriteOutcome,
    WriteResult,
)

FIRST = GroupRecord("a", 1, ("a", "b"), 1)
SECOND = GroupRecord("b", 2, ("a", "b"), 2)
OTHER = GroupRecord("a", 1, ("a",), 2)


class WaitingMemory:
    """A MemoryStore as a blocking store."""

    def __init__(self) -> None:
        self._store = MemoryStore()

    def read(self, key: str) -> GroupRecord | None:
        results: list[GroupRecord | MetadataStoreUnavailable | None] = []
        self._store.read(key, results.append)
        assert not isinstance(results[0], MetadataStoreUnavailable)
        return results[0]

    def swap(self, key: str, expected_version: int, record: GroupRecord) -> WriteResult:
        write_results: list[WriteResult] = []
        self._store.swap(key, expected_version, record, write_results.append)
        return write_results[0]


@pytest.fixture
def api() -> Iterator[LeaseApi]:
    with LeaseApi() as lease_api:
        yield lease_api


def lease_store(api: LeaseApi, *, timeout_s: float = 5.0) -> LeaseStore:
    return LeaseStore(ApiServer(api.url, "shop", timeout_s=timeout_s), "popmq")


@pytest.fixture(params=["memory", "file", "kubernetes"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> BlockingStore:
    makers: dict[str, Callable[[], BlockingStore]] = {
        "memory": WaitingMemory,
        "file": lambda: FileStore(str(tmp_path)),
        "kubernetes": lambda: lease_store(request.getfixturevalue("api")),
    }
    return makers[request.param]()


# -- what holds for every store


def test_a_store_gives_back_what_was_written(store: BlockingStore) -> None:
    assert store.read("g") is None
    assert store.swap("g", 0, FIRST) == WriteResult(WriteOutcome.WRITTEN, FIRST)
    assert store.read("g") == FIRST
    assert store.swap("g", 1, SECOND) == WriteResult(WriteOutcome.WRITTEN, SECOND)
    assert store.read("g") == SECOND


def test_groups_do_not_meet(store: BlockingStore) -> None:
    for key in ("a-b", "A-b", "a_b"):
        store.swap(key, 0, FIRST)
        assert store.swap(key, 1, SECOND).outcome is WriteOutcome.WRITTEN


@pytest.mark.parametrize("expected", [0, 2], ids=["none", "a later one"])
def test_a_write_that_expects_another_version_writes_nothing(
    store: BlockingStore, expected: int
) -> None:
    store.swap("g", 0, FIRST)
    record = GroupRecord("b", 9, ("b",), expected + 1)
    result = store.swap("g", expected, record)
    assert result.outcome is not WriteOutcome.WRITTEN
    assert result.record == FIRST
    assert store.read("g") == FIRST


# -- files


def test_a_file_store_reads_what_the_last_process_wrote(tmp_path: Path) -> None:
    FileStore(str(tmp_path)).swap("g", 0, FIRST)
    assert FileStore(str(tmp_path)).read("g") == FIRST


def test_of_two_stores_on_one_folder_one_wins(tmp_path: Path) -> None:
    item, two = FileStore(str(tmp_path)), FileStore(str(tmp_path))
    item.swap("g", 0, FIRST)
    assert item.swap("g", 1, SECOND).outcome is WriteOutcome.WRITTEN
    assert two.swap("g", 1, OTHER) == WriteResult(WriteOutcome.CONFLICT, SECOND)


def _write_many(folder: str, name: str, wins: int) -> None:
    store, won = FileStore(folder), 0
    while won < wins:
        found_record = store.read("g")
        version = found_record.version if found_record else 0
        record = GroupRecord(
            name, 1 + (found_record.epoch if found_record else 0), (name,), version + 1
        )
        won += store.swap("g", version, record).outcome is WriteOutcome.WRITTEN


@pytest.mark.more
def test_processes_that_write_at_once_lose_no_write(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    wins = 25
    writers = [
        context.Process(target=_write_many, args=(str(tmp_path), name, wins)) for name in "abc"
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    last = FileStore(str(tmp_path)).read("g")
    assert last is not None
    assert (last.version, last.epoch) == (3 * wins, 3 * wins)


def test_a_draft_that_a_crash_left_behind_is_nothing(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path))
    store.swap("g", 0, FIRST)
    (tmp_path / "g.json.tmp").write_text('{"leader": "x"')
    assert store.read("g") == FIRST
    assert store.swap("g", 1, SECOND).outcome is WriteOutcome.WRITTEN


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"leader": "a", "epoch": 1}', "\udcff"])
def test_a_damaged_file_is_said_and_never_taken_for_no_record(tmp_path: Path, text: str) -> None:
    (tmp_path / "g.json").write_text(text, errors="surrogateescape")
    store = FileStore(str(tmp_path))
    with pytest.raises(MetadataStoreUnavailable, match=r"g\.json cannot be read"):
        store.read("g")
    assert store.swap("g", 0, FIRST).outcome is WriteOutcome.UNKNOWN
    assert (tmp_path / "g.json").read_text(errors="surrogateescape") == text


def test_a_disk_that_fails_after_the_rename_leaves_the_outcome_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(str(tmp_path))

    def broken(folder: str) -> None:
        raise OSError("I/O error")

    monkeypatch.setattr(file_store, "_sync_folder", broken)
    result = store.swap("g", 0, FIRST)
    assert (result.outcome, result.reason) == (WriteOutcome.UNKNOWN, "I/O error")


def test_a_lock_that_a_stopped_controller_holds_is_waited_for_and_then_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_store, "LOCK_WAIT_S", 0.05)
    store = FileStore(str(tmp_path))
    fd = os.open(tmp_path / "lock", os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    result = store.swap("g", 0, FIRST)
    assert result.outcome is WriteOutcome.UNKNOWN
    assert "another controller has held" in result.reason
    os.close(fd)
    assert store.swap("g", 0, FIRST).outcome is WriteOutcome.WRITTEN


def test_a_folder_that_cannot_be_made_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"controller\.data = .* cannot be written"):
        FileStore(str(tmp_path / "file" / "folder"))


# -- Kubernetes


def test_a_lease_shows_leader_and_epoch_to_people(api: LeaseApi) -> None:
    store = lease_store(api)
    store.swap("shop-a", 0, FIRST)
    store.swap("shop-a", 1, SECOND)
    lease = api.leases["popmq.popmq.shop-a"]
    assert lease["spec"] == {"holderIdentity": "b", "leaseTransitions": 2}
    assert lease["metadata"]["namespace"] == "shop"


def test_a_write_between_read_and_write_wins(api: LeaseApi) -> None:
    store = lease_store(api)
    store.swap("g", 0, FIRST)
    api.before_write = lambda: lease_store(api).swap("g", 1, SECOND)
    assert store.swap("g", 1, OTHER) == WriteResult(WriteOutcome.CONFLICT, SECOND)


def test_two_that_make_the_lease_at_once_make_one(api: LeaseApi) -> None:
    other = GroupRecord("b", 1, ("b",), 1)
    api.before_write = lambda: lease_store(api).swap("g", 0, other)
    assert lease_store(api).swap("g", 0, FIRST) == WriteResult(WriteOutcome.CONFLICT, other)


def test_a_write_that_happened_and_was_not_answered_is_found_by_reading(api: LeaseApi) -> None:
    store = lease_store(api)
    store.swap("g", 0, FIRST)
    api.lose_answers = 1
    assert store.swap("g", 1, SECOND) == WriteResult(WriteOutcome.WRITTEN, SECOND)


def test_a_conflict_after_our_own_success_is_a_success(api: LeaseApi) -> None:
    """As when a load balancer repeats the request."""
    store = lease_store(api)
    store.swap("g", 0, FIRST)
    api.repeat_writes = 1
    assert store.swap("g", 1, SECOND) == WriteResult(WriteOutcome.WRITTEN, SECOND)


def test_a_write_that_was_not_answered_and_is_not_there_is_unknown(api: LeaseApi) -> None:
    store = lease_store(api, timeout_s=0.3)
    store.swap("g", 0, FIRST)
    api.delay_writes()
    result = store.swap("g", 1, SECOND)
    assert result.outcome is WriteOutcome.UNKNOWN
    assert result.record == FIRST
    api.let_writes_go()
    assert api.landed.wait(10)
    assert store.read("g") == SECOND  # it came late


def test_a_late_write_loses_against_one_that_was_made_meanwhile(api: LeaseApi) -> None:
    store = lease_store(api, timeout_s=0.3)
    store.swap("g", 0, FIRST)
    api.delay_writes()
    assert store.swap("g", 1, SECOND).outcome is WriteOutcome.UNKNOWN
    assert lease_store(api).swap("g", 1, OTHER).outcome is WriteOutcome.WRITTEN
    api.let_writes_go()
    assert api.landed.wait(10)
    assert store.read("g") == OTHER


def test_an_old_lease_from_a_cache_decides_nothing(api: LeaseApi) -> None:
    store = lease_store(api)
    store.swap("g", 0, FIRST)
    store.swap("g", 1, SECOND)
    api.stale_reads = True
    third = GroupRecord("a", 3, ("a", "b"), 3)
    result = store.swap("g", 2, third)
    assert result.outcome is WriteOutcome.UNKNOWN
    assert "old Lease" in result.reason
    # One that believes the old record writes nothing either.
    assert store.swap("g", 1, OTHER).outcome is not WriteOutcome.WRITTEN
    api.stale_reads = False
    assert store.read("g") == SECOND


@pytest.mark.parametrize("status", [401, 403, 429, 500, 503])
def test_an_api_server_that_refuses_to_read_is_away(api: LeaseApi, status: int) -> None:
    api.refuse_with = status
    with pytest.raises(MetadataStoreUnavailable, match=f"answers {status}"):
        lease_store(api).read("g")
    assert lease_store(api).swap("g", 0, FIRST).outcome is WriteOutcome.UNKNOWN


def test_an_api_server_that_is_not_there_is_away() -> None:
    with LeaseApi() as gone:
        url = gone.url
    with pytest.raises(MetadataStoreUnavailable, match=url):
        LeaseStore(ApiServer(url, "shop"), "popmq").read("g")


def test_a_lease_that_somebody_else_made_is_not_overwritten(api: LeaseApi) -> None:
    store = lease_store(api)
    store.swap("g", 0, FIRST)
    api.leases["popmq.popmq.g"]["metadata"]["annotations"] = {"popmq.io/record": "mine"}
    with pytest.raises(MetadataStoreUnavailable, match=r"Lease popmq\.popmq\.g cannot be read"):
        store.read("g")
    assert store.swap("g", 0, FIRST).outcome is WriteOutcome.UNKNOWN


def test_the_token_is_sent_and_read_anew_for_each_request(api: LeaseApi) -> None:
    tokens = iter(["one", "two"])
    store = LeaseStore(ApiServer(api.url, "shop", lambda: next(tokens)), "popmq")
    store.read("g")
    store.read("g")
    assert api.tokens == ["Bearer one", "Bearer two"]


@pytest.mark.parametrize(
    ("cluster", "key"), [("popmq", "Broker_A"), ("popmq", "b" * 100), ("X-", "-y_")]
)
def test_every_group_has_a_lease_name_that_kubernetes_takes(
    api: LeaseApi, cluster: str, key: str
) -> None:
    store = LeaseStore(ApiServer(api.url, "shop"), cluster)
    assert store.swap(key, 0, FIRST).outcome is WriteOutcome.WRITTEN
    assert store.read(key) == FIRST


def test_outside_of_a_pod_the_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match="this is no pod of a Kubernetes cluster"):
        ApiServer.of_pod({}, "")
