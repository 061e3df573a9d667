"""Each check of a request with RocketMQ's code, and a sentence that says what to change."""

import pytest

from popmq.common.errors import Code, PopmqError, Refused
from popmq.common.protocol.messaging_payloads import FilterType
from popmq.common.settings.settings import MessageSettings, PopSettings
from popmq.common.topics import MessageType, Permission, TopicConfig
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service
from popmq.proxy.lanes.ordinary_send import read_ordinary
from popmq.proxy.rpc.validate import (
    MessageFacts,
    batch_limit,
    change_invisible_ms,
    check_attempt_id,
    check_message,
    check_readable,
    check_stored_size,
    check_type,
    check_writable,
    common_code,
    filter_of,
    poll_ms,
    receive_invisible_ms,
    time_ms,
    type_of,
)

LIMITS = MessageSettings()
POP = PopSettings()
NOW_MS = 1_700_000_000_000
GOOD = MessageFacts()
TRANSACTION = GOOD._replace(claimed_type=MessageType.TRANSACTION)


def topic(kind: MessageType, permission: Permission = Permission.READ_WRITE) -> TopicConfig:
    return TopicConfig(64, "orders", 8, kind, permission)


GOOD_MESSAGES = {
    "plain": GOOD,
    "largest body": GOOD._replace(body_bytes=4 << 20),
    "short id": GOOD._replace(message_id="abc"),
    "empty tag": GOOD._replace(tag=""),
    "long tag": GOOD._replace(tag="t" * 4000),
    "key with a space": GOOD._replace(keys=["a b"]),
    "empty key": GOOD._replace(keys=[""]),
    "empty value": GOOD._replace(user_properties={"k": ""}),
    "as many properties as allowed": GOOD._replace(
        user_properties={f"k{n}": "" for n in range(128)}
    ),
    "properties as large as allowed": GOOD._replace(user_properties={"k": "v" * 16383}),
    "group of 63 bytes": GOOD._replace(message_group="g" * 63),
    "empty group": GOOD._replace(message_group=""),
    "priority 0": GOOD._replace(priority=0),
    "recovery of an hour": GOOD._replace(recovery_ms=3_600_000),
}


@pytest.mark.parametrize("facts", GOOD_MESSAGES.values(), ids=GOOD_MESSAGES.keys())
def test_a_message_that_rocketmq_takes_passes(facts: MessageFacts) -> None:
    check_message(facts, LIMITS)


BAD_MESSAGES: list[tuple[str, MessageFacts, Code, str]] = [
    ("empty body", GOOD._replace(body_bytes=0), Code.MESSAGE_BODY_EMPTY, "empty"),
    (
        "large body",
        GOOD._replace(body_bytes=(4 << 20) + 1),
        Code.MESSAGE_BODY_TOO_LARGE,
        "4194305 bytes is over the limit of 4194304 bytes (message.max_body_bytes)",
    ),
    (
        "many properties",
        GOOD._replace(user_properties={str(n): "" for n in range(129)}),
        Code.MESSAGE_PROPERTIES_TOO_LARGE,
        "129 user properties are over the limit of 128 (message.max_properties)",
    ),
    (
        "large properties",
        GOOD._replace(user_properties={"k": "v" * 16384}),
        Code.MESSAGE_PROPERTIES_TOO_LARGE,
        "16385 bytes are over the limit of 16384 bytes (message.max_properties_bytes)",
    ),
    (
        "large tag and keys",
        GOOD._replace(tag="ä" * 8000, keys=["k" * 500]),
        Code.MESSAGE_PROPERTIES_TOO_LARGE,
        "16500 bytes",
    ),
    (
        "reserved name",
        GOOD._replace(user_properties={"TAGS": "x"}),
        Code.ILLEGAL_MESSAGE_PROPERTY_KEY,
        "'TAGS'",
    ),
    (
        "control character in a name",
        GOOD._replace(user_properties={"a\tb": "x"}),
        Code.ILLEGAL_MESSAGE_PROPERTY_KEY,
        "in its name",
    ),
    (
        "control character in a value",
        GOOD._replace(user_properties={"a": "x\x7f"}),
        Code.ILLEGAL_MESSAGE_PROPERTY_KEY,
        "in its value",
    ),
    ("blank tag", GOOD._replace(tag="  "), Code.ILLEGAL_MESSAGE_TAG, "white space"),
    ("tag that filters trim", GOOD._replace(tag=" paid"), Code.ILLEGAL_MESSAGE_TAG, "no filter"),
    ("tag with a blank behind", GOOD._replace(tag="a "), Code.ILLEGAL_MESSAGE_TAG, "no filter"),
    ("tag that means all", GOOD._replace(tag="*"), Code.ILLEGAL_MESSAGE_TAG, "every tag"),
    ("tag with a bar", GOOD._replace(tag="a|b"), Code.ILLEGAL_MESSAGE_TAG, "'a|b'"),
    ("tag with a control", GOOD._replace(tag="a\n"), Code.ILLEGAL_MESSAGE_TAG, "control"),
    ("blank key", GOOD._replace(keys=["ok", " "]), Code.ILLEGAL_MESSAGE_KEY, "white space"),
    ("key with a control", GOOD._replace(keys=["a\x85"]), Code.ILLEGAL_MESSAGE_KEY, "control"),
    ("no id", GOOD._replace(message_id=""), Code.ILLEGAL_MESSAGE_ID, "empty"),
    ("long id", GOOD._replace(message_id="i" * 256), Code.ILLEGAL_MESSAGE_ID, "256 bytes"),
    (
        "blank group",
        GOOD._replace(message_group=" "),
        Code.ILLEGAL_MESSAGE_GROUP,
        "white space",
    ),
    (
        "group of 64 bytes",
        GOOD._replace(message_group="ä" * 32),
        Code.ILLEGAL_MESSAGE_GROUP,
        "64 bytes is over the limit of 63 bytes",
    ),
    (
        "group with a control",
        GOOD._replace(message_group="g\x00"),
        Code.ILLEGAL_MESSAGE_GROUP,
        "control",
    ),
    (
        "long recovery",
        TRANSACTION._replace(recovery_ms=3_600_001),
        Code.BAD_REQUEST,
        "3600001 ms is over the limit of 3600000 ms",
    ),
    (
        "negative recovery",
        TRANSACTION._replace(recovery_ms=-1),
        Code.BAD_REQUEST,
        "-1 ms is negative",
    ),
    ("priority", GOOD._replace(priority=-1), Code.BAD_REQUEST, "priority -1 is negative"),
]


