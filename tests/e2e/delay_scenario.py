"""Delivery times through an official client: on time, recalled, in the past, and too far ahead."""

import time
from functools import partial
from pathlib import Path

from e2e.official import INVISIBLE_S, START_S, Event, Launch, OfficialClient
from e2e.processes import Served

TOPIC = "later"
AHEAD_S = (2, 3, 3, 4, 5)
LATENESS_LIMIT_MS = 1_000


def run(cluster: Served, launch: Launch, folder: Path) -> list[int]:
    """Play all of it; returns how late each message was, in milliseconds."""
    cluster.popmq("topic", "create", TOPIC, "--type", "delay")
    cluster.popmq("group", "create", "delays")
    with (
        OfficialClient("consumer", launch("simple"), folder=folder) as consumer,
        OfficialClient("producer", launch("producer"), folder=folder) as producer,
    ):
        for client, endpoint in (
            (consumer, cluster.endpoints[-1]),
            (producer, cluster.endpoints[0]),
        ):
            client.tell(
                op="start",
                endpoint=endpoint,
                topic=TOPIC,
                group="delays",
                invisible_s=INVISIBLE_S,
            )
            client.wait(partial(_has, client, "ready", 1), "being ready", within_s=START_S)
        return _play(producer, consumer)


def _play(producer: OfficialClient, consumer: OfficialClient) -> list[int]:
    now_s = int(time.time())
    due_s = {f"on time {number}": now_s + 1 + s for number, s in enumerate(AHEAD_S)}
    for name, at_s in due_s.items():
        sent = _tell(producer, "sent", "delay", name, deliver_at_s=at_s)
        assert sent["handle"], f"no recall handle for {name}"
    gone = _tell(producer, "sent", "delay", "recalled", deliver_at_s=now_s + 4)
    recalled = _tell(producer, "recalled", "recall", "recalled", handle=gone["handle"])
    assert recalled["message_id"] == gone["message_id"]
    past = _tell(producer, "sent", "delay", "past", deliver_at_s=now_s - 3_600)
    assert past["handle"] == ""
    consumer.wait(lambda: past["message_id"] in consumer.distinct, "the past one", within_s=2)
    refused = _tell(producer, "send_failed", "delay", "far", deliver_at_s=now_s + 367 * 86_400)
    assert "over the limit of 366d (timer.max_delay_ms)" in refused["error"]
    assert "timer.max_delay_ms" in refused["error"]
    consumer.wait(
        lambda: consumer.delivered >= len(AHEAD_S) + 1, "every message", within_s=max(AHEAD_S) + 10
    )
    first = producer.of("sent")[0]
    late = _tell(producer, "recall_failed", "recall", "too late", handle=first["handle"])
    assert "visible already" in late["error"]
    # Whatever must not come would come within this time.
    assert not consumer.comes(lambda: consumer.delivered > len(AHEAD_S) + 1, within_s=INVISIBLE_S)
    assert gone["message_id"] not in consumer.distinct
    due_ms = {
        sent["message_id"]: due_s[sent["name"]] * 1_000
        for sent in producer.of("sent")
        if sent["name"] in due_s
    }
    received_ms = {
        message["message_id"]: message["received_ms"] for message in consumer.of("delivered")
    }
    late_ms = [received_ms[message_id] - due_ms[message_id] for message_id in due_ms]
    assert min(late_ms) >= 0, f"early: {late_ms}"
    assert max(late_ms) < LATENESS_LIMIT_MS, f"late: {late_ms}"
    return late_ms


def _tell(client: OfficialClient, answer: str, op: str, name: str, **more: object) -> Event:
    """One command; returns the event that answers it."""
    before = client.count(answer)
    client.tell(op=op, name=name, **more)
    client.wait(partial(_has, client, answer, before + 1), f"{answer} of {name}", within_s=15)
    return client.of(answer)[-1]


def _has(client: OfficialClient, kind: str, count: int) -> bool:
    return client.count(kind) >= count
