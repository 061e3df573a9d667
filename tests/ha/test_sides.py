"""A master and its slaves over real stores: rules R10 to R23, and what breaking them would do."""

import pytest
from ha.replicas import ask, hello_to, pair, refusal, trio

from popmq.broker.ha.epoch_file import EpochFile
from popmq.broker.ha.replication_client import Phase
from popmq.common.errors import Code
from popmq.common.protocol import replication_payloads as replication
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.protocol.replication_payloads import EpochEntry

# -- the stream


def test_a_slave_gets_the_log_and_what_it_has_on_its_disk_is_confirmed() -> None:
    world, a, b = pair(follows=True)
    end = a.append(50)
    world.settle()
    assert (b.store.durable, a.store.confirmed) == (end, end)
    assert b.log() == a.log()
    assert b.entries == a.entries == [EpochEntry(1, 0)]
    world.advance(50)
    assert b.store.confirmed == end


def test_a_slave_has_no_record_of_an_epoch_that_its_disk_does_not_know() -> None:
    """R23: the entry of the EpochFile is durable before the block is in the log."""
    world, a, b = pair(follows=True)
    a.lead(2, b)
    b.follow(a)
    before = b.store.end
    seen: list[tuple[list[EpochEntry], int]] = []
    append = EpochFile.append

    def watched(self: EpochFile, epoch: int, start: int) -> None:
        append(self, epoch, start)
        if self is b.epochs:
            seen.append((EpochFile(b.disk, "data/epochs").entries, b.store.end))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EpochFile, "append", watched)
        world.settle()
    assert b.store.end == a.store.end > before
    assert seen == [([EpochEntry(1, 0), EpochEntry(2, before)], before)]


def test_records_are_confirmed_when_all_of_the_set_have_them_on_their_disks() -> None:
    world, a, b, c = trio(follows=True)
    before = a.store.confirmed
    c.flusher.held = True
    end = a.append()
    world.settle()
    assert (b.store.durable, c.store.end, a.store.confirmed) == (end, end, before)
    c.flusher.release()
    world.settle()
    assert a.store.confirmed == end


def test_a_slave_acknowledges_what_is_on_its_disk_and_not_what_it_received() -> None:
    world, a, b = pair(follows=True)
    before = a.store.confirmed
    b.flusher.held = True
    a.append()
    world.settle()
    assert b.store.end == a.store.end
    assert a.store.confirmed == before
    b.crash()  # what it had received is gone, and nobody was told otherwise
    assert b.store.end == before == a.store.confirmed


def test_the_master_counts_itself_with_what_is_on_its_disk() -> None:
    world, a, b = pair(follows=True)
    before = a.store.confirmed
    a.flusher.held = True
    a.append()
    world.settle()
    assert b.store.durable == a.store.end  # both disks write at the same time
    assert a.store.confirmed == before


def test_a_slave_writes_while_the_masters_disk_does() -> None:
    world, a, b = pair(follows=True)
    a.flusher.held = b.flusher.held = True
    a.append()
    world.settle()
    assert b.store.end == a.store.end > a.store.durable


def test_a_block_never_holds_records_of_two_epochs() -> None:
    world, a, b = pair()
    starts = []
    for epoch in (1, 2, 7):
        a.lead(epoch, version=epoch)
        starts.append(a.append(5))
    world.settle()
    port = b.follow(a)
    ends = []
    while b.store.end < a.store.end:
        port.held = True
        world.settle()
        port.deliver_kept()
        ends.append(b.store.end)
    world.settle()
    assert set(starts) <= set(ends)
    assert b.entries == a.entries
    assert [entry.epoch for entry in b.entries] == [1, 2, 7]
    assert b.log() == a.log()


def test_an_idle_slave_hears_of_the_confirmed_position_soon() -> None:
    world, a, b, c = trio(follows=True)
    c.flusher.held = True
    end = a.append()
    world.settle()
    c.flusher.release()
    world.settle()
    assert b.store.confirmed < end
    world.advance(30)
    assert b.store.confirmed == end


def test_a_slave_is_told_the_masters_timer_check_point_every_three_seconds() -> None:
    world, a, b = pair()
    a.lead(1, b)
    b.follow(a)
    b.timers.clear()
    world.step()
    assert [(timer.last_read_ms, timer.queue_offset) for timer in b.timers] == [(111, 222)]
    world.advance(2_900)
    assert len(b.timers) == 1
    world.advance(200)
    assert len(b.timers) == 2


# -- R10: everything names its epoch, its store and its session


def test_an_ack_of_another_epoch_session_or_store_counts_for_nothing() -> None:
    world, a, b = pair()
    side = a.lead(2, b)
    b.follow(a)
    world.settle()
    session = side.followers[b.id].session
    before = a.store.confirmed
    b.flusher.held = True
    end = a.append()
    world.settle()
    for epoch, store_id, number in (
        (1, b.id, session),
        (3, b.id, session),
        (2, b.id, session + 1),
        (2, b.id, 0),
        (2, "f" * 32, session),
    ):
        body = replication.encode_acked(replication.Acked(epoch, store_id, number, end))
        assert refusal(ask(world, a, Kind.ACKED, body)) in (
            Code.NOT_MASTER,
            Code.PRECONDITION_FAILED,
        )
        assert a.store.confirmed == before


