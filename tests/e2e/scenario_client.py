"""Scenarios of the official Python client, one after the other (`python -m e2e.scenario_client`).

What it is asked comes as one JSON object on stdin (endpoint, and what to run); what each scenario
saw leaves as one JSON line on stdout.  test_official_scenarios.py judges it; node/scenarios.mjs and
java/Scenarios.java are the twins.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import Any

from e2e.python_client import Command, configuration, now_ms
from rocketmq import (  # type: ignore[import-untyped,import-not-found,unused-ignore]
    ConsumeResult,
    FilterExpression,
    LitePushConsumer,
    LiteSimpleConsumer,
    Message,
    MessageListener,
    Producer,
    PushConsumer,
    SimpleConsumer,
    TransactionChecker,
    TransactionResolution,
)

INVISIBLE_S = 30
SQL = 2  # FilterType of the protocol
_stdout = threading.Lock()


def main() -> None:
    start = json.loads(sys.stdin.readline())
    for name in start["run"]:
        try:
            seen = SCENARIOS[name](start)
        except Exception as error:
            seen = {"error": repr(error)}
        emit({"scenario": name, **seen})
    os._exit(0)  # threads of the client that are no daemons would keep the interpreter alive


def producer_of(start: Command, *topics: str, checker: Any = None) -> Any:
    producer = Producer(configuration(start), topics, checker=checker)
    producer.startup()
    return producer


def consumer_of(start: Command, group: str, topic: str, await_s: int, **more: Any) -> Any:
    expression = FilterExpression(**more) if more else FilterExpression()
    simple_consumer = SimpleConsumer(
        configuration(start), group, {topic: expression}, await_duration=await_s
    )
    simple_consumer.startup()
    return simple_consumer


def message_to(topic: str, body: bytes, **fields: Any) -> Any:
    message = Message()
    message.topic, message.body = topic, body
    for name, value in fields.items():
        if name == "properties":
            for key, text in value.items():
                message.add_property(key, text)
        else:
            setattr(message, name, value)
    return message


def received(consumer: Any, *, rounds: int = 1, limit: int = 32) -> list[Any]:
    """What so many receives brought, acknowledged."""
    results = []
    for _ in range(rounds):
        got = consumer.receive(limit, INVISIBLE_S)
        for item in got:
            consumer.ack(item)
        results += got
    return results


def awaits(start: Command) -> dict[str, Any]:
    """Waits of every length at once: how long each took with nothing there, in seconds."""

    def wait(consumer: Any) -> float:
        began_s = time.monotonic()
        assert not consumer.receive(1, INVISIBLE_S)
        return time.monotonic() - began_s

    lengths = start["awaits"]
    consumers = [consumer_of(start, f"waits-{length}", "quiet", length) for length in lengths]
    with ThreadPoolExecutor(len(lengths)) as threads:
        return {"took_s": dict(zip(map(str, lengths), threads.map(wait, consumers), strict=True))}


def large(start: Command) -> dict[str, Any]:
    body = os.urandom(start["large_bytes"])
    consumer = consumer_of(start, "large", "large", 10)
    producer_of(start, "large").send(message_to("large", body))
    return {
        "sent": sha256(body).hexdigest(),
        "received": [sha256(message.body).hexdigest() for message in received(consumer)],
    }


def unpacked(start: Command) -> dict[str, Any]:
    """What the test sent compressed."""
    messages = received(consumer_of(start, "gzip", "gzip", 10))
    return {"received": [message.body.decode() for message in messages]}


def many_topics(start: Command) -> dict[str, Any]:
    topics = [f"many-{number}" for number in range(200)]
    began_s = time.monotonic()
    producer = producer_of(start, *topics)
    ready_s = time.monotonic() - began_s
    ids = [producer.send(message_to(topic, b"x")).message_id for topic in topics]
    return {"ready_s": ready_s, "sent": len(set(ids))}


def filters(start: Command) -> dict[str, Any]:
    producer = producer_of(start, "filtered")
    for number in range(20):
        producer.send(
            message_to(
                "filtered",
                b"%d" % number,
                tag="even" if number % 2 == 0 else "odd",
                properties={"number": str(number)},
            )
        )
    tags = consumer_of(start, "tags", "filtered", 5, expression="odd || none")
    sql = consumer_of(
        start,
        "sql",
        "filtered",
        5,
        expression="number BETWEEN 5 AND 8 AND TAGS = 'even'",
        filter_type=SQL,
    )
    return {
        name: sorted(int(message.body) for message in received(consumer, rounds=2))
        for name, consumer in (("tags", tags), ("sql", sql))
    }


def transactions(start: Command) -> dict[str, Any]:
    class Checker(TransactionChecker):  # type: ignore[misc]
        def check(self, message: Any) -> Any:
            checked.append(message.body.decode())
            return TransactionResolution.COMMIT

    checked: list[str] = []
    producer = producer_of(start, "halves", checker=Checker())
    for body, end in ((b"kept", "commit"), (b"dropped", "rollback")):
        transaction = producer.begin_transaction()
        producer.send(message_to("halves", body), transaction)
        getattr(transaction, end)()
    producer.send(message_to("halves", b"orphan"), producer.begin_transaction())
    consumer = consumer_of(start, "ends", "halves", 5)
    results: list[str] = []
    until_s = time.monotonic() + start["check_s"]
    while len(results) < 2 and time.monotonic() < until_s:
        results += [message.body.decode() for message in received(consumer)]
    results += [message.body.decode() for message in received(consumer)]
    return {"received": sorted(results), "checked": checked}


def ranks(start: Command) -> dict[str, Any]:
    producer = producer_of(start, "ranked")
    for priority in (1, 3, 2):
        producer.send(message_to("ranked", b"%d" % priority, priority=priority))
    consumer = consumer_of(start, "ranks", "ranked", 5)
    return {"received": [int(received(consumer, limit=1)[0].body) for _ in range(3)]}


def expiring(start: Command) -> dict[str, Any]:
    producer = producer_of(start, "expiring")
    producer.send(message_to("expiring", b"old", properties={"TTL_MS": "1000"}))
    producer.send(message_to("expiring", b"stays", properties={"TTL_MS": "600000"}))
    time.sleep(1.2)  # real time, which the broker measures: the first message's is over then
    consumer = consumer_of(start, "late", "expiring", 3)
    return {"received": sorted(message.body.decode() for message in received(consumer, rounds=2))}


def ordered(start: Command) -> dict[str, Any]:
    """Messages of 20 groups. Every seventh group fails each third of its messages at first: it and
    what the same reply has of the group behind it are to come again in a second."""
    producer = producer_of(start, "ordered")
    for number in range(6):
        for key in range(20):
            producer.send(message_to("ordered", b"%d" % number, message_group=f"key-{key}"))
    consumer = consumer_of(start, "in-order", "ordered", 5)
    acked: dict[str, list[int]] = {f"key-{key}": [] for key in range(20)}
    failed = 0
    until_s = time.monotonic() + start["check_s"]
    while sum(map(len, acked.values())) < 120 and time.monotonic() < until_s:
        stuck: set[str] = set()
        for message in consumer.receive(32, INVISIBLE_S):
            key, number = message.message_group, int(message.body)
            first = message.delivery_attempt == 1
            if key in stuck or (first and int(key[4:]) % 7 == 0 and number % 3 == 0):
                stuck.add(key)
                failed += 1
                consumer.change_invisible_duration(message, 1)
                continue
            consumer.ack(message)
            acked[key].append(number)
    return {"acked": acked, "failed": failed}


def letters(start: Command) -> dict[str, Any]:
    """One message that a push consumer never manages: when it came, and as which attempt."""

    class Listener(MessageListener):  # type: ignore[misc]
        def consume(self, message: Any) -> Any:
            deliveries.append([message.delivery_attempt, now_ms()])
            if len(deliveries) == start["attempts"]:
                last.set()
            return ConsumeResult.FAILURE

    deliveries: list[list[int]] = []
    last = threading.Event()
    sent = producer_of(start, "letters").send(message_to("letters", b"poison"))
    PushConsumer(
        configuration(start), "letters", Listener(), {"letters": FilterExpression()}
    ).startup()
    last.wait(start["check_s"])
    return {"sent": sent.message_id, "deliveries": deliveries}


def everyone(start: Command) -> dict[str, Any]:
    """Three instances, each with a group of its own; and one group that two more of them share."""
    groups = ["each-1", "each-2", "each-3", "shared", "shared"]
    consumers = [consumer_of(start, group, "everyone", 2) for group in groups]
    producer = producer_of(start, "everyone")
    for number in range(20):
        producer.send(message_to("everyone", b"%d" % number))
    with ThreadPoolExecutor(len(consumers)) as threads:
        results = list(threads.map(lambda item: received(item, rounds=4), consumers))
    seen: dict[str, list[int]] = {}
    for group, messages in zip(groups, results, strict=True):
        seen[group] = sorted([*seen.get(group, []), *(int(message.body) for message in messages)])
    return seen


class Collected(MessageListener):  # type: ignore[misc]
    """What a push consumer was given; `wait` ends when there are so many."""

    def __init__(self) -> None:
        self.got: list[list[str]] = []
        self._changed = threading.Condition()

    def consume(self, message: Any) -> Any:
        with self._changed:
            self.got.append([message.lite_topic, message.body.decode()])
            self._changed.notify_all()
        return ConsumeResult.SUCCESS

    def wait(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.got) >= count, 20), self.got


def subscribed(consumer: Any, *names: str) -> None:
    """The client refuses every subscription until it has its settings, for which it does not
    wait by itself."""
    until_s = time.monotonic() + 10
    for name in names:
        while True:
            try:
                consumer.subscribe_lite(name)
                break
            except Exception:
                if time.monotonic() > until_s:
                    raise
                threading.Event().wait(0.05)


def refused(work: Callable[[], object]) -> list[Any]:
    """The client's exception, by name, and the code that it tells."""
    try:
        work()
    except Exception as error:
        return [type(error).__name__, int(getattr(error, "code", 0))]
    return ["", 0]


