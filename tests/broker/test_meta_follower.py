"""Topics and groups of one broker group, followed by another: two brokers, no network."""

from dataclasses import replace

import pytest

from popmq.broker.meta_follower import ASK_MS, KEEP_ADDRESS_MS, MetaFollower
from popmq.common.errors import Code, PopmqError, TopicNotFound, Unavailable
from popmq.common.hop import Kind, OnReply
from popmq.common.topics import FIRST_LOCAL_TOPIC_ID, MessageType, TopicConfig
from popmq.common.wire import admin_pb2 as admin
from popmq.common.wire.replication_pb2 import CopyMetaReply, CopyMetaRequest
from popmq.testing.core import SMALL, CoreBroker


def named(name: str, *, auto_create: bool = False) -> CoreBroker:
    broker = replace(SMALL.broker, name=name)
    topic = replace(SMALL.topic, auto_create=auto_create)
    return CoreBroker(settings=replace(SMALL, broker=broker, topic=topic))


class Two:
    """broker-a owns, broker-b follows."""

    def __init__(self, *, auto_create: bool = False) -> None:
        self.owner = named("broker-a", auto_create=auto_create)
        self.other = named("broker-b", auto_create=auto_create)
        self.away = False
        self.asked = 0
        self.now_ms = 0
        self.replies: list[bytes] = []  # of the owner, in their order
        self.replay: bytes | None = None  # what an old master says instead of the owner
        self.follower = self.new_follower()

    def new_follower(self) -> MetaFollower:
        made = MetaFollower(
            cluster="popmq",
            group="broker-b",
            open_port=lambda address: self,
            now_ms=lambda: self.now_ms,
        )
        made.hear("broker-a", "owner:1")
        return made

    def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: OnReply) -> int:
        """To the owner."""
        assert kind is Kind.COPY_META
        self.asked += 1
        if self.away:
            on_reply(Unavailable("the owner is away"))
        elif self.replay is not None:
            on_reply(self.replay)
        else:
            answer = self.owner.ask(kind, body)
            self.replies.append(answer.body or b"")
            on_reply(answer.error or answer.body or b"")
        return 1

    def cancel(self, request_id: int) -> None: ...

    def follow(self, ms: int = ASK_MS) -> None:
        """Let time pass at the follower."""
        self.now_ms += ms
        for _ in range(20):
            self.follower.step(self.other.broker)
            self.other.settle()

    def same(self) -> bool:
        mine, theirs = self.owner.broker.registry, self.other.broker.registry
        topics = [one for one in theirs.topics() if one.id < FIRST_LOCAL_TOPIC_ID]
        return list(mine.topics()) == topics and list(mine.groups()) == list(theirs.groups())


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
    assert (two.other.broker.store.end, two.asked, two.follower.copies) == (end, 6, 1)


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
        two.other.broker.directory.topic("new", auto_create=True)
    with pytest.raises(PopmqError, match="consumer group readers does not exist"):
        two.other.broker.directory.group("readers")
    two.follow(0)
    assert two.same()
    assert two.other.send("new", b"x").code == Code.OK
    assert [one.head for one in two.other.receive("new", "readers")] == [b"x"]


def test_a_name_that_the_owner_may_not_make_stays_unknown() -> None:
    two = Two()
    two.follow()
    with pytest.raises(TopicNotFound):
        two.other.broker.directory.topic("new", auto_create=True)
    asked = two.asked
    two.follow(0)
    assert two.asked == asked + 1
    two.follow(0)
    assert two.asked == asked + 1
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
    retry = [one for one in two.other.broker.registry.topics() if one.name[0] == "%"]
    assert [one.id for one in retry] == [FIRST_LOCAL_TOPIC_ID]
    made = [two.owner.topic(f"t-{number}") for number in range(3)]
    two.follow()
    assert two.same()
    assert two.other.broker.registry.topic_by_id(made[-1].id) == made[-1]
    two.other.stop()
    two.other.start()
    two.owner.broker.registry.delete_topic("orders")
    two.follow()
    assert [one for one in two.other.broker.registry.topics() if one.name[0] == "%"] == []


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
    two.other.settle()
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
    assert [one.message for one in caplog.records if one.levelname == "ERROR"] == [
        "topics are not followed"
    ]


def test_a_group_that_follows_one_owner_does_not_change_to_another() -> None:
    two = Two()
    two.owner.topic("orders")
    two.follow()
    two.follower.hear("broker-c", "elsewhere:1")
    asked = two.asked
    two.follow()
    assert two.asked == asked
    assert two.other.broker.registry.owner == "broker-a"


def test_the_owner_tells_nobody_what_is_not_confirmed() -> None:
    two = Two()
    two.owner.broker.registry.create_topic(TopicConfig(0, "new"))
    answer = two.owner.ask(Kind.COPY_META, _copy_request(), settle=False)
    assert not answer.heard
    two.owner.settle()
    assert answer.heard