@pytest.mark.parametrize(
    ("facts", "code", "words"),
    [entry[1:] for entry in BAD_MESSAGES],
    ids=[entry[0] for entry in BAD_MESSAGES],
)
def test_a_message_that_rocketmq_refuses_is_refused_with_its_code(
    facts: MessageFacts, code: Code, words: str
) -> None:
    with pytest.raises(PopmqError) as caught:
        check_message(facts, LIMITS)
    assert caught.value.code is code
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("facts", "kind"),
    [
        (GOOD, MessageType.NORMAL),
        (GOOD._replace(claimed_type=0), MessageType.NORMAL),
        (GOOD._replace(claimed_type=MessageType.FIFO), MessageType.NORMAL),
        (GOOD._replace(claimed_type=MessageType.DELAY), MessageType.NORMAL),
        (GOOD._replace(message_group="g"), MessageType.FIFO),
        (GOOD._replace(message_group="g", deliver_at_ms=1), MessageType.DELAY),
        (GOOD._replace(deliver_at_ms=0), MessageType.DELAY),
        (GOOD._replace(user_properties={"TIMER_DELAY_MS": "0"}), MessageType.DELAY),
        (GOOD._replace(user_properties={"TIMER_DELAY_SEC": "x"}), MessageType.DELAY),
        (GOOD._replace(user_properties={"TIMER_SPREAD_MS": "1"}), MessageType.NORMAL),
        (TRANSACTION._replace(deliver_at_ms=1), MessageType.TRANSACTION),
        (GOOD._replace(priority=1), MessageType.PRIORITY),
        (GOOD._replace(claimed_type=MessageType.PRIORITY), MessageType.PRIORITY),
    ],
)
def test_the_properties_make_the_type_and_not_what_is_claimed(
    facts: MessageFacts, kind: MessageType
) -> None:
    assert type_of(facts) is kind


@pytest.mark.parametrize("kind", [MessageType.FIFO, MessageType.DELAY, MessageType.TRANSACTION])
def test_a_topic_refuses_the_types_that_it_does_not_take(kind: MessageType) -> None:
    with pytest.raises(
        PopmqError, match="this one is NORMAL: send it to a topic of type normal"
    ) as caught:
        check_type(GOOD, topic(kind))
    assert caught.value.code is Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE


def test_a_mixed_topic_takes_normal_and_fifo() -> None:
    mixed = topic(MessageType.MIXED)
    assert check_type(GOOD, mixed) is MessageType.NORMAL
    fifo = GOOD._replace(message_group="g")
    assert check_type(fifo, mixed) is MessageType.FIFO


