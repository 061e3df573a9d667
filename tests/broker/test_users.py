"""Users and the mode as records of the owner: changed, followed, and there after a start."""

from popmq.broker.meta.registry import _hashed
from popmq.common.errors import Code
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.wire import meta_pb2 as meta
from popmq.testing.harness.core_broker import Answer, CoreBroker

Change = meta.ChangeUserRequest
SECRET = meta.SecretRecord(id="s1", key="k1", nonce=b"n" * 12, sealed=b"sealed")
ORDERS = meta.PolicyRecord(resources=["topic:orders"], actions=["pub"])


def change(broker: CoreBroker, request: meta.ChangeUserRequest) -> Answer:
    answer = broker.ask(Kind.CHANGE_USER, request.SerializeToString())
    broker.run_until_idle()
    return answer


def changed(broker: CoreBroker, request: meta.ChangeUserRequest) -> meta.UserRecord:
    answer = change(broker, request)
    assert answer.body is not None, answer.error
    return meta.ChangeUserReply.FromString(answer.body).user


def refused(broker: CoreBroker, request: meta.ChangeUserRequest) -> Code:
    answer = change(broker, request)
    assert answer.error is not None
    return answer.error.code


def create(broker: CoreBroker, name: str = "ann", **fields: object) -> meta.UserRecord:
    return changed(broker, Change(kind=Change.CREATE, name=name, **fields))  # type: ignore[arg-type]


def follow(broker: CoreBroker, known: tuple[int, int] = (0, 0), wait_ms: int = 0) -> Answer:
    request = meta.FollowUsersRequest(known_epoch=known[0], known_version=known[1], wait_ms=wait_ms)
    answer = broker.ask(Kind.FOLLOW_USERS, request.SerializeToString())
    broker.run_until_idle()
    return answer


def reply_of(answer: Answer) -> meta.FollowUsersReply:
    assert answer.body is not None, answer.error
    return meta.FollowUsersReply.FromString(answer.body)


def test_a_user_is_there_with_its_sealed_secret_and_its_policy_after_a_start() -> None:
    broker = CoreBroker()
    create(broker, secret=SECRET, entries=[ORDERS], networks=["10.0.0.0/8"])
    changed(broker, Change(kind=Change.ALTER, name="ann", add_offsets=[345]))
    before = reply_of(follow(broker))
    broker.stop()
    broker.start()
    after = reply_of(follow(broker))
    assert after.users == before.users
    assert after.version == before.version == 2
    (user,) = after.users
    assert (user.secrets[0], user.entries[0]) == (SECRET, ORDERS)
    assert (list(user.clock_offsets), user.learns_clock) == ([345], False)


def test_a_snapshot_holds_users_the_mode_and_how_often_they_changed() -> None:
    broker = CoreBroker()
    create(broker, secret=SECRET)
    create(broker, "bob")
    change(broker, Change(kind=Change.DELETE, name="bob"))
    change(broker, Change(kind=Change.SET_MODE, mode="observe"))
    pieces = [piece for piece, _ in broker.broker.registry.begin_snapshot()]
    other = CoreBroker()
    for piece in pieces:
        other.broker.registry.restore(piece)
    other.broker.registry.restored()
    assert list(other.broker.registry.users) == list(broker.broker.registry.users)
    assert other.broker.registry.users.mode.value == "observe"
    assert other.broker.registry.users.changes == 4


def test_a_table_without_users_has_the_snapshot_that_it_had_before_there_were_any() -> None:
    assert CoreBroker().broker.registry.users.snapshot_records() == []


def test_a_follower_that_waits_gets_the_changed_users_alone() -> None:
    broker = CoreBroker()
    create(broker, "ann")
    create(broker, "bob")
    known = reply_of(follow(broker))
    waiting = follow(broker, (known.epoch, known.version), wait_ms=5_000)
    assert not waiting.heard
    change(broker, Change(kind=Change.GRANT, name="bob", entries=[ORDERS]))
    reply = reply_of(waiting)
    assert not reply.whole
    assert [user.name for user in reply.users] == ["bob"]
    change(broker, Change(kind=Change.DELETE, name="ann"))
    later = reply_of(follow(broker, (reply.epoch, reply.version)))
    assert (list(later.deleted), list(later.users)) == (["ann"], [])


def test_a_change_is_followed_once_it_is_confirmed() -> None:
    """What a crash of the master could undo must not be in force at a proxy."""
    broker = CoreBroker()
    known = reply_of(follow(broker))
    waiting = follow(broker, (known.epoch, known.version), wait_ms=5_000)
    request = Change(kind=Change.CREATE, name="ann")
    answer = broker.ask(Kind.CHANGE_USER, request.SerializeToString(), settle=False)
    assert not waiting.heard
    assert not answer.heard
    broker.run_until_idle()
    assert waiting.heard
    assert answer.heard


