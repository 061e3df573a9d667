"""A receive whose filter passes over much looks on piece by piece, and others have their turn."""

import pytest

from popmq.broker.pop.pop_batch import SCAN_UNITS
from popmq.common.errors import TopicNotFound
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Kind, PutEntry, PutRequest
from popmq.common.record.message import tag_hash
from popmq.common.topics import GroupType, MessageType
from popmq.testing.harness.core_broker import Answer, CoreBroker, pop, tagged

QUEUES = 8
FOREIGN = 300  # messages of another tag in each queue


def entry(queue_id: int, number: int, tag: str, kind: MessageType) -> PutEntry:
    name = b"key %d" % (number % 7)
    group = b"\x8a\x01" + bytes((len(name),)) + name if kind is MessageType.FIFO else b""
    return PutEntry(kind, b"%d" % number, tagged(tag) + group, tag_hash(tag), queue_id)


@pytest.fixture(params=[GroupType.NORMAL, GroupType.FIFO])
def core(request: pytest.FixtureRequest) -> CoreBroker:
    broker = CoreBroker()
    kind = MessageType.FIFO if request.param is GroupType.FIFO else MessageType.NORMAL
    broker.topic("orders", queues=QUEUES, type=kind)
    broker.topic("others", queues=1)
    broker.group("g", type=request.param)
    for queue_id in range(QUEUES):
        entries = [entry(queue_id, number, "A", kind) for number in range(FOREIGN)]
        broker.reply(Kind.PUT, hop.encode_put(PutRequest("orders", entries)))
    expected = [entry(QUEUES - 1, FOREIGN, "B", kind)]
    broker.reply(Kind.PUT, hop.encode_put(PutRequest("orders", expected)))
    return broker


def looked_at(core: CoreBroker) -> list[int]:
    """How many messages of each queue the group has passed, by queue."""
    group, topic = core.broker.registry.group("g"), core.broker.registry.topic("orders")
    cursors = []
    for queue_id in range(QUEUES):
        progress = core.broker.table.progress(group.id, topic.id, queue_id)
        cursors.append(progress.cursor if progress else 0)
    return cursors


def ask(core: CoreBroker, *, poll_ms: int = 0) -> Answer:
    request = pop("orders", "g", expression="B", poll_ms=poll_ms)
    return core.ask(Kind.POP, request, settle=False)


@pytest.mark.more
def test_one_piece_looks_at_so_many_units_in_all_and_at_every_queue(core: CoreBroker) -> None:
    ask(core, poll_ms=5_000)
    passed = looked_at(core)
    assert sum(passed) <= SCAN_UNITS
    assert min(passed) >= SCAN_UNITS // QUEUES // 2


def test_a_receive_that_waits_finds_what_lies_behind_in_later_steps(core: CoreBroker) -> None:
    answer = ask(core, poll_ms=5_000)
    before = looked_at(core)
    steps = 0
    while not answer.heard:
        core.broker.step()
        core.run_until_idle()
        steps += 1
        assert sum(looked_at(core)) - sum(before) <= SCAN_UNITS
        before = looked_at(core)
    assert steps >= QUEUES * FOREIGN // SCAN_UNITS - 1
    assert answer.body is not None
    assert [delivery.head for delivery in hop.decode_pop_reply(answer.body).deliveries] == [b"300"]


def test_a_receive_that_does_not_wait_looks_on_between_the_requests_of_others(
    core: CoreBroker,
) -> None:
    answer = ask(core)
    core.send("others", b"x")  # settles: all of its turns have come
    assert answer.body is not None
    assert [delivery.head for delivery in hop.decode_pop_reply(answer.body).deliveries] == [b"300"]
    group = core.broker.registry.group("g")
    core.broker.registry.delete_group(group.name)
    core.group("g", type=group.type)
    answer = ask(core)
    assert sum(looked_at(core)) <= SCAN_UNITS
    core.tick()
    assert SCAN_UNITS < sum(looked_at(core)) <= 2 * SCAN_UNITS
    assert not answer.heard
    core.run_until_idle()
    assert answer.heard


def test_a_receive_whose_client_left_looks_no_further(core: CoreBroker) -> None:
    answer = ask(core)
    core.server.cancel(answer.id)
    before = looked_at(core)
    core.run_until_idle()
    assert looked_at(core) == before
    assert not answer.heard


def test_a_receive_that_looks_on_is_refused_when_its_topic_goes(core: CoreBroker) -> None:
    answer = ask(core)
    core.broker.registry.delete_topic("orders")
    core.run_until_idle()
    assert isinstance(answer.error, TopicNotFound)


def test_a_broker_that_leads_no_more_looks_no_further(core: CoreBroker) -> None:
    answer = ask(core)
    core.server.end()
    before = looked_at(core)
    core.run_until_idle()
    assert looked_at(core) == before
    assert not answer.heard
