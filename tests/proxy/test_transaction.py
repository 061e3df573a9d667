"""Transactions at the proxy: ids find their broker, and checks find a producer."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from proxy.rights import EveryRight

from popmq.common.errors import Code, Refused
from popmq.common.protocol.messaging_payloads import Kind, PutResult, encode_put_reply
from popmq.common.record.transaction_id import TransactionId
from popmq.common.topics import MessageType
from popmq.common.wire import transaction_pb2
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service
from popmq.proxy.messaging.publishers import CLIENTS_LIMIT, Publishers, Sender

ID = TransactionId("broker-b", 64, 7).encode(b"key", "m-1")


@pytest.fixture
def bench(two_brokers: Any) -> Any:
    two_brokers.topic("trans", kind="transaction")
    return two_brokers


def end(bench: Any, transaction: str = ID, resolution: Any = pb.COMMIT) -> Any:
    request = service.EndTransactionRequest(
        topic=pb.Resource(name="trans"),
        message_id="m-1",
        transaction_id=transaction,
        resolution=resolution,
        source=pb.SOURCE_CLIENT,
    )
    return bench.unary("EndTransaction", request, service.EndTransactionResponse).status


def told(bench: Any, answer: bytes | Refused = b"") -> None:
    for broker in bench.brokers.values():
        broker.tells[Kind.END_TRANSACTION] = lambda body: answer


# -- ends


@pytest.mark.parametrize(("resolution", "commit"), [(pb.COMMIT, True), (pb.ROLLBACK, False)])
def test_an_end_goes_to_the_broker_that_the_id_names(
    bench: Any, resolution: Any, commit: bool
) -> None:
    told(bench)
    assert end(bench, resolution=resolution).code == Code.OK
    (asked,) = bench.brokers["broker-b"].bodies(Kind.END_TRANSACTION)
    assert transaction_pb2.EndTransactionRequest.FromString(
        asked
    ) == transaction_pb2.EndTransactionRequest(
        topic="trans", message_id="m-1", transaction_id=ID, commit=commit
    )
    assert bench.brokers["broker-a"].bodies(Kind.END_TRANSACTION) == []


def test_a_producer_that_does_not_know_is_told_ok_and_nothing_happens(bench: Any) -> None:
    unknown = pb.TRANSACTION_RESOLUTION_UNSPECIFIED
    assert end(bench, resolution=unknown).code == Code.OK
    assert bench.brokers["broker-b"].bodies(Kind.END_TRANSACTION) == []


def test_what_the_broker_refuses_reaches_the_client(bench: Any) -> None:
    told(bench, Refused(Code.INVALID_TRANSACTION_ID, "the transaction was rolled back"))
    status = end(bench)
    assert (status.code, status.message) == (40008, "the transaction was rolled back")


@pytest.mark.parametrize(
    ("transaction", "words"),
    [
        ("", "is empty"),
        (" ", "is empty"),
        ("m-1", "is not base64"),
        (ID[:-4], "was cut short"),
        ("A" * 1_028, "over the limit"),
        (TransactionId("broker/z", 64, 7).encode(b"key", "m-1"), "no group can have that name"),
    ],
)
def test_an_id_that_is_none_is_refused_with_its_reason(
    bench: Any, transaction: str, words: str
) -> None:
    status = end(bench, transaction)
    assert status.code == Code.INVALID_TRANSACTION_ID
    assert words in status.message


def test_a_broker_that_is_away_is_no_end(bench: Any) -> None:
    bench.brokers["broker-b"].away = True
    assert end(bench).code == Code.HA_NOT_AVAILABLE


def test_the_end_for_a_broker_group_that_is_not_known_now_may_be_tried_again(bench: Any) -> None:
    status = end(bench, TransactionId("broker-z", 64, 7).encode(b"key", "m-1"))
    assert status.code == Code.HA_NOT_AVAILABLE
    assert "'broker-z' is not known now" in status.message


# -- sends


def send(bench: Any, **system: Any) -> Any:
    sent = pb.SystemProperties(
        message_id="m-1", message_type=pb.TRANSACTION, body_encoding=pb.IDENTITY, **system
    )
    message = pb.Message(topic=pb.Resource(name="trans"), system_properties=sent, body=b"half")
    request = service.SendMessageRequest(messages=[message])
    return bench.unary("SendMessage", request, service.SendMessageResponse)


def test_a_half_message_comes_back_with_its_transaction_id(bench: Any) -> None:
    for broker in bench.brokers.values():
        broker.tells[Kind.PUT] = lambda body: encode_put_reply([PutResult(message=ID)])
    reply = send(bench)
    assert (reply.status.code, reply.status.message) == (Code.OK, "OK")
    (entry,) = reply.entries
    assert (entry.message_id, entry.transaction_id) == ("m-1", ID)


def test_its_own_time_to_the_first_check_reaches_the_broker(bench: Any) -> None:
    recovery: Any = timedelta(seconds=20)
    send(bench, orphaned_transaction_recovery_duration=recovery)
    ((put,),) = [put.entries for broker in bench.brokers.values() for put in broker.puts()]
    assert (put.type, put.due_ms) == (MessageType.TRANSACTION, 20_000)


def test_a_half_message_goes_elsewhere_while_its_broker_is_away(bench: Any) -> None:
    send(bench)
    (owner,) = [broker for broker in bench.brokers.values() if broker.puts()]
    owner.away = True
    assert send(bench).status.code == Code.OK
    assert [len(broker.puts()) for broker in bench.brokers.values()] == [1, 1]


# -- checks


HOST = "10.0.0.9"


def stream(bench: Any, make_call: Any, client: str, *topics: str, named: Sequence[str] = ()) -> Any:
    """Of a client that sent half messages to `topics`; its settings name others."""
    call = make_call(metadata={"x-mq-client-id": client})
    inbound = bench.methods["Telemetry"].open(call)
    for topic in topics:
        bench.proxy.telemetry.publishers.add_topic(Sender(client, HOST), topic)
    names = [pb.Resource(name=topic) for topic in named]
    settings = pb.Settings(client_type=pb.PRODUCER, publishing=pb.Publishing(topics=names))
    inbound.message(service.TelemetryCommand(settings=settings).SerializeToString())
    call.sent.clear()
    return call


def check(name: str = "m-1") -> bytes:
    reply = transaction_pb2.ChecksReply()
    reply.checks.add(
        topic="trans",
        transaction_id=ID,
        queue_id=3,
        half_offset=7,
        stored_ms=1_700_000_000_123,
        head=pb.Message(topic=pb.Resource(name="trans"), body=b"half").SerializeToString(),
        properties=pb.SystemProperties(message_id=name).SerializeToString(),
    )
    return reply.SerializeToString()


def asked(broker: Any) -> list[list[str]]:
    bodies = broker.bodies(Kind.CHECKS)
    return [list(transaction_pb2.ChecksRequest.FromString(body).topics) for body in bodies]


def test_no_broker_is_asked_while_there_is_no_producer(bench: Any, make_call: Any) -> None:
    bench.proxy.checks.look()
    stream(bench, make_call, "consumer")
    bench.proxy.checks.look()
    assert [asked(broker) for broker in bench.brokers.values()] == [[], []]


def test_every_broker_is_asked_once_for_the_topics_of_the_producers(
    bench: Any, make_call: Any
) -> None:
    stream(bench, make_call, "one", "trans")
    stream(bench, make_call, "two", "orders", "trans")
    for _ in range(3):
        bench.proxy.checks.look()
    assert [asked(broker) for broker in bench.brokers.values()] == [[["orders", "trans"]]] * 2


def test_another_topic_is_asked_for_anew(bench: Any, make_call: Any) -> None:
    stream(bench, make_call, "one", "trans")
    bench.proxy.checks.look()
    stream(bench, make_call, "two", "orders")
    bench.proxy.checks.look()
    assert asked(bench.broker) == [["trans"], ["orders", "trans"]]
    assert len(bench.broker.cancelled) == 1


def test_without_its_producers_the_proxy_stops_asking(bench: Any, make_call: Any) -> None:
    call = stream(bench, make_call, "one", "trans")
    bench.proxy.checks.look()
    call.leave()
    bench.proxy.checks.look()
    assert (len(bench.broker.open), len(bench.broker.cancelled)) == (0, 1)


def test_a_check_goes_to_each_producer_in_turn_as_a_whole_message(
    bench: Any, make_call: Any
) -> None:
    calls = [stream(bench, make_call, f"client-{number}", "trans") for number in range(3)]
    for _ in range(3):
        bench.proxy.checks.look()
        bench.broker.answer(check())
    assert [len(call.sent) for call in calls] == [1, 1, 1]
    command: Any = service.TelemetryCommand.FromString(calls[0].sent[0])
    recover_orphaned_transaction_command = command.recover_orphaned_transaction_command
    assert recover_orphaned_transaction_command.transaction_id == ID
    system = recover_orphaned_transaction_command.message.system_properties
    assert (
        recover_orphaned_transaction_command.message.body,
        system.message_id,
        system.store_host,
    ) == (b"half", "m-1", "broker-a")
    assert (system.queue_id, system.queue_offset, system.delivery_attempt) == (3, 7, 1)
    assert not system.HasField("receipt_handle")
    assert bench.proxy.metrics.transaction_checks == 3


def test_a_client_that_sent_a_half_message_is_a_producer_too(bench: Any, make_call: Any) -> None:
    call = stream(bench, make_call, "me@1")  # its settings were never seen here
    send(bench)
    bench.proxy.checks.look()
    assert asked(bench.broker) == [["trans"]]
    bench.broker.answer(check())
    assert len(call.sent) == 1


def test_a_client_whose_settings_name_the_topic_is_not_asked(bench: Any, make_call: Any) -> None:
    call = stream(bench, make_call, "curious", named=["trans"])
    bench.proxy.checks.look()
    assert asked(bench.broker) == []
    stream(bench, make_call, "me@1")
    send(bench)
    bench.proxy.checks.look()
    bench.broker.answer(check())
    assert call.sent == []


def test_a_stream_from_another_address_is_not_asked(bench: Any, make_call: Any) -> None:
    stream(bench, make_call, "me@1")
    other = make_call(metadata={"x-mq-client-id": "me@1"})
    other.peer = "10.0.0.66:999"
    bench.methods["Telemetry"].open(other)
    send(bench)
    for _ in range(3):
        bench.proxy.checks.look()
        bench.broker.answer(check())
    assert other.sent == []
    assert bench.proxy.metrics.transaction_checks == 3


def test_a_check_for_nobody_is_dropped_and_comes_again(bench: Any, make_call: Any) -> None:
    call = stream(bench, make_call, "one", "trans")
    bench.proxy.checks.look()
    call.leave()
    bench.broker.answer(check())
    assert call.sent == []
    assert bench.proxy.metrics.transaction_checks == 0


def test_a_broker_that_refuses_or_ends_empty_is_asked_again(bench: Any, make_call: Any) -> None:
    stream(bench, make_call, "one", "trans")
    bench.proxy.checks.look()
    bench.broker.answer(Refused(Code.TOO_MANY_REQUESTS, "not now"))
    bench.proxy.checks.look()
    bench.broker.answer(b"")
    bench.proxy.checks.look()
    assert len(asked(bench.broker)) == 3


def test_a_proxy_that_stops_gives_up_asking(bench: Any, make_call: Any) -> None:
    stream(bench, make_call, "one", "trans")
    bench.proxy.checks.look()
    bench.proxy.drain()
    assert len(bench.broker.cancelled) == 1


def test_a_client_with_very_many_topics_is_asked_about_the_first() -> None:
    texts: list[str] = []

    class Stream:
        user, peer = "", ""

        def send(self, command: bytes) -> None:
            texts.append(command.decode())

    publishers = Publishers(lambda sender: (Stream(),), EveryRight())
    for number in range(1_500):
        publishers.add_topic(Sender("me", HOST), f"t-{number}")
    assert publishers.topics() == {f"t-{number}" for number in range(1_000)}
    assert publishers.send_command("t-999", b"check")
    assert not publishers.send_command("t-1000", b"check")
    assert texts == ["check"]


def test_the_number_of_remembered_clients_is_bounded() -> None:
    publishers = Publishers(lambda sender: (), EveryRight())
    for number in range(CLIENTS_LIMIT + 10):
        publishers.add_topic(Sender(str(number), HOST), "trans")
    assert not publishers.send_command("trans", b"")
    assert len(publishers._topics) == CLIENTS_LIMIT  # the bound itself
