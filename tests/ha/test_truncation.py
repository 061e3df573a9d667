"""Where two logs part, and what goes: rules R11, R12, R21 and R22 over real stores."""

from ha.replicas import World, pair, trio

from popmq.broker.ha.replication_client import Phase
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.protocol.replication_payloads import EpochEntry

# -- R11, R12: what a new master keeps


def test_a_new_master_keeps_what_its_predecessor_may_have_acknowledged() -> None:
    world, a, b, c = trio(follows=True)
    end = a.append(10)
    world.settle()
    assert a.store.confirmed == end
    b.boot()  # it forgot what was confirmed
    b.lead(2, c, version=2)
    c.follow(b)
    world.settle()
    assert b.log()[:end] == a.log()[:end]
    assert b.store.confirmed == c.store.durable == b.store.end > end


# -- R21, R22: where logs part


def test_a_slave_cuts_what_its_new_master_never_had() -> None:
    world, a, b, c = trio(follows=True)
    common = a.append(5)
    world.settle()
    for port in (b.port, c.port):
        assert port is not None
        port.cut = True
    a.append(7)  # reaches nobody
    world.settle()
    b.lead(2, c, version=2)
    c.follow(b)
    b.append(2)
    world.settle()
    a.follow(b)
    world.settle()
    assert a.log() == b.log() == c.log()
    assert a.entries == b.entries == [EpochEntry(1, 0), EpochEntry(2, common)]
    assert a.slave is not None
    assert a.slave.truncations == 1
    a.crash()  # the cut was durable: nothing of it comes back
    assert a.log() == b.log()[: a.store.end]


def test_nothing_is_acknowledged_or_taken_for_confirmed_before_the_cut() -> None:
    world, a, b = pair()
    a.lead(1, b)
    a.append(3)
    world.settle()
    port = b.follow(a)
    world.settle()
    port.cut = True
    stale = a.append(9)
    world.settle()
    b.lead(2, version=2)
    b.append(20, size=300)
    world.settle()
    assert b.store.confirmed > stale
    a.boot()
    before = a.store.confirmed
    a.flusher.held = True  # the cut takes its time
    new = a.follow(b)
    world.settle()
    kinds = [kind for kind, _ in new.asked]
    assert kinds == [Kind.HANDSHAKE]
    assert a.store.confirmed == before
    a.flusher.release()
    world.settle()
    assert a.log() == b.log()


def test_a_slave_that_restarts_keeps_what_its_master_has() -> None:
    world, a, b = pair(follows=True)
    end = a.append(10)
    world.settle()
    b.crash()
    assert b.store.confirmed == 0
    port = b.follow(a)
    world.settle()
    assert b.store.end == end == a.store.confirmed
    assert b.slave is not None
    assert b.slave.truncations == 0
    assert port.asked[0][0] is Kind.HANDSHAKE


def test_a_member_of_the_set_that_would_have_to_cut_confirmed_records_stops() -> None:
    world, a, b = pair(follows=True)
    a.append(10)
    world.settle()
    world.advance(50)
    end = b.store.confirmed
    stranger = World("x", world.settings)
    (x,) = stranger.replicas
    x.world = world
    x.boot()
    x.lead(5, b)
    b.follow(x, members=(b, x))
    world.settle()
    assert len(b.broken) == 1
    assert "is confirmed up to" in str(b.broken[0])
    assert b.store.end == end


def test_a_store_outside_the_set_with_nothing_in_common_is_rebuilt() -> None:
    world, a, b = pair()
    a.lead(1)
    a.append(3)
    b.lead(1)
    b.append(4)
    world.settle()
    b.lead(3)
    b.append(2)
    world.settle()
    a.epochs.clear()
    a.epochs.append(2, 0)
    a.follow(b, members=(b,))
    world.settle()
    assert a.rebuilds == ["the master's log and this one have no epoch in common"]
    assert a.broken == []


def test_an_answer_to_an_older_handshake_cuts_nothing() -> None:
    world, a, b = pair()
    a.lead(1, b)
    a.append(3)
    world.settle()
    port = b.follow(a)
    port.held = True
    world.settle()  # its answer says that the log ends here, and comes late
    late, port.kept, port.held = port.kept, [], False
    assert len(late) == 1
    assert b.slave is not None
    b.slave._link.fail("the connection broke")
    world.advance(200)
    a.append(10)
    world.settle()
    end = b.store.end
    assert a.store.confirmed == end
    late[0]()
    world.advance(200)
    assert (b.store.end, b.slave.truncations, b.slave.phase) == (end, 0, Phase.FOLLOWING)


def test_a_slave_cuts_to_where_the_logs_part_and_not_to_what_it_knows_as_confirmed() -> None:
    world, a, b, c = trio(follows=True)
    common = a.append(5)
    world.settle()
    for port in (b.port, c.port):
        assert port is not None
        port.cut = True
    stale = a.append(7)
    world.settle()
    b.lead(2, c, version=2)
    world.settle()
    a.crash()  # it forgot what was confirmed
    assert a.store.confirmed == 0
    a.follow(b)
    world.settle()
    assert a.slave is not None
    assert a.slave.truncated_bytes == stale - common


def test_epochs_behind_the_cut_are_forgotten() -> None:
    """A third master goes on with more of epoch 1 than the second one had."""
    world, a, b, c = trio(follows=True)
    assert b.port is not None
    b.port.cut = True
    a.append(5)
    world.settle()
    short, long = b.store.end, c.store.end
    assert short < long
    b.lead(2, a, c, version=2)
    b.append(3)
    world.settle()
    assert b.entries == [EpochEntry(1, 0), EpochEntry(2, short)]
    c.lead(3, a, b, version=3)
    b.follow(c)
    world.settle()
    assert b.entries == c.entries == [EpochEntry(1, 0), EpochEntry(3, long)]
    assert b.log() == c.log()


def test_a_first_master_that_lost_all_it_wrote_stops_no_slave() -> None:
    """Epoch 1 left records at the slave only, nothing of them was ever confirmed."""
    world, a, b = pair()
    a.flusher.held = True
    a.lead(1, b)
    b.follow(a)
    a.append(3)
    world.settle()
    assert b.store.end > 0 == b.store.confirmed
    a.crash()
    a.flusher.held = False
    a.epochs.clear()
    a.lead(2, b, version=2)
    world.settle()
    b.follow(a, members=(a, b))
    world.settle()
    assert b.broken == []
    assert b.rebuilds == ["the master's log and this one have no epoch in common"]
