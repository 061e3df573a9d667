"""A topic or a group that was deleted and made again, at a broker group that has the old one."""

import pytest
from broker.meta_pair import Two

from popmq.common import hop
from popmq.common.errors import Code, PopmqError
from popmq.common.hop import Kind, PutEntry, PutRequest
from popmq.common.topics import MessageType, SubscriptionGroup, TopicConfig
from popmq.testing.core import CoreBroker, pop


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
    return [one.head for one in reply.deliveries]


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
