"""What the commands understand, build and print; end to end they are tested elsewhere."""

import gzip
import json
import shlex
import socket
import sys
import zlib
from pathlib import Path

import click
import pytest
from cli.parsing import parsed
from google.protobuf.timestamp_pb2 import Timestamp
from programs import run_program

from popmq.cli.__main__ import main
from popmq.cli.client import (
    CallRefused,
    check_status,
    duration,
    messages_of,
    new_client_id,
)
from popmq.cli.commands import COMMANDS, parse, root
from popmq.cli.message_ids import MessageIds
from popmq.cli.messages import as_line, message_fields
from popmq.cli.recv import one_per_broker
from popmq.cli.send import body_of, built
from popmq.cli.terminal.command_line import Invocation
from popmq.cli.terminal.output import columns
from popmq.common.wire import admin_pb2 as admin
from popmq.proxy.api import definition_pb2 as api
from popmq.proxy.api import service_pb2 as service
from tools import command_examples, plain_english
from tools.command_examples import commands_below


def sent(*argv: str) -> api.Message:
    return built(parsed("send", "orders", "hello", *argv), b"hello", "01AB", 1_000_500)


def received(body: bytes = b"hello", **properties: object) -> api.Message:
    message = api.Message(body=body)
    message.system_properties.message_id = "01AB"
    message.system_properties.delivery_attempt = 2
    for name, value in properties.items():
        setattr(message.system_properties, name, value)
    return message


def test_commands_find_the_proxy_by_argument_then_variable_then_on_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("POPMQ_ENDPOINT", raising=False)
    assert parsed("topic", "list").endpoint == "127.0.0.1:8081"
    monkeypatch.setenv("POPMQ_ENDPOINT", "there:1")
    assert parsed("topic", "list").endpoint == "there:1"
    assert parsed("topic", "list", "--endpoint", "here:2").endpoint == "here:2"


@pytest.mark.parametrize(
    "command",
    [
        ["send", "t", "b"],
        ["recv", "t", "--group", "g"],
        *(["topic", action, "t"] for action in ("create", "alter", "delete", "show")),
        *(["group", action, "g"] for action in ("create", "alter", "delete", "show")),
        *(
            ["group", action, "g", "--topic", "t", "--key", "k"]
            for action in ("resume", "skip", "dead-letter")
        ),
        ["topic", "list"],
        ["group", "list"],
        ["timers", "forecast"],
        ["timers", "list"],
        ["timers", "show", "01AB"],
        ["timers", "cancel", "01AB", "--topic", "t"],
        ["timers", "reschedule", "01AB", "--delay", "9s"],
    ],
)
def test_every_command_takes_an_endpoint_and_json(command: list[str]) -> None:
    args = parsed(*command, "--json", "--endpoint", "[::1]:9")
    assert args.json
    assert args.output == "jsonl"
    assert args.endpoint == "[::1]:9"


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["dance"],
        ["topic"],
        ["send", "t"],
        ["send", "t", "b", "--delay", "90"],
        ["send", "t", "b", "--at", "tomorrow"],
        ["send", "t", "b", "--property", "novalue"],
        ["send", "t", "b", "--count", "0"],
        ["send", "t", "b", "--delay", "9s", "--group-key", "g"],
        ["send", "t", "b", "--endpoint", "nowhere"],
        ["recv", "t"],
        ["recv", "t", "--group", "g", "--wait", "long"],
        ["topic", "create", "t", "--type", "odd"],
        ["group", "create", "g", "--back-off", "1s,,2s"],
    ],
)
def test_wrong_usage_exits_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert "Usage: popmq" in error


