"""What tests share that keep flow_client.py, node/flow.mjs and java/Flow.java at work."""

import json
import sys
import time
from functools import partial
from typing import Any

from e2e.official import HERE, OfficialClient, launch_node
from e2e.official_java import java_program
from e2e.processes import Served

NEXT_SEND_S = 60.0
SETTLED_S = 90.0


def command(language: str) -> list[str]:
    if language == "python":
        return [sys.executable, "-m", "e2e.flow_client"]
    if language == "java":
        return java_program("Flow")
    return [launch_node("push")[0], str(HERE / "node" / "flow.mjs")]


def has(client: OfficialClient, kind: str, count: int) -> bool:
    return client.count(kind) >= count


def sent_after(client: OfficialClient, at_ms: int) -> bool:
    sent: list[dict[str, Any]] = client.of("sent")
    return bool(sent) and max(manifest["at_ms"] for manifest in sent[-50:]) > at_ms


def percentiles(values: list[int]) -> str:
    ordered = sorted(values)
    p50, p99 = ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]
    return f"p50 {p50} p99 {p99} max {ordered[-1]} ms of {len(ordered)}"


def settle(served: Served, clients: list[OfficialClient]) -> None:
    """No more sends; everything acknowledged is received; the groups are owed nothing.

    What a kill left in flight comes back after its invisible time and is acknowledged then, so
    an acknowledgement that was undone shows before the end.
    """
    for client in clients:
        client.tell(op="quiet")
    for client in clients:
        client.wait(partial(has, client, "done", 1), "the last send", within_s=NEXT_SEND_S)
    owed = {manifest["name"] for client in clients for manifest in client.of("sent")}
    for client in clients:
        client.comes(partial(has_seen, client, owed), within_s=SETTLED_S)
    deadline_s = time.monotonic() + SETTLED_S
    while any(lag(served, client) for client in clients):
        assert time.monotonic() < deadline_s, [lag(served, client) for client in clients]
        time.sleep(0.5)


def judge(client: OfficialClient) -> None:
    """Print what one client's books say, and insist that nothing is lost, undone or early."""
    sent, acked = (
        client.of("sent"),
        {manifest["name"]: manifest["n"] for manifest in client.of("acked")},
    )
    seen = client.of("seen")
    received = {manifest["name"] for manifest in seen}
    lost = [manifest["name"] for manifest in sent if manifest["name"] not in received]
    undone = [
        manifest for manifest in seen if manifest["n"] > acked.get(manifest["name"], manifest["n"])
    ]
    due = {manifest["name"]: manifest["due_ms"] for manifest in sent}
    early = [manifest for manifest in seen if manifest["at_ms"] < due.get(manifest["name"], 0)]
    print(
        f"{client.name}: sent {len(sent)} ({sum(ms > 0 for ms in due.values())} delayed), unknown"
        f" {client.count('send_failed')}, received {len(received)}, again"
        f" {len(seen) - len(received)}, acked {len(acked)}, acks without an OK"
        f" {client.count('ack_failed')}, lost {len(lost)}, acks undone {len(undone)}"
    )
    assert len(sent) > 100
    assert any(due.values())
    assert lost == []
    assert undone == []
    assert early == []


def lag(served: Served, client: OfficialClient) -> dict[str, int]:
    """What the group is owed, by kind; nothing is left out but zeros."""
    found_lag: dict[str, int] = {}
    for line in served.popmq("lag", "--group", client.name, "--json").splitlines():
        document = json.loads(line)
        for kind in ("ready", "in_flight", "delayed", "retries"):
            if document[kind]:
                found_lag[f"{document['topic']} {kind}"] = document[kind]
    return found_lag


def has_seen(client: OfficialClient, owed: set[str]) -> bool:
    return owed <= {manifest["name"] for manifest in client.of("seen")}