def test_a_topic_of_priorities_takes_those_and_messages_without_one() -> None:
    ranked = topic(MessageType.PRIORITY)
    assert check_type(GOOD._replace(priority=3), ranked) is MessageType.PRIORITY
    assert check_type(GOOD, ranked) is MessageType.PRIORITY
    for kind in (MessageType.NORMAL, MessageType.MIXED):
        with pytest.raises(PopmqError, match="this one is PRIORITY") as caught:
            check_type(GOOD._replace(priority=3), topic(kind))
        assert caught.value.code is Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE


@pytest.mark.parametrize(
    ("facts", "kind", "words"),
    [
        (GOOD._replace(message_group="g"), MessageType.PRIORITY, "a message group"),
        (GOOD._replace(deliver_at_ms=5), MessageType.PRIORITY, "a delivery time"),
        (TRANSACTION, MessageType.TRANSACTION, "a transaction"),
    ],
)
def test_a_message_has_a_priority_or_something_else_that_chooses_its_place(
    facts: MessageFacts, kind: MessageType, words: str
) -> None:
    with pytest.raises(PopmqError, match=f"a priority or {words}, not both") as caught:
        check_type(facts._replace(priority=2), topic(kind))
    assert caught.value.code is Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE


@pytest.mark.parametrize("deliver_at_ms", [-5, 0, NOW_MS, NOW_MS + 1])
def test_a_delay_over_or_not_is_taken_by_a_topic_of_delays_only(deliver_at_ms: int) -> None:
    delayed = GOOD._replace(deliver_at_ms=deliver_at_ms)
    assert check_type(delayed, topic(MessageType.DELAY)) is MessageType.DELAY
    with pytest.raises(PopmqError) as caught:
        check_type(delayed, topic(MessageType.NORMAL))
    assert caught.value.code is Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE


def test_a_transaction_is_taken_by_a_topic_of_transactions_or_of_all() -> None:
    for kind in (MessageType.MIXED, MessageType.TRANSACTION):
        assert check_type(TRANSACTION, topic(kind)) is MessageType.TRANSACTION
    with pytest.raises(PopmqError) as caught:
        check_type(TRANSACTION, topic(MessageType.NORMAL))
    assert caught.value.code is Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE


@pytest.mark.parametrize(
    "change", [{"deliver_at_ms": 5}, {"user_properties": {"TIMER_DELAY_MS": "5"}}]
)
def test_a_transaction_has_no_delivery_time(change: dict[str, object]) -> None:
    delayed = TRANSACTION._replace(**change)  # type: ignore[arg-type]
    with pytest.raises(PopmqError, match="no delivery time") as caught:
        check_type(delayed, topic(MessageType.MIXED))
    assert caught.value.code is Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE


def test_permissions_are_asked_before_anything_is_sent_or_read() -> None:
    check_writable(topic(MessageType.NORMAL, Permission.WRITE))
    check_readable(topic(MessageType.NORMAL, Permission.READ))
    with pytest.raises(PopmqError, match="no writable queue") as caught:
        check_writable(topic(MessageType.NORMAL, Permission.READ))
    assert caught.value.code is Code.FORBIDDEN
    with pytest.raises(PopmqError, match="no readable queue"):
        check_readable(topic(MessageType.NORMAL, Permission.WRITE))


@pytest.mark.parametrize(("asked", "limit"), [(0, 32), (1, 1), (32, 32), (33, 32), (2000, 32)])
def test_a_batch_is_cut_to_the_limit(asked: int, limit: int) -> None:
    assert batch_limit(asked, POP) == limit


def test_a_negative_batch_is_a_bad_request() -> None:
    with pytest.raises(PopmqError, match="-1") as caught:
        batch_limit(-1, POP)
    assert caught.value.code is Code.BAD_REQUEST


@pytest.mark.parametrize(
    ("given", "auto_renew", "result"),
    [(None, True, 0), (1, False, 1), (43_200_000, False, 43_200_000), (5_000, True, 5_000)],
)
def test_an_invisible_time_within_the_limits_passes(
    given: int | None, auto_renew: bool, result: int
) -> None:
    assert receive_invisible_ms(given, auto_renew=auto_renew, limits=POP) == result


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, "missing"),
        (0, "0 ms is under the limit of 1 ms (pop.invisible_min_ms)"),
        (-1, "-1 ms"),
        (43_200_001, "12h1ms is over the limit of 12h (pop.invisible_max_ms)"),
    ],
)
def test_an_invisible_time_outside_the_limits_is_refused(given: int | None, words: str) -> None:
    with pytest.raises(PopmqError) as caught:
        receive_invisible_ms(given, auto_renew=False, limits=POP)
    assert caught.value.code is Code.ILLEGAL_INVISIBLE_TIME
    assert words in str(caught.value)


def test_a_change_may_be_to_zero_and_not_below() -> None:
    assert change_invisible_ms(0, POP) == 0
    assert change_invisible_ms(43_200_000, POP) == 43_200_000
    for given in (-1, 43_200_001):
        with pytest.raises(PopmqError) as caught:
            change_invisible_ms(given, POP)
        assert caught.value.code is Code.ILLEGAL_INVISIBLE_TIME


