"""`popmq failover` at the controller: planned hand-overs and unclean elections."""

import pytest
from controller.controller_rig import DEAD_MS, GROUP, Broker, Rig, failover, running

from popmq.common.errors import Code, PopmqError, Refused, Unavailable
from popmq.common.protocol.group_record import GroupRecord
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.wire import controller_pb2 as pb

# -- a planned hand-over


def test_a_planned_hand_over_asks_the_master_and_then_writes_the_record() -> None:
    rig = running()
    asked: list[pb.HandOverRequest] = []

    def serve(kind: Kind, body: bytes) -> bytes:
        assert kind is Kind.HAND_OVER
        asked.append(pb.HandOverRequest.FromString(body))
        return pb.HandOverReply(end=77).SerializeToString()

    rig.peers["node-a:1"] = serve
    reply = failover(rig.controllers[0], "node-c")
    (request,) = asked
    assert (request.group, request.epoch, request.to) == (GROUP, 1, "store-node-c")
    # Nothing waits for the old master, which has to begin again from its disk.
    assert rig.record == GroupRecord("store-node-c", 2, ("store-node-b", "store-node-c"), 2)
    assert (reply.from_node, reply.to_node, reply.handed_over) == ("node-a", "node-c", True)
    assert list(reply.steps) == [
        "node-a stopped admitting at 77, which node-c has",
        "node-c leads in epoch 2",
    ]


@pytest.mark.parametrize("answer", [Unavailable("gone"), Refused(Code.PROXY_TIMEOUT, "late")])
def test_a_hand_over_that_the_master_does_not_answer_changes_nothing(answer: PopmqError) -> None:
    rig = running()
    rig.peers["node-a:1"] = lambda kind, body: answer
    before = rig.record
    with pytest.raises(PopmqError, match="node-a did not hand over, nothing changed"):
        failover(rig.controllers[0])
    assert rig.record == before


def test_a_hand_over_survives_that_the_master_changes_its_set_meanwhile() -> None:
    rig = running()
    first = rig.record
    assert first is not None
    shrunk = GroupRecord(first.leader, 1, ("store-node-a", "store-node-b"), 2)

    def serve(kind: Kind, body: bytes) -> bytes:
        rig.store.swap(GROUP, 1, shrunk, lambda swapped: None)
        return pb.HandOverReply(end=1).SerializeToString()

    rig.peers["node-a:1"] = serve
    failover(rig.controllers[0], "node-b")
    assert rig.record == GroupRecord("store-node-b", 2, ("store-node-a", "store-node-b"), 3)


def test_a_hand_over_to_one_that_left_the_set_meanwhile_changes_nothing() -> None:
    rig = running()
    first = rig.record
    assert first is not None
    shrunk = GroupRecord(first.leader, 1, ("store-node-a", "store-node-c"), 2)

    def serve(kind: Kind, body: bytes) -> bytes:
        rig.store.swap(GROUP, 1, shrunk, lambda swapped: None)
        return pb.HandOverReply(end=1).SerializeToString()

    rig.peers["node-a:1"] = serve
    with pytest.raises(PopmqError, match="changed meanwhile"):
        failover(rig.controllers[0], "node-b")
    assert rig.record == shrunk


def test_a_hand_over_that_hears_of_the_smaller_set_before_it_writes_changes_nothing() -> None:
    """The controller has read the record that the successor is not in when the master answers."""
    rig = running()
    first = rig.record
    assert first is not None
    shrunk = GroupRecord(first.leader, 1, ("store-node-a", "store-node-c"), 2)

    def serve(kind: Kind, body: bytes) -> bytes:
        rig.controllers[0].groups[GROUP].records.write(1, shrunk, lambda swapped: None)
        return pb.HandOverReply(end=1).SerializeToString()

    rig.peers["node-a:1"] = serve
    with pytest.raises(PopmqError, match="changed meanwhile"):
        failover(rig.controllers[0], "node-b")
    assert rig.record == shrunk


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        ("node-a", "is the master of broker-a already"),
        ("node-x", "has no node node-x; known are node-a, node-b, node-c"),
        ("node-b", "node node-b of broker-a sends no heartbeats"),
    ],
)
def test_a_hand_over_that_cannot_be_says_why(node: str, reason: str) -> None:
    rig = running()
    rig.broker("node-b").up = False
    rig.run(2 * DEAD_MS)
    with pytest.raises(PopmqError, match=reason):
        failover(rig.controllers[0], node)


def test_a_dry_run_tells_and_changes_nothing() -> None:
    rig = running()
    before = rig.record
    reply = failover(rig.controllers[0], "node-b", dry_run=True)
    assert (reply.to_node, reply.after.epoch, reply.handed_over) == ("node-b", 2, True)
    assert rig.record == before
    assert rig.opened == []


# -- unclean


def outside() -> Rig:
    """node-c is not in the set and has 40 of 100 bytes; the others are dead."""
    rig = running()
    first = rig.record
    assert first is not None
    rig.broker("node-a").end = rig.broker("node-b").end = 100
    rig.broker("node-c").end = 40
    shrunk = GroupRecord(first.leader, 1, ("store-node-a", "store-node-b"), 2)
    rig.store.swap(GROUP, 1, shrunk, lambda swapped: None)
    rig.run(2 * DEAD_MS)
    rig.broker("node-a").up = rig.broker("node-b").up = False
    rig.run(2 * DEAD_MS)
    return rig


def test_an_unclean_election_says_what_it_loses() -> None:
    rig = outside()
    reply = failover(rig.controllers[0], "node-c", unclean=True)
    assert (reply.lost_from, reply.lost_to) == (40, 100)
    assert list(reply.lost_nodes) == ["node-a", "node-b"]
    assert rig.record == GroupRecord("store-node-c", 2, ("store-node-c",), 3)
    rig.broker("node-a").up = True
    rig.run(2 * DEAD_MS)
    assert rig.leader == "node-c"


def test_an_unclean_election_has_to_be_asked_for() -> None:
    rig = outside()
    before = rig.record
    with pytest.raises(PopmqError, match="no member sends heartbeats: start a member, or give up"):
        failover(rig.controllers[0], "node-c")
    with pytest.raises(PopmqError, match="no broker could take over without a loss"):
        failover(rig.controllers[0])
    assert rig.record == before


def test_an_unclean_election_is_refused_while_a_member_is_heard() -> None:
    rig = outside()
    rig.broker("node-b").up = True
    rig.broker("node-b").obeys = False
    rig.beat()
    before = rig.record
    with pytest.raises(PopmqError, match="node-b can take over without a loss"):
        failover(rig.controllers[0], "node-c", unclean=True)
    assert rig.record == before


def test_a_failover_of_a_group_that_is_unknown_or_single_is_refused() -> None:
    rig = Rig(Broker("node-a", replicas=1))
    rig.beat()
    with pytest.raises(PopmqError, match="broker group broker-a has one broker") as refused:
        failover(rig.controllers[0])
    assert refused.value.code is Code.PRECONDITION_FAILED
