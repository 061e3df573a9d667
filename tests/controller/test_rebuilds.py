"""Which replica may rebuild its store, and when it is the master that is replaced."""

from dataclasses import replace

import pytest

from popmq.common.protocol.group_record import GroupRecord
from popmq.common.wire import controller_pb2 as pb
from popmq.controller.rebuilds import Rebuilds, refusal, successor_of_suspect
from popmq.controller.replicas import ReplicaHeartbeat, Role

AT = 1_000
OWN, OTHER = "own", "other"


def replica(name: str, **fields: object) -> ReplicaHeartbeat:
    heartbeat = ReplicaHeartbeat(
        f"node-{name}", name, f"{name}:1", epoch=3, end=5_000, role=Role.SLAVE
    )
    return replace(heartbeat, **fields)  # type: ignore[arg-type]


def equal(name: str, at: int = AT) -> ReplicaHeartbeat:
    return replica(name, tables_equal_at=at)


def wrong(
    name: str, tables: str = OWN, reason: int = pb.TABLES_DIFFER, *, at: int = AT
) -> ReplicaHeartbeat:
    return replica(
        name,
        tables_differ_at=AT,
        tables_hash_at=at,
        tables_hash=tables,
        asks_rebuild=reason,
    )


def record(*members: str) -> GroupRecord:
    return GroupRecord("m", 3, tuple(sorted({"m", *members})), 7)


MASTER = replica("m", role=Role.MASTER)


def test_one_that_differs_may_rebuild_when_another_has_the_masters_tables() -> None:
    asking = wrong("b")
    assert refusal(asking, record("a"), [MASTER, equal("a"), asking], 2) == ""


@pytest.mark.parametrize(
    ("others", "members", "least", "why"),
    [
        ([], ("a",), 1, "no master serves"),
        ([replica("m", role=Role.OPENING), equal("a")], ("a",), 2, "no master serves"),
        ([replica("m", role=Role.MASTER, epoch=2), equal("a")], ("a",), 2, "no master serves"),
        ([MASTER, equal("a")], ("a", "b"), 2, "in the SyncStateSet"),
        ([MASTER], ("a",), 2, "1 members of the SyncStateSet are heard, 2 have to be"),
        ([MASTER], (), 1, "no other replica is known"),
        ([MASTER, equal("a", AT - 1)], ("a",), 2, "no other replica is known"),
        ([MASTER, equal("a")], (), 1, "no other replica is known"),
        ([MASTER, wrong("a", OTHER)], ("a",), 2, "no other replica is known"),
        (
            [MASTER, equal("a"), wrong("c"), wrong("d")],
            ("a", "c", "d"),
            2,
            "more replicas agree with each other",
        ),
        # Whether b and c agree is not known before they name the same position.
        ([MASTER, equal("a"), wrong("c", at=2 * AT)], ("a", "c"), 2, "more replicas agree"),
    ],
)
def test_a_store_is_not_removed_when(
    others: list[ReplicaHeartbeat], members: tuple[str, ...], least: int, why: str
) -> None:
    asking = wrong("b")
    assert why in refusal(asking, record(*members), [*others, asking], least)


def test_a_leader_and_one_of_another_epoch_never_rebuild() -> None:
    leader = replace(wrong("m"), role=Role.MASTER)
    assert "does not follow" in refusal(leader, record("a"), [leader, equal("a")], 1)
    late = replace(wrong("b"), epoch=2)
    assert "does not follow" in refusal(late, record("a"), [MASTER, equal("a"), late], 1)


def test_a_log_that_cannot_be_brought_to_the_masters_needs_only_a_master() -> None:
    asking = wrong("b", reason=pb.LOG_DIFFERS)
    assert refusal(asking, record(), [MASTER, asking], 2) == ""
    opening = replica("m", role=Role.OPENING)
    assert refusal(asking, record("b"), [opening, asking], 2) == "", "it may wait for this one"


def test_one_replica_of_a_group_at_a_time_is_allowed() -> None:
    rebuilds, first, second = Rebuilds("group-a"), wrong("b"), wrong("c", OTHER)
    living = [MASTER, equal("a"), first, second]
    assert rebuilds.ask(first, record("a"), living, 2)
    assert rebuilds.ask(first, record("a"), living, 2), "it may not have heard the answer"
    assert not rebuilds.ask(second, record("a"), living, 2)
    copying = replica("b2", node="node-b", role=Role.COPYING)
    assert not rebuilds.ask(second, record("a"), [MASTER, equal("a"), copying, second], 2)
    done = replica("b2", node="node-b")
    assert rebuilds.ask(second, record("a"), [MASTER, equal("a"), done, second], 2)


def test_every_controller_allows_the_same_replica_first() -> None:
    first, second = wrong("b"), wrong("c", OTHER)
    living = [MASTER, equal("a"), first, second]
    assert not Rebuilds("group-a").ask(second, record("a"), living, 2)
    assert Rebuilds("group-a").ask(first, record("a"), living, 2)


def test_a_grant_ends_when_what_it_rests_on_is_gone() -> None:
    rebuilds, asking = Rebuilds("group-a"), wrong("b")
    assert rebuilds.ask(asking, record("a"), [MASTER, equal("a"), asking], 2)
    assert not rebuilds.ask(asking, record("a"), [MASTER, asking], 2)


def test_a_master_is_replaced_by_one_of_a_larger_number_that_agree() -> None:
    living = [MASTER, wrong("a"), wrong("b")]
    heartbeat = successor_of_suspect(record("b"), living)
    assert heartbeat is not None
    assert heartbeat.store_id == "b", "only a member of the SyncStateSet can lead"
    assert successor_of_suspect(record(), living) is None


def test_replicas_agree_by_their_newest_position_whatever_the_first_was() -> None:
    late = replace(wrong("b", at=2 * AT), tables_differ_at=2 * AT)
    living = [MASTER, wrong("a", at=2 * AT), late]
    assert successor_of_suspect(record("a", "b"), living) is not None


@pytest.mark.parametrize(
    "living",
    [
        [MASTER, wrong("a")],
        [MASTER, wrong("a"), wrong("b", OTHER)],
        [MASTER, wrong("a"), wrong("b", at=2 * AT)],
        [MASTER, wrong("a", at=2 * AT), wrong("b", at=2 * AT), equal("c")],
        [MASTER, wrong("a"), wrong("b"), equal("c")],
        [MASTER, wrong("a"), equal("b")],
        [replica("m", role=Role.HANDING_OVER), wrong("a"), wrong("b")],
    ],
)
def test_a_master_stays_when_no_larger_number_agrees(living: list[ReplicaHeartbeat]) -> None:
    assert successor_of_suspect(record("a", "b", "c"), living) is None