def test_a_handshake_of_another_epoch_is_refused() -> None:
    world, a, b = pair()
    a.lead(2, b)
    for epoch in (1, 3):
        body = hello_to(a, epoch, b.id, "b", "", 0)
        assert refusal(ask(world, a, Kind.HANDSHAKE, body)) is Code.NOT_MASTER


def test_a_session_is_over_when_its_store_shakes_hands_again() -> None:
    world, a, b = pair()
    side = a.lead(1, b)
    b.follow(a)
    world.settle()
    old = side.followers[b.id].session
    hello = hello_to(a, 1, b.id, "b", "", b.store.end)
    assert isinstance(ask(world, a, Kind.HANDSHAKE, hello), bytes)
    body = replication.encode_acked(replication.Acked(1, b.id, old, b.store.end))
    assert refusal(ask(world, a, Kind.ACKED, body)) is Code.PRECONDITION_FAILED


def test_an_answer_of_an_older_connection_is_dropped() -> None:
    world, a, b = pair()
    a.lead(1, b)
    a.append(3)
    world.settle()
    old = b.follow(a)
    old.held = True
    world.settle()  # the answer to the first handshake is late: it says that the log ends here
    assert old.kept
    b.follow(a)
    world.settle()
    a.append(10)
    world.settle()
    end = b.store.end
    assert a.store.confirmed == end
    old.deliver_kept()
    world.settle()
    assert (b.store.end, b.store.durable) == (end, end)


def test_what_an_older_master_still_says_is_not_taken() -> None:
    world, a, b, c = trio()
    a.lead(1, b, c)
    port = b.follow(a)
    c.follow(a)
    world.settle()
    port.held = True
    a.append(5)
    world.settle()
    c.lead(2, b, version=2)
    b.follow(c)
    world.settle()
    before = b.log()
    port.deliver_kept()
    world.settle()
    assert b.log() == before == c.log()


def test_the_slave_of_another_log_is_refused() -> None:
    world, a, b = pair()
    a.lead(1, b)
    body = hello_to(a, 1, b.id, "b", "their-log", 10)
    answer = ask(world, a, Kind.HANDSHAKE, body)
    assert refusal(answer) is Code.FORBIDDEN
    assert "another broker group" in str(answer)


def test_a_slave_with_segments_of_another_size_is_refused() -> None:
    world, a, b = pair()
    a.lead(1, b)
    answer = ask(world, a, Kind.HANDSHAKE, hello_to(a, 1, b.id, "b", "", 0, segment_bytes=4_096))
    assert refusal(answer) is Code.PRECONDITION_FAILED
    own = str(a.store.replicas.segment_bytes)
    assert all(word in str(answer) for word in ("4096", own, "store.segment_bytes"))


def test_an_ack_beyond_the_log_is_refused() -> None:
    world, a, b = pair()
    side = a.lead(1, b)
    b.follow(a)
    world.settle()
    asked = replication.Acked(1, b.id, side.followers[b.id].session, a.store.end + 1)
    assert refusal(ask(world, a, Kind.ACKED, replication.encode_acked(asked))) is Code.BAD_REQUEST


# -- R23 and R6: what a slave takes


@pytest.mark.parametrize(
    "change",
    [
        {"position": 57},
        {"block_epoch": 1, "epoch_start": 3},
        {"block_epoch": 0},
        {"epoch": 2},
    ],
)
def test_a_block_that_does_not_fit_is_refused_and_the_session_ends(
    change: dict[str, int],
) -> None:
    world, a, b = pair()
    a.lead(1, b)
    port = b.follow(a)
    world.settle()
    end = b.store.end
    port.held = True
    a.append()
    world.settle()
    data = a.store.replicas.read_tail(end, 1 << 20)
    assert data
    block = replication.Block(1, 1, 0, end, end, a.store.end, data)
    block = block._replace(**change)  # type: ignore[arg-type]  # none of them is the data
    port.kept.clear()
    port.held = False
    assert b.slave is not None
    b.slave._fetched(replication.encode_block(block))
    assert b.store.end == end
    assert b.slave.phase is not Phase.FOLLOWING
    world.advance(100)
    assert b.log() == a.log()


def test_an_epoch_is_on_the_disk_before_its_first_record_is() -> None:
    world, a, b = pair()
    a.lead(1)
    a.append()
    a.lead(2, version=2)
    world.settle()
    b.flusher.held = True
    b.follow(a)
    world.settle()
    assert b.store.durable < b.store.end
    assert [entry.epoch for entry in b.entries] == [1, 2]
    b.disk.restore_power()
    b.boot()
    assert b.store.end == 0


def test_the_master_does_not_count_what_waits_behind_a_batch() -> None:
    world, a, b = pair(follows=True)
    a.flusher.held = True
    first = a.append()
    world.settle()
    a.append()  # waits for the first one's batch
    a.flusher.release()
    a.flusher.held = True
    world.advance(100)
    assert b.store.durable == a.store.end > first
    assert a.store.confirmed == first
