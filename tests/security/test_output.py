"""Messages that are to do something to the terminal of whoever looks at them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from security.target import CLIENT, SERVICE, Target

from popmq.common.errors import Code
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service

pytestmark = pytest.mark.more
# A title, a colour by C1, a line feed that begins a line of its own, and text from right to left.
PAYLOAD = "\x1b]0;owned\x07 \x9b31m \x85 \x7f \r\nready: forged \u202e\u2028"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with Target(tmp_path_factory.mktemp("output")) as running:
        yield running


def send(target: Target, message_id: str, body: str) -> int:
    message = pb.Message(topic=pb.Resource(name="letters"), body=body.encode())
    message.system_properties.message_id = message_id
    request = service.SendMessageRequest(messages=[message])
    with grpc.insecure_channel(target.ready.endpoint) as channel:
        call: Any = channel.unary_unary(f"{SERVICE}SendMessage")
        answer = call(request.SerializeToString(), metadata=CLIENT, timeout=30)
    return int(service.SendMessageResponse.FromString(answer).status.code)


def printed(target: Target, *words: str, terminal: bool = False) -> str:
    """What the command shows, on both outputs."""
    command = [sys.executable, "-m", "popmq", *words, "--endpoint", target.ready.endpoint]
    if not terminal:
        done = subprocess.run(command, capture_output=True, check=True, timeout=60)
        return (done.stdout + done.stderr).decode()
    ours, theirs = os.openpty()
    with subprocess.Popen(command, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        parts = []
        while True:
            try:
                part = os.read(ours, 65_536)
            except OSError:  # nobody writes there any more
                break
            parts.append(part)
        process.wait(60)
    os.close(ours)
    return b"".join(parts).decode().replace("\r\n", "\n")


def unsafe(text: str) -> set[str]:
    return {char for char in text if not char.isprintable() and char != "\n"}


@pytest.mark.parametrize("output", ["table", "json", "jsonl", "yaml"])
def test_bodies_with_control_characters_are_shown_escaped(target: Target, output: str) -> None:
    assert send(target, f"letter-{output}", PAYLOAD) == Code.OK.value
    look = ("recv", "letters", "--group", f"g-{output}", "--ack", "-o", output)
    for words in (look, ("message", "show", f"letter-{output}", "-o", output)):
        text = printed(target, *words)
        assert "forged" in text
        assert unsafe(text) == set(), (words, unsafe(text))
        assert not any(line.startswith("ready:") for line in text.splitlines())
    explained = printed(target, "explain", f"letter-{output}", "-o", output)
    assert unsafe(explained) == set()


def test_a_format_of_ones_own_is_escaped_on_a_terminal_and_exact_for_programs(
    target: Target,
) -> None:
    assert send(target, "formatted", PAYLOAD) == Code.OK.value
    words = ("recv", "letters", "--format", "{body}", "--group")
    assert unsafe(printed(target, *words, "seen", terminal=True)) == set()
    assert PAYLOAD in printed(target, *words, "piped")


def test_ids_with_control_characters_are_refused(target: Target) -> None:
    for number in (*range(0x20), *range(0x7F, 0xA0)):
        assert send(target, f"id-{chr(number)}", "x") == Code.ILLEGAL_MESSAGE_ID.value
    text = target.log_text()
    assert unsafe(text) == set()
