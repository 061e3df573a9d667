"""A topic or a group that was deleted and made again, at a broker group that has the old one."""

import pytest
from broker.meta_pair import Two
from google.protobuf.message import Message

from popmq.broker.node.meta_follower import ASK_MS
from popmq.common.errors import Code, PopmqError
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Kind, PutEntry, PutRequest
from popmq.common.topics import MessageType, SubscriptionGroup, TopicConfig
from popmq.common.wire import pull_pb2
from popmq.common.wire.transaction_pb2 import EndTransactionRequest
from popmq.testing.harness.core_broker import CoreBroker, pop


class Recreated(Two):
    """Topic `orders` and group `g` were made again at the owner; the follower has the old ones,
    with a message in flight."""

    def __init__(self) -> None:
        super().__init__()
        self.old_topic, self.old_group = self.owner.topic("orders"), self.owner.group("g")
        self.follow()
        self.other.send("orders", b"of the old topic")
        (self.delivery,) = self.other.receive("orders", "g")
        registry = self.owner.broker.registry
        registry.delete_topic("orders")
        registry.delete_group("g")
        self.topic: TopicConfig = self.owner.topic("orders")
        self.group: SubscriptionGroup = self.owner.group("g")


def put(broker: CoreBroker, topic_id: int, body: bytes = b"x") -> Code:
    request = PutRequest("orders", [PutEntry(MessageType.NORMAL, body, b"")], topic_id=topic_id)
    answer = broker.ask(Kind.PUT, hop.encode_put(request))
    return answer.error.code if answer.error is not None else Code.OK


def receive(broker: CoreBroker, topic_id: int, group_id: int) -> list[bytes]:
    plain = hop.decode_pop(pop("orders", "g"))
    body = hop.encode_pop(plain._replace(topic_id=topic_id, group_id=group_id))
    reply = hop.decode_pop_reply(broker.reply(Kind.POP, body))
    return [delivery.head for delivery in reply.deliveries]


def test_a_message_for_the_new_topic_is_not_stored_in_the_old_one() -> None:
    two = Recreated()
    assert put(two.other, two.topic.id) is Code.NOT_COPIED
    two.run()  # the owner is asked at once
    assert put(two.other, two.topic.id, b"acknowledged") is Code.OK
    two.follow()
    assert receive(two.other, two.topic.id, two.group.id) == [b"acknowledged"]


def test_a_message_that_was_placed_for_the_old_topic_is_placed_again() -> None:
    two = Recreated()
    assert put(two.other, two.old_topic.id) is Code.OK  # both are old: the deletion waits for it
    two.follow()
    for broker in (two.owner, two.other):
        assert put(broker, two.old_topic.id) is Code.OTHER_INCARNATION
        assert put(broker, 0) is Code.OK  # a proxy from before ids


def test_a_receive_that_names_new_ones_reads_nothing_of_the_old_ones() -> None:
    two = Recreated()
    for ids in ((two.topic.id, two.old_group.id), (two.old_topic.id, two.group.id)):
        with pytest.raises(PopmqError, match="was deleted and made again") as refused:
            receive(two.other, *ids)
        assert refused.value.code is Code.NOT_COPIED
    two.run()
    put(two.other, two.topic.id, b"new")
    assert receive(two.other, two.old_topic.id, two.old_group.id) == [b"new"]


def test_an_ack_for_the_new_group_is_not_taken_by_the_old_one() -> None:
    two = Recreated()
    handles = [two.delivery.handle]
    body = hop.encode_ack(hop.AckRequest("orders", "g", handles, two.group.id))
    change = hop.ChangeRequest("orders", "g", handles[0], 1_000, two.group.id)
    for kind, request in ((Kind.ACK, body), (Kind.CHANGE, hop.encode_change(change))):
        refused = two.other.ask(kind, request)
        assert refused.error is not None
        assert refused.error.code is Code.NOT_COPIED
    two.run()
    (result,) = hop.decode_ack_reply(two.other.reply(Kind.ACK, body))
    assert result.code == Code.INVALID_RECEIPT_HANDLE
    assert "a group that was deleted" in result.message


def test_an_owner_that_lost_the_new_topic_has_the_message_placed_again() -> None:
    """After an unclean election a proxy may know a topic that its owner has no more."""
    two = Recreated()
    assert put(two.owner, two.topic.id + 1) is Code.OTHER_INCARNATION
    assert receive(two.owner, two.topic.id + 1, two.group.id + 1) == []


def test_pulls_and_offsets_of_new_ones_are_not_answered_from_the_old_ones() -> None:
    two = Recreated()
    orders, group = two.topic.id, two.group.id
    pull = pull_pb2.PullRequest(topic="orders", group="g", topic_id=orders, group_id=group)
    update = pull_pb2.UpdateOffsetRequest(topic="orders", group="g", topic_id=orders)
    update.group_id = group
    get = pull_pb2.GetOffsetRequest(topic="orders", group="g", topic_id=orders, group_id=group)
    query = pull_pb2.QueryOffsetRequest(topic="orders", topic_id=orders)
    requests: list[tuple[Kind, Message]] = [
        (Kind.PULL, pull),
        (Kind.UPDATE_OFFSET, update),
        (Kind.GET_OFFSET, get),
        (Kind.QUERY_OFFSET, query),
    ]
    for kind, request in requests:
        answer = two.other.ask(kind, request.SerializeToString())
        assert answer.error is not None, kind
        assert answer.error.code is Code.NOT_COPIED, kind
    two.run()
    for kind, request in requests:
        assert two.other.ask(kind, request.SerializeToString()).error is None, kind


def test_half_messages_and_timers_of_the_old_topic_never_reach_the_new_one() -> None:
    two = Recreated()
    half = PutEntry(MessageType.TRANSACTION, b"half", b"", message_id="m")
    mixed = two.owner.topic("mixed", type=MessageType.MIXED)
    two.follow()
    delayed = PutEntry(MessageType.DELAY, b"delayed", b"", due_ms=-5_000)
    request = PutRequest("mixed", [half, delayed], topic_id=mixed.id)
    results = hop.decode_put_reply(two.other.reply(Kind.PUT, hop.encode_put(request)))
    assert [result.code for result in results] == [Code.OK, Code.OK]
    two.owner.broker.registry.delete_topic("mixed")
    two.owner.topic("mixed", type=MessageType.MIXED)
    two.follow()
    commit = EndTransactionRequest(
        topic="mixed", message_id="m", transaction_id=results[0].message, commit=True
    )
    ended = two.other.ask(Kind.END_TRANSACTION, commit.SerializeToString())
    assert ended.error is not None
    assert ended.error.code is Code.INVALID_TRANSACTION_ID
    two.other.advance(20_000)
    assert two.other.receive("mixed", "g") == []


def test_a_group_that_was_made_again_reads_no_retries_of_the_old_one() -> None:
    two = Recreated()
    two.other.advance(70_000)  # the delivery comes back, by way of a retry topic
    registry = two.other.broker.registry
    assert [topic.name for topic in registry.topics()] == ["%RETRY%g+orders", "orders"]
    two.follow(ASK_MS)
    assert [topic.name for topic in registry.topics()] == ["orders"]
    assert two.other.receive("orders", "g") == []
