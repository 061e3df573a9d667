"""How a master keeps its SyncStateSet, and the bounds of what it does for its slaves."""

from dataclasses import replace

from ha.replicas import SETTINGS, DirectPort, World, ask, hello_to, pair, refusal, trio

from popmq.broker.ha.replication_client import Phase
from popmq.common.errors import Code
from popmq.common.protocol.messaging_payloads import Kind


def test_who_caught_up_is_added_and_who_fell_silent_is_taken_out() -> None:
    world, a, b = pair()
    side = a.lead(1)
    b.follow(a)
    world.advance(20)
    assert [alter.sync_state_set for alter in a.alters] == [frozenset((a.id, b.id))]
    assert side.sync.pending == {b.id}
    side.learn(epoch=1, version=2, members=frozenset((a.id, b.id)))
    a.alters.clear()
    world.advance(5_000)
    assert a.alters == []  # an idle slave is no laggard
    assert b.port is not None
    b.port.cut = True
    b.slave = None
    world.advance(1_400)
    assert a.alters == []
    world.advance(300)
    assert a.alters[0].sync_state_set == {a.id}


def test_a_member_whose_connection_ended_is_taken_out_sooner_unless_it_is_back() -> None:
    world, a, b, c = trio()
    side = a.lead(1, b, c)
    b.follow(a)
    c.follow(a)
    world.advance(100)
    side.lost(b.name)
    a.append()
    world.advance(250)
    assert a.alters == []
    world.advance(200)
    assert a.alters == []  # it was another connection, or it is back
    assert b.port is not None
    b.port.cut = True
    b.slave = None
    side.lost(b.name)
    world.advance(250)
    assert a.alters == []
    world.advance(100)
    assert a.alters[0].sync_state_set == {a.id, c.id}


def test_a_member_whose_disk_hangs_is_taken_out_though_it_speaks() -> None:
    world, a, b, c = trio()
    side = a.lead(1, b, c)
    b.follow(a)
    c.follow(a)
    world.settle()
    world.advance(100)
    b.flusher.held = True
    for _ in range(200):
        a.append()
        world.advance(10)
    assert {alter.sync_state_set for alter in a.alters} == {frozenset((a.id, c.id))}
    assert side.sync.members == {a.id, b.id, c.id}  # until it is known


def test_a_request_is_sent_again_until_the_record_answers_it() -> None:
    world, a, b = pair()
    side = a.lead(1)
    b.follow(a)
    world.advance(1_000)
    assert len(a.alters) > 2
    assert len(set(a.alters)) == 1
    side.learn(epoch=1, version=2, members=frozenset((a.id, b.id)))
    count = len(a.alters)
    world.advance(1_000)
    assert len(a.alters) == count


def test_a_candidate_is_waited_for_as_long_as_nobody_says_whether_it_was_added() -> None:
    """The request may have been written, and only its answer be lost."""
    world, a, b = pair()
    side = a.lead(1)
    b.follow(a)
    world.advance(20)
    assert side.sync.pending == {b.id}
    a.reachable = False
    assert b.port is not None
    b.port.cut = True
    b.slave = None
    end = a.append()
    world.advance(10_000)
    assert side.sync.pending == {b.id}
    assert a.store.confirmed < end == a.store.durable


def test_a_candidate_that_died_is_given_up_by_a_request_that_competes() -> None:
    world, a, b = pair()
    side = a.lead(1)
    b.follow(a)
    world.advance(20)
    assert b.port is not None
    b.port.cut = True
    b.slave = None
    end = a.append()
    world.advance(2_500)
    assert a.store.confirmed < end
    assert a.alters[-1].sync_state_set == {a.id}
    assert a.alters[-1].expected_version == a.alters[0].expected_version == 1
    side.learn(epoch=1, version=2, members=frozenset((a.id,)))
    assert a.store.confirmed == end


def test_a_slave_far_behind_is_not_asked_for_yet() -> None:
    world, a, b = pair()
    a.lead(1)
    a.append(300, size=1_000)
    world.settle()
    b.flusher.held = True
    b.follow(a)
    world.advance(100)
    assert a.alters == []


# -- bounds


def test_a_slave_that_copies_is_held_to_its_rate() -> None:
    world = World("ab", replace(SETTINGS, catch_up_bytes_per_second=40_000))
    a, b = world.replicas
    a.lead(1)
    a.append(200, size=1_000)
    world.settle()
    b.follow(a)
    world.advance(2_000)
    assert 60_000 < b.store.end < 110_000
    world.advance(4_000)
    assert b.store.end == a.store.end


def test_a_slave_waits_for_its_own_disk_before_it_asks_for_more() -> None:
    world, a, b = pair()
    a.lead(1)
    a.append(300, size=1_000)
    world.settle()
    b.flusher.held = True
    b.follow(a)
    world.settle()
    assert 8 * 4_096 < b.store.end < 12 * 4_096
    b.flusher.release()
    world.settle()
    assert b.store.end == a.store.end


def test_no_more_slaves_connect_than_the_table_holds() -> None:
    world, a, b = pair()
    a.lead(1)
    for number in range(32):
        body = hello_to(a, 1, f"{number:032x}", f"n{number}", "", 0)
        assert isinstance(ask(world, a, Kind.HANDSHAKE, body), bytes)
    body = hello_to(a, 1, b.id, "b", "", 0)
    assert refusal(ask(world, a, Kind.HANDSHAKE, body)) is Code.TOO_MANY_REQUESTS
    world.clock.advance(5_000)  # the others are silent: one of them makes room
    assert isinstance(ask(world, a, Kind.HANDSHAKE, body), bytes)


def test_a_deposed_master_answers_who_waits() -> None:
    world, a, b = pair()
    side = a.lead(1, b)
    b.follow(a)
    world.settle()
    assert b.slave is not None
    side.stop()
    world.settle()
    assert b.slave.phase is not Phase.FOLLOWING


def test_a_port_that_refuses_at_once_is_tried_again_later() -> None:
    world, a, b = pair()
    a.lead(1, b)
    port = b.follow(a)
    port.cut = True
    world.settle()
    assert isinstance(port, DirectPort)
    tries = len(port.asked)
    assert tries == 1


def test_a_master_that_stood_still_blames_nobody() -> None:
    world, a, *_ = trio(follows=True)
    world.advance(100)
    world.clock.advance(60_000)  # it was stopped, and with it everybody it heard of
    world.step()
    world.advance(1_000)
    assert a.alters == []
