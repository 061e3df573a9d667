"""The whole of `popmq up` is killed, or stopped, and started again under official clients at work.

Each client sends, delays, receives and acknowledges; it is the same client before and after.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest
from e2e.flow import command, has, judge, sent_after, settle
from e2e.many import Up
from e2e.official import START_S, OfficialClient, ensure_node_client

TOPIC, LATER = "flow", "flow-later"
INVISIBLE_S = 5
SENT = 120  # by each client at least
# After a lost connection gRPC waits for 1 s, 1.6 s, 2.56 s ... before it tries again.
COMES_BACK_S = 20.0
KINDS = [f"{language}-{kind}" for language in ("python", "node") for kind in ("simple", "push")]


@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(KINDS, marks=pytest.mark.heavy, id="python-and-node"),
        pytest.param(["java-simple"], marks=pytest.mark.long, id="java"),
    ],
)
@pytest.mark.timeout(900)  # the first run installs the client
def test_connected_clients_go_on_when_the_server_was_killed_and_when_it_was_stopped(
    tmp_path: Path, kinds: list[str]
) -> None:
    ensure_node_client()
    with flowing(tmp_path, kinds) as (up, clients):
        for way in (up.kill9, up.terminate):
            way()
            up.restart()
            back_ms = time.time_ns() // 1_000_000
            print(f"\n{way.__name__}; after the server was back, in ms:")
            for client in clients:
                print(f"  {client.name}: {goes_on(client, back_ms)}")
        for client in clients:
            client.wait(partial(has, client, "sent", SENT), f"{SENT} sends", within_s=START_S)
        settle(up, clients)
    for client in clients:
        judge(client)


@contextmanager
def flowing(folder: Path, kinds: list[str]) -> Iterator[tuple[Up, list[OfficialClient]]]:
    """A server, and a client of each kind at work; each has a group of its own."""
    with ExitStack() as stack:
        # What a push consumer was given by a server that died before it could say so.
        settings = {"POPMQ_POP_INVISIBLE_DEFAULT_MS": f"{INVISIBLE_S * 1_000}"}
        up = stack.enter_context(Up(folder, settings))
        up.create(topic=TOPIC, groups=kinds)
        up.popmq("topic", "create", LATER, "--type", "delay")
        clients = []
        for name in kinds:
            language, kind = name.split("-")
            client = OfficialClient(name, command(language), folder=folder)
            clients.append(stack.enter_context(client))
            client.tell(
                op="start",
                endpoint=up.endpoints[0],
                kind=kind,
                name=name,
                topic=TOPIC,
                later=LATER,
                group=name,
                invisible_s=INVISIBLE_S,
                pause_s=0.2,
            )
        for client in clients:
            client.wait(partial(has, client, "ready", 1), "being ready", within_s=2 * START_S)
            client.tell(op="go")
        for client in clients:
            client.wait(partial(has, client, "acked", 20), "20 acks", within_s=START_S)
        yield up, clients


def goes_on(client: OfficialClient, back_ms: int) -> str:
    """When it first sent again, and first acknowledged what was sent since: both within bounds."""
    left_s = COMES_BACK_S - (time.time_ns() // 1_000_000 - back_ms) / 1_000
    client.wait(partial(sent_after, client, back_ms), "a send after it", within_s=max(left_s, 0.1))
    acknowledged = partial(new_ack_ms, client, back_ms)
    client.wait(lambda: acknowledged() > 0, "an ack after it", within_s=max(left_s, 0.1))
    sent_ms = min(
        manifest["at_ms"] for manifest in client.of("sent") if manifest["at_ms"] > back_ms
    )
    return f"sent after {sent_ms - back_ms}, acknowledged after {acknowledged()}"


def new_ack_ms(client: OfficialClient, back_ms: int) -> int:
    """How long after it the first message that was sent after it was acknowledged; 0: not yet."""
    new = {manifest["name"] for manifest in client.of("sent") if manifest["begun_ms"] > back_ms}
    at = [manifest["at_ms"] for manifest in client.of("acked") if manifest["name"] in new]
    return min(at) - back_ms if at else 0
