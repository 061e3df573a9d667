"""`--namespace`: every command that names topics and groups reaches those of one namespace."""

import json

import pytest
from cli.parsing import parsed

from popmq.cli.__main__ import main
from popmq.testing.running_broker import RunningBroker


class Commands:
    def __init__(self, broker: RunningBroker, capsys: pytest.CaptureFixture[str]) -> None:
        self._endpoint = broker.endpoint
        self._capsys = capsys

    def run(self, *arguments: str) -> tuple[int, str]:
        status = main([*arguments, "--endpoint", self._endpoint])
        printed = self._capsys.readouterr()
        return status, printed.out + printed.err

    def json(self, *arguments: str) -> list[dict[str, object]]:
        status, text = self.run(*arguments, "--json")
        assert status == 0, text
        return list(map(json.loads, text.splitlines()))


@pytest.fixture
def commands(popmq_broker: RunningBroker, capsys: pytest.CaptureFixture[str]) -> Commands:
    found_commands = Commands(popmq_broker, capsys)
    for namespace in ("eu", "us"):
        within = ("--namespace", namespace)
        assert found_commands.run("topic", "create", "orders", *within)[0] == 0
        assert found_commands.run("group", "create", "workers", *within)[0] == 0
        for number in range(2):
            sent = found_commands.run(
                "send", "orders", f"{namespace}-{number}", "--key", "k", *within
            )
            assert sent[0] == 0
    return found_commands


def test_lists_of_a_namespace_show_its_topics_and_groups_by_their_whole_names(
    commands: Commands,
) -> None:
    for what, name in (("topic", "orders"), ("group", "workers")):
        mine = commands.json(what, "list", "--namespace", "eu")
        assert [manifest["name"] for manifest in mine] == [f"eu%{name}"]
        every = commands.json(what, "list")
        assert {f"eu%{name}", f"us%{name}"} <= {manifest["name"] for manifest in every}
        (shown,) = commands.json(what, "show", name, "--namespace", "us")
        assert shown["name"] == f"us%{name}"


def test_what_is_received_is_of_the_namespace(commands: Commands) -> None:
    expected = ("recv", "orders", "--group", "workers", "--count", "3", "--wait", "1ms", "--ack")
    got = commands.json(*expected, "--namespace", "us")
    assert sorted(str(message["body"]) for message in got) == ["us-0", "us-1"]
    text = commands.run(*expected, "--namespace", "us")[1]
    assert "no message in us%orders for group us%workers" in text


def test_lag_reset_and_lookup_are_those_of_the_namespace(commands: Commands) -> None:
    expected = ("recv", "orders", "--group", "workers", "--wait", "1ms")
    for namespace in ("eu", "us"):
        assert commands.run(*expected, "--namespace", namespace)[0] == 0
    lags = [
        manifest for manifest in commands.json("lag", "--namespace", "eu") if "topic" in manifest
    ]
    assert [(lag["group"], lag["topic"]) for lag in lags] == [("eu%workers", "eu%orders")]
    results = commands.json(
        "message", "show", "--topic", "orders", "--key", "k", "--namespace", "eu"
    )
    assert sorted(str(message["body"]) for message in results) == ["eu-0", "eu-1"]
    reset = ("reset-offset", "--group", "workers", "--topic", "orders", "--to", "oldest")
    rows = commands.json(*reset, "--yes", "--namespace", "us")
    assert {row["topic"] for row in rows} == {"us%orders"}
    message = str(results[0]["message_id"])
    assert commands.run("explain", message, "--namespace", "eu")[0] == 0
    assert commands.run("explain", message, "--namespace", "us")[0] == 4


def test_a_namespace_that_can_be_none_and_sums_over_all_topics_are_refused(
    commands: Commands,
) -> None:
    status, text = commands.run("topic", "list", "--namespace", "a%b")
    assert (status, "'a%b' has characters" in text) == (1, True)
    status, text = commands.run("timers", "list", "--namespace", "eu")
    assert (status, "needs --topic" in text) == (1, True)
    assert commands.run("timers", "list", "--namespace", "eu", "--topic", "orders")[0] == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["send", "t", "x"],
        ["recv", "t", "--group", "g"],
        ["ack", "--topic", "t", "--group", "g", "HANDLE"],
        ["topic", "list"],
        ["group", "resume", "g", "--topic", "t", "--key", ""],
        ["message", "show", "--topic", "t", "ID"],
        ["explain", "ID"],
        ["lag"],
        ["reset-offset", "--group", "g", "--topic", "t", "--to", "newest"],
        ["dlq", "list", "g"],
        ["timers", "forecast"],
    ],
)
def test_every_command_about_topics_or_groups_takes_a_namespace(arguments: list[str]) -> None:
    assert parsed(*arguments, "--namespace", "eu").namespace == "eu"
