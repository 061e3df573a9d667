"""Copies of the owner's topics never go back to an older state of it."""

import pytest
from broker.meta_pair import Two, copy_request, named, restart

from popmq.broker.node.meta_follower import ASK_MS, KEEP_ADDRESS_MS, MetaFollower
from popmq.common.errors import Code, Unavailable
from popmq.common.protocol.messaging_payloads import Kind, OnReply
from popmq.common.wire.replication_pb2 import CopyMetaReply, CopyMetaRequest


def test_a_state_that_is_older_than_the_copy_is_not_followed() -> None:
    """Two controllers name two masters of the owner in turn: one of them leads no more."""
    two = Two()
    two.owner.topic("orders")
    two.follow()
    two.restart_owner()
    two.owner.topic("new")
    two.follow()
    assert two.other.send("new", b"acknowledged").code == Code.OK
    two.replaced(two.replies[0])
    for _ in range(3):
        two.follow()
    assert two.other.broker.registry.find_topic("new") is not None
    two.replaced(None)
    two.follow()
    two.owner.group("g")
    two.follow()
    assert [delivery.head for delivery in two.other.receive("new", "g")] == [b"acknowledged"]


@pytest.mark.parametrize("crash", [False, True])
def test_an_older_state_is_not_followed_after_a_restart_of_the_follower(crash: bool) -> None:
    """With and without a snapshot of the registry."""
    two = Two()
    two.restart_owner()
    two.owner.topic("orders")
    two.follow()
    old_version = two.owner.broker.registry.changes
    two.restart_owner()
    two.owner.topic("new")
    two.follow()
    if crash:
        two.other.broker.release_files()
    else:
        two.other.stop()
    two.other.start()
    two.follower = two.new_follower()
    # An old master that went on by itself: its version is higher, its epoch is not.
    old = CopyMetaReply.FromString(two.replies[0])
    old.version = old_version + 100
    two.replaced(old.SerializeToString())
    two.follow()
    assert two.other.broker.registry.find_topic("new") is not None


def test_a_later_epoch_with_a_lower_version_is_followed() -> None:
    """After an unclean election of the owner, or with a backup: what is lost there goes here."""
    two = Two()
    for name in ("orders", "lost"):
        two.owner.topic(name)
    two.follow()
    elected = named("broker-a")
    elected.topic("orders")
    for _ in range(2):
        restart(elected)
    assert elected.broker.registry.changes < two.owner.broker.registry.changes
    two.cut()
    two.owner = elected
    two.follow()
    assert two.same()
    assert two.other.broker.registry.find_topic("lost") is None


def test_an_id_that_an_owner_gives_again_after_it_lost_a_topic_is_another_topic() -> None:
    two = Two()
    lost = two.owner.topic("lost")
    two.owner.group("lost-group")
    two.follow()
    two.other.send("lost", b"of the lost topic")
    assert len(two.other.receive("lost", "lost-group")) == 1
    elected = named("broker-a")
    topic, group = elected.topic("other"), elected.group("g")
    assert topic.id == lost.id
    for _ in range(2):
        restart(elected)
    two.cut()
    two.owner = elected
    two.follow()
    for _ in range(2):
        assert two.same()
        assert two.other.broker.registry.group_by_id(group.id) == group
        assert two.other.receive("other", "g") == []
        two.cut()
        restart(two.other)
    two.follower = two.new_follower()
    two.other.send("other", b"new")
    assert [delivery.head for delivery in two.other.receive("other", "g")] == [b"new"]


def test_a_later_epoch_of_the_same_state_is_remembered() -> None:
    two = Two()
    two.owner.topic("orders")
    two.follow()
    two.restart_owner()
    two.follow()
    mine, theirs = two.owner.broker, two.other.broker.registry
    assert theirs.meta_state == (mine.store.epoch, mine.registry.changes)
    end = two.other.broker.store.end
    two.follow()
    assert two.other.broker.store.end == end


def test_an_owner_from_before_epochs_is_followed_forwards_only() -> None:
    two = Two()
    two.owner.topic("orders")
    two.follow()
    two.owner.topic("new")
    two.follow()

    def without_epoch(reply: bytes) -> bytes:
        decoded_reply = CopyMetaReply.FromString(reply)
        decoded_reply.epoch = 0
        return decoded_reply.SerializeToString()

    two.replaced(without_epoch(two.replies[0]))
    two.follow()
    assert two.same()
    two.replaced(None)
    two.away = True
    two.owner.topic("newest")
    answer = two.owner.ask(Kind.COPY_META, copy_request())
    assert answer.body is not None
    two.away = False
    two.replaced(without_epoch(answer.body))
    two.follow()
    assert two.same()


def test_a_follower_from_before_epochs_is_told_what_it_does_not_have() -> None:
    two = Two()
    two.owner.topic("orders")
    version = two.owner.broker.registry.changes

    def told(known_version: int) -> int:
        request = CopyMetaRequest(cluster="popmq", known_version=known_version)
        reply = two.owner.reply(Kind.COPY_META, request.SerializeToString())
        return len(CopyMetaReply.FromString(reply).records)

    assert (told(version), told(version - 1)) == (0, 1)


def test_the_epoch_of_a_copy_is_no_part_of_the_state_hash() -> None:
    """A replica from before epochs does not keep it, and has to get the same hash."""
    two = Two()
    two.restart_owner()
    two.owner.topic("orders")
    two.follow()
    registry = two.other.broker.registry
    assert registry.owner_epoch > 0
    hashed = sum(part for _, part in registry.begin_snapshot())
    registry.owner_epoch = 0
    assert sum(part for _, part in registry.begin_snapshot()) == hashed


def test_the_address_of_an_older_master_of_the_owner_is_not_asked() -> None:
    two = Two()
    asked: list[str] = []

    class Refusing:
        def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: OnReply) -> int:
            on_reply(Unavailable("nobody is there"))
            return 1

        def cancel(self, request_id: int) -> None: ...

    def open_port(address: str) -> Refusing:
        asked.append(address)
        return Refusing()

    follower = MetaFollower(
        cluster="popmq", group="broker-b", open_port=open_port, now_ms=lambda: two.now_ms
    )
    for epoch, address in ((7, "new:1"), (6, "old:1"), (7, "new:1"), (0, "unknown:1")):
        follower.hear("broker-a", address, epoch)
        two.now_ms += ASK_MS
        follower.step(two.other.broker)
    assert asked == ["new:1"] * 4
    follower.hear("", "")  # a controller that has just started
    two.now_ms += KEEP_ADDRESS_MS
    follower.hear("broker-a", "old:1", 6)  # nobody names the newer one any more
    follower.step(two.other.broker)
    assert asked[4:] == ["old:1"]
