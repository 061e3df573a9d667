"""Delayed messages in `popmq send` and `popmq recv`: times, durations, due times, handles."""

import click
import pytest
from cli.parsing import parsed

from popmq.cli.messages import as_line, message_fields
from popmq.cli.send import built, sent_line
from popmq.cli.terminal.arguments import time_argument
from popmq.common.quantities import iso_time
from popmq.common.record.recall_handle import RecallHandle
from popmq.proxy.api import definition_pb2 as api
from popmq.proxy.api import service_pb2 as service


def sent(*argv: str) -> api.Message:
    args = parsed("send", "orders", "hello", *argv)
    return built(args, b"hello", "01AB", 1_000_500)


def test_a_delay_counts_from_now() -> None:
    properties = sent("--delay", "90s").system_properties
    assert properties.message_type == api.DELAY
    assert properties.delivery_timestamp.ToMilliseconds() == 1_090_500


def test_a_time_may_have_a_zone() -> None:
    properties = sent("--at", "2030-01-31T12:00:00.25+01:00").system_properties
    assert properties.message_type == api.DELAY
    assert properties.delivery_timestamp.ToMilliseconds() == 1_896_087_600_250


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [
        ("1700000000123", 1_700_000_000_123),
        ("10000000000", 10_000_000_000),
        ("2023111412000", 2_023_111_412_000),
        ("20300131T000000Z", 1_896_048_000_000),
        ("2030-01-31T00:00Z", 1_896_048_000_000),
    ],
)
def test_a_time_is_iso_8601_or_milliseconds_since_1970(text: str, milliseconds: int) -> None:
    assert time_argument(text) == milliseconds


@pytest.mark.parametrize("text", ["", "5", "-1700000000123", "9" * 16, "\u0661" * 13, "9" * 5_000])
def test_what_is_no_time_is_refused_in_a_short_sentence(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a time") as caught:
        time_argument(text)
    assert len(str(caught.value)) < 200


def test_a_spread_goes_along_as_a_property_and_only_with_a_delay() -> None:
    message = sent("--delay", "90s", "--spread", "1m", "--property", "a=b")
    assert dict(message.user_properties) == {"a": "b", "TIMER_SPREAD_MS": "60000"}
    assert dict(sent("--delay", "90s").user_properties) == {}
    with pytest.raises(click.UsageError, match="--spread goes with --delay or --at"):
        sent("--spread", "1m")


def test_a_sent_timer_is_shown_with_its_due_time_and_its_handle() -> None:
    entry = service.SendResultEntry(message_id="01AB", offset=7)
    assert sent_line(entry) == "01AB queue_offset=7"
    entry.recall_handle = RecallHandle("later", "broker-a", 1_700_000_000_123, "01AB").encode()
    assert sent_line(entry) == (
        f"01AB queue_offset=7 due=2023-11-14T22:13:20.123+00:00 recall_handle={entry.recall_handle}"
    )


def delayed(due_s: int, stored_ms: int, attempt: int) -> api.Message:
    message = api.Message(body=b"hello")
    properties = message.system_properties
    properties.message_id, properties.delivery_attempt = "01AB", attempt
    properties.delivery_timestamp.seconds = due_s
    properties.store_timestamp.FromMilliseconds(stored_ms)
    return message


def test_a_delayed_message_is_shown_with_its_due_time_and_how_late_it_was() -> None:
    message = delayed(1_700_000_000, 1_700_000_000_012, 1)
    assert as_line(message) == (
        "hello  id=01AB  attempt=1  due=2023-11-14T22:13:20.000+00:00  late=0.012s"
    )
    value = message_fields(message)
    assert (value["due_ms"], value["late_ms"]) == (1_700_000_000_000, 12)
    message.system_properties.ClearField("delivery_timestamp")
    assert "due_ms" not in message_fields(message)
    assert as_line(message) == "hello  id=01AB  attempt=1"


def test_a_retry_of_a_delayed_message_does_not_count_as_late() -> None:
    message = delayed(1_700_000_000, 1_700_000_099_000, 2)
    assert as_line(message).endswith("attempt=2  due=2023-11-14T22:13:20.000+00:00")
    assert message_fields(message)["late_ms"] is None


def test_a_due_time_that_no_calendar_holds_is_shown_as_a_number() -> None:
    message = delayed(-(1 << 60), 5, 1)
    assert f"due={-(1 << 60) * 1000}ms" in as_line(message)
    assert message_fields(message)["due_ms"] == -(1 << 60) * 1000
    assert iso_time(1 << 62) == f"{1 << 62}ms"
