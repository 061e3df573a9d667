"""`python -m bench core`: CPU of a send, a receive and an ack, of this tree and of an earlier one.

The two trees run in turns, each round in a process of its own, on the same interpreter; the least
of ten rounds counts.  The earlier tree runs twice in each turn: what its two series differ by is
the spread, below which a difference says nothing.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOTS = ("common", "broker", "proxy", "controller", "cli", "testing")
OPERATIONS = ("send", "receive", "ack")


def compare(revision: str, *, rounds: int, messages: int, headers: str) -> str:
    """A table in Markdown: microseconds of CPU for each message of 1 KiB."""
    with tempfile.TemporaryDirectory() as folder:
        before = extract(revision, Path(folder))
        series: dict[str, list[dict[str, float]]] = {"before": [], "again": [], "now": []}
        for number in range(rounds):
            turn = [("before", before), ("now", ROOT), ("again", before)]
            for name, tree in turn if number % 2 else reversed(turn):
                series[name].append(run(tree, messages=messages, headers=headers))
                print(
                    f"round {number + 1} of {rounds}, {name}: {series[name][-1]}", file=sys.stderr
                )
    least = {
        name: {each: min(figures[each] for figures in rows) for each in OPERATIONS}
        for name, rows in series.items()
    }
    return table(revision, least, f"minimum of {rounds} rounds, headers {headers}")


def table(revision: str, least: dict[str, dict[str, float]], caption: str) -> str:
    lines = [
        f"{caption}, Python {sys.version.split()[0]}, us of CPU a message",
        "",
        f"| | {revision} | now | change | spread of {revision} |",
        "|---|---|---|---|---|",
    ]
    for each in OPERATIONS:
        before, again, now = (least[name][each] for name in ("before", "again", "now"))
        best = min(before, again)
        lines.append(
            f"| {each} | {best:.2f} | {now:.2f} | {100 * (now / best - 1):+.1f} % "
            f"| {100 * abs(before / again - 1):.1f} % |"
        )
    return "\n".join(lines)


def extract(revision: str, folder: Path) -> Path:
    """The tree of a commit of this repository."""
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", "--format=tar", revision, *ROOTS, "bench"],
        check=True,
        stdout=subprocess.PIPE,
    )
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    if not (folder / "bench/core_cost.py").exists():
        raise SystemExit(f"{revision} has no bench/core_cost.py: choose a later commit")
    return folder


def run(tree: Path, *, messages: int, headers: str) -> dict[str, float]:
    """One round: the roots of the tree come before the editable installation."""
    roots: Sequence[Path] = [tree / root for root in ROOTS]
    output = subprocess.run(
        [sys.executable, "-m", "bench.core_cost", f"--messages={messages}", f"--headers={headers}"],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": ":".join(map(str, roots))},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    figures: dict[str, float] = json.loads(output)["us"]
    return figures
