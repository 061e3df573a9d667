"""Half messages at the broker: nobody sees one before it is committed, and each ends once."""

from itertools import pairwise

import pytest
from transaction.rig import (
    FIRST_MS,
    INTERVAL_MS,
    ask_end,
    begin,
    broker,
    checks,
    crash,
    end,
    entry,
    names,
    received,
    restart,
    wait,
)

from popmq.common import topics
from popmq.common.disk import ColdRead
from popmq.common.errors import Code, PopmqError
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.drain_remainder import drain_remainder
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.topics import GroupType, MessageType
from popmq.common.wire import admin_pb2 as admin
from popmq.testing.harness.core_broker import CoreBroker, pop


@pytest.fixture
def core() -> CoreBroker:
    return broker()


def code(error: PopmqError | None) -> int:
    return Code.OK if error is None else error.code


def pending(core: CoreBroker) -> int:
    return len(core.broker.transactions.table.pending)


STARTS = pytest.mark.parametrize("clean", [True, False], ids=["clean stop", "crash"])


# -- commit and rollback


def test_a_half_message_is_invisible_until_it_is_committed(core: CoreBroker) -> None:
    half = begin(core, "a", tag="red")
    assert received(core) == []
    assert end(core, "a", half.message) is None
    (delivery,) = core.receive("orders", "g", expression="red")
    assert delivery.head == b"body of a"
    assert core.ack("orders", "g", delivery.handle)[0].code == Code.OK
    assert pending(core) == 0


def test_a_group_with_a_half_message_is_not_drained(core: CoreBroker) -> None:
    half = begin(core, "a")
    for left in (1, 0):
        body = admin.DrainRequest(look=True).SerializeToString()
        reply = admin.DrainReply.FromString(core.reply(Kind.DRAIN, body))
        rest, _ = drain_remainder("b", admin.LagReply(brokers=["b"]), [], reply)
        assert (rest.transactions, rest.is_drained) == (left, not left)
        end(core, "a", half.message)


def test_a_message_that_was_rolled_back_is_never_seen(core: CoreBroker) -> None:
    half = begin(core, "a")
    assert end(core, "a", half.message, commit=False) is None
    core.advance(3_600_000)
    assert received(core) == []
    assert pending(core) == 0


def test_a_commit_wakes_who_waits_for_the_topic(core: CoreBroker) -> None:
    half = begin(core, "a")
    waiting = core.ask(Kind.POP, pop("orders", "g", poll_ms=20_000))
    core.advance(1_000)
    assert not waiting.heard
    end(core, "a", half.message)
    assert waiting.body is not None
    (delivery,) = hop.decode_pop_reply(waiting.body).deliveries
    assert delivery.head == b"body of a"


def test_it_comes_into_the_queue_that_was_chosen_when_it_was_sent(core: CoreBroker) -> None:
    half = begin(core, "a", queue_id=1)
    end(core, "a", half.message)
    (delivery,) = core.receive("orders", "g")
    assert delivery.queue_id == 1


def test_an_end_is_answered_when_it_is_durable(core: CoreBroker) -> None:
    half = begin(core, "a")
    answer = ask_end(core, "a", half.message)
    assert not answer.heard
    core.run_until_idle()
    assert answer.body == b""


def test_a_commit_that_was_not_durable_is_none(core: CoreBroker) -> None:
    half = begin(core, "a")
    ask_end(core, "a", half.message)
    crash(core)
    assert received(core) == []
    assert end(core, "a", half.message) is None
    assert received(core) == ["a"]


def test_a_repeated_end_is_ok_and_changes_nothing(core: CoreBroker) -> None:
    result, other = begin(core, "a"), begin(core, "b")
    for _ in range(3):
        assert end(core, "a", result.message) is None
        assert end(core, "b", other.message, commit=False) is None
    assert received(core) == ["a"]


def test_the_other_end_is_refused_only_when_the_first_is_on_the_disk(core: CoreBroker) -> None:
    """Transaction seed 90151: a crash would have brought the transaction back."""
    half = begin(core, "a")
    first = ask_end(core, "a", half.message)
    other = ask_end(core, "a", half.message, commit=False)
    assert (first.heard, other.heard) == (False, False)
    core.run_until_idle()
    assert (first.error, code(other.error)) == (None, Code.INVALID_TRANSACTION_ID)


