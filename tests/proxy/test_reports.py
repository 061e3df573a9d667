"""What reports ask goes to every broker group, or to the one that is named."""

from typing import Any

from popmq.common.errors import Code, PopmqError, Refused, TooManyRequests
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.wire import report_pb2 as pb

REQUEST = pb.DescribeRequest(tables=["revive"], sample=True)


def described(broker: str) -> bytes:
    tables = pb.BrokerTables(broker=broker, partitions=[pb.Partition(table="revive", next=7)])
    return pb.DescribeReply(brokers=[tables]).SerializeToString()


def describe(bench: Any, *answers: bytes | PopmqError) -> pb.DescribeReply:
    for broker, answer in zip(bench.brokers.values(), answers, strict=True):
        broker.tells[Kind.DESCRIBE_TABLES] = lambda body, answer=answer: answer
    reply: pb.DescribeReply = bench.unary("Describe", REQUEST, pb.DescribeReply)
    return reply


def test_every_broker_group_describes_its_tables(two_brokers: Any) -> None:
    reply = describe(two_brokers, described("broker-a"), described("broker-b"))
    assert [tables.broker for tables in reply.brokers] == ["broker-a", "broker-b"]
    assert (reply.status.code, reply.incomplete) == (Code.OK, "")
    for broker in two_brokers.brokers.values():
        assert broker.bodies(Kind.DESCRIBE_TABLES) == [REQUEST.SerializeToString()]


def test_a_broker_group_that_is_away_is_named(two_brokers: Any) -> None:
    two_brokers.brokers["broker-a"].away = True
    reply = describe(two_brokers, described("broker-a"), described("broker-b"))
    assert [broker.broker for broker in reply.brokers] == ["broker-b"]
    assert reply.status.code == Code.OK
    assert reply.incomplete == "broker broker-a: the broker is away"


def test_what_every_broker_group_refuses_is_refused(two_brokers: Any) -> None:
    refusal = Refused(Code.TOPIC_NOT_FOUND, "topic t does not exist")
    reply = describe(two_brokers, refusal, refusal)
    assert (reply.status.code, reply.status.message) == (Code.TOPIC_NOT_FOUND, str(refusal))


def test_records_are_read_of_the_broker_group_that_is_named(two_brokers: Any) -> None:
    request = pb.ReadRawRequest(broker="broker-b", layout="revive", next=9)
    answer = pb.ReadRawReply(data=b"records", next=9).SerializeToString()
    two_brokers.brokers["broker-b"].tells[Kind.READ_RAW] = lambda body: answer
    reply = two_brokers.unary("ReadRaw", request, pb.ReadRawReply)
    assert (reply.data, reply.next) == (b"records", 9)
    assert two_brokers.brokers["broker-a"].asked == []


def test_a_report_is_told_to_try_again_when_a_broker_group_is_not_known_now(
    two_brokers: Any,
) -> None:
    for name, request in (
        ("ReadRaw", pb.ReadRawRequest(broker="broker-z")),
        ("Names", pb.NamesRequest(broker="broker-z")),
    ):
        reply = two_brokers.unary(name, request, pb.ReadRawReply)
        assert reply.status.code == Code.HA_NOT_AVAILABLE
        assert "'broker-z'" in reply.status.message


def test_a_refused_read_keeps_its_code(two_brokers: Any) -> None:
    busy = TooManyRequests("256 requests of this kind are being served")
    two_brokers.brokers["broker-a"].tells[Kind.READ_RAW] = lambda body: busy
    reply = two_brokers.unary("ReadRaw", pb.ReadRawRequest(broker="broker-a"), pb.ReadRawReply)
    assert (reply.status.code, reply.status.message) == (Code.TOO_MANY_REQUESTS, str(busy))


def test_names_of_all_broker_groups_come_together(two_brokers: Any) -> None:
    for name, broker in two_brokers.brokers.items():
        answer = pb.NamesReply(brokers=[pb.BrokerNames(broker=name)]).SerializeToString()
        broker.tells[Kind.NAMES] = lambda body, answer=answer: answer
    reply = two_brokers.unary("Names", pb.NamesRequest(), pb.NamesReply)
    assert [broker.broker for broker in reply.brokers] == ["broker-a", "broker-b"]
