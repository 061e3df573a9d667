"""What a comparison found: JSON, a Markdown page and a plot; medians, with lowest and highest."""

import html
import json
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.compare import Outcome
from bench.measure import Measure
from popmq.cli.load.figures import interpreter

Pick = Callable[[Measure], float]

REFERENCE = "popmq apart"


def _rate(measure: Measure) -> float:
    return measure.per_second


def _cpu_us(measure: Measure) -> float:
    return measure.cpu_us


# Ours to theirs in each of GOAL_CASES; True: at least so much, False: at most.
GOALS: tuple[tuple[str, str, Pick, float, bool], ...] = (
    ("messages/s to RocketMQ SYNC_FLUSH", "RocketMQ apart sync", _rate, 4.0, True),
    ("CPU a message to RocketMQ SYNC_FLUSH", "RocketMQ apart sync", _cpu_us, 0.2, False),
    ("messages/s to Redis Streams", "Redis Streams", _rate, 0.7, True),
)
GOAL_CASES = ("send 64x1", "send 4x64")
LIMITS: tuple[tuple[str, str, Pick, float], ...] = (
    ("CPU us a message, receive 32 + 32 acks", "receive 32, 32 acks", _cpu_us, 25.0),
)


def write(outcome: Outcome, folder: Path) -> Path:
    """Write the three files; the Markdown page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = machine()
    (folder / "results.json").write_text(json.dumps(as_json(outcome, facts), indent=1))
    (folder / "plot.svg").write_text(plot(outcome))
    page = folder / "results.md"
    page.write_text(markdown(outcome, facts))
    return page


def machine() -> dict[str, str]:
    cpus = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "cores": f"{os.cpu_count()} of {cpus[0] if cpus else 'unknown'}",
        "kernel": platform.release(),
        "python": interpreter(),
        "load average": " ".join(f"{load:.1f}" for load in os.getloadavg()),
    }


def as_json(outcome: Outcome, facts: dict[str, str]) -> dict[str, object]:
    return {
        "machine": facts,
        "body": outcome.plan.body,
        "seconds": outcome.plan.seconds,
        "rounds": outcome.plan.rounds,
        "settings": outcome.settings,
        "unavailable": outcome.unavailable,
        "warmed": outcome.warmed,
        "failures": outcome.failures,
        "measures": [measure.as_json() for measure in outcome.measures],
    }


def cases(outcome: Outcome) -> list[str]:
    return list(dict.fromkeys(measure.case for measure in outcome.measures))


def of(outcome: Outcome, peer: str, case: str) -> list[Measure]:
    return [measure for measure in outcome.measures if (measure.peer, measure.case) == (peer, case)]


def spread(values: Sequence[float], digits: int = 1) -> str:
    """`median (lowest-highest)`"""
    if not values:
        return "-"
    middle = statistics.median(values)
    return f"{middle:.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def ratios(outcome: Outcome, case: str, ours: str, theirs: str, pick: Pick) -> list[float]:
    """Ours to theirs, round by round."""
    mine = {measure.round: pick(measure) for measure in of(outcome, ours, case)}
    other = {measure.round: pick(measure) for measure in of(outcome, theirs, case)}
    return [mine[n] / other[n] for n in sorted(mine.keys() & other.keys()) if other[n]]


def markdown(outcome: Outcome, facts: dict[str, str]) -> str:
    plan = outcome.plan
    lines = ["# Comparison", ""]
    lines.append(", ".join(f"{name} {value}" for name, value in facts.items()) + ".")
    lines.append(
        f"Bodies of {plan.body} B, {plan.rounds} rounds of {plan.seconds:g} s, interleaved: median "
        "(lowest-highest). CPU is user and system time of all the peer's processes."
    )
    lines += ["", "| peer | settings | warmed with |", "|---|---|---|"]
    lines += [
        f"| {name} | {text} | {outcome.warmed.get(name, '-')} |"
        for name, text in outcome.settings.items()
    ]
    lines += ["", *(f"- **{name}** {why}" for name, why in outcome.unavailable.items())]
    lines += [f"- {failure}" for failure in outcome.failures]
    for case in cases(outcome):
        lines += ["", *_table(outcome, case)]
    lines += ["", "## Goals", "", *_goals(outcome), "", "![plot](plot.svg)", ""]
    return "\n".join(lines)


def _table(outcome: Outcome, case: str) -> list[str]:
    lines = [
        f"## {case}",
        "",
        "| peer | messages/s | CPU us | of which | p50 ms | p99 ms | p99.9 ms | per flush | "
        "loader us | others' cores |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in outcome.warmed:
        rows = of(outcome, name, case)
        if not rows:
            continue
        parts = {
            role: statistics.median(row.by_process_us[role] for row in rows)
            for role in rows[0].by_process_us
        }
        per_flush = [row.messages / row.flushes for row in rows if row.flushes > 0]
        cells = (
            name,
            spread([row.per_second for row in rows], 0),
            spread([row.cpu_us for row in rows]),
            " + ".join(f"{role} {us:.1f}" for role, us in parts.items()),
            spread([row.ms.p50 for row in rows if row.ms.count], 2),
            spread([row.ms.p99 for row in rows if row.ms.count], 2),
            spread([row.ms.p999 for row in rows if row.ms.count], 2),
            f"{statistics.median(per_flush):.1f}" if per_flush else "-",
            f"{statistics.median(row.loader_us for row in rows):.1f}",
            spread([row.other_cores for row in rows], 2),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _goals(outcome: Outcome) -> list[str]:
    lines = ["| popmq apart | is | aim | |", "|---|---|---|---|"]
    for text, theirs, pick, aim, at_least in GOALS:
        for case in GOAL_CASES:
            values = ratios(outcome, case, REFERENCE, theirs, pick)
            lines.append(_goal(f"{text}, {case}", values, aim, at_least))
    for text, case, pick, aim in LIMITS:
        lines.append(
            _goal(text, [pick(measure) for measure in of(outcome, REFERENCE, case)], aim, False)
        )
    return lines


def _goal(text: str, values: Sequence[float], aim: float, at_least: bool) -> str:
    if not values:
        return f"| {text} | not measured | {aim:g} | |"
    middle = statistics.median(values)
    met = middle >= aim if at_least else middle <= aim
    bound = "at least" if at_least else "at most"
    return f"| {text} | {spread(values, 2)} | {bound} {aim:g} | {'met' if met else '**not met**'} |"


# -- the plot

WIDTH, BAR, GAP, LEFT = 860, 16, 26, 210
COLOURS = ("#2f6f9f", "#c0672b")


def plot(outcome: Outcome) -> str:
    """Two bars a peer and case: messages/s, and CPU a message; each with its spread."""
    parts: list[str] = []
    top = 20
    for case in cases(outcome):
        names = [name for name in outcome.warmed if of(outcome, name, case)]
        parts.append(_text(10, top, case, weight="bold"))
        for title, colour, pick in (
            ("messages/s", COLOURS[0], _rate),
            ("server CPU, us a message", COLOURS[1], _cpu_us),
        ):
            top += 18
            parts.append(_text(LEFT, top, title, size=11))
            values = {
                name: [pick(measure) for measure in of(outcome, name, case)] for name in names
            }
            highest = max((max(found_values) for found_values in values.values()), default=1.0)
            for name, found_values in values.items():
                top += GAP - 6
                parts.append(_bar(top, name, found_values, highest, colour))
        top += GAP
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{top}" '
        f'font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" '
        f'fill="white"/>\n{body}\n</svg>\n'
    )


def _bar(top: int, name: str, values: Sequence[float], highest: float, colour: str) -> str:
    scale = (WIDTH - LEFT - 160) / highest
    middle = statistics.median(values)
    low, high = LEFT + min(values) * scale, LEFT + max(values) * scale
    line = top - BAR / 2 + 4
    return (
        _text(10, top, name)
        + f'<rect x="{LEFT}" y="{top - BAR + 4}" width="{middle * scale:.1f}" height="{BAR - 2}" '
        f'fill="{colour}"/><line x1="{low:.1f}" x2="{high:.1f}" y1="{line}" y2="{line}" '
        f'stroke="black"/>' + _text(LEFT + int(high - LEFT) + 8, top, f"{middle:,.1f}", size=11)
    )


def _text(x: int, y: int, text: str, *, size: int = 12, weight: str = "normal") -> str:
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}">'
        f"{html.escape(text)}</text>"
    )
