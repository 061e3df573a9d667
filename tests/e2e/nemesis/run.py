"""Runs the nemesis, keeps the history, prints the table, and writes it to docs/reliability.md.

PYTHONPATH=tests .venv/bin/python -m e2e.nemesis.run --seconds 7200 --write
"""

import argparse
import asyncio
import datetime
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from e2e.nemesis.checker import Verdict, check, read
from e2e.nemesis.cluster import CommandAccess, NemesisCluster, wall_ms
from e2e.nemesis.faults import Nemesis
from e2e.nemesis.workload import GROUPS, History, Workload
from e2e.processes import RoleFailed

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reliability.md"
BEGIN, END = "<!-- nemesis: begin -->\n", "<!-- nemesis: end -->\n"
DRAIN_S = 240.0


async def run(folder: Path, *, seconds: float, seed: int, groups: int, replicas: int) -> Path:
    """The history of one run."""
    path, rng = folder / "history.jsonl", random.Random(seed)
    async with NemesisCluster(folder, groups=groups, replicas=replicas) as cluster:
        with path.open("w", encoding="utf-8") as file:
            history = History(wall_ms, file.write)
            workload = Workload(CommandAccess(cluster), history, rng)
            await workload.make()
            clients = asyncio.create_task(workload.run())
            await Nemesis(cluster, history, rng).run(seconds)
            workload.sending = False
            await _drain(cluster, history, workload)
            workload.draining = True
            await clients
    return path


async def _drain(cluster: NemesisCluster, history: History, workload: Workload) -> None:
    """Until nothing is left, or for long enough."""
    begun, end_s = wall_ms(), time.monotonic() + DRAIN_S
    left = -1
    while left and time.monotonic() < end_s:
        await asyncio.sleep(1)
        await workload.redrive()
        if workload.operating:
            continue
        try:
            lines = (await cluster.popmq("lag", "--json")).splitlines()
        except RoleFailed:  # a broker group has no master yet
            continue
        rows = [json.loads(line) for line in lines]
        rows = [row for row in rows if row.get("group") in GROUPS]
        left = sum(row["lag"] + row["delayed"] for row in rows if "lag" in row)
        # Of dead letters, and what no redrive has sent back.
        left += sum(row["dead_letters"] - row["redriven"] for row in rows if "redriven" in row)
    history.add("lag", begun, left=left)


def write(verdict: Verdict, what: str) -> None:
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    table = f"{what}\n\n```\n{verdict.table()}\n```\n"
    PAGE.write_text(f"{before}{BEGIN}{table}{END}{after}", encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m e2e.nemesis.run")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="for data, logs and the history")
    parser.add_argument("--write", action="store_true", help="the table, to docs/reliability.md")
    chosen = parser.parse_args(arguments)
    folder = chosen.folder or Path(tempfile.mkdtemp(prefix="nemesis-"))
    folder.mkdir(parents=True, exist_ok=True)
    shape = {"groups": chosen.groups, "replicas": chosen.replicas}
    path = asyncio.run(run(folder, seconds=chosen.seconds, seed=chosen.seed, **shape))
    verdict = check(read(path))
    print(f"seed {chosen.seed}, history {path}\n{verdict.table()}")
    print("\n".join(verdict.violations[:50]))
    if chosen.write:
        today = datetime.datetime.now(datetime.UTC).date()
        cluster = f"{chosen.groups} broker groups of {chosen.replicas}, 2 proxies, 2 controllers"
        write(verdict, f"{today}: {cluster}, {chosen.seconds:g} s of faults, seed {chosen.seed}.")
    return 1 if verdict.violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