def test_a_follower_of_another_epoch_gets_the_whole_table() -> None:
    broker = CoreBroker()
    create(broker)
    known = reply_of(follow(broker))
    reply = reply_of(follow(broker, (known.epoch + 7, known.version)))
    assert reply.whole
    assert len(reply.users) == 1


def test_a_new_secret_comes_first_and_the_older_one_ends_when_it_is_told_to() -> None:
    broker = CoreBroker()
    create(broker, secret=SECRET)
    second = meta.SecretRecord(id="s2", key="k1", nonce=b"m" * 12, sealed=b"other")
    third = meta.SecretRecord(id="s3", key="k1", nonce=b"o" * 12, sealed=b"third")
    changed(broker, Change(name="ann", secret=second, retire_ms=9_000))
    user = changed(broker, Change(name="ann", secret=third, retire_ms=9_500))
    assert [(item.id, item.until_ms) for item in user.secrets] == [("s3", 0), ("s2", 9_500)]
    user = changed(broker, Change(name="ann", drop_secret="s2"))
    assert [item.id for item in user.secrets] == ["s3"]
    assert refused(broker, Change(name="ann", drop_secret="s2")) == Code.NOT_FOUND


def test_the_first_of_two_proxies_sets_the_clock_that_is_learned() -> None:
    broker = CoreBroker()
    create(broker)
    learn = Change(kind=Change.LEARN_CLOCK, name="ann", add_offsets=[480])
    assert list(changed(broker, learn).clock_offsets) == [480]
    learn = Change(kind=Change.LEARN_CLOCK, name="ann", add_offsets=[0])
    assert list(changed(broker, learn).clock_offsets) == [480]
    moved = Change(kind=Change.LEARN_CLOCK, name="ann", add_offsets=[540], remove_offsets=[480])
    assert list(changed(broker, moved).clock_offsets) == [540]
    again = changed(broker, Change(name="ann", clock="learn"))
    assert (list(again.clock_offsets), again.learns_clock) == ([], True)


def test_what_cannot_be_is_refused_and_changes_nothing() -> None:
    broker = CoreBroker()
    create(broker)
    before = broker.broker.registry.users.changes
    bad = meta.PolicyRecord(resources=["queue:x"], actions=["pub"])
    cases = [
        (Change(kind=Change.CREATE, name="ann"), Code.BAD_REQUEST),
        (Change(kind=Change.CREATE, name="Ann Lee"), Code.BAD_REQUEST),
        (Change(name="bob", state="disabled"), Code.NOT_FOUND),
        (Change(kind=Change.DELETE, name="bob"), Code.NOT_FOUND),
        (Change(name="ann", type="king"), Code.BAD_REQUEST),
        (Change(name="ann", networks=["10.0.0.1/8"]), Code.BAD_REQUEST),
        (Change(name="ann", add_offsets=[7]), Code.BAD_REQUEST),
        (Change(name="ann", add_offsets=[15 * 60]), Code.BAD_REQUEST),
        (Change(kind=Change.GRANT, name="ann", entries=[bad]), Code.BAD_REQUEST),
        (Change(kind=Change.REVOKE, name="ann", entries=[ORDERS]), Code.NOT_FOUND),
        (Change(kind=Change.SET_MODE, mode="maybe"), Code.BAD_REQUEST),
        (Change(name="ann", state="disabled", if_version=99), Code.PRECONDITION_FAILED),
    ]
    for request, code in cases:
        assert refused(broker, request) == code, request
    assert broker.broker.registry.users.changes == before


def test_quotas_are_there_after_a_start_and_one_alone_can_end() -> None:
    broker = CoreBroker()
    create(broker)
    changed(broker, Change(kind=Change.ALTER, name="ann", quotas={"calls": 5, "topics": 2}))
    changed(broker, Change(kind=Change.ALTER, name="ann", quotas={"calls": 0, "queues": 7}))
    broker.stop()
    broker.start()
    (user,) = reply_of(follow(broker)).users
    assert dict(user.quotas) == {"topics": 2, "queues": 7}
    bad = Change(kind=Change.ALTER, name="ann", quotas={"lakes": 1})
    assert refused(broker, bad) is Code.BAD_REQUEST


def test_a_replica_that_drops_quotas_and_creators_has_the_same_state() -> None:
    for with_field, without in (
        (meta.MetaRecord(user=meta.UserRecord(name="ann", quotas={"calls": 1})), "user"),
        (meta.MetaRecord(topic=meta.TopicRecord(id=9, created_by="ann")), "topic"),
        (meta.MetaRecord(group=meta.GroupRecord(id=9, created_by="ann")), "group"),
    ):
        old = meta.MetaRecord()
        old.CopyFrom(with_field)
        getattr(old, without).ClearField("quotas" if without == "user" else "created_by")
        bodies = [record.SerializeToString(deterministic=True) for record in (with_field, old)]
        assert bodies[0] != bodies[1]
        assert _hashed(with_field, bodies[0]) == _hashed(old, bodies[1]) == bodies[1]
