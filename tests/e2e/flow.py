"""What tests share that keep flow_client.py and node/flow.mjs at work."""

import sys
from typing import Any

from e2e.official import HERE, OfficialClient, launch_node


def command(language: str) -> list[str]:
    if language == "python":
        return [sys.executable, "-m", "e2e.flow_client"]
    return [launch_node("push")[0], str(HERE / "node" / "flow.mjs")]


def has(client: OfficialClient, kind: str, count: int) -> bool:
    return client.count(kind) >= count


def sent_after(client: OfficialClient, at_ms: int) -> bool:
    sent: list[dict[str, Any]] = client.of("sent")
    return bool(sent) and max(one["at_ms"] for one in sent[-50:]) > at_ms


def percentiles(values: list[int]) -> str:
    ordered = sorted(values)
    p50, p99 = ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]
    return f"p50 {p50} p99 {p99} max {ordered[-1]} ms of {len(ordered)}"
