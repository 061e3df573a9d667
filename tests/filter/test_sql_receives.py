"""Receives with an SQL filter: what they get, what they pass over, and what that costs others."""

import pytest

from popmq.broker.filter.sql92 import SqlFilters
from popmq.broker.pop.pop_batch import LOOK_UNITS
from popmq.common.disk import ColdRead
from popmq.common.errors import Code, PopmqError
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import FilterType, Kind
from popmq.common.record.message import tag_hash
from popmq.common.topics import GroupType, MessageType
from popmq.proxy.api import definition_pb2 as api
from popmq.testing.harness.core_broker import Answer, CoreBroker, tagged


@pytest.fixture
def core() -> CoreBroker:
    broker = CoreBroker()
    broker.topic("orders", queues=1, type=MessageType.MIXED)
    broker.group("g")
    broker.group("f", type=GroupType.FIFO)
    return broker


def head(number: int, **properties: object) -> bytes:
    texts = {name: str(value) for name, value in properties.items()}
    return api.Message(user_properties=texts, body=b"%d" % number).SerializeToString()


def send(core: CoreBroker, *heads: bytes, group: str = "") -> None:
    kind = MessageType.FIFO if group else MessageType.NORMAL
    properties = api.SystemProperties(message_group=group).SerializeToString() if group else b""
    entries = [hop.PutEntry(kind, data, properties, 0, 0) for data in heads]
    core.reply(Kind.PUT, hop.encode_put(hop.PutRequest("orders", entries)))


def request(expression: str, group: str = "g", *, poll_ms: int = 0, limit: int = 32) -> bytes:
    return hop.encode_pop(
        hop.PopRequest(
            "orders",
            group,
            "a-client",
            limit,
            60_000,
            poll_ms,
            filter_type=FilterType.SQL,
            expression=expression,
        )
    )


def numbers(answer: Answer) -> list[int] | None:
    if answer.error is not None:
        raise answer.error
    if answer.body is None:
        return None
    deliveries = hop.decode_pop_reply(answer.body).deliveries
    return [int(api.Message.FromString(delivery.head).body) for delivery in deliveries]


def receive(core: CoreBroker, expression: str, group: str = "g", limit: int = 32) -> list[int]:
    found_numbers = numbers(core.ask(Kind.POP, request(expression, group, limit=limit)))
    assert found_numbers is not None, "it waits"
    return found_numbers


@pytest.mark.parametrize("group", ["g", "f"])
def test_a_receive_gets_what_its_filter_says_and_passes_over_the_rest(
    core: CoreBroker, group: str
) -> None:
    send(core, *(head(n, n=n, colour="red" if n % 2 else "blue") for n in range(10)))
    send(core, head(10), b"no protobuf")
    assert receive(core, "n > 2 AND colour = 'red'", group) == [3, 5, 7, 9]
    assert receive(core, "n > 2 AND colour = 'red'", group) == []
    assert receive(core, "TRUE", group) == []
    assert core.broker.pop.service.metrics.filtered == 8


@pytest.mark.parametrize("group", ["g", "f"])
def test_a_limit_stops_before_the_next_match_and_not_behind_it(
    core: CoreBroker, group: str
) -> None:
    for n in range(10):
        send(core, head(n, n=n), group=f"key-{n}")
    assert receive(core, "n > 1", group, limit=3) == [2, 3, 4]
    assert receive(core, "n > 1", group, limit=3) == [5, 6, 7]
    assert receive(core, "n > 1", group, limit=3) == [8, 9]


def test_matches_that_are_far_apart_make_several_check_points(core: CoreBroker) -> None:
    send(core, *(head(n, n=n % 100) for n in range(250)))
    assert receive(core, "n = 7") == [7, 107, 207]
    assert len(core.broker.table) == 3


@pytest.mark.parametrize("group", ["g", "f"])
def test_what_matched_comes_back_until_it_is_acked(core: CoreBroker, group: str) -> None:
    send(core, *(head(n, n=n) for n in range(4)), group="key")
    assert receive(core, "n = 2", group) == [2]
    core.advance(60_100)
    answer = core.ask(Kind.POP, request("n = 2", group))
    assert numbers(answer) == [2]
    assert answer.body is not None
    (again,) = hop.decode_pop_reply(answer.body).deliveries
    assert again.attempt == 2
    assert core.ack("orders", group, again.handle)[0].code == Code.OK
    core.advance(120_000)
    assert receive(core, "n = 2", group) == []


def test_a_fifo_group_passes_over_a_returned_message_that_its_new_filter_does_not_want(
    core: CoreBroker,
) -> None:
    send(core, head(1, n=1), head(2, n=2), group="key")
    assert receive(core, "n = 1 OR n = 2", "f", limit=1) == [1]
    core.advance(60_100)
    assert receive(core, "n = 2", "f") == [2]


def test_one_receive_that_does_not_wait_finds_a_match_behind_thousands(core: CoreBroker) -> None:
    send(core, *(head(n, n=n) for n in range(4_000)))
    assert receive(core, "n = 3999") == [3999]