def lites(start: Command) -> dict[str, Any]:
    producer = producer_of(start, "chats")

    def send(lite_topic: str, *bodies: str) -> None:
        for body in bodies:
            producer.send(message_to("chats", body.encode(), lite_topic=lite_topic))

    def send_many(count: int) -> None:
        for number in range(count):
            send(f"more-{number}", "x")

    simple = LiteSimpleConsumer("chats", configuration(start), "lite-simple", 5)
    simple.startup()
    subscribed(simple, "one", "two")
    messages = Collected()
    push = LitePushConsumer(configuration(start), "lite-push", "chats", messages)
    push.startup()
    subscribed(push, "two", "three")
    for lite_topic in ("one", "two", "three", "four"):
        send(lite_topic, *(f"{lite_topic}-{number}" for number in range(5)))
    first = [[message.lite_topic, message.body.decode()] for message in received(simple, rounds=3)]
    messages.wait(10)
    simple.unsubscribe_lite("one")
    send("one", "nobody's")
    send("two", "somebody's")
    second = [message.body.decode() for message in received(simple, rounds=2)]
    messages.wait(11)
    seen = {
        "simple": first,
        "after": second,
        "push": list(messages.got),
        "too_many_topics": refused(lambda: send_many(20)),
        "too_many_here": refused(
            lambda: [simple.subscribe_lite(f"more-{n}") for n in range(start["lite_quota"])]
        ),
        "too_many_there": refused(
            lambda: [push.subscribe_lite(f"more-{n}") for n in range(start["lite_quota"] - 2)]
        ),
        "bad_name": refused(lambda: push.subscribe_lite("a b")),
    }
    push.shutdown()
    simple.shutdown()
    return seen


def emit(fields: dict[str, Any]) -> None:
    with _stdout:
        sys.stdout.write(json.dumps(fields) + "\n")
        sys.stdout.flush()


SCENARIOS: dict[str, Callable[[Command], dict[str, Any]]] = {
    "awaits": awaits,
    "large": large,
    "gzip": unpacked,
    "many_topics": many_topics,
    "filters": filters,
    "transactions": transactions,
    "ranks": ranks,
    "expiring": expiring,
    "ordered": ordered,
    "letters": letters,
    "everyone": everyone,
    "lites": lites,
}

if __name__ == "__main__":
    main()
