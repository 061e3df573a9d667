"""What operators see of lite topics: the audit, explain, a reset, the doctor."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from lite.lites import TOPIC, live, made, named, put, receive, small, sync, take

from popmq.broker.diagnostics.audit import APART_MS, Balance
from popmq.broker.diagnostics.lag import lags, queue_lags
from popmq.broker.doctor.finding import RequiredAction
from popmq.cli.local.doctor import examine
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.drain_remainder import DrainRemainder, drain_remainder
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.settings.lite_settings import LiteSettings
from popmq.common.settings.settings import PopSettings
from popmq.common.topics import CheckPoints, GroupType, MessageType
from popmq.common.wire import admin_pb2 as pb
from popmq.proxy.api import definition_pb2 as api
from popmq.testing.disk.lying_disk import ResidentDisk
from popmq.testing.harness.core_broker import SMALL, CoreBroker

SHORT = LiteSettings(ttl_ms=60_000)


def audited(core: CoreBroker, group: str = "g") -> Balance:
    """One more recount, whole."""
    audit = core.broker.diagnostics.audit
    audit.on_scrape()
    before, start = audit.passes, core.clock.boot_ms()
    while audit.passes == before:
        core.tick()
        assert core.clock.boot_ms() - start < 10 * APART_MS, "no recount"
        core.advance(20)
    return audit.balances.get(core.broker.registry.group(group).id, Balance())


@pytest.mark.more
def test_the_audit_accounts_for_lite_topics_and_for_queues_that_were_given_again() -> None:
    core = made(SHORT)
    core.group("g")
    sync(core, ["one", "two"])
    for name in ("one", "two", "two", "other"):
        put(core, name, name.encode())
    assert audited(core).unaccounted == 0
    receive(core, limit=1)
    assert audited(core).unaccounted == 0
    for _ in range(3):
        core.advance(61_000)
        sync(core, ["one", "two"])
        while take(core):
            pass
        assert audited(core).unaccounted == 0
        core.advance(80_000)
        assert live(core) == []
        assert audited(core).unaccounted == 0
        sync(core, ["two", "three"])
        for name in ("three", "two", "three"):
            put(core, name, name.encode())
        receive(core, limit=1)
        assert audited(core).unaccounted == 0


def told(core: CoreBroker, message_id: str) -> str:
    request = pb.ExplainRequest(message_id=message_id, group="g")
    reply = pb.ExplainReply.FromString(core.reply(Kind.EXPLAIN, request.SerializeToString()))
    (message,) = reply.messages
    (explained,) = message.groups
    return explained.state


def send(core: CoreBroker, lite_topic: str, message_id: str) -> None:
    system_property = api.SystemProperties(message_id=message_id, lite_topic=lite_topic)
    entry = hop.PutEntry(MessageType.LITE, b"x", system_property.SerializeToString(), 0, 0)
    core.reply(Kind.PUT, hop.encode_put(hop.PutRequest(TOPIC, [entry])))


def test_explain_says_what_became_of_a_message_of_a_lite_topic() -> None:
    core = made()
    core.group("g")
    sync(core, ["one"])
    for message_id in ("m-1", "m-2", "m-3"):
        send(core, "one", message_id)
    first, _ = receive(core, limit=2)
    core.ack(TOPIC, "g", first.handle)
    assert [told(core, name) for name in ("m-1", "m-2", "m-3")] == ["ACKED", "INVISIBLE", "BLOCKED"]


def test_explain_tells_of_lite_topics_that_ended_what_was_acked_in_them() -> None:
    core = made(SHORT)
    core.group("g")
    core.group("other")
    sync(core, ["one"])
    send(core, "one", "m-1")
    send(core, "two", "m-2")
    first, *_ = receive(core)
    core.ack(TOPIC, "g", first.handle)
    core.advance(80_000)
    assert live(core) == []
    assert [told(core, item) for item in ("m-1", "m-2")] == ["ACKED", "EXPIRED"]
    # The queues are given again, and read.
    sync(core, ["three", "four"])
    for name in ("three", "four"):
        put(core, name, b"x")
    assert len(take(core)) == 2
    for _ in range(2):
        assert [told(core, item) for item in ("m-1", "m-2")] == ["ACKED", "EXPIRED"]
        core.stop()
        core.start()


def test_a_reset_of_the_parent_topic_sets_every_lite_topic_and_wakes_who_waits() -> None:
    core = made()
    sync(core, ["one", "two"])
    for name in ("one", "two"):
        put(core, name, name.encode())
    assert sorted(take(core)) == [b"one", b"two"]
    assert take(core) == []
    request = pb.ResetOffsetRequest(topic=TOPIC, group="g", oldest=True)
    core.reply(Kind.RESET_OFFSET, request.SerializeToString())
    assert sorted(take(core)) == [b"one", b"two"]


def test_a_reset_leaves_alone_a_lite_topic_that_ends_while_it_is_looked_up() -> None:
    core = made(SHORT)
    names = [f"room-{number}" for number in range(40)]
    sync(core, names)
    for name in names:
        put(core, name, b"x")
    assert len(take(core)) + len(take(core)) == 40
    request = pb.ResetOffsetRequest(topic=TOPIC, group="g", oldest=True)
    answer = core.ask(Kind.RESET_OFFSET, request.SerializeToString(), settle=False)
    assert answer.body is None, "done in one step"
    registry = core.broker.registry
    topic = registry.topic(TOPIC)
    gone = registry.lites.find(topic.id, "room-3")
    assert gone is not None
    core.broker.expiries.lites.remove(gone)
    core.run_until_idle()
    assert answer.body is not None
    told_of = {queue.queue_id for queue in pb.ResetOffsetReply.FromString(answer.body).queues}
    assert told_of == set(registry.queue_ids(topic))
    group = registry.group("g")
    for _ in range(2):
        assert core.broker.table.progress(group.id, topic.id, gone.queue_id) is None
        core.stop()
        core.start()
    assert len(told_of) == 39


def test_groups_of_every_kind_read_lite_topics_in_the_same_way() -> None:
    core = made()
    core.group("fifo", type=GroupType.FIFO)
    core.group("buffered", check_points=CheckPoints.BUFFERED)
    for group in ("fifo", "buffered"):
        sync(core, ["one"], group=group)
        put(core, "one", b"1")
        (first, *_) = receive(core, group=group)
        assert receive(core, group=group) == []
        core.stop()
        core.start()
        sync(core, ["one"], group=group)
        core.advance(61_000)
        (again, *_) = receive(core, group=group)
        assert (again.head, again.attempt) == (first.head, 2)
        core.ack(TOPIC, group, again.handle)


def test_a_blocked_lite_topic_parks_nothing_and_holds_up_no_other() -> None:
    core = CoreBroker(
        settings=replace(small(), pop=PopSettings(fifo_open_offsets=100, fifo_park_after_ms=1_000))
    )
    core.topic(TOPIC, queues=1, type=MessageType.LITE)
    sync(core, ["stuck", "free"])
    for number in range(300):
        put(core, "stuck", b"%d" % number)
    core.receive(TOPIC, "g", limit=1, invisible_ms=3_600_000, client_id="a")
    put(core, "free", b"free")
    core.advance(5_000)
    assert take(core) == [b"free"]
    assert core.broker.registry.find_topic(f"%PARKED%g+{TOPIC}") is None


def findings(folder: Path) -> Sequence[str]:
    found_findings = examine(str(folder), segment_bytes=SMALL.store.segment_bytes).findings
    return [
        str(found_finding)
        for found_finding in found_findings
        if found_finding.need is not RequiredAction.NOTHING
    ]


def test_a_store_with_lite_topics_is_whole_for_the_doctor(tmp_path: Path) -> None:
    data = replace(SMALL.broker, data=str(tmp_path / "data"))
    core = CoreBroker(disk=ResidentDisk(), settings=replace(small(SHORT), broker=data))
    core.topic(TOPIC, queues=1, type=MessageType.LITE)
    sync(core, ["one", "two"])
    for name in ("one", "two", "one"):
        put(core, name, named(name))
    receive(core, limit=1)
    core.advance(90_000)
    put(core, "three", b"3")
    core.broker.release_files()
    assert findings(tmp_path / "data") == []


def drained(core: CoreBroker) -> DrainRemainder:
    """What a look of `popmq drain` finds."""
    name = core.settings.broker.name
    core.broker.registry.owner = "somebody"  # who owns the topics cannot be drained
    asked = pb.DrainRequest(group=name).SerializeToString()
    reply = pb.DrainReply.FromString(core.reply(Kind.DRAIN, asked))
    lag = pb.LagReply.FromString(core.reply(Kind.LAG, pb.LagRequest().SerializeToString()))
    here = [pb.Topic(name=TOPIC, brokers=[name])]
    rest, free = drain_remainder(name, lag, here, reply)
    assert bool(rest.homed) is not bool(free)
    return rest


def test_a_drain_waits_for_lite_topics_that_no_reader_of_their_parent_has_begun() -> None:
    """As for a queue that a reader of its topic has not visited; a topic without one is not."""
    core = made(SHORT)
    core.group("g")
    for name in ("one", "one", "two", "two", "two"):
        put(core, name, b"x")
    assert drained(core).is_drained, "no group ever read the parent topic"
    sync(core, ["one"])
    assert drained(core).messages == 5, "a client subscribes"
    assert take(core) == [b"x", b"x"]
    rest = drained(core)
    assert (rest.messages, rest.homed, rest.is_drained) == (3, (TOPIC,), False)
    core.start()
    assert drained(core).messages == 3, "the group's place is in the log, subscriptions are not"
    sync(core, ["two"])
    (first, *_) = receive(core)
    assert drained(core).messages == 3, "begun, and in the lag now"
    core.advance(61_000)
    while take(core):
        pass
    rest = drained(core)
    assert (rest.messages, rest.homed, rest.is_drained) == (0, (), True)
    assert first.head == b"x"


def test_a_drain_waits_for_an_unread_lite_topic_until_its_time_to_live_is_over() -> None:
    core = made(SHORT)
    core.group("g")
    sync(core, ["one"])
    put(core, "one", b"x")
    put(core, "nobody", b"y")
    assert len(take(core)) == 1
    assert drained(core).messages == 1
    core.advance(80_000)
    assert live(core) == []
    assert drained(core).is_drained


def test_a_report_has_one_row_for_all_lite_topics_and_the_lag_those_with_something_to_do() -> None:
    core = made()
    core.group("g")
    names = [f"l{number}" for number in range(20)]
    sync(core, names)
    for name in names:
        put(core, name, b"x")
    while take(core):
        pass
    broker = core.broker
    (lag,) = lags(broker.store, broker.registry, broker.table)
    assert lag.total == 0
    assert len(list(queue_lags(broker.store, broker.registry, broker.table, lag))) == 1
    for name in names[:3]:
        put(core, name, b"y")
    (lag,) = lags(broker.store, broker.registry, broker.table)
    assert (lag.total, len(lag.heads)) == (3, 3)
    before = broker.diagnostics.sampler.logs["topics"].next
    core.advance(31_000)
    rows = broker.diagnostics.sampler.logs["topics"].next - before
    assert rows == len([topic for topic in broker.registry.topics() if topic.name == TOPIC])
