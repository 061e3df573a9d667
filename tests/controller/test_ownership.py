"""Which broker group owns topics: what logs say, what the store keeps, and when to choose."""

import pytest
from controller.controller_rig import DEAD_MS, HEARTBEAT_MS, Broker, Rig, ask, running

from popmq.common.protocol.group_record import GroupRecord
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.wire import controller_pb2 as pb
from popmq.controller.metadata_ownership import KEY, MetadataOwnership, OwnershipClaim
from popmq.controller.metadata_store import MemoryStore


def single(name: str, *, owner: str = "", changes: int = 0) -> Broker:
    return Broker(
        name, group=name, replicas=1, epoch=1, role=pb.MASTER, owner=owner, changes=changes
    )


def told(rig: Rig, broker: Broker) -> pb.RegisterReply:
    return pb.RegisterReply.FromString(ask(rig.controllers[0], Kind.REGISTER, broker.heartbeat()))


def routes(rig: Rig) -> pb.RoutesReply:
    body = pb.RoutesRequest().SerializeToString()
    return pb.RoutesReply.FromString(ask(rig.controllers[0], Kind.ROUTES, body))


def names(rig: Rig) -> list[str]:
    return [broker.broker for broker in routes(rig).brokers]


def test_a_group_that_moves_its_timers_is_told_where_the_others_are() -> None:
    rig = Rig(single("a"), single("b"))
    rig.run(DEAD_MS)
    beat = pb.RegisterRequest.FromString(rig.broker("b").heartbeat())
    assert not pb.RegisterReply.FromString(
        ask(rig.controllers[0], Kind.REGISTER, beat.SerializeToString())
    ).peers
    beat.moves_timers = beat.broker.draining = True
    peers = pb.RegisterReply.FromString(
        ask(rig.controllers[0], Kind.REGISTER, beat.SerializeToString())
    ).peers
    assert [(peer.broker, peer.address, peer.draining) for peer in peers] == [
        ("a", "a:1", False),
        ("b", "b:1", True),
    ]


def test_of_new_groups_the_first_name_owns_after_all_had_time_to_come() -> None:
    rig = Rig(single("b"), single("a"))
    rig.run(HEARTBEAT_MS)
    assert routes(rig).owner == ""
    assert names(rig) == ["a", "b"]
    rig.run(DEAD_MS)
    assert routes(rig).owner == "a"
    reply = told(rig, rig.broker("b"))
    assert (reply.owner, reply.owner_address) == ("a", "a:1")


def test_the_broker_of_the_same_process_owns_at_once() -> None:
    rig = Rig(single("a"))
    rig.broker("a").address = "in-process"
    assert told(rig, rig.broker("a")).owner == "a"


@pytest.mark.parametrize(
    ("claims", "wanted"),
    [
        ({"a": OwnershipClaim("", 0), "b": OwnershipClaim("", 3)}, "b"),
        ({"a": OwnershipClaim("", 0), "c": OwnershipClaim("b", 0)}, "b"),
        ({"a": OwnershipClaim("", 9), "c": OwnershipClaim("b", 0)}, "b"),
        ({"a": OwnershipClaim("", 2), "b": OwnershipClaim("", 3)}, "b"),
        ({"b": OwnershipClaim("", 0), "a": OwnershipClaim("", 0)}, ""),
    ],
    ids=["has topics", "is followed", "is followed by one", "has more", "nobody has any"],
)
def test_what_is_in_the_logs_says_who_owns_without_waiting(
    claims: dict[str, OwnershipClaim], wanted: str
) -> None:
    metadata_ownership = MetadataOwnership(MemoryStore(), patience_ms=1_000, on_owner=lambda: None)
    for name, claim in claims.items():
        metadata_ownership.on_claim(name, claim)
    metadata_ownership.step(0)
    assert metadata_ownership.owner == wanted
    metadata_ownership.step(1_000)
    assert metadata_ownership.owner == (wanted or "a")


def test_a_restarted_controller_with_an_empty_store_learns_the_owner_from_the_logs() -> None:
    rig = Rig(single("b", owner="z"), single("z", changes=5))
    rig.run(2 * HEARTBEAT_MS)
    assert routes(rig).owner == "z"


def test_the_store_keeps_the_owner_whatever_is_heard_later() -> None:
    store = MemoryStore()
    rig = Rig(single("z"), store=store)
    rig.run(2 * DEAD_MS)
    assert routes(rig).owner == "z"
    rig.controllers[:] = [rig.controller()]
    rig.brokers = [single("a", changes=5), single("z")]
    rig.run(2 * DEAD_MS)
    assert routes(rig).owner == "z"


def test_two_controllers_choose_one_owner() -> None:
    rig = Rig(single("a"), single("b"), controllers=2)
    rig.deaf = {(0, "b"), (1, "a")}
    rig.run(2 * DEAD_MS)
    assert {controller.ownership.owner for controller in rig.controllers} == {"a"}


def test_a_group_gets_no_messages_before_it_has_the_topics() -> None:
    rig = Rig(single("a", changes=1), single("b"))
    rig.run(2 * HEARTBEAT_MS)
    assert (routes(rig).owner, names(rig)) == ("a", ["a"])
    assert list(told(rig, rig.broker("a")).groups) == ["a"]
    before = routes(rig).version
    rig.broker("b").owner = "a"
    rig.run(HEARTBEAT_MS)
    assert names(rig) == ["a", "b"]
    assert routes(rig).version > before
    assert list(told(rig, rig.broker("a")).groups) == ["a", "b"]


def test_a_slave_that_is_behind_says_nothing_about_topics() -> None:
    rig = running()
    rig.run(2 * DEAD_MS)
    assert routes(rig).owner == "broker-a"
    rig.broker("node-b").owner = "elsewhere"
    rig.run(2 * HEARTBEAT_MS)
    assert rig.controllers[0].ownership.has_joined("broker-a")
    results: list[object] = []
    rig.store.read(KEY, results.append)
    assert results == [GroupRecord("broker-a", 1, ("broker-a",), 1)]


def test_a_drained_group_is_told_of_until_it_was_taken_away() -> None:
    rig = Rig(single("a", changes=1), single("b", owner="a"))
    rig.run(HEARTBEAT_MS)
    rig.broker("b").draining = True
    rig.run(HEARTBEAT_MS)
    assert [(broker.broker, broker.draining) for broker in routes(rig).brokers] == [
        ("a", False),
        ("b", True),
    ]
    assert list(told(rig, rig.broker("a")).groups) == ["a"]
    rig.broker("b").up = False
    rig.run(2 * DEAD_MS)
    assert names(rig) == ["a"]
    rig.broker("b").up = True
    rig.run(HEARTBEAT_MS)
    assert names(rig) == ["a", "b"]
