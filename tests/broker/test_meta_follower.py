"""Topics and groups of one broker group, followed by another: two brokers, no network."""

import pytest
from broker.meta_pair import Two, copy_request

from popmq.broker.meta.meta_records import META_VERSION, topic_record
from popmq.broker.meta.registry import Registry
from popmq.broker.node.meta_follower import ASK_MS
from popmq.common.errors import Code, PopmqError, TopicNotFound
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.topics import (
    FIRST_LOCAL_TOPIC_ID,
    FIRST_USER_TOPIC_ID,
    MessageType,
    TopicConfig,
    is_internal_topic,
)
from popmq.common.wire import admin_pb2 as admin
from popmq.common.wire import pull_pb2
from popmq.common.wire.meta_pb2 import MetaRecord


def test_topics_and_groups_are_copied_with_their_ids() -> None:
    two = Two()
    two.owner.topic("orders", queues=3)
    two.owner.group("g", max_attempts=5)
    two.follow()
    assert two.same()
    assert (
        two.other.broker.registry.topic("orders").id == two.owner.broker.registry.topic("orders").id
    )
    assert two.other.broker.registry.owner == "broker-a"


def test_changes_and_deletions_follow_and_a_name_made_again_is_another_topic() -> None:
    two = Two()
    old = two.owner.topic("orders")
    two.owner.topic("gone")
    two.owner.group("g")
    two.follow()
    two.other.send("orders", b"of the first life")
    registry = two.owner.broker.registry
    registry.delete_topic("gone")
    registry.delete_topic("orders")
    registry.delete_group("g")
    two.owner.topic("orders", queues=9)
    two.follow()
    assert two.same()
    assert two.other.broker.registry.topic("orders").id > old.id
    two.owner.group("g")
    two.follow()
    assert two.other.receive("orders", "g") == []


def test_nothing_is_written_while_nothing_changes() -> None:
    two = Two()
    two.owner.topic("orders")
    two.follow()
    end = two.other.broker.store.end
    for _ in range(5):
        two.follow()
    # One question after the copy, one when each second is over.
    assert (two.other.broker.store.end, two.asked, two.follower.copies) == (end, 7, 1)


def test_a_group_that_follows_makes_and_changes_nothing_by_itself() -> None:
    two = Two(auto_create=True)
    two.follow()
    request = admin.CreateTopicRequest(topic=admin.Topic(name="mine"))
    with pytest.raises(PopmqError, match="owned by broker group broker-a") as caught:
        two.other.reply(Kind.CREATE_TOPIC, request.SerializeToString())
    assert caught.value.code is Code.PRECONDITION_FAILED


def test_a_name_that_is_asked_for_is_made_by_the_owner_and_copied_at_once() -> None:
    two = Two(auto_create=True)
    two.follow()
    with pytest.raises(TopicNotFound):
        two.other.broker.metadata_resolver.topic("new", auto_create=True)
    with pytest.raises(PopmqError, match="consumer group readers does not exist"):
        two.other.broker.metadata_resolver.group("readers")
    two.follow(0)
    assert two.same()
    assert two.other.send("new", b"x").code == Code.OK
    assert [delivery.head for delivery in two.other.receive("new", "readers")] == [b"x"]


def test_a_name_that_the_owner_may_not_make_stays_unknown() -> None:
    two = Two()
    two.follow()
    with pytest.raises(TopicNotFound):
        two.other.broker.metadata_resolver.topic("new", auto_create=True)
    asked = two.asked
    two.follow(0)
    assert two.asked == asked + 2  # the name, and then a question that the owner keeps back
    two.follow(0)
    assert two.asked == asked + 2
    assert two.other.broker.registry.find_topic("new") is None


def test_what_was_copied_serves_while_the_owner_is_away_and_after_a_restart() -> None:
    two = Two()
    two.owner.topic("orders")
    two.owner.group("g")
    two.follow()
    two.away = True
    two.other.send("orders", b"x")
    two.other.stop()
    two.other.start()
    two.follow()
    assert two.other.broker.registry.owner == "broker-a"
    (delivery,) = two.other.receive("orders", "g")
    two.other.ack("orders", "g", delivery.handle)
    two.away = False
    two.owner.topic("later")
    two.follow()
    assert two.same()


def test_retry_topics_have_ids_of_their_own_that_no_copy_meets() -> None:
    two = Two()
    two.owner.topic("orders")
    two.owner.group("g")
    two.follow()
    two.other.send("orders", b"x")
    (delivery,) = two.other.receive("orders", "g", invisible_ms=1_000)
    two.other.advance(5_000)
    (again,) = two.other.receive("orders", "g")
    assert (delivery.attempt, again.attempt) == (1, 2)
    retry = [topic for topic in two.other.broker.registry.topics() if is_internal_topic(topic.name)]
    assert [topic.id for topic in retry] == [FIRST_LOCAL_TOPIC_ID]
    topics = [two.owner.topic(f"t-{number}") for number in range(3)]
    two.follow()
    assert two.same()
    assert two.other.broker.registry.topic_by_id(topics[-1].id) == topics[-1]
    two.other.stop()
    two.other.start()
    two.owner.broker.registry.delete_topic("orders")
    two.follow()
    assert [
        topic for topic in two.other.broker.registry.topics() if is_internal_topic(topic.name)
    ] == []


def test_a_topic_of_an_earlier_release_that_begins_with_a_percent_sign_is_copied() -> None:
    two = Two()
    two.owner.group("g")
    odd = topic_record(TopicConfig(FIRST_USER_TOPIC_ID, "%odd", queues=2))
    write_record(two.owner.broker.registry, MetaRecord(version=META_VERSION, topic=odd))
    two.follow()
    assert two.same()
    assert two.other.send("%odd", b"x").code == Code.OK
    assert [delivery.head for delivery in two.other.receive("%odd", "g")] == [b"x"]


