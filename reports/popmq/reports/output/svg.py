"""Charts as inline SVG. Colours are attributes: what turns a page into PDF or mail drops styles.

Every colour is legible on light and on dark; text takes the page's own colour.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from html import escape

WIDTH, HEIGHT = 1_100, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 250, 12, 28
_TICKS = 7  # at most so many times on an axis
# Seconds between them.
_APART_S = (
    *(1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1_800, 3_600, 7_200, 10_800, 21_600, 43_200),
    *(86_400, 172_800, 604_800, 1_209_600, 2_592_000),
)
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

    parts = [_axis(top, unit, wide)]
    for at, text in times(first, last):
        x, bottom = place(at, 0)
        parts.append(_line(x, x, _TOP, bottom + 4))
        parts.append(_text(x, HEIGHT - 8, text, "middle"))
    taken: list[float] = []
    # Labels are placed from the top, so that they are in the order of their lines.
    numbered = sorted(enumerate(series.items()), key=lambda line: -line[1][1][-1][1])
    for number, (name, values) in numbered:
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in values))
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}"/>')
        x, y = place(*values[-1])
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
        y = _free(y, taken)
        parts.append(_text(x + 8, y + 4, _short(name), colour=colour))
    return _svg(parts, "lag over time")


def times(first: int, last: int) -> Iterator[tuple[int, str]]:
    """Round times between two, in milliseconds, with what is written below them."""
    apart_s = next((s for s in _APART_S if (last - first) / 1_000 / s < _TICKS), _APART_S[-1])
    days = last - first > 86_400_000
    form = "%m-%d" if apart_s >= 86_400 else "%m-%d %H:%M" if days else "%H:%M"
    form += ":%S" if apart_s < 60 else ""
    at = -(-first // (apart_s * 1_000)) * apart_s * 1_000
    while at <= last:
        yield at, datetime.fromtimestamp(at / 1_000, UTC).strftime(form)
        at += apart_s * 1_000


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


def _axis(top: float, unit: str, wide: float) -> str:
    high = HEIGHT - _TOP - _BOTTOM
    parts = []
    for part in (0, 0.5, 1):
        y = _TOP + high * (1 - part)
        parts.append(_line(_LEFT, _LEFT + wide, y, y))
        parts.append(_text(_LEFT - 6, y + 4, f"{_round(top * part)}{unit}", "end"))
    return "".join(parts)


def _line(x1: float, x2: float, y1: float, y2: float) -> str:
    where = f'x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"'
    return f'<line {where} stroke="{_GRID}"/>'


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