def test_one_that_follows_tells_nobody() -> None:
    two = Two()
    two.follow()
    with pytest.raises(PopmqError, match="owns no topics"):
        two.other.reply(Kind.COPY_META, _copy_request())


def test_a_topic_with_message_groups_remembers_the_broker_groups_it_was_made_over() -> None:
    two = Two()
    two.owner.broker.directory.cluster_groups = ("broker-a", "broker-b")
    for kind in ("fifo", "mixed", "normal"):
        request = admin.CreateTopicRequest(topic=admin.Topic(name=kind, type=kind))
        two.owner.reply(Kind.CREATE_TOPIC, request.SerializeToString())
    two.owner.broker.directory.cluster_groups = ("broker-a", "broker-b", "broker-c")
    registry = two.owner.broker.registry
    found = {name: registry.topic(name).brokers for name in ("fifo", "mixed", "normal")}
    both = ("broker-a", "broker-b")
    assert found == {"fifo": both, "mixed": both, "normal": ()}
    two.owner.stop()
    two.owner.start()
    assert two.owner.broker.registry.topic("fifo").brokers == both
    two.follow()
    assert two.other.broker.registry.topic("fifo").brokers == both
    assert two.other.broker.registry.topic("fifo").type is MessageType.FIFO


def _copy_request() -> bytes:
    return CopyMetaRequest(cluster="popmq").SerializeToString()


def test_a_restart_from_a_snapshot_counts_changes_on_where_it_was() -> None:
    two = Two()
    for number in range(3):
        two.owner.topic(f"t-{number}")
    two.owner.broker.registry.delete_topic("t-0")
    two.owner.settle()
    before = two.owner.broker.registry.changes
    two.follow()
    two.owner.stop()
    two.owner.start()
    assert two.owner.broker.registry.changes == before == 4
    two.follow()
    assert two.follower.copies == 2  # the second one brings the owner's new epoch and no change
    assert two.other.broker.registry.owner_version == before


# -- never back


def restart(broker: CoreBroker) -> None:
    """The broker leads another epoch from now on."""
    broker.stop()
    broker.start()


def test_a_state_that_is_older_than_the_copy_is_not_followed() -> None:
    """Two controllers name two masters of the owner in turn: one of them leads no more."""
    two = Two()
    two.owner.topic("orders")
    two.follow()
    restart(two.owner)
    two.owner.topic("new")
    two.follow()
    assert two.other.send("new", b"acknowledged").code == Code.OK
    two.replay = two.replies[0]
    for _ in range(3):
        two.follow()
    assert two.other.broker.registry.find_topic("new") is not None
    two.replay = None
    two.follow()
    two.owner.group("g")
    two.follow()
    assert [one.head for one in two.other.receive("new", "g")] == [b"acknowledged"]


@pytest.mark.parametrize("crash", [False, True])
def test_an_older_state_is_not_followed_after_a_restart_of_the_follower(crash: bool) -> None:
    """With and without a snapshot of the registry."""
    two = Two()
    restart(two.owner)
    two.owner.topic("orders")
    two.follow()
    old_version = two.owner.broker.registry.changes
    restart(two.owner)
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
    two.replay = old.SerializeToString()
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
    two.owner = elected
    two.follow()
    assert two.same()
    assert two.other.broker.registry.find_topic("lost") is None


def test_a_later_epoch_of_the_same_state_is_remembered() -> None:
    two = Two()
    two.owner.topic("orders")
    two.follow()
    restart(two.owner)
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
        told = CopyMetaReply.FromString(reply)
        told.epoch = 0
        return told.SerializeToString()

    two.replay = without_epoch(two.replies[0])
    two.follow()
    assert two.same()
    two.replay = None
    two.away = True
    two.owner.topic("newest")
    answer = two.owner.ask(Kind.COPY_META, _copy_request())
    assert answer.body is not None
    two.away, two.replay = False, without_epoch(answer.body)
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
    restart(two.owner)
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

    def open_port(address: str) -> Two:
        asked.append(address)
        return two

    follower = MetaFollower(
        cluster="popmq", group="broker-b", open_port=open_port, now_ms=lambda: two.now_ms
    )
    for epoch, address in ((7, "new:1"), (6, "old:1"), (7, "new:1"), (0, "unknown:1")):
        follower.hear("broker-a", address, epoch)
        two.now_ms += ASK_MS
        while follower.step(two.other.broker):
            two.other.settle()
    assert asked == ["new:1"] * 4
    follower.hear("", "")  # a controller that has just started
    two.now_ms += KEEP_ADDRESS_MS
    follower.hear("broker-a", "old:1", 6)  # nobody names the newer one any more
    follower.step(two.other.broker)
    assert asked[4:] == ["old:1"]
