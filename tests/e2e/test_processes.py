"""What a ready line says, and that a free port is one."""

import socket

import pytest
from e2e.processes import Ready, free_port


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "ready: endpoint 127.0.0.1:8081, metrics http://127.0.0.1:5557/metrics,"
            " data ./popmq-data",
            Ready(
                endpoint="127.0.0.1:8081",
                metrics="http://127.0.0.1:5557/metrics",
                data="./popmq-data",
            ),
        ),
        (
            "ready: controller 127.0.0.1:9878, metrics http://127.0.0.1:5557/metrics",
            Ready(controller="127.0.0.1:9878", metrics="http://127.0.0.1:5557/metrics"),
        ),
        (
            "ready: broker broker-a frames 127.0.0.1:10911, metrics http://h:1/metrics,"
            " data /var/a, data of mine",
            Ready(
                broker="broker-a",
                frames="127.0.0.1:10911",
                metrics="http://h:1/metrics",
                data="/var/a, data of mine",
            ),
        ),
    ],
)
def test_a_ready_line_is_taken_apart(line: str, expected: Ready) -> None:
    assert Ready.parse(line + "\n") == expected


@pytest.mark.parametrize("line", ["", "hello", "ready: endpoint", "ready: colour red"])
def test_another_line_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r"not a ready line|unknown words|argument"):
        Ready.parse(line)


def test_a_free_port_can_be_listened_on() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))
        listener.listen()