@pytest.mark.parametrize("group", ["g", "f"])
def test_one_look_is_bounded_and_who_waits_looks_on_in_steps(core: CoreBroker, group: str) -> None:
    send(core, *(head(n, n=n) for n in range(3 * LOOK_UNITS)))
    waiting = core.ask(Kind.POP, request(f"n = {3 * LOOK_UNITS - 1}", group, poll_ms=20_000))
    looked: list[int] = []
    while numbers(waiting) is None and len(looked) < 10:
        place = (core.broker.registry.group(group).id, core.broker.registry.topic("orders").id, 0)
        progress = core.broker.table.progress(*place)
        assert progress is not None
        looked.append(progress.cursor)
        core.broker.step()
        core.run_until_idle()
    assert numbers(waiting) == [3 * LOOK_UNITS - 1]
    assert looked == [LOOK_UNITS, 2 * LOOK_UNITS]


def test_a_look_reads_half_a_mebibyte_at_most_but_one_message_always(core: CoreBroker) -> None:
    send(core, *(head(n, n=n, pad="x" * 200_000) for n in range(5)))
    core.ask(Kind.POP, request("n = 9", poll_ms=20_000))
    place = (core.broker.registry.group("g").id, core.broker.registry.topic("orders").id, 0)
    progress = core.broker.table.progress(*place)
    assert progress is not None
    assert progress.cursor == 2


def test_a_long_expression_looks_at_fewer_messages(core: CoreBroker) -> None:
    send(core, *(head(n, n=n) for n in range(LOOK_UNITS)))
    expression = " OR ".join(["n = -1"] * 200)
    core.ask(Kind.POP, request(expression, poll_ms=20_000))
    place = (core.broker.registry.group("g").id, core.broker.registry.topic("orders").id, 0)
    progress = core.broker.table.progress(*place)
    assert progress is not None
    assert progress.cursor == LOOK_UNITS // (1 + len(expression) // 128)


@pytest.mark.parametrize(("number", "got"), [(1, [1]), (2, None)])
def test_an_arrival_wakes_who_waits_if_it_matches(
    core: CoreBroker, number: int, got: list[int] | None
) -> None:
    waiting = core.ask(Kind.POP, request("n = 1", poll_ms=20_000))
    send(core, head(number, n=number))
    core.broker.step()
    core.run_until_idle()
    assert numbers(waiting) == got


def test_those_that_wait_with_other_filters_are_tried_too(core: CoreBroker) -> None:
    core.group("h")
    first = core.ask(Kind.POP, request("n = 1", poll_ms=20_000))
    second = core.ask(Kind.POP, request("n = 2", "h", poll_ms=20_000))
    send(core, head(2, n=2))
    assert (numbers(first), numbers(second)) == (None, [2])


def test_a_bad_filter_is_refused_with_its_column_whether_or_not_it_waits(core: CoreBroker) -> None:
    for poll_ms in (0, 20_000):
        with pytest.raises(PopmqError, match="column 8: expected AND, OR or the end") as caught:
            numbers(
                core.ask(Kind.POP, request("a = 1 ) ", poll_ms=poll_ms).replace(b" ) ", b"  )"))
            )
        assert caught.value.code is Code.ILLEGAL_FILTER_EXPRESSION


def test_a_cold_message_is_warmed_and_nothing_is_passed_over_meanwhile(
    core: CoreBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(core, head(1, n=1), head(2, n=2))
    log = core.broker.store.reader._log  # the page cache of this test
    monkeypatch.setattr(log, "tail", None)
    real, cold = log.view_warm, [True]

    def view_warm(position: int, size: int) -> memoryview:
        if cold.pop() if cold else False:
            raise ColdRead(lambda: None)
        return memoryview(real(position, size))

    monkeypatch.setattr(log, "view_warm", view_warm)
    assert receive(core, "n = 2") == [2]
    assert core.broker.pop.service.metrics.cold_pops == 1


def test_the_same_expression_is_compiled_once_and_the_cache_is_bounded() -> None:
    filters = SqlFilters(limit=2)
    first = filters.get("a = 1")
    assert filters.get("a = 1") is first
    filters.get("a = 2")
    filters.get("a = 3")
    assert (len(filters), filters.compiled) == (2, 3)
    assert filters.get("a = 1") is not first
    large = SqlFilters(words_limit=1_000)
    for number in range(10):
        large.get(f"a = {number}" + " OR a = 1" * 74)  # 300 words with the end
    assert len(large) == 3


# -- tags, exactly


@pytest.mark.parametrize("group", ["g", "f"])
def test_a_tag_whose_hash_collides_is_not_delivered(core: CoreBroker, group: str) -> None:
    forged = hop.PutEntry(MessageType.NORMAL, head(1), tagged("other"), tag_hash("wanted"), 0)
    honest = hop.PutEntry(MessageType.NORMAL, head(2), tagged("wanted"), tag_hash("wanted"), 0)
    core.reply(Kind.PUT, hop.encode_put(hop.PutRequest("orders", [forged, honest])))
    result = core.receive("orders", group, expression="wanted || more")
    assert [api.Message.FromString(delivery.head).body for delivery in result] == [b"2"]
