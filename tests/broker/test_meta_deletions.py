"""Deletions and creations at the owner, and what other broker groups have copied of them."""

import pytest
from broker.meta_pair import Two

from popmq.broker.core.meta_copies import COPIED_MS
from popmq.broker.node.meta_follower import AGAIN_MS
from popmq.common.errors import Code, TopicNotFound
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.wire import admin_pb2 as admin
from popmq.testing.harness.core_broker import Answer


class Deleting(Two):
    """As the owner's clients do; broker-b follows, and a controller lists both."""

    def __init__(self) -> None:
        super().__init__()
        self.owner.broker.metadata_resolver.set_cluster_groups(("broker-a", "broker-b"), now_ms=0)
        self.owner.topic("orders")
        self.owner.group("g")
        self.follow()

    def delete_topic(self, name: str = "orders") -> Answer:
        return self.owner.ask(
            Kind.DELETE_TOPIC, admin.DeleteTopicRequest(name=name).SerializeToString()
        )

    def create_topic(self, name: str = "orders") -> Answer:
        topic = admin.Topic(name=name, queues=4)
        request = admin.CreateTopicRequest(topic=topic)
        return self.owner.ask(Kind.CREATE_TOPIC, request.SerializeToString())

    def id_there(self) -> int:
        topic = self.other.broker.registry.find_topic("orders")
        return topic.id if topic is not None else 0


def test_a_deletion_is_answered_when_every_broker_group_has_copied_it() -> None:
    """The follower hears of it at once, because the owner keeps its question back."""
    two = Deleting()
    answer = two.delete_topic()
    assert not answer.heard
    assert two.id_there()
    two.run()
    assert answer.body is not None
    assert admin.TopicReply.FromString(answer.body).incomplete == ""
    assert two.id_there() == 0


def test_a_deletion_of_a_group_is_answered_when_every_broker_group_has_copied_it() -> None:
    two = Deleting()
    request = admin.DeleteGroupRequest(name="g").SerializeToString()
    answer = two.owner.ask(Kind.DELETE_GROUP, request)
    assert not answer.heard
    two.run()
    assert answer.body is not None
    assert two.other.broker.registry.find_group("g") is None


def test_a_copy_counts_when_it_is_confirmed() -> None:
    """Else a power cut of the follower would bring back what was deleted."""
    two = Deleting()
    answer = two.delete_topic()
    while two.id_there():
        two.follower.step(two.other.broker)
    for _ in range(5):
        two.follower.step(two.other.broker)
    assert not answer.heard
    two.run()
    assert answer.heard


def test_a_send_after_a_deletion_and_a_creation_is_stored_in_the_new_topic() -> None:
    two = Deleting()
    two.delete_topic()
    two.run()
    created = two.create_topic()
    assert created.body is not None  # nothing is waited for any more
    two.follow()
    assert two.other.send("orders", b"acknowledged").code == Code.OK
    two.follow()
    assert [delivery.head for delivery in two.other.receive("orders", "g")] == [b"acknowledged"]


def test_a_creation_waits_for_a_deletion_whose_answer_was_lost() -> None:
    two = Deleting()
    two.delete_topic()
    created = two.create_topic()
    assert not created.heard
    two.run()
    assert created.heard
    assert two.id_there() == two.owner.broker.registry.topic("orders").id


def test_a_creation_waits_for_the_deletions_of_the_master_before() -> None:
    two = Deleting()
    two.owner.broker.registry.delete_topic("orders")
    two.restart_owner()
    two.owner.broker.metadata_resolver.set_cluster_groups(("broker-a", "broker-b"), now_ms=0)
    created = two.create_topic()
    assert not created.heard
    two.follow(AGAIN_MS)
    assert created.heard


def test_a_broker_group_that_cannot_be_waited_for_delays_a_deletion_by_a_bound() -> None:
    two = Deleting()
    two.cut()
    two.away = True
    answer = two.delete_topic()
    two.follow(COPIED_MS - 100)
    assert not answer.heard
    created = two.create_topic()
    two.follow(100)
    assert (answer.error, created.error) == (None, None)
    assert answer.body is not None
    assert created.body is not None
    missing = "broker group broker-b has not copied the deletion yet, and does so once reachable"
    reply = admin.TopicReply.FromString(answer.body)
    assert (reply.topic.name, reply.incomplete) == ("orders", missing)
    assert admin.TopicReply.FromString(created.body).incomplete == ""
    assert two.create_topic("another").heard  # the time of that deletion is over


@pytest.mark.parametrize("groups", [(), ("broker-a",)])
def test_without_other_broker_groups_nothing_is_waited_for(groups: tuple[str, ...]) -> None:
    two = Two()
    two.owner.broker.metadata_resolver.set_cluster_groups(groups, now_ms=0)
    for name in ("orders", "orders"):
        topic = admin.Topic(name=name, queues=4)
        two.owner.reply(
            Kind.CREATE_TOPIC, admin.CreateTopicRequest(topic=topic).SerializeToString()
        )
        two.owner.reply(Kind.DELETE_TOPIC, admin.DeleteTopicRequest(name=name).SerializeToString())


def test_a_broker_group_that_is_drained_is_waited_for_while_it_follows() -> None:
    two = Deleting()
    two.owner.broker.metadata_resolver.set_cluster_groups(("broker-a",), now_ms=0)
    answer = two.delete_topic()
    assert not answer.heard
    two.run()
    assert answer.heard


def test_a_deletion_is_copied_at_once_also_after_somebody_asked_for_a_name() -> None:
    two = Deleting()
    with pytest.raises(TopicNotFound):
        two.other.broker.metadata_resolver.topic("unknown", auto_create=True)
    two.run()
    answer = two.delete_topic()
    two.run()
    assert answer.heard


def test_what_somebody_asked_for_does_not_wait_for_a_question_that_is_kept_back() -> None:
    two = Two(auto_create=True)
    two.follow()
    assert two.open is not None
    with pytest.raises(TopicNotFound):
        two.other.broker.metadata_resolver.topic("new", auto_create=True)
    two.run()
    assert two.same()
    assert two.other.broker.registry.find_topic("new") is not None


def test_a_series_of_deletions_delays_each_of_them_by_no_more_than_the_bound() -> None:
    """One a second, while a broker group that a controller lists does not answer."""
    two = Deleting()
    for number in range(8):
        two.owner.topic(f"topic-{number}")
    two.follow()
    two.cut()
    two.away = True
    answers = []
    for number in range(8):
        answers.append(two.delete_topic(f"topic-{number}"))
        two.follow(1_000)
        in_time = COPIED_MS // 1_000
        assert all(answer.heard for answer in answers[: max(0, len(answers) - in_time)])