@pytest.mark.parametrize(
    ("asked", "remaining", "result"),
    [
        (None, None, 20_000),
        (5_000, None, 5_000),
        (60_000, None, 30_000),
        (0, 10_000, 0),
        (20_000, 3_000, 2_600),
        (20_000, 100, 0),
        (-5, None, 0),
    ],
)
def test_a_poll_ends_before_the_client_gives_up(
    asked: int | None, remaining: int | None, result: int
) -> None:
    assert poll_ms(asked, remaining, 30_000) == result


def test_a_poll_has_a_shortest_length_too_where_the_setting_says_so() -> None:
    assert poll_ms(0, None, 30_000, 5_000) == 5_000
    assert poll_ms(7_000, None, 30_000, 5_000) == 7_000
    assert poll_ms(1_000, 3_000, 30_000, 5_000) == 2_600  # the client's deadline counts more


@pytest.mark.parametrize(
    ("filter_type", "expression", "result"),
    [
        (0, "", (FilterType.NONE, "")),
        (1, "*", (FilterType.NONE, "")),
        (1, " ", (FilterType.NONE, "")),
        (0, "a", (FilterType.TAG, "a")),
        (1, "a || b", (FilterType.TAG, "a || b")),
    ],
)
def test_tags_go_to_the_broker_as_text(
    filter_type: int, expression: str, result: tuple[FilterType, str]
) -> None:
    assert filter_of(filter_type, expression) == result


def test_an_sql_filter_goes_to_the_broker_as_it_was_written() -> None:
    assert filter_of(2, "  a = 1 ") == (FilterType.SQL, "  a = 1 ")


def test_an_sql_filter_that_says_nothing_is_refused() -> None:
    with pytest.raises(PopmqError, match="the SQL filter is empty") as caught:
        filter_of(2, " ")
    assert caught.value.code is Code.ILLEGAL_FILTER_EXPRESSION


def test_texts_that_would_not_fit_a_frame_are_refused() -> None:
    with pytest.raises(PopmqError, match="filter expression of 16385 bytes"):
        filter_of(1, "a" * 16_385)
    with pytest.raises(PopmqError, match="attempt_id of 1025 bytes"):
        check_attempt_id("a" * 1025)


def test_headers_do_not_carry_what_the_body_may_not() -> None:
    check_stored_size(LIMITS.largest_bytes, LIMITS)
    with pytest.raises(PopmqError) as caught:
        check_stored_size(LIMITS.largest_bytes + 1, LIMITS)
    assert caught.value.code is Code.MESSAGE_PROPERTIES_TOO_LARGE


def test_entries_that_agree_give_their_code_to_the_reply() -> None:
    assert common_code([Code.OK, Code.OK]) == Code.OK
    assert common_code([Code.INVALID_RECEIPT_HANDLE]) == Code.INVALID_RECEIPT_HANDLE
    assert common_code([Code.OK, Code.INVALID_RECEIPT_HANDLE]) == Code.MULTIPLE_RESULTS


def test_a_time_is_told_in_milliseconds_and_one_before_1970_is_0() -> None:
    assert time_ms(1, 1_999_999) == 1_001
    assert time_ms(-1, 0) == 0
    assert time_ms(253_402_300_799, 999_999_999) == 253_402_300_799_999


@pytest.mark.parametrize(
    ("seconds", "nanos"),
    [(1 << 62, 0), (253_402_300_800, 0), (-62_135_596_801, 0), (0, -1), (0, 1_000_000_000)],
)
def test_what_is_no_time_is_refused_with_what_is_one(seconds: int, nanos: int) -> None:
    with pytest.raises(PopmqError, match=f"{seconds} s and {nanos} ns: it takes") as refused:
        time_ms(seconds, nanos)
    assert refused.value.code == Code.BAD_REQUEST


@pytest.mark.parametrize("text", ["a\x1b[2Jb", "a\nb", "a\x7f", "a\x9b31m"])
def test_a_message_id_with_a_control_character_is_refused(text: str) -> None:
    with pytest.raises(Refused, match="control character") as refused:
        check_message(MessageFacts(message_id=text), MessageSettings())
    assert refused.value.code == Code.ILLEGAL_MESSAGE_ID
    message = pb.Message(topic=pb.Resource(name="orders"), body=b"x")
    message.system_properties.message_id = text
    request = service.SendMessageRequest(messages=[message]).SerializeToString()
    limits = MessageSettings()
    assert read_ordinary(request, 0, len(request), limits, sender=1, peer="", now_ms=0) is None