@STARTS
def test_the_other_end_is_refused_with_what_it_came_to(core: CoreBroker, clean: bool) -> None:
    item, other = begin(core, "a"), begin(core, "b")
    end(core, "a", item.message)
    end(core, "b", other.message, commit=False)
    restart(core, clean=clean)
    refused = end(core, "a", item.message, commit=False)
    assert code(refused) == Code.INVALID_TRANSACTION_ID
    assert "was committed" in str(refused)
    refused = end(core, "b", other.message)
    assert code(refused) == Code.INVALID_TRANSACTION_ID
    assert "was rolled back" in str(refused)
    assert end(core, "a", item.message) is None
    assert received(core) == ["a"]


def test_ten_minutes_later_nobody_knows(core: CoreBroker) -> None:
    half = begin(core, "a")
    end(core, "a", half.message)
    core.advance(610_000)
    refused = end(core, "a", half.message)
    assert "more than 10 minutes ago" in str(refused)
    assert received(core) == ["a"]


@pytest.mark.parametrize(
    ("name", "topic", "change"),
    [
        ("b", "orders", lambda text: text),
        ("a", "others", lambda text: text),
        ("a", "orders", lambda text: text[:-4]),
        ("a", "orders", lambda text: text[:20] + ("A" if text[20] != "A" else "B") + text[21:]),
        ("a", "orders", lambda text: ""),
        ("a", "orders", lambda text: "a"),
        ("a", "orders", lambda text: "no base64 !"),
        ("a", "orders", lambda text: "A" * 2_000),
    ],
    ids=["message", "topic", "cut", "changed", "empty", "a", "text", "long"],
)
def test_an_id_is_good_for_its_own_message_only(
    core: CoreBroker, name: str, topic: str, change: object
) -> None:
    half = begin(core, "a")
    assert callable(change)
    refused = end(core, name, change(half.message), topic=topic)
    assert code(refused) == Code.INVALID_TRANSACTION_ID
    assert received(core) == []
    assert end(core, "a", half.message) is None


def test_the_id_of_another_store_is_refused(core: CoreBroker) -> None:
    other = CoreBroker(seed=2, settings=core.settings)
    other.topic("orders", queues=2, type=core.broker.registry.topic("orders").type)
    half = begin(other, "a")
    begin(core, "a")
    assert code(end(core, "a", half.message)) == Code.INVALID_TRANSACTION_ID


@STARTS
def test_a_pending_one_survives_a_start_and_its_id_too(core: CoreBroker, clean: bool) -> None:
    item, other = begin(core, "a"), begin(core, "b")
    restart(core, clean=clean)
    assert received(core) == []
    assert end(core, "a", item.message) is None
    assert end(core, "b", other.message, commit=False) is None
    restart(core, clean=clean)
    assert received(core) == ["a"]
    assert pending(core) == 0


def test_a_resend_of_a_half_message_gets_the_same_transaction(core: CoreBroker) -> None:
    half = begin(core, "a")
    assert begin(core, "a") == half
    crash(core)
    assert begin(core, "a") == half
    assert pending(core) == 1
    end(core, "a", half.message)
    assert begin(core, "a") == half  # and stores nothing
    assert received(core) == ["a"]


@STARTS
def test_a_half_message_that_was_rolled_back_is_stored_when_it_is_sent_again(
    core: CoreBroker, clean: bool
) -> None:
    half = begin(core, "a")
    end(core, "a", half.message, commit=False)
    restart(core, clean=clean)
    again = begin(core, "a")
    assert again.message != half.message
    assert end(core, "a", again.message) is None
    assert received(core) == ["a"]


@STARTS
def test_an_id_that_was_sent_plainly_before_gives_no_transaction(
    core: CoreBroker, clean: bool
) -> None:
    begin(core, "secret", "others")
    plain = entry("a")._replace(type=MessageType.NORMAL)
    core.reply(Kind.PUT, hop.encode_put(hop.PutRequest("others", [plain])))
    restart(core, clean=clean)
    again = begin(core, "a", "others")
    assert (again.code, again.message) == (Code.OK, "")
    assert pending(core) == 1


