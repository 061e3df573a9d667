"""`--namespace`: every command that names topics and groups reaches those of one namespace."""

import json

import pytest

from popmq.cli.__main__ import NAMESPACED, build_parser, main
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
    found = Commands(popmq_broker, capsys)
    for namespace in ("eu", "us"):
        within = ("--namespace", namespace)
        assert found.run("topic", "create", "orders", *within)[0] == 0
        assert found.run("group", "create", "workers", *within)[0] == 0
        for number in range(2):
            sent = found.run("send", "orders", f"{namespace}-{number}", "--key", "k", *within)
            assert sent[0] == 0
    return found


def test_lists_of_a_namespace_show_its_topics_and_groups_by_their_whole_names(
    commands: Commands,
) -> None:
    for what, name in (("topic", "orders"), ("group", "workers")):
        mine = commands.json(what, "list", "--namespace", "eu")
        assert [one["name"] for one in mine] == [f"eu%{name}"]
        every = commands.json(what, "list")
        assert {f"eu%{name}", f"us%{name}"} <= {one["name"] for one in every}
        (shown,) = commands.json(what, "show", name, "--namespace", "us")
        assert shown["name"] == f"us%{name}"


def test_what_is_received_is_of_the_namespace(commands: Commands) -> None:
    wanted = ("recv", "orders", "--group", "workers", "--count", "3", "--wait", "1ms", "--ack")
    got = commands.json(*wanted, "--namespace", "us")
    assert sorted(str(one["body"]) for one in got) == ["us-0", "us-1"]
    text = commands.run(*wanted, "--namespace", "us")[1]
    assert "no message in us%orders for group us%workers" in text


def test_lag_reset_and_lookup_are_those_of_the_namespace(commands: Commands) -> None:
    wanted = ("recv", "orders", "--group", "workers", "--wait", "1ms")
    for namespace in ("eu", "us"):
        assert commands.run(*wanted, "--namespace", namespace)[0] == 0
    lags = [one for one in commands.json("lag", "--namespace", "eu") if "topic" in one]
    assert [(one["group"], one["topic"]) for one in lags] == [("eu%workers", "eu%orders")]
    found = commands.json("message", "show", "--topic", "orders", "--key", "k", "--namespace", "eu")
    assert sorted(str(one["body"]) for one in found) == ["eu-0", "eu-1"]
    reset = ("reset-offset", "--group", "workers", "--topic", "orders", "--to", "oldest")
    rows = commands.json(*reset, "--namespace", "us")
    assert {one["topic"] for one in rows} == {"us%orders"}
    message = str(found[0]["message_id"])
    assert commands.run("explain", message, "--namespace", "eu")[0] == 0
    assert commands.run("explain", message, "--namespace", "us")[0] == 1


def test_a_namespace_that_can_be_none_and_sums_over_all_topics_are_refused(
    commands: Commands,
) -> None:
    status, text = commands.run("topic", "list", "--namespace", "a%b")
    assert (status, "'a%b' has characters" in text) == (1, True)
    status, text = commands.run("timers", "list", "--namespace", "eu")
    assert (status, "needs --topic" in text) == (1, True)
    assert commands.run("timers", "list", "--namespace", "eu", "--topic", "orders")[0] == 0


@pytest.mark.parametrize("module", NAMESPACED)
def test_every_command_about_topics_or_groups_takes_a_namespace(module: str) -> None:
    arguments = {
        "messages": ["send", "t", "x"],
        "metadata": ["group", "resume", "g", "--topic", "t", "--key", ""],
        "lookup": ["message", "show", "--topic", "t", "ID"],
        "explain": ["explain", "ID"],
        "consumer_offsets": ["lag"],
        "dlq": ["dlq", "list", "g"],
        "timers": ["timers", "forecast"],
    }[module]
    parsed = build_parser({}).parse_args([*arguments, "--namespace", "eu"])
    assert parsed.namespace == "eu"
