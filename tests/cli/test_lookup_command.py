"""`popmq message show`: what it asks for, and how it shows what was found."""

import json

import click
import pytest

from cli import parsing
from popmq.cli.__main__ import main
from popmq.cli.lookup import check_found, found_fields, found_lines, request_of
from popmq.cli.terminal.command_line import Args
from popmq.common.errors import Refused
from popmq.common.wire import admin_pb2 as admin
from popmq.proxy.api import definition_pb2 as api
from popmq.testing.running_broker import RunningBroker


def parsed(*argv: str) -> Args:
    return parsing.parsed("message", "show", "--topic", "orders", *argv)


def found() -> admin.FoundMessage:
    head = api.Message(topic=api.Resource(name="orders"), body=b"hello", user_properties={"p": "v"})
    properties = api.SystemProperties(keys=["k"], message_id="01AB", tag="t")
    return admin.FoundMessage(
        broker="broker-a",
        topic="orders",
        queue_id=3,
        queue_offset=7,
        position=1234,
        stored_ms=1_700_000_000_123,
        attempt=2,
        head=head.SerializeToString(),
        properties=properties.SerializeToString(),
    )


def test_a_broker_that_did_not_answer_is_named_also_when_nothing_was_found(
    capsys: pytest.CaptureFixture[str],
) -> None:
    check_found(admin.FindMessagesReply(messages=[found()]), "nothing")
    assert capsys.readouterr().err == ""
    with pytest.raises(Refused, match="nothing"):
        check_found(admin.FindMessagesReply(incomplete="broker b: no answer"), "nothing")
    assert "broker b: no answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "request_"),
    [
        (["01AB"], admin.FindMessagesRequest(message_id="01AB")),
        (["--key", "k", "--limit", "5"], admin.FindMessagesRequest(key="k", limit=5)),
        (
            ["--queue", "0", "--offset", "0"],
            admin.FindMessagesRequest(queue_id=0, queue_offset=0),
        ),
        (
            ["--queue", "1", "--time", "1970-01-01T00:00:02+00:00"],
            admin.FindMessagesRequest(queue_id=1, stored_ms=2000),
        ),
        (
            ["--key", "k", "--begin", "1970-01-01T00:00:01Z", "--end", "1970-01-01T00:00:02Z"],
            admin.FindMessagesRequest(key="k", begin_ms=1000, end_ms=2000),
        ),
    ],
)
def test_the_arguments_become_one_question(
    argv: list[str], request_: admin.FindMessagesRequest
) -> None:
    request_.topic = "orders"
    assert request_of(parsed(*argv)) == request_


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["01AB", "--key", "k"],
        ["--offset", "1"],
        ["--queue", "1"],
        ["--queue", "1", "--key", "k"],
        ["01AB", "--begin", "1970-01-01T00:00:01Z"],
    ],
)
def test_arguments_that_are_no_one_question_are_refused(argv: list[str]) -> None:
    with pytest.raises(click.UsageError):
        parsed(*argv)


def test_a_message_is_shown_with_its_content_and_its_place() -> None:
    *lines, stored = found_lines(found()).splitlines()
    assert lines == [
        "hello  id=01AB  tag=t  keys=k  attempt=2",
        "    topic=orders broker=broker-a queue=3 offset=7 position=1234",
    ]
    assert stored.startswith("    stored=2023-11-14T22:13:20.123+00:00 (")
    assert stored.endswith(" ago)")


def test_as_json_a_message_has_what_recv_shows_and_its_place() -> None:
    value = json.loads(json.dumps(found_fields(found())))
    assert value["body"] == "hello"
    assert value["properties"] == {"p": "v"}
    assert (value["queue_id"], value["queue_offset"], value["attempt"]) == (3, 7, 2)
    assert (value["topic"], value["broker"], value["position"]) == ("orders", "broker-a", 1234)
    assert value["stored_ms"] == 1_700_000_000_123
    assert "receipt_handle" not in value


@pytest.mark.parametrize(
    "arguments",
    [
        ["--queue", "99999999999", "--offset", "0"],
        ["--queue", "0", "--offset", "99999999999999999999"],
        ["--queue", "0", "--offset", "9" * 5_000],
    ],
)
def test_numbers_that_fit_no_queue_are_wrong_usage(arguments: list[str]) -> None:
    assert main(["message", "show", "--topic", "orders", *arguments]) == 2


def shown(
    broker: RunningBroker, capsys: pytest.CaptureFixture[str], *arguments: str
) -> list[dict[str, object]]:
    capsys.readouterr()
    command = ["message", "show", "--endpoint", broker.endpoint, "--topic", "orders", "--json"]
    assert main([*command, *arguments]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_running_popmq_finds_messages_in_each_way_and_after_a_crash_too(
    popmq_broker: RunningBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    popmq_broker.create_topic("orders", queues=1)
    ids = []
    for number in range(5):
        popmq_broker.advance("1h")
        key = "even" if number % 2 == 0 else "odd"
        ids.append(popmq_broker.send("orders", f"body {number}", keys=[key]))
    between_ms = popmq_broker.now_ms() - 90 * 60_000
    for crashed in (False, True):
        if crashed:
            popmq_broker.crash()
        for arguments, numbers in (
            ((ids[3],), [3]),
            (("--key", "even"), [4, 2, 0]),
            (("--key", "even", "--limit", "1"), [4]),
            (("--queue", "0", "--offset", "2", "--limit", "2"), [2, 3]),
            (("--queue", "0", "--time", str(between_ms)), [3]),
        ):
            results = shown(popmq_broker, capsys, *arguments)
            assert [result["body"] for result in results] == [
                f"body {number}" for number in numbers
            ]
            assert [result["message_id"] for result in results] == [
                ids[number] for number in numbers
            ]
    assert (
        main(
            ["message", "show", "nothing", "--endpoint", popmq_broker.endpoint, "--topic", "orders"]
        )
        == 4
    )
    assert "no such message in topic orders" in capsys.readouterr().err