def test_the_number_of_pending_ones_is_bounded() -> None:
    core = broker(max_pending=2)
    result, _ = begin(core, "a"), begin(core, "b")
    refused = begin(core, "c")
    assert refused.code == Code.TOO_MANY_REQUESTS
    assert "transaction.max_pending" in refused.message
    end(core, "a", result.message)
    assert begin(core, "c").code == Code.OK


def test_a_topic_takes_no_half_messages_unless_it_is_made_for_them(core: CoreBroker) -> None:
    core.topic("normal")
    assert begin(core, "a", "normal").code == Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE


@STARTS
def test_with_its_topic_a_half_message_is_gone(core: CoreBroker, clean: bool) -> None:
    half = begin(core, "a")
    core.broker.registry.delete_topic("orders")
    core.run_until_idle()
    assert code(end(core, "a", half.message)) == Code.TOPIC_NOT_FOUND
    restart(core, clean=clean)
    assert pending(core) == 0
    core.topic("orders", type=core.broker.registry.topic("others").type)
    assert code(end(core, "a", half.message)) == Code.INVALID_TRANSACTION_ID


def test_a_committed_message_keeps_its_order_in_a_fifo_group(core: CoreBroker) -> None:
    core.group("f", type=GroupType.FIFO)
    first, second = begin(core, "a"), begin(core, "b")
    end(core, "b", second.message)
    end(core, "a", first.message)
    (delivery,) = core.receive("orders", "f", limit=1)
    assert delivery.head == b"body of b"  # it was committed first


