"""Charts as inline SVG. Colours are attributes: what turns a page into PDF or mail drops styles.

Every colour is legible on light and on dark; text takes the page's own colour.
"""

from collections.abc import Mapping, Sequence
from html import escape

from popmq.reports.output.formatting import span

WIDTH, HEIGHT = 820, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 250, 12, 24
_NAME = 40  # characters that fit beside a line's end
COLOURS = (
    *("#3b82c4", "#d9822b", "#2f9e6e", "#c0508a"),
    *("#8a6fd1", "#b08d1e", "#4aa3b5", "#d05a4e"),
)
_GRID = "#8884"


def lines(series: Mapping[str, Sequence[tuple[int, float]]], unit: str = "") -> str:
    """Values over time; each line has its name at its end."""
    points = [point for series in series.values() for point in series]
    if not points:
        return ""
    first, last = min(at for at, _ in points), max(at for at, _ in points)
    top = max(max(value for _, value in points), 1.0)
    wide, high = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM

    def place(at: int, value: float) -> tuple[float, float]:
        x = _LEFT + wide * ((at - first) / (last - first) if last > first else 1)
        return x, _TOP + high * (1 - value / top)

    parts = [_axis(top, unit, wide), _text(_LEFT, HEIGHT - 6, f"{span(last - first)} ago")]
    parts.append(_text(_LEFT + wide, HEIGHT - 6, "now", "end"))
    taken: list[float] = []
    for number, (name, values) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in values))
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}"/>')
        x, y = place(*values[-1])
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
        y = _free(y, taken)
        parts.append(_text(x + 8, y + 4, _short(name), colour=colour))
    return _svg(parts, "lag over time")


def bars(values: Mapping[str, float], what: str) -> str:
    """One bar for each name, with its value on it."""
    if not values:
        return ""
    top = max(max(values.values()), 1.0)
    wide, high = WIDTH - _LEFT - 12, HEIGHT - _TOP - _BOTTOM
    step = min(64.0, wide / len(values))
    parts = [_axis(top, "", wide)]
    for number, (name, value) in enumerate(values.items()):
        x, tall = _LEFT + number * step, high * value / top
        parts.append(
            f'<rect x="{x + 3:.1f}" y="{_TOP + high - tall:.1f}" width="{step - 6:.1f}" '
            f'height="{tall:.1f}" rx="2" fill="{COLOURS[0]}"/>'
        )
        parts.append(_text(x + step / 2, HEIGHT - 8, name, "middle"))
        parts.append(_text(x + step / 2, _TOP + high - tall - 3, f"{value:,.0f}", "middle"))
    return _svg(parts, what)


def spark(values: Sequence[float], colour: str = COLOURS[0]) -> str:
    """A small line for a table's cell."""
    if len(values) < 2:
        return ""
    top = max(max(values), 1.0)
    step = 80 / (len(values) - 1)
    path = " ".join(f"{n * step:.1f},{18 - 16 * value / top:.1f}" for n, value in enumerate(values))
    return (
        '<svg width="80" height="20" viewBox="0 0 80 20" aria-hidden="true">'
        f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{path}"/></svg>'
    )


def _axis(top: float, unit: str, wide: float) -> str:
    high = HEIGHT - _TOP - _BOTTOM
    parts = []
    for part in (0, 0.5, 1):
        y = _TOP + high * (1 - part)
        parts.append(f'<line x1="{_LEFT}" x2="{_LEFT + wide}" y1="{y}" y2="{y}" stroke="{_GRID}"/>')
        parts.append(_text(_LEFT - 6, y + 4, f"{_round(top * part)}{unit}", "end"))
    return "".join(parts)


def _round(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _free(y: float, taken: list[float]) -> float:
    """The place nearest to `y` that no label has: they must not lie on each other."""
    apart, steps = 12, 8 * (len(taken) + 1)
    places = [y + 3 * step for near in range(steps) for step in (near, -near)]
    inside = [place for place in places if _TOP <= place <= HEIGHT - _BOTTOM]
    free = [
        position for position in inside if all(abs(position - other) >= apart for other in taken)
    ]
    position = (free or inside or [y])[0]
    taken.append(position)
    return position


def _text(
    x: float, y: float, text: str, anchor: str = "start", colour: str = "currentColor"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="11" text-anchor="{anchor}" '
        f'fill="{colour}">{escape(text)}</text>'
    )


def _short(name: str) -> str:
    """Both ends tell lines apart: the group in front, the broker behind."""
    half = _NAME // 2
    return name if len(name) <= _NAME else f"{name[: half - 1]}…{name[-half:]}"


def _svg(parts: Sequence[str], what: str) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(what)}" font-family="system-ui, sans-serif">{"".join(parts)}</svg>'
    )
