"""What `popmq topic` and `popmq group` understand and ask for."""

import importlib
import json
import time

import pytest
from cli.parsing import parsed

from popmq.cli.__main__ import main
from popmq.cli.metadata import _cell, group_fields, group_of, topic_fields, topic_of
from popmq.common.wire import admin_pb2 as admin
from popmq.testing.running_broker import RunningBroker


@pytest.mark.parametrize(
    ("argv", "instead"),
    [
        (["topic", "create", "t", "--retention", "0h"], "'0h' is no time: write 1h, or `store`"),
        (["topic", "alter", "t", "--retention", "0ms"], "'0ms' is no time: write 1h, or `store`"),
        (["topic", "alter", "t", "--lite-ttl", "0s"], "'0s' is no time: write 1h, or `default`"),
    ],
)
def test_a_time_to_keep_that_would_change_nothing_is_refused(
    argv: list[str], instead: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    assert instead in capsys.readouterr().err


def test_a_topic_is_created_with_the_defaults_of_the_contract() -> None:
    topic = topic_of(parsed("topic", "create", "orders"))
    assert topic == admin.Topic(name="orders", type="normal", permission="rw", durability="disk")


@pytest.mark.popmq(settings={"topic.queues": 3, "group.max_attempts": 5})
def test_what_create_is_not_told_is_as_the_brokers_settings_say(
    popmq_broker: RunningBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    def made(*argv: str) -> dict[str, object]:
        assert main([*argv, "--endpoint", popmq_broker.endpoint, "--json"]) == 0
        fields: dict[str, object] = json.loads(capsys.readouterr().out)
        return fields

    assert made("topic", "create", "orders")["queues"] == 3
    assert made("topic", "create", "bills", "--queues", "7")["queues"] == 7
    assert made("group", "create", "readers")["max_attempts"] == 5
    assert made("group", "create", "others", "--max-attempts", "2")["max_attempts"] == 2


def test_what_alter_is_not_told_stays_empty() -> None:
    assert topic_of(parsed("topic", "alter", "orders", "--queues", "16")) == admin.Topic(
        name="orders", queues=16
    )
    assert group_of(parsed("group", "alter", "g", "--start", "newest")) == admin.Group(
        name="g", start_at="newest"
    )


def test_broker_groups_are_separated_by_commas_and_shown_so() -> None:
    topic = topic_of(parsed("topic", "alter", "orders", "--brokers", "broker-a,broker-b"))
    assert topic == admin.Topic(name="orders", brokers=["broker-a", "broker-b"])
    assert topic_fields(topic)["brokers"] == "broker-a,broker-b"
    assert topic_fields(admin.Topic(name="orders"))["brokers"] == "-"


def test_a_back_off_is_a_list_of_durations() -> None:
    options = ("--max-attempts", "17", "--back-off", "1s,5s,2m")
    group = group_of(parsed("group", "create", "g", *options))
    assert group_fields(group) == {
        "name": "g",
        "type": "normal",
        "max_attempts": 17,
        "start": "oldest",
        "retry": "customised",
        "check_points": "durable",
        "back_off_ms": [1000, 5000, 120_000],
    }


def test_a_new_group_gets_a_whole_exponential_back_off_and_an_altered_one_what_is_given() -> None:
    created = group_of(parsed("group", "create", "g", "--initial", "2s", "--jitter", "20%"))
    assert created.exponential == admin.ExponentialBackOff(
        initial_ms=2_000, max_ms=7_200_000, multiplier_milli=2_000, jitter_percent=20
    )
    fields = group_fields(created)
    assert (fields["retry"], fields["back_off_ms"]) == ("exponential", [2_000, 7_200_000])
    assert (fields["multiplier"], fields["jitter"]) == ("2", "20%")
    assert _cell(fields, "retry") == "exponential x2 +20%"
    altered = group_of(parsed("group", "alter", "g", "--multiplier", "1.5"))
    assert altered.exponential == admin.ExponentialBackOff(multiplier_milli=1_500)
    assert not group_of(parsed("group", "create", "g")).HasField("exponential")


@pytest.mark.parametrize(
    "option",
    [
        ("--multiplier", "x"),
        ("--multiplier", "1.2345"),
        ("--multiplier", "-1"),
        ("--jitter", "101%"),
        ("--jitter", "a"),
        ("--retry", "linear"),
    ],
)
def test_impossible_retry_options_are_wrong_usage(option: tuple[str, str]) -> None:
    assert main(["group", "create", "g", *option]) == 2


def run(broker: RunningBroker, capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    capsys.readouterr()
    assert main([*argv, "--endpoint", broker.endpoint]) == 0
    return capsys.readouterr().out


def test_group_show_names_the_fifo_topics_whose_order_the_group_does_not_keep(
    popmq_broker: RunningBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    run(popmq_broker, capsys, "topic", "create", "steps", "--type", "fifo")
    for kind in ("normal", "fifo"):
        run(popmq_broker, capsys, "group", "create", kind, "--type", kind)
        run(popmq_broker, capsys, "recv", "steps", "--group", kind, "--wait", "0s")
    shown = run(popmq_broker, capsys, "group", "show", "normal")
    assert "out of order: group normal is normal and reads FIFO topics (steps)" in shown
    assert "out of order" not in run(popmq_broker, capsys, "group", "show", "fifo")
    row = json.loads(run(popmq_broker, capsys, "group", "show", "normal", "--json"))
    assert row["unordered_topics"] == ["steps"]


def test_the_deletion_of_a_topic_names_the_clients_that_use_it(
    popmq_broker: RunningBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    run(popmq_broker, capsys, "topic", "create", "orders")
    assert run(popmq_broker, capsys, "topic", "delete", "orders", "--yes") == (
        "deleted topic orders\n"
    )
    run(popmq_broker, capsys, "topic", "create", "orders")
    official = importlib.import_module("rocketmq")
    config = official.ClientConfiguration(popmq_broker.endpoint, official.Credentials())
    producer = official.Producer(config, ("orders",))
    producer.startup()
    try:
        deadline_s = time.monotonic() + 30
        while not run(popmq_broker, capsys, "clients", "--topic", "orders", "--json"):
            assert time.monotonic() < deadline_s, "no proxy has told of the producer"
        shown = run(popmq_broker, capsys, "topic", "delete", "orders", "--yes")
    finally:
        producer.shutdown()
    assert "deleted topic orders; connected clients that use it: " in shown
    assert "(producer)" in shown


@pytest.mark.popmq(settings={"topic.auto_create": True})
def test_a_receive_from_a_misspelt_topic_creates_nothing(
    popmq_broker: RunningBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["recv", "typo", "--group", "g", "--wait", "1s"]
    assert main([*arguments, "--endpoint", popmq_broker.endpoint]) == 4
    assert "no topic typo" in capsys.readouterr().err
    assert run(popmq_broker, capsys, "topic", "list") == "no topic\n"
    assert run(popmq_broker, capsys, "group", "list") == "no consumer group\n"