def test_a_body_that_has_to_come_from_the_disk_is_committed_once(
    core: CoreBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = begin(core, "a")
    log = core.broker.store.reader._log  # the page cache of this test
    real, cold = log.view_warm, [True]

    def view_warm(position: int, size: int) -> memoryview:
        if cold.pop() if cold else False:
            raise ColdRead(lambda: None)
        return memoryview(real(position, size))

    monkeypatch.setattr(log, "view_warm", view_warm)
    assert end(core, "a", half.message) is None
    assert received(core) == ["a"]


# -- checks


def test_a_producer_is_asked_after_the_first_time_and_then_at_intervals(core: CoreBroker) -> None:
    half = begin(core, "a")
    asked = []
    proxy = wait(core, wait_ms=1_000_000)
    for _ in range(200):
        core.advance(500)
        found_names = names(proxy)
        if found_names is not None:
            assert found_names == ["a"]
            asked.append(core.clock.boot_ms())
            proxy = wait(core, wait_ms=1_000_000)
    gaps = [later - earlier for earlier, later in pairwise(asked)]
    assert len(asked) == 4
    assert gaps == [INTERVAL_MS] * 3
    end(core, "a", half.message)
    core.advance(100_000)
    assert names(proxy) is None


def test_a_check_names_the_transaction_and_has_the_whole_message(core: CoreBroker) -> None:
    half = begin(core, "a", tag="red")
    proxy = wait(core, "others", "orders")
    core.advance(FIRST_MS)
    (check,) = checks(proxy) or []
    assert (check.topic, check.transaction_id) == ("orders", half.message)
    assert check.head == b"body of a"
    assert check.half_offset == half.queue_offset
    assert end(core, "a", check.transaction_id) is None


def test_the_message_says_when_it_is_to_be_checked_first(core: CoreBroker) -> None:
    begin(core, "soon", check_ms=1_000)
    begin(core, "late", check_ms=60_000)
    proxy = wait(core)
    core.advance(1_000)
    assert names(proxy) == ["soon"]


def test_only_proxies_with_producers_of_the_topic_are_asked_each_in_turn(core: CoreBroker) -> None:
    other = wait(core, "others")
    first, second = wait(core, wait_ms=100_000), wait(core, wait_ms=100_000)
    begin(core, "a")
    core.advance(FIRST_MS)
    assert (names(first), names(second), names(other)) == (["a"], None, None)
    wait(core, wait_ms=100_000)
    core.advance(INTERVAL_MS)
    assert names(second) == ["a"]


def test_a_check_leaves_when_it_is_counted_durably(core: CoreBroker) -> None:
    begin(core, "a")
    proxy = wait(core)
    core.clock.advance(FIRST_MS)
    core.broker.step()
    assert names(proxy) is None
    core.run_until_idle()
    assert names(proxy) == ["a"]


def test_without_a_producer_nothing_is_counted_and_the_first_to_come_is_asked(
    core: CoreBroker,
) -> None:
    begin(core, "a")
    core.advance(3_600_000)
    assert core.broker.transactions.table.pending[0].checks == 0
    proxy = wait(core)
    core.advance(10)
    assert names(proxy) == ["a"]


def test_what_nobody_knows_after_the_last_check_becomes_a_dead_letter() -> None:
    core = broker(max_checks=2, check_interval_ms=1_000)
    half = begin(core, "a")
    seen = 0
    for _ in range(20):
        proxy = wait(core, wait_ms=0)
        core.advance(1_000)
        seen += names(proxy) == ["a"]
    assert (seen, pending(core)) == (2, 0)
    assert received(core) == []
    refused = end(core, "a", half.message)
    assert "was given up" in str(refused)
    assert received(core, topics.TRANSACTION_DLQ_TOPIC) == ["a"]


@STARTS
def test_checks_are_counted_over_starts(clean: bool) -> None:
    core = broker(max_checks=3, check_interval_ms=1_000)
    begin(core, "a")
    seen = 0
    for _ in range(20):
        proxy = wait(core, wait_ms=0)
        core.advance(1_000)
        seen += names(proxy) == ["a"]
        restart(core, clean=clean)
    assert (seen, pending(core)) == (3, 0)


def test_without_a_producer_for_days_it_is_given_up_too() -> None:
    core = broker(keep_ms=3_600_000)
    begin(core, "a")
    core.advance(3_000_000)
    begin(core, "b")
    core.advance(700_000)
    assert pending(core) == 1
    assert received(core, topics.TRANSACTION_DLQ_TOPIC) == ["a"]


def test_a_proxy_that_waits_ends_with_nothing_when_its_time_is_over(core: CoreBroker) -> None:
    proxy = wait(core, wait_ms=1_000)
    core.advance(990)
    assert names(proxy) is None
    core.advance(20)
    assert names(proxy) == []


def test_a_proxy_that_left_is_asked_nothing(core: CoreBroker) -> None:
    begin(core, "a")
    gone = wait(core)
    core.server.cancel(gone.id)
    core.advance(FIRST_MS)
    assert names(gone) is None
    assert core.broker.transactions.checks.waiting == 0
    assert core.broker.transactions.table.pending[0].checks == 0


def test_a_broker_that_stops_answers_the_proxies_that_wait(core: CoreBroker) -> None:
    proxy = wait(core)
    core.stop()
    assert names(proxy) == []


def test_one_answer_is_bounded_and_the_next_has_the_rest(core: CoreBroker) -> None:
    for number in range(40):
        begin(core, f"m-{number:02}")
    core.advance(FIRST_MS)
    first = wait(core)
    core.advance(10)
    second = wait(core)
    core.advance(10)
    assert [len(names(answer) or []) for answer in (first, second)] == [32, 8]
    assert sorted([*(names(first) or []), *(names(second) or [])]) == [
        f"m-{number:02}" for number in range(40)
    ]


def test_a_cold_body_is_read_elsewhere_and_no_check_is_lost(
    core: CoreBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(core, "a")
    begin(core, "b")
    log = core.broker.store.reader._log  # the page cache of this test
    real, reads = log.view_warm, iter((True, False, True))  # the first and then the second

    def view_warm(position: int, size: int) -> memoryview:
        if next(reads, False):
            raise ColdRead(lambda: None)
        return memoryview(real(position, size))

    monkeypatch.setattr(log, "view_warm", view_warm)
    core.advance(FIRST_MS)
    results = []
    for _ in range(3):
        proxy = wait(core, wait_ms=0)
        core.advance(10)
        results += names(proxy) or []
    assert results == ["a", "b"]
    assert [half.checks for half in core.broker.transactions.table.pending.values()] == [1, 1]
