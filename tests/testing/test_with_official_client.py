"""The official Python client, unmodified, in the same process as a broker whose time is skipped."""

import asyncio
import importlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from typing import Any

import pytest
from testing.receivers import half_messages

from popmq.testing import broker
from popmq.testing.running_broker import RunningBroker

TOPIC = "orders"


@pytest.fixture(scope="module")
def rocketmq(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The client's package; it makes a folder for its log in HOME when it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        return importlib.import_module("rocketmq")


@pytest.fixture(autouse=True)
def loop_of_this_thread() -> Iterator[None]:
    """The client needs one when its route comes before it has asked to be told of it.

    Its callback runs in this thread then and opens the telemetry stream here, which raises
    after any `asyncio.run` in the same thread, as earlier tests of one worker have it.
    """
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    asyncio.set_event_loop(None)
    loop.close()


@contextmanager
def consumer_of(rocketmq: Any, b: RunningBroker, group: str, wait_s: int = 1) -> Iterator[Any]:
    consumer = rocketmq.SimpleConsumer(
        rocketmq.ClientConfiguration(b.endpoint, rocketmq.Credentials()),
        group,
        {TOPIC: rocketmq.FilterExpression()},
        await_duration=wait_s,
    )
    consumer.startup()
    try:
        yield consumer
    finally:
        consumer.shutdown()


def send(rocketmq: Any, b: RunningBroker, body: bytes) -> None:
    producer = rocketmq.Producer(
        rocketmq.ClientConfiguration(b.endpoint, rocketmq.Credentials()), (TOPIC,)
    )
    producer.startup()
    message = rocketmq.Message()
    message.topic, message.body = TOPIC, body
    producer.send(message)
    producer.shutdown()


def test_what_it_did_not_ack_comes_back_when_time_is_skipped(rocketmq: Any) -> None:
    with broker() as b:
        send(rocketmq, b, b"one")
        with consumer_of(rocketmq, b, "workers") as consumer:
            attempts = []
            started = time.monotonic()
            for _ in range(4):
                (message,) = consumer.receive(16, 3_600)
                attempts.append((message.body, message.delivery_attempt))
                b.advance("1h")
            took_ms = (time.monotonic() - started) * 1000
            (message,) = consumer.receive(16, 3_600)
            consumer.ack(message)
            b.advance("1h")
            assert b.receive(TOPIC, "workers") == []
        print(f"\n4 expiries of an hour, official client: {took_ms:.0f} ms")
        assert attempts == [(b"one", number) for number in (1, 2, 3, 4)]
        assert took_ms < 3_000


def test_it_sees_no_message_that_went_to_the_dead_letters(rocketmq: Any) -> None:
    with broker() as b:
        b.create_group("workers", max_attempts=2)
        send(rocketmq, b, b"poison")
        with consumer_of(rocketmq, b, "workers") as consumer:
            started = time.monotonic()
            for _ in range(2):
                (message,) = consumer.receive(16, 43_200)
                b.advance("12h")
            took_ms = (time.monotonic() - started) * 1000
            assert b.receive(TOPIC, "workers") == []
            (dead,) = b.receive("%DLQ%workers", "undertaker")
        print(f"\ndead letter after 2 attempts of 12 hours: {took_ms:.0f} ms")
        assert dead.body == b"poison"
        assert dead.message_id == message.message_id
        assert took_ms < 3_000


def test_its_delayed_message_comes_when_time_is_skipped_unless_it_was_recalled(
    rocketmq: Any,
) -> None:
    with broker() as b:
        producer = rocketmq.Producer(
            rocketmq.ClientConfiguration(b.endpoint, rocketmq.Credentials()), (TOPIC,)
        )
        producer.startup()
        handles = []
        for body in (b"kept", b"recalled"):
            message = rocketmq.Message()
            message.topic, message.body = TOPIC, body
            message.delivery_timestamp = b.now_ms() // 1_000 + 3 * 86_400
            handles.append(producer.send(message).recall_handle)
        producer.recall_message(TOPIC, handles[1])
        b.advance("2d")
        assert b.receive(TOPIC, "workers") == []
        b.advance("1d")
        assert [delivery.body for delivery in b.receive(TOPIC, "workers")] == [b"kept"]
        with pytest.raises(Exception, match="visible already"):
            producer.recall_message(TOPIC, handles[0])
        producer.shutdown()


def test_its_long_poll_gets_what_becomes_due(rocketmq: Any) -> None:
    with broker() as b:
        send(rocketmq, b, b"one")
        b.receive(TOPIC, "workers", invisible="1h")
        with consumer_of(rocketmq, b, "workers", wait_s=20) as consumer:
            results: list[Any] = []
            receiving = threading.Thread(target=lambda: results.extend(consumer.receive(1, 30)))
            receiving.start()
            wait_for(lambda: b._running().broker.broker.polling.count == 1)
            b.advance("1h")
            receiving.join(15)
            assert [message.delivery_attempt for message in results] == [2]


def test_it_starts_when_its_route_comes_before_it_asks(
    rocketmq: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = asyncio.run_coroutine_threadsafe

    def answered_first(coroutine: Any, loop: asyncio.AbstractEventLoop) -> Any:
        future = submit(coroutine, loop)
        if "query_route" in coroutine.__qualname__:
            wait([future])
        return future

    with broker() as b:
        b.create_topic(TOPIC)
        monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", answered_first)
        send(rocketmq, b, b"one")
        assert [message.body for message in b.receive(TOPIC, "workers")] == [b"one"]


def test_it_goes_on_after_a_crash(rocketmq: Any) -> None:
    with broker() as b:
        send(rocketmq, b, b"one")
        with consumer_of(rocketmq, b, "workers") as consumer:
            (message,) = consumer.receive(16, 60)
            b.crash()
            until = time.monotonic() + 20
            while True:  # it sees a broken connection first
                try:
                    consumer.ack(message)
                    break
                except Exception:
                    assert time.monotonic() < until
            b.advance("60s")
            assert b.receive(TOPIC, "workers") == []


def test_a_push_consumer_counts_as_silent_for_the_time_that_is_skipped(
    rocketmq: Any,
) -> None:
    deliveries: list[int] = []
    first_hangs = threading.Event()

    class Listener(rocketmq.MessageListener):  # type: ignore[misc]
        def consume(self, message: Any) -> Any:
            deliveries.append(message.delivery_attempt)
            if message.delivery_attempt == 1:
                first_hangs.wait(60)
            return rocketmq.ConsumeResult.SUCCESS

    with broker() as b:
        b.create_topic(TOPIC)
        consumer = rocketmq.PushConsumer(
            rocketmq.ClientConfiguration(b.endpoint, rocketmq.Credentials()),
            "workers",
            Listener(),
            {TOPIC: rocketmq.FilterExpression()},
        )
        consumer.startup()
        try:
            b.send(TOPIC, b"one")
            wait_for(lambda: deliveries == [1])
            b.advance("5m")
            wait_for(lambda: deliveries == [1, 2])
        finally:
            first_hangs.set()
            consumer.shutdown()


def wait_for(happened: Callable[[], bool]) -> None:
    """For what other threads do and tell nobody."""
    until = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < until, "it did not happen within 20 s"
        time.sleep(0.002)


def test_its_sql_filter_chooses_by_properties_and_a_wrong_one_is_refused(rocketmq: Any) -> None:
    configuration = rocketmq.ClientConfiguration
    sql = importlib.import_module("rocketmq.grpc_protocol.definition_pb2").FilterType.SQL
    with broker() as b:
        for number in range(20):
            region = "eu" if number % 3 else "us"
            b.send(TOPIC, f"{number}", properties={"region": region, "price": f"{number}.50"})
        chosen = []
        expected = {TOPIC: rocketmq.FilterExpression("region = 'eu' AND price > 15", sql)}
        consumer = rocketmq.SimpleConsumer(
            configuration(b.endpoint, rocketmq.Credentials()), "chosen", expected, await_duration=1
        )
        consumer.startup()
        while result := consumer.receive(16, 60):
            for message in result:
                chosen.append(int(message.body))
                consumer.ack(message)
        consumer.subscribe(TOPIC, rocketmq.FilterExpression("region = ", sql))
        with pytest.raises(Exception, match="SQL filter, column 10"):
            consumer.receive(16, 60)
        consumer.shutdown()
    assert sorted(chosen) == [16, 17, 19]


class Transactions:
    """A producer of the official client with a checker that says what it is told to."""

    def __init__(self, rocketmq: Any, b: RunningBroker) -> None:
        self._rocketmq = rocketmq
        resolution = rocketmq.TransactionResolution
        self.asked: list[bytes] = []
        self.answers = {b"commit": resolution.COMMIT, b"rollback": resolution.ROLLBACK}
        outer = self

        class Checker(rocketmq.TransactionChecker):  # type: ignore[misc]  # it has no types
            def check(self, message: Any) -> Any:
                word = message.body.partition(b" ")[2]
                answer = outer.answers.get(word, resolution.TRANSACTION_RESOLUTION_UNSPECIFIED)
                outer.asked.append(message.body)  # last: the test changes the answers then
                return answer

        configuration = rocketmq.ClientConfiguration(b.endpoint, rocketmq.Credentials())
        self.producer = rocketmq.Producer(configuration, (TOPIC,), checker=Checker())
        self.producer.startup()

    def begin(self, body: bytes) -> Any:
        transaction = self.producer.begin_transaction()
        message = self._rocketmq.Message()
        message.topic, message.body = TOPIC, body
        self.producer.send(message, transaction)
        return transaction

    def was_asked(self, times: int, within_s: float = 10) -> bool:
        end = time.monotonic() + within_s
        while len(self.asked) < times and time.monotonic() < end:
            time.sleep(0.01)
        return len(self.asked) >= times


def bodies(b: RunningBroker, group: str = "readers") -> list[bytes]:
    messages = b.receive(TOPIC, group)
    b.ack(*messages)
    return sorted(message.body for message in messages)


def test_its_transactions_are_committed_and_rolled_back(rocketmq: Any) -> None:
    with broker() as b:
        b.create_topic(TOPIC, type="transaction")
        transactions = Transactions(rocketmq, b)
        committed, rolled_back = transactions.begin(b"one"), transactions.begin(b"two")
        assert bodies(b) == []
        committed.commit()
        rolled_back.rollback()
        assert bodies(b) == [b"one"]
        transactions.producer.shutdown()


def test_its_checker_is_asked_about_what_nobody_ended(rocketmq: Any) -> None:
    with broker() as b:
        b.create_topic(TOPIC, type="transaction")
        transactions = Transactions(rocketmq, b)
        for body in (b"1 commit", b"2 rollback", b"3 later"):
            transactions.begin(body)
        b.advance("6s")
        assert transactions.was_asked(3)
        assert sorted(transactions.asked) == [b"1 commit", b"2 rollback", b"3 later"]
        wait_for(lambda: half_messages(b) == 1)  # or it asks again for an answer that is on its way
        transactions.answers[b"later"] = rocketmq.TransactionResolution.COMMIT
        b.advance("30s")
        assert transactions.was_asked(4)
        assert transactions.asked[3:] == [b"3 later"]
        results: list[bytes] = []
        end = time.monotonic() + 10
        while len(results) < 2 and time.monotonic() < end:
            results += bodies(b)
        assert sorted(results) == [b"1 commit", b"3 later"]
        b.advance("1h")
        assert len(transactions.asked) == 4
        transactions.producer.shutdown()