@pytest.mark.parametrize(
    "argv",
    [
        ["send", "t", "b", "--delay", "99999999999999999999d"],
        ["send", "t", "b", "--delay", "9" * 5_000 + "d"],
        ["send", "t", "b", "--count", "9" * 5_000],
        ["recv", "t", "--group", "g", "--wait", "999999999999999d"],
        ["recv", "t", "--group", "g", "--invisible", "36501d"],
        ["topic", "create", "t", "--queues", "99999999999"],
        ["topic", "alter", "t", "--queues", "2147483648"],
        ["group", "create", "g", "--max-attempts", "99999999999"],
        ["group", "create", "g", "--back-off", "1s,99999999999999999999d"],
    ],
)
def test_a_number_that_is_too_large_is_refused_in_one_line(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "is over the limit of" in last
    assert len(last) < 200


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--groups", "0"], "'--groups': '0' is not a number from 1 to 26"),
        (["--replicas", "10"], "'--replicas': '10' is not a number from 1 to 9"),
        (["--groups", "2", "--replicas", "30"], "'--replicas': '30' is not a number from 1 to 9"),
    ],
)
def test_a_cluster_of_an_impossible_shape_is_refused_before_it_has_a_folder(
    argv: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "data"
    ports = ["--port", "0", "--http-port", "0"]
    assert main(["up", *argv, "--data", str(folder), *ports]) == 2
    assert why in capsys.readouterr().err
    assert not folder.exists()


@pytest.mark.parametrize(
    "argv",
    [
        ["send", "t", "b", "--tag", "\udcff"],
        ["send", "t", "b", "--key", "good", "--key", "\udcff"],
        ["send", "t", "b", "--property", "a=\udcff"],
        ["send", "\udcff", "b"],
        ["recv", "t", "--group", "\udcff"],
        ["group", "show", "\udcff"],
    ],
)
def test_an_argument_that_is_no_text_is_refused(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    assert "is not UTF-8" in capsys.readouterr().err.splitlines()[-1]


def test_a_body_that_is_no_text_is_sent_as_it_is() -> None:
    assert body_of(parsed("send", "t", "caf\u00e9 \udcff")) == "caf\u00e9 ".encode() + b"\xff"


def test_every_command_says_what_it_does_with_an_example() -> None:
    for name, result in commands_below("popmq", root()):
        assert result.help, name
        if not isinstance(result, click.Group):
            assert "Examples:" in (result.epilog or ""), name
            assert f"popmq {name.removeprefix('popmq ')}" in (result.epilog or ""), name


def test_popmq_accepts_every_example_of_its_help_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("order.json").touch()
    for _, command in commands_below("popmq", root()):
        lines = (command.epilog or "").partition("Examples:\n")[2].splitlines()
        for line in (line.strip() for line in lines):
            words = shlex.split(line.rpartition(" | ")[2].partition(" > ")[0])
            if words[0] == "popmq":
                assert isinstance(parse(words[1:]), Invocation), line


def test_help_texts_are_plain_english() -> None:
    texts = {
        text
        for _, result in commands_below("popmq", root())
        for text in (
            result.help or "",
            result.short_help or "",
            *(part.help or "" for part in result.params if isinstance(part, click.Option)),
        )
    }
    assert len(texts) > 100
    assert [text for text in sorted(texts) if list(plain_english.findings(text))] == []


def test_every_command_is_in_the_tables_of_commands() -> None:
    page = command_examples.PAGE.read_text(encoding="utf-8")
    table = "\n".join(line for line in page.splitlines() if line.startswith("| `popmq "))
    assert {name for name in COMMANDS if f"`popmq {name}" not in table} == set()


def test_the_examples_on_the_page_of_commands_are_those_of_the_help_texts() -> None:
    page = command_examples.PAGE.read_text(encoding="utf-8")
    assert command_examples.page(page) == page, "run `make commands` and commit the page"


def test_a_command_imports_no_role_that_it_does_not_need() -> None:
    """Roles take most of a second to import, and commands are run in scripts."""
    code = (
        "import sys\n"
        "from popmq.cli.__main__ import main\n"
        "assert main(['topic', '--help']) == 0\n"
        "print(*{name.split('.')[1] for name in sys.modules if name.startswith('popmq.')})"
    )
    done = run_program([sys.executable, "-c", code], check=True)
    assert set(done.stdout.splitlines()[-1].split()) == {"cli", "common"}


def test_a_refusal_of_arguments_moves_no_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topic", "list", "\x9b2J\rX"]) == 2
    assert "(\\x9b2J\\rX)" in capsys.readouterr().err
    assert main(["completion"]) == 2
    assert capsys.readouterr().err.endswith("Choose from:\n    bash,\n    zsh,\n    fish\n")


def test_help_is_no_refusal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "send" in capsys.readouterr().out


def test_nobody_at_the_endpoint_is_refused_with_the_way_to_start_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.socket() as bound:  # bound but not listening: connections are refused
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        assert main(["send", "orders", "hello", "--endpoint", address]) == 3
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == f"popmq: no popmq at {address}: start one with `popmq up`\n"


def test_a_message_is_normal_unless_told_otherwise() -> None:
    message = sent("--key", "k1", "--key", "k2", "--tag", "t", "--property", "a=b=c")
    properties = message.system_properties
    assert properties.message_type == api.NORMAL
    assert message.topic.name == "orders"
    assert message.body == b"hello"
    assert list(properties.keys) == ["k1", "k2"]
    assert properties.tag == "t"
    assert dict(message.user_properties) == {"a": "b=c"}
    assert properties.born_timestamp.ToMilliseconds() == 1_000_500
    assert not properties.HasField("delivery_timestamp")


def test_a_message_into_a_lite_topic_names_it() -> None:
    message = built(parsed("send", "chats", "x", "--lite", "room-1"), b"x", "id", 1)
    properties = message.system_properties
    assert (properties.message_type, properties.lite_topic) == (api.LITE, "room-1")


def test_a_group_key_makes_a_message_fifo() -> None:
    properties = sent("--group-key", "customer-7").system_properties
    assert properties.message_type == api.FIFO
    assert properties.message_group == "customer-7"


def test_message_ids_have_the_public_form_and_differ() -> None:
    ids = MessageIds()
    first, second = ids.next(1_609_459_201), ids.next(1_609_459_201)
    assert len(first) == 34
    assert first.startswith("01")
    assert first[-16:] == "0000000100000000"
    assert second[-16:] == "0000000100000001"
    assert MessageIds().next(1_609_459_201) != first


def test_client_ids_fit_into_metadata() -> None:
    assert new_client_id().isascii()


def test_a_duration_keeps_its_milliseconds() -> None:
    assert duration(1_250).ToMilliseconds() == 1_250


def test_a_line_holds_the_body_and_what_is_known_of_the_message() -> None:
    message = received(tag="t")
    message.system_properties.keys.extend(["k1", "k2"])
    assert as_line(message) == "hello  id=01AB  tag=t  keys=k1,k2  attempt=2"


def test_a_body_cannot_break_its_line() -> None:
    assert as_line(received(b"two\nlines\x1b[2J")).startswith('"two\\nlines\\u001b[2J"  id=')


def test_a_body_that_is_no_text_is_shown_in_base64() -> None:
    assert as_line(received(b"\xff\xfe")).startswith("base64://4=  id=")
    assert message_fields(received(b"\xff\xfe"))["body_base64"] == "//4="


@pytest.mark.parametrize("packed", [gzip.compress(b"hello", mtime=0), zlib.compress(b"hello")])
def test_a_body_that_its_sender_packed_is_shown_unpacked(packed: bytes) -> None:
    assert as_line(received(packed, body_encoding=api.GZIP)).startswith("hello  ")


def test_a_long_body_that_is_no_text_does_not_fill_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert len(as_line(received(b"\xff" * 3_000))) > 4_000
    monkeypatch.setenv("COLUMNS", "80")
    line = as_line(received(b"\xff" * 3_000))
    assert "... (3000 bytes; -o json has all)  id=" in line
    assert len(line) < 200


def test_a_body_that_only_claims_to_be_packed_is_shown_in_base64() -> None:
    assert as_line(received(b"hello", body_encoding=api.GZIP)).startswith("base64:")


def test_json_says_everything_about_a_message() -> None:
    value = message_fields(received(receipt_handle="R", queue_id=3, queue_offset=9))
    assert value["body"] == "hello"
    assert value["attempt"] == 2
    assert (value["queue_id"], value["queue_offset"]) == (3, 9)
    assert value["receipt_handle"] == "R"


def part(code: int, message: str = "") -> service.ReceiveMessageResponse:
    return service.ReceiveMessageResponse(
        status=api.Status(code=api.Code.ValueType(code), message=message)
    )


def test_a_receive_gives_its_messages_whatever_else_is_in_the_stream() -> None:
    parts = [
        part(20000),
        service.ReceiveMessageResponse(message=received(b"a")),
        service.ReceiveMessageResponse(message=received(b"b")),
        service.ReceiveMessageResponse(delivery_timestamp=Timestamp(seconds=1)),
    ]
    assert [message.body for message in messages_of(parts)] == [b"a", b"b"]


def test_no_message_found_is_an_empty_receive() -> None:
    assert messages_of([part(40401, "no new message")]) == []


def test_a_refused_receive_says_code_and_reason() -> None:
    with pytest.raises(CallRefused, match=r"^TOO_MANY_REQUESTS \(42900\): polling full$"):
        messages_of([part(42900, "polling full")])


def test_messages_that_came_before_a_refusal_are_kept() -> None:
    parts = [service.ReceiveMessageResponse(message=received()), part(50000)]
    assert len(messages_of(parts)) == 1


def test_a_code_that_this_build_does_not_know_is_still_shown() -> None:
    with pytest.raises(CallRefused, match=r"^unknown code \(59999\): odd$"):
        check_status(admin.Status(code=59999, message="odd"))


def test_a_receive_asks_each_broker_once() -> None:
    def queue(broker: str, number: int, permission: api.Permission.ValueType) -> api.MessageQueue:
        return api.MessageQueue(id=number, permission=permission, broker=api.Broker(name=broker))

    queues = [
        queue("a", 0, api.WRITE),
        queue("a", 1, api.READ_WRITE),
        queue("a", 2, api.READ_WRITE),
        queue("b", 0, api.READ),
    ]
    assert [(q.broker.name, q.id) for q in one_per_broker(queues)] == [("a", 1), ("b", 0)]


def test_columns_are_aligned() -> None:
    assert columns(("NAME", "N"), [("orders", 8), ("x", 10)]) == "NAME    N\norders  8\nx       10"


def test_tables_are_the_same_without_rich_and_yaml_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [("orders", 8, "\x1b[2J"), ("a", "", "no")]
    with_rich = columns(("NAME", "QUEUES", "X"), rows)
    for name in ("rich", "rich.console", "rich.table", "rich.text", "yaml"):
        monkeypatch.setitem(sys.modules, name, None)
    assert columns(("NAME", "QUEUES", "X"), rows) == with_rich
    assert main(["config", "-o", "yaml"]) == 2
    assert "-o yaml needs PyYAML: pip install 'popmq[cli]'" in capsys.readouterr().err


def test_config_shows_each_value_and_where_it_came_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "popmq.toml"
    path.write_text("[pop]\nmax_batch = 16\n")
    monkeypatch.setenv("POPMQ_BROKER_NAME", "broker-b")
    assert main(["config", "--config", str(path), "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    shown = {line["key"]: (line["value"], line["source"]) for line in lines}
    assert shown["pop.max_batch"] == (16, str(path))
    assert shown["broker.name"] == ("broker-b", "POPMQ_BROKER_NAME")
    assert shown["store.flush"] == ("auto", "default")


def test_a_wrong_setting_is_refused_on_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "popmq.toml"
    path.write_text("[pop]\nmax_batch = 99\n")
    assert main(["config", "--config", str(path)]) == 1
    assert capsys.readouterr().err == "popmq: pop.max_batch = 99: at most 64\n"


def test_long_names_are_cut_where_the_terminal_is_narrower_and_whole_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    header = ("GROUP", "TOPIC", "LAG", "OLDEST")
    group, topic = "billing-of-the-second-department", "orders-of-the-northern-region"
    rows = [(group, topic, 1, "3m"), ("g", "t", 20, "now")]
    monkeypatch.setenv("COLUMNS", "60")
    lines = columns(header, rows).splitlines()
    assert max(map(len, lines)) <= 60
    shown_group, shown_topic, *_ = lines[1].split()
    assert group.startswith(shown_group.removesuffix("..."))
    assert shown_topic.endswith("...")
    assert group in columns(header, rows, wide=True)
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, columns(header, rows).splitlines())) <= 80
    monkeypatch.delenv("COLUMNS")
    assert topic in columns(header, rows)
