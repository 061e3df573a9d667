"""Brokers of a group through their roles: a real controller, real stores, time by hand."""

from ha.node_rig import Node, Rig

from popmq.broker.ha.role import Role
from popmq.common.errors import Code


def running(names: str = "abc", *, least: int = 0) -> Rig:
    rig = Rig(names, least=least)
    rig.ready()
    rig.make_topic()
    rig.advance(100)
    return rig


def others(rig: Rig) -> list[Node]:
    return [node for node in rig.nodes if node is not rig.master]


def sent(rig: Rig, *bodies: bytes) -> None:
    for body in bodies:
        answer = rig.send(body)
        rig.until(lambda answer=answer: answer.heard)  # type: ignore[misc]
        assert answer.error is None


def test_a_new_group_elects_its_first_node_and_the_others_follow() -> None:
    rig = running()
    assert [node.role for node in rig.nodes] == [Role.MASTER, Role.SLAVE, Role.SLAVE]
    assert len({node.node.identity.store_id for node in rig.nodes}) == 3
    assert {node.node.identity.epoch for node in rig.nodes} == {1}


def test_what_was_acknowledged_survives_its_master() -> None:
    rig = running()
    sent(rig, b"one", b"two", b"three")
    (first,) = [one.handle for one in rig.receive(limit=1)][:1] or [b""]
    acked = rig.ack(first)
    rig.until(lambda: acked.heard)
    rig.master.kill(power=True)
    rig.ready(members=2)
    assert rig.master.node.identity.epoch == 2
    rig.advance(61_000)
    left = [one.head for one in rig.receive()]
    assert len(left) == 2
    assert not [node.failures for node in rig.nodes if node.failures]


def test_a_slave_refuses_clients_and_says_why() -> None:
    rig = running()
    answer = rig.send(b"x", to=others(rig)[0])
    assert answer.error is not None
    assert answer.error.code is Code.NOT_MASTER


def test_a_deposed_master_cuts_what_nobody_else_has_and_follows() -> None:
    rig = running()
    old = rig.master
    sent(rig, b"kept")
    rig.cut(old.name)
    lost = [rig.send(b"lost", to=old) for _ in range(5)]
    rig.until(lambda: rig.master is not old and len(rig.masters) == 2)
    assert not any(one.heard for one in lost)
    sent(rig, b"new")
    rig.heal()
    rig.until(lambda: old.role is Role.SLAVE and old.end == rig.master.end)
    assert old.drops == 1
    assert old.node.truncations == 1
    assert old.log() == rig.master.log()
    assert not any(one.heard for one in lost)
    rig.until(lambda: len(rig._set()) == 3)


def test_a_master_that_restarts_waits_for_a_new_epoch() -> None:
    rig = running()
    old = rig.master
    sent(rig, b"one")
    old.kill()
    rig.stop_controller()
    old.start()
    rig.advance(3_000)
    assert old.role is Role.NOBODY
    assert not old.node.gate.clients.is_open
    rig.start_controller()
    rig.ready()
    assert rig.master.node.identity.epoch == 2


def test_confirmed_writes_go_on_without_a_controller() -> None:
    rig = running()
    rig.stop_controller()
    rig.advance(10_000)
    sent(rig, b"one", b"two")
    assert len(rig.receive()) == 2


def test_sends_are_refused_while_too_few_replicas_are_there() -> None:
    rig = running()
    sent(rig, b"one")
    for node in others(rig):
        node.kill()
    rig.advance(4_000)
    answer = rig.send(b"two")
    assert answer.error is not None
    assert answer.error.code is Code.HA_NOT_AVAILABLE
    assert "2 have to be (replication.min_in_sync)" in str(answer.error)
    others(rig)[0].start()
    rig.until(lambda: rig.send(b"again").error is None)


def test_the_set_never_gets_smaller_than_min_in_sync() -> None:
    rig = running()
    for node in others(rig):
        node.kill()
    rig.advance(10_000)
    assert len(rig._set()) == 2


def test_a_slave_that_died_is_taken_out_and_comes_back() -> None:
    rig = running()
    gone = others(rig)[0]
    gone.kill(power=True)
    late = rig.send(b"waits")
    rig.until(lambda: late.heard)
    assert late.error is None
    assert len(rig._set()) == 2
    gone.start()
    rig.until(lambda: len(rig._set()) == 3)
    assert gone.log() == rig.master.log()


def test_all_brokers_may_stop_and_start_again() -> None:
    rig = running()
    sent(rig, b"one", b"two")
    for _ in range(2):
        for node in rig.nodes:
            node.kill(power=True)
        for node in rig.nodes:
            node.start()
        rig.ready()
    assert len(rig.receive()) == 2
    assert rig.master.node.identity.epoch == 3


def test_the_second_of_two_masters_confirms_and_the_first_does_not() -> None:
    rig = running()
    old = rig.master
    rig.cut(old.name)
    rig.until(lambda: rig.master is not old)
    late = rig.send(b"late", to=old)
    sent(rig, b"one")
    rig.advance(5_000)
    assert not late.heard or late.error is not None
    assert old.node.broker.store.confirmed < rig.master.node.broker.store.confirmed
