"""Planned changes of masters, and clients that wait meanwhile."""

import pytest
from ha.node_rig import GROUP, TOPIC, Node, Rig
from ha.test_node import others, running, sent

from popmq.broker.ha.role import BrokerRole
from popmq.common.errors import Code
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.wire import controller_pb2 as pb
from popmq.testing.harness.core_broker import Answer, pop


def hand_over(rig: Rig, to: Node, *, epoch: int = 0, wait_ms: int = 0) -> Answer:
    master = rig.master.node
    asked = pb.HandOverRequest(
        group=GROUP,
        epoch=epoch or master.identity.epoch,
        leader=master.identity.store_id,
        to=to.node.identity.store_id,
        wait_ms=wait_ms,
    )
    return rig.ask(Kind.HAND_OVER, asked.SerializeToString())


def test_a_hand_over_is_answered_when_the_other_has_everything_and_clients_wait_outside() -> None:
    rig = running()
    old, heir = rig.master, others(rig)[0]
    pending = rig.send(b"in front of it")
    answer = hand_over(rig, heir)
    refused = rig.send(b"behind it", to=old)
    rig.until(lambda: answer.heard)
    assert pending.heard
    assert pending.error is None
    assert refused.error is not None
    assert refused.error.code is Code.NOT_MASTER
    assert answer.body is not None
    assert pb.HandOverReply.FromString(answer.body).end == old.end == heir.end


def test_a_hand_over_without_a_new_epoch_ends_by_itself() -> None:
    rig = running()
    old = rig.master
    answer = hand_over(rig, others(rig)[0])
    assert old.role is BrokerRole.HANDING_OVER
    took_ms = rig.until(lambda: old.role is BrokerRole.MASTER)
    assert took_ms == rig.settings.replication.hand_over_ms
    assert answer.body is not None
    sent(rig, b"it goes on")


def test_a_hand_over_to_a_slave_that_does_not_follow_is_refused_in_the_end() -> None:
    rig = running()
    old, heir = rig.master, others(rig)[0]
    rig.cut(heir.name)
    rig.send(b"x")
    answer = hand_over(rig, heir, wait_ms=300)
    rig.until(lambda: answer.heard)
    assert answer.error is not None
    assert "not handed over: node" in str(answer.error)
    assert old.role is BrokerRole.MASTER


@pytest.mark.parametrize("mistake", ["epoch", "to", "role"])
def test_a_hand_over_that_is_not_this_masters_is_refused(mistake: str) -> None:
    rig = running()
    old, heir = rig.master, others(rig)[0]
    if mistake == "role":
        body = pb.HandOverRequest(epoch=1, to=old.node.identity.store_id).SerializeToString()
        answer = rig.ask(Kind.HAND_OVER, body, of=heir)
    elif mistake == "to":
        gone = Node(rig, "node-x").start()
        answer = hand_over(rig, gone)
    else:
        answer = hand_over(rig, heir, epoch=7)
    assert answer.error is not None
    assert old.role is BrokerRole.MASTER


def test_an_operator_hands_over_and_nobody_notices_but_a_moment() -> None:
    rig = running()
    old, heir = rig.master, others(rig)[1]
    sent(rig, b"before")
    assert rig.controller is not None
    asked = pb.FailoverRequest(group=GROUP, node=heir.name).SerializeToString()
    answer = Answer()
    rig.controller.request(Kind.FAILOVER, asked, 10_000, answer.on_result)
    gap_ms = rig.until(lambda: rig.masters == [heir])
    assert gap_ms <= 1_000
    rig.until(lambda: answer.heard and old.role is BrokerRole.SLAVE)
    assert answer.body is not None
    assert pb.FailoverReply.FromString(answer.body).handed_over
    sent(rig, b"after")
    assert len(rig.receive()) == 2
    assert old.node.slave_role.truncations == 0


# -- waiting clients


def test_a_waiting_receive_is_answered_when_its_master_is_deposed() -> None:
    rig = running()
    old = rig.master
    waiting = rig.ask(Kind.POP, pop(TOPIC, "g", poll_ms=20_000))
    rig.advance(100)
    assert not waiting.heard
    asked = pb.FailoverRequest(group=GROUP, node=others(rig)[0].name).SerializeToString()
    assert rig.controller is not None
    rig.controller.request(Kind.FAILOVER, asked, 10_000, lambda reply: None)
    rig.until(lambda: old.role is BrokerRole.SLAVE)
    assert waiting.body is not None
    assert hop.decode_pop_reply(waiting.body).deliveries == []
    assert old.drops == 1
