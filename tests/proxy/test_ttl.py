"""The user property TTL_MS, from its sender to what an operator is told, under virtual time."""

import json

import pytest

from popmq.cli.__main__ import main
from popmq.cli.client import CallRefused
from popmq.testing.running_broker import RunningBroker

TEN_S = {"TTL_MS": "10000"}


def received(broker: RunningBroker, topic: str = "orders") -> list[bytes]:
    got = broker.receive(topic, "workers")
    broker.ack(*got)
    return [message.body for message in got]


@pytest.fixture
def broker(popmq_broker: RunningBroker) -> RunningBroker:
    popmq_broker.create_topic("orders", type="mixed")
    return popmq_broker


@pytest.mark.popmq(freeze=True)
def test_a_message_is_received_until_its_time_to_live_is_over(broker: RunningBroker) -> None:
    broker.send("orders", "taken", properties=TEN_S)
    broker.advance("9s")
    assert received(broker) == [b"taken"]
    broker.send("orders", "old", properties=TEN_S)
    broker.send("orders", "stays", properties={"other": "10000"})
    broker.advance("10s")
    assert received(broker) == [b"stays"]


@pytest.mark.popmq(freeze=True)
def test_the_time_to_live_of_a_delayed_message_begins_when_it_is_due(
    broker: RunningBroker,
) -> None:
    broker.send("orders", "taken", delay="1h", properties=TEN_S)
    broker.advance("1h")
    broker.advance("9s")
    assert received(broker) == [b"taken"]
    broker.send("orders", "old", delay="1h", properties=TEN_S)
    broker.send("orders", "by duration", properties={"TIMER_DELAY_SEC": "3600", **TEN_S})
    broker.advance("1h")
    broker.advance("10s")
    assert received(broker) == []


@pytest.mark.popmq(freeze=True)
def test_it_outlives_a_crash_and_explain_and_lag_tell_of_it(
    broker: RunningBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    def told() -> str:
        assert main(["explain", message_id, "--endpoint", broker.endpoint]) == 0
        return capsys.readouterr().out

    for number in range(8):  # the group reads every queue
        broker.send("orders", f"{number}")
    received(broker)
    message_id = broker.send("orders", "old", properties=TEN_S)
    assert "READY" in told()
    broker.send("orders", "stays")
    broker.crash()
    broker.advance("10s")
    assert "EXPIRED" in told()
    assert received(broker) == [b"stays"]
    assert "EXPIRED" in told()
    assert "TTL_MS" in told()
    assert main(["lag", "--json", "--endpoint", broker.endpoint]) == 0
    (lag,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (lag["lag"], lag["expired"]) == (0, 1)


@pytest.mark.parametrize("ttl", ["0", "-1", "1s", "", "1" * 19, str(100 * 366 * 86_400_000 + 1)])
def test_what_is_no_time_to_live_is_refused(broker: RunningBroker, ttl: str) -> None:
    with pytest.raises(CallRefused, match=r"ILLEGAL_MESSAGE_PROPERTY_KEY.*TTL_MS"):
        broker.send("orders", "x", properties={"TTL_MS": ttl})
