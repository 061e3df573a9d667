"""Whatever a sender wrote into its message, the commands that show messages show it."""

import json
import random
import uuid
from contextlib import suppress

import pytest

from popmq.cli.__main__ import main
from popmq.cli.client import CallRefused, Client
from popmq.cli.messages import as_line, format_argument, formatted, message_fields
from popmq.proxy.api import definition_pb2 as api
from popmq.testing.running_broker import RunningBroker

SECONDS = (0, -5, 1, 1_700_000_000, 253_402_300_799, 253_402_300_800, 1 << 55, -(1 << 62))
NANOS = (0, -7, 1, 999_999_999, 1_000_000_000, 2_000_000_000, -(1 << 31))
TEXTS = ("", "a", "\u8ba2\u5355", "\u202eevil", "a\u200bb", "{x}", "%s%d", "-dash", "a,b", "x" * 60)
BODIES = (b"x", b"\xff\xfe", b"\x1b[31mred", "\u4ef7 \U0001f600".encode(), b"{", b"\r\n")
TEMPLATE = format_argument("{message_id} {born_ms} {stored_ms} {due_ms} {late_ms} {properties}")


def message(chance: random.Random, *, id_: str = "") -> api.Message:
    """With system properties as no official client writes them."""
    made = api.Message(topic=api.Resource(name="orders"), body=chance.choice(BODIES))
    made.user_properties[chance.choice(TEXTS)] = chance.choice(TEXTS)
    system = made.system_properties
    system.message_id = id_ or uuid.UUID(int=chance.getrandbits(128)).hex
    system.message_type = api.NORMAL
    system.body_encoding = api.Encoding.ValueType(chance.randrange(3))
    system.born_timestamp.seconds = chance.choice(SECONDS)
    system.born_timestamp.nanos = chance.choice(NANOS)
    system.born_host = chance.choice(TEXTS)
    system.tag = chance.choice(TEXTS)
    system.keys.extend(chance.choices(TEXTS, k=chance.randrange(3)))
    system.trace_context = chance.choice(TEXTS)
    system.body_digest.checksum = chance.choice(TEXTS)
    system.receipt_handle = chance.choice(TEXTS)
    system.queue_id = chance.choice((0, -1, 1 << 30))
    return made


def test_every_time_that_was_ever_stored_is_shown() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for _ in range(2_000):
        stored = message(chance)
        times = [stored.system_properties.store_timestamp]
        times += [stored.system_properties.delivery_timestamp] if chance.random() < 0.5 else []
        for time in times:
            time.seconds, time.nanos = chance.choice(SECONDS), chance.choice(NANOS)
        assert "\x1b" not in as_line(stored, wide=True)
        assert json.loads(json.dumps(message_fields(stored)))["message_id"]
        assert stored.system_properties.message_id in formatted(TEMPLATE, stored, escape=True)


@pytest.mark.more
def test_two_thousand_odd_messages_are_shown_by_every_command_that_shows_messages(
    popmq_broker: RunningBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    run = Commands(popmq_broker.endpoint, capsys)
    run("topic", "create", "orders")
    run("group", "create", "g", "--max-attempts", "1")
    ids = []
    with Client(popmq_broker.endpoint) as client:
        for _ in range(2_000):
            odd = message(chance)
            with suppress(CallRefused):  # such as a tag that no filter selects
                client.send(odd)
                ids.append(odd.system_properties.message_id)
    assert len(ids) > 1_000
    every = ("--count", "2000", "--wait", "2s")
    assert len(run("recv", "orders", "--group", "plain", *every).splitlines()) == len(ids)
    lines = run("recv", "orders", "--group", "json", *every, "--json").splitlines()
    assert {json.loads(line)["message_id"] for line in lines} == set(ids)
    for name in chance.sample(ids, 60):
        for as_json in ((), ("--json",)):
            assert name in run("message", "show", name, "--topic", "orders", *as_json)
            assert "orders" in run("explain", name, *as_json)
    run("recv", "orders", "--group", "g", *every)  # and no ack
    popmq_broker.advance("1h")
    for command in ("list", "peek"):
        for as_json in ((), ("--json",)):
            assert ids[0] in run("dlq", command, "g", "--count", "1000", *as_json)


class Commands:
    """Runs commands in this process; one that fails, or raises, fails the test."""

    def __init__(self, endpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
        self._endpoint, self._capsys = endpoint, capsys

    def __call__(self, *arguments: str) -> str:
        self._capsys.readouterr()
        code = main([*arguments, "--endpoint", self._endpoint])
        out, err = self._capsys.readouterr()
        assert code == 0, (arguments, err)
        return out
