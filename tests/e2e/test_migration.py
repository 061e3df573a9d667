"""docs/how-to/migrate-from-rocketmq.md, followed with the unmodified client of RocketMQ 4.9.8.

The blocks of the page run as they stand, in their order.  Only the port is another one, as several
popmq run on one machine, and MESSAGE_ID becomes an id.
"""

import re
import shlex
import time
from pathlib import Path

import pytest
from e2e.official_java import remoting_program
from e2e.processes import Role
from e2e.quickstart_pages import ENDPOINT, run_commands
from e2e.remoting_programs import RUN_S, ConsumerProgram

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "migrate-from-rocketmq.md"
VERSION = "4.9.8"
# What the commands of the last block show once the client has written its offsets (every 5 s).
SHOWN = (
    r"^\S+ +push consumer +billing +orders,reminders .*java +4\.9\.8 +remoting ",
    r"^\S+ +producer .*java +4\.9\.8 +remoting ",
    r"^billing +orders +0 ",
    r"^billing +reminders +0 ",
    r"^message in topic orders .*\n  billing: ACKED ",
    r"^message in topic %RETRY%billing .*\n  billing: ACKED ",
)


def blocks_of(text: str) -> list[str]:
    return re.findall(r"^```(?:sh)?\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.heavy
@pytest.mark.timeout(300)
def test_an_application_of_rocketmq_4_moves_by_another_name_server_address_alone(
    tmp_path: Path,
) -> None:
    role = Role("up", ["up", "--port", "0", "--http-port", "0"], folder=tmp_path, settings={})
    with role:
        endpoint = role.ready.endpoint
        page = PAGE.read_text(encoding="utf-8").replace(ENDPOINT, endpoint)
        address, topics, verify = blocks_of(page)
        assert endpoint in address
        run_commands(topics, tmp_path, POPMQ_ENDPOINT=endpoint)
        application = shlex.join(remoting_program(VERSION, "Shop"))
        shop = ConsumerProgram(["bash", "-euc", f"{address}\nexec {application}"])
        with shop:
            sent = {event["name"]: event["id"] for event in shop.wait_for("sent", 2)}
            got = shop.wait_for("got", 3)
            assert sorted((event["body"], event["times"], event["id"]) for event in got) == [
                ("a reminder", "0", sent["reminder"]),
                ("an order", "0", sent["order"]),
                ("an order", "1", sent["order"]),
            ]
            deadline_s = time.monotonic() + RUN_S
            commands = verify.replace("MESSAGE_ID", sent["order"])
            missing: tuple[str, ...] = SHOWN
            while missing:
                output = run_commands(commands, tmp_path, POPMQ_ENDPOINT=endpoint)
                missing = tuple(text for text in SHOWN if not re.search(text, output, re.MULTILINE))
                assert time.monotonic() < deadline_s, (missing, output)
            shop.end()
