"""Commands about one group: every broker has parked message groups of its own."""

from typing import Any

import pytest

from popmq.common.errors import Code, Refused
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.wire import admin_pb2 as pb

REQUEST = pb.DescribeGroupRequest(name="g", parked=True)
NO_GROUP = Refused(Code.CONSUMER_GROUP_NOT_FOUND, "group g does not exist")
NOT_PARKED = Refused(Code.NOT_FOUND, "message group 'a' is not parked")


def group_reply(broker: str, *parked: tuple[str, int], keys: int | None = None) -> bytes:
    reply = pb.GroupReply(group=pb.Group(name="g", type="fifo", back_off_ms=[1_000]))
    for key, parked_ms in parked:
        reply.parked.add(topic="orders", key=key, parked_ms=parked_ms, broker=broker)
    reply.parked_keys = len(parked) if keys is None else keys
    return reply.SerializeToString()


def ask(bench: Any, *answers: bytes | Refused) -> pb.GroupReply:
    for broker, answer in zip(bench.brokers.values(), answers, strict=True):
        broker.tells[Kind.DESCRIBE_GROUP] = lambda body, answer=answer: answer
    reply: pb.GroupReply = bench.unary("DescribeGroup", REQUEST, pb.GroupReply)
    return reply


def test_a_group_is_shown_with_what_is_parked_at_every_broker_longest_first(
    two_brokers: Any,
) -> None:
    reply = ask(
        two_brokers,
        group_reply("broker-a", ("x", 9_000), ("y", 100)),
        group_reply("broker-b", ("x", 500)),
    )
    shown = [(key.broker, key.key, key.parked_ms) for key in reply.parked]
    assert shown == [("broker-a", "x", 9_000), ("broker-b", "x", 500), ("broker-a", "y", 100)]
    assert (reply.parked_keys, reply.incomplete, reply.status.code) == (3, "", Code.OK)
    assert list(reply.group.back_off_ms) == [1_000]


def test_of_very_many_parked_message_groups_those_parked_for_longest_are_shown(
    two_brokers: Any,
) -> None:
    first = group_reply("broker-a", *(("k", 2 * ms) for ms in range(1_000)), keys=4_000)
    reply = ask(two_brokers, first, group_reply("broker-b", ("k", 1_999)))
    assert (len(reply.parked), reply.parked_keys) == (1_000, 4_001)
    assert [key.parked_ms for key in reply.parked][-2:] == [4, 2]


@pytest.mark.parametrize("away", ["broker-a", "broker-b"])
def test_a_broker_that_is_away_is_named_and_the_others_answer_is_shown(
    two_brokers: Any, away: str
) -> None:
    two_brokers.brokers[away].away = True
    reply = ask(two_brokers, group_reply("broker-a", ("x", 5)), group_reply("broker-b", ("y", 5)))
    assert [item.key for item in reply.parked] == ["y" if away == "broker-a" else "x"]
    assert (reply.status.code, reply.group.name) == (Code.OK, "g")
    assert reply.incomplete == f"broker {away}: the broker is away"


def test_a_group_that_no_broker_has_is_not_found(two_brokers: Any) -> None:
    reply = ask(two_brokers, NO_GROUP, NO_GROUP)
    assert reply.status.code == Code.CONSUMER_GROUP_NOT_FOUND


@pytest.mark.parametrize(("second", "total"), [(4, 7), (None, 3)])
def test_what_an_operator_says_of_a_message_group_counts_the_messages_of_every_broker(
    two_brokers: Any, second: int | None, total: int
) -> None:
    answers = [
        NOT_PARKED if count is None else pb.UnparkReply(messages=count).SerializeToString()
        for count in (3, second)
    ]
    for broker, answer in zip(two_brokers.brokers.values(), answers, strict=True):
        broker.tells[Kind.UNPARK] = lambda body, answer=answer: answer
    request = pb.UnparkRequest(group="g", topic="orders", key="a", action="skip")
    reply = two_brokers.unary("Unpark", request, pb.UnparkReply)
    assert (reply.status.code, reply.messages) == (Code.OK, total)