def write_record(registry: Registry, record: MetaRecord) -> None:
    """As an earlier release wrote it."""
    registry._write(record)


@pytest.mark.parametrize("done", range(6))
def test_a_crash_in_the_middle_of_a_copy_is_completed(done: int) -> None:
    two = Two()
    for number in range(4):
        two.owner.topic(f"t-{number}")
    two.owner.group("g")
    two.now_ms += ASK_MS
    two.follower.step(two.other.broker)
    for change in list(two.follower._changes)[:done]:
        change()
    two.other.run_until_idle()
    two.other.broker.release_files()
    two.other.start()
    two.follower = two.new_follower()
    two.follow()
    assert two.same()
    assert two.other.broker.registry.owner_version == two.owner.broker.registry.changes


def test_a_group_with_topics_of_its_own_does_not_follow(caplog: pytest.LogCaptureFixture) -> None:
    two = Two()
    two.owner.topic("orders")
    two.other.topic("mine")
    two.follow()
    two.follow()
    assert two.other.broker.registry.owner == ""
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [
        "topics are not followed"
    ]


def test_a_group_that_follows_one_owner_does_not_change_to_another() -> None:
    two = Two()
    two.owner.topic("orders")
    two.follow()
    two.follower.hear("broker-c", "elsewhere:1")
    asked = two.asked
    two.owner.advance(ASK_MS)  # the answer to a question of before
    two.follow()
    assert two.asked == asked
    assert two.other.broker.registry.owner == "broker-a"
    assert two.same()


def test_the_owner_tells_nobody_what_is_not_confirmed() -> None:
    two = Two()
    two.owner.broker.registry.create_topic(TopicConfig(0, "new"))
    answer = two.owner.ask(Kind.COPY_META, copy_request(), settle=False)
    assert not answer.heard
    two.owner.run_until_idle()
    assert answer.heard


def test_one_that_follows_tells_nobody() -> None:
    two = Two()
    two.follow()
    with pytest.raises(PopmqError, match="owns no topics"):
        two.other.reply(Kind.COPY_META, copy_request())


def test_a_topic_with_message_groups_remembers_the_broker_groups_it_was_made_over() -> None:
    two = Two()
    directory = two.owner.broker.metadata_resolver
    directory.set_cluster_groups(("broker-a", "broker-b"), now_ms=0)
    for kind in ("fifo", "mixed", "normal"):
        request = admin.CreateTopicRequest(topic=admin.Topic(name=kind, type=kind))
        two.owner.reply(Kind.CREATE_TOPIC, request.SerializeToString())
    directory.set_cluster_groups(("broker-a", "broker-b", "broker-c"), now_ms=0)
    registry = two.owner.broker.registry
    brokers = {name: registry.topic(name).brokers for name in ("fifo", "mixed", "normal")}
    both = ("broker-a", "broker-b")
    assert brokers == {"fifo": both, "mixed": both, "normal": ()}
    two.owner.stop()
    two.owner.start()
    assert two.owner.broker.registry.topic("fifo").brokers == both
    two.follow()
    assert two.other.broker.registry.topic("fifo").brokers == both
    assert two.other.broker.registry.topic("fifo").type is MessageType.FIFO


def test_a_restart_from_a_snapshot_counts_changes_on_where_it_was() -> None:
    two = Two()
    for number in range(3):
        two.owner.topic(f"t-{number}")
    two.owner.broker.registry.delete_topic("t-0")
    two.owner.run_until_idle()
    before = two.owner.broker.registry.changes
    two.follow()
    two.restart_owner()
    assert two.owner.broker.registry.changes == before == 4
    two.follow()
    assert two.follower.copies == 2  # the second one brings the owner's new epoch and no change
    assert two.other.broker.registry.owner_version == before


def test_an_offset_is_not_read_before_the_copy_of_its_group_that_a_write_waits_for() -> None:
    """A proxy asks again for what is refused here, so that the read would be the first."""
    two = Two()
    two.owner.topic("orders")
    two.follow()
    assert two.other.send("orders", b"x", queue_id=0).code == Code.OK
    group = two.owner.group("g")
    write = pull_pb2.UpdateOffsetRequest(topic="orders", group="g", group_id=group.id, offset=1)
    read = pull_pb2.GetOffsetRequest(topic="orders", group="g", group_id=group.id)
    for kind, request in ((Kind.UPDATE_OFFSET, write), (Kind.GET_OFFSET, read)):
        answer = two.other.ask(kind, request.SerializeToString())
        assert answer.error is not None, kind
        assert answer.error.code is Code.CONSUMER_GROUP_NOT_FOUND, kind
    two.follow()
    two.other.reply(Kind.UPDATE_OFFSET, write.SerializeToString())
    offset = two.other.reply(Kind.GET_OFFSET, read.SerializeToString())
    assert pull_pb2.OffsetReply.FromString(offset).offset == 1


def test_a_group_that_was_deleted_is_not_made_again_by_a_read_of_its_offset() -> None:
    two = Two(auto_create=True)
    two.owner.topic("orders")
    read = pull_pb2.GetOffsetRequest(topic="orders", group="g", group_id=77)
    answer = two.owner.ask(Kind.GET_OFFSET, read.SerializeToString())
    assert answer.error is not None
    assert answer.error.code is Code.OFFSET_NOT_FOUND
    assert two.owner.broker.registry.find_group("g") is None
