"""Charts as inline SVG: nothing to load, and coloured by the page's style sheet, so that they follow light, dark and print.

`style` is a class of the style sheet: `s0` is the base, `s1` ... the slots, each the same colour all over the page. A chart carries a
sentence for those who cannot see it; the exact figures stand in a table beside it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from markupsafe import Markup

from trace_jax.report.text import figure, number, percent, percent_interval, visible

_POINTS = 200  # of one curve; more cannot be told apart in its width
_NARROW = 350  # pixels that a phone has for a chart


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bar:
    """A share in [0, 1] with its interval."""

    label: str
    value: float
    interval: Sequence[float] | None = None
    style: str = "s0"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Series:
    """A curve; it is interrupted where `y` is None.

    Attributes:
      dash: 0 a whole line, 1 to 3 broken ones, so that curves can be told apart without colours.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    style: str = "s1"
    dash: int = 0


def bars(rows: Sequence[Bar], title: str, line: Bar | None = None) -> Markup:
    """Horizontal bars with whiskers, and a vertical line for what they are to be seen against; on a narrow screen labels stand above."""
    return _either(_bars(rows, title, line, left=246, step=27, width=640), _bars(rows, title, line, left=0, step=44, width=_NARROW))


def _bars(rows: Sequence[Bar], title: str, line: Bar | None, *, left: int, step: int, width: int) -> Markup:
    right, top = 58, 24
    end = min(1.0, math.ceil(10 * max([row.interval[1] if row.interval else row.value for row in rows], default=0.1) + 1e-9) / 10)
    bottom = top + step * len(rows)

    def x(value: float) -> float:
        return left + (width - left - right) * value / end

    parts = []
    for tick in range(0, round(10 * end) + 1, 2 if end > 0.5 else 1):
        at = x(tick / 10)
        parts += [_line(at, top, at, bottom, "rule"), _text(at, bottom + 16, f"{10 * tick} %", "middle" if at else "start", "tick")]
    for n, row in enumerate(rows):
        y = top + step * n + step / 2 + (0 if left else 8)
        parts.append(_text(left - 10, y + 4, row.label, "end") if left else _text(0, y - 13, row.label, "start"))
        parts.append(_rect(left, y - 8, x(row.value) - left, 16, f"bar {row.style}"))
        if row.interval:
            low, high = (x(value) for value in row.interval)
            for style in ("halo", "whisker"):
                parts += [_line(low, y, high, y, style), _line(low, y - 4, low, y + 4, style), _line(high, y - 4, high, y + 4, style)]
        parts.append(_text(x(max(row.value, *(row.interval or (0.0,)))) + 7, y + 4, percent(row.value), "start", "value"))
    if line:
        at = x(line.value)
        parts += [_line(at, top - 6, at, bottom, "floor"), _text(at + 4, top - 9, line.label, "start", "tick")]
    said = "; ".join(f"{row.label} {percent(row.value)}" + (f" ({percent_interval(row.interval)})" if row.interval else "") for row in rows)
    return _svg(width, bottom + 24, f"{title}: {said}" + (f"; {line.label}" if line else ""), parts)


def lines(
    series: Sequence[Series],
    title: str,
    x_label: str,
    *,
    span: tuple[float, float] | None = None,
    size: tuple[int, int] = (360, 190),
    shares: bool = False,
    levels: Sequence[Bar] = (),
    dots: bool = False,
) -> Markup:
    """Curves over one x axis.

    Args:
      span: of the y axis; by default that of the data.
      shares: whether y is a share, written in per cent.
      levels: horizontal lines to compare with, labelled at their right end.
      dots: whether every point has one.
    """
    width, height = size
    places = _legend([one.name for one in series], width) if len(series) > 1 else []
    left, right, top, bottom = 44, 20, 10 + (places[-1][1] + 6 if places else 0), height - 34
    series = [_thinned(one) for one in series]
    ys = [y for one in series for y in one.y if y is not None] + [level.value for level in levels]
    xs = [x for one in series for x in one.x] or [0.0]
    if not ys:
        return Markup("")
    y_ticks = ticks(*(span or (min(ys), max(ys))))
    low, high = y_ticks[0], y_ticks[-1]
    first, last = min(xs), max(max(xs), min(xs) + 1)

    def place(x: float, y: float) -> tuple[float, float]:
        return left + (width - left - right) * (x - first) / (last - first), bottom - (bottom - top) * (y - low) / (high - low)

    parts = []
    for tick in y_ticks:
        y = place(first, tick)[1]
        parts += [_line(left, y, width - right, y, "rule"), _text(left - 6, y + 4, _tick(tick, shares), "end", "tick")]
    for tick in (tick for tick in ticks(first, last, whole=True) if first <= tick <= last):
        parts.append(_text(place(tick, low)[0], bottom + 15, _tick(tick), "middle", "tick"))
    parts.append(_text((left + width - right) / 2, height - 4, x_label, "middle", "tick"))
    for level in levels:
        y = place(first, level.value)[1]
        parts += [_line(left, y, width - right, y, f"level {level.style}"), _text(width - right, y - 5, level.label, "end", "tick")]
    for one in series:
        style = f"{one.style} dash{one.dash}" if one.dash else one.style
        for piece in _pieces(one):
            spots = [place(x, y) for x, y in piece]
            if len(spots) > 1:
                drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
                parts.append(Markup('<polyline class="curve {}" points="{}"/>').format(style, drawn))
            if dots or len(spots) == 1:
                parts += [Markup('<circle class="dot {}" cx="{:.1f}" cy="{:.1f}" r="3"/>').format(one.style, *spot) for spot in spots]
    for (x, y), one in zip(places, series, strict=False):
        style = f"{one.style} dash{one.dash}" if one.dash else one.style
        parts += [_line(x, y, x + 22, y, f"curve {style}"), _text(x + 27, y + 4, one.name, "start", "tick")]
    return _svg(width, height, f"{title}: " + "; ".join(_said(one, x_label, shares) for one in series), parts)


def histogram(shares: Iterable[float], title: str, style: str = "s1", bins: int = 8) -> Markup:
    """How many seeds have which share of successes, `bins + 1` columns from 0 to 1."""
    counts = [0] * (bins + 1)
    for share in shares:
        counts[round(share * bins)] += 1
    width, height, left, top = 300, 130, 10, 18
    bottom, step, most = height - 34, (width - 2 * left) / len(counts), max(max(counts), 1)
    parts = [_line(left, bottom, width - left, bottom, "rule")]
    for n, count in enumerate(counts):
        tall = (bottom - top) * count / most
        parts.append(_rect(left + n * step + 2, bottom - tall, step - 4, tall, f"bar {style}"))
        if count:
            parts.append(_text(left + (n + 0.5) * step, bottom - tall - 4, str(count), "middle", "tick"))
        if n % (bins // 4) == 0:
            parts.append(_text(left + (n + 0.5) * step, bottom + 14, f"{100 * n / bins:.0f} %", "middle", "tick"))
    parts.append(_text(width / 2, height - 4, "successful rollouts of a seed", "middle", "tick"))
    said = ", ".join(f"{count} at {100 * n / bins:.0f} %" for n, count in enumerate(counts) if count)
    return _svg(width, height, f"{title}, seeds by share of successful rollouts: {said or 'none'}", parts)


def stacks(rows: Mapping[str, Sequence[tuple[str, float, str]]], title: str, *, left: int = 90, step: int = 0) -> Markup:
    """One bar of full width for each row, cut into (name, share, style).

    Args:
      left: room for the names of the rows.
      step: from row to row; by default narrower for many.
    """
    step = step or (20 if len(rows) <= 12 else 12)
    return _either(*(_stacks(rows, title, left, step, width) for width in (640, _NARROW)))


def _stacks(rows: Mapping[str, Sequence[tuple[str, float, str]]], title: str, left: int, step: int, width: int) -> Markup:
    parts, said = [], []
    for n, (label, pieces) in enumerate(rows.items()):
        x, y = float(left), n * step
        parts.append(_text(left - 8, y + step / 2 + 4, label, "end", "tick"))
        for _, share, style in pieces:
            wide = (width - left) * share
            parts.append(_rect(x, y + 1, wide, step - 2, f"bar {style}"))
            if wide > 44 and step >= 20:
                parts.append(_text(x + wide / 2, y + step / 2 + 4, f"{100 * share:.0f} %", "middle", "inside"))
            x += wide
        said.append(f"{label}: " + ", ".join(f"{name} {100 * share:.0f} %" for name, share, _ in pieces))
    return _svg(width, max(step * len(rows), 1), f"{title}: " + "; ".join(said), parts)


def whisker(value: float, interval: Sequence[float] | None, bound: float | None, title: str, style: str = "s1") -> Markup:
    """A dot with its interval between -0.25 and 1, and the bound that it must reach; small enough for a table's cell."""
    width, height = 130, 22

    def x(value: float) -> float:
        return 4 + (width - 8) * (min(max(value, -0.25), 1.0) + 0.25) / 1.25

    parts = [_line(x(0), 3, x(0), height - 3, "rule"), _line(x(-0.25), height / 2, x(1), height / 2, "rule")]
    if bound is not None:
        parts.append(_line(x(bound), 2, x(bound), height - 2, "floor"))
    if interval:
        parts.append(_line(x(interval[0]), height / 2, x(interval[1]), height / 2, f"curve {style}"))
    parts.append(Markup('<circle class="dot {}" cx="{:.1f}" cy="{}" r="4"/>').format(style, x(value), height // 2))
    said = f"{title} {figure(value)}" + (f", interval {figure(interval[0])} to {figure(interval[1])}" if interval else "")
    return _svg(width, height, said + (f", bound {figure(bound)}" if bound is not None else ""), parts)


def ticks(low: float, high: float, count: int = 4, *, whole: bool = False) -> list[float]:
    """Round numbers, about `count` steps of them, from the last at or below `low` to the first at or above `high`."""
    if high - low < 1e-9 * max(1.0, abs(high)):
        low, high = low - 0.5 * (abs(low) or 1.0), high + 0.5 * (abs(high) or 1.0)
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= 0.75 * raw)
    step = max(1.0, step) if whole else step
    return [n * step for n in range(math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9) + 1)]


def _thinned(one: Series) -> Series:
    stride = math.ceil(len(one.x) / _POINTS)
    keep = [n for n in range(len(one.x)) if n % stride == 0 or n == len(one.x) - 1] if stride > 1 else range(len(one.x))
    return dataclasses.replace(one, x=[one.x[n] for n in keep], y=[one.y[n] for n in keep])


def _legend(names: Sequence[str], width: float) -> list[tuple[float, float]]:
    """Where each name stands: one beside the other, in as many rows as they need."""
    places, x, y = [], 44.0, 10.0
    for name in names:
        wide = 27 + 7.2 * len(name)
        if places and x + wide > width:
            x, y = 44.0, y + 17
        places.append((x, y))
        x += wide + 16
    return places


def _pieces(one: Series) -> list[list[tuple[float, float]]]:
    pieces: list[list[tuple[float, float]]] = [[]]
    for x, y in zip(one.x, one.y, strict=True):
        if y is None:
            pieces.append([])
        else:
            pieces[-1].append((x, y))
    return [piece for piece in pieces if piece]


def _said(one: Series, x_label: str, shares: bool) -> str:
    known = [(x, y) for x, y in zip(one.x, one.y, strict=True) if y is not None]
    if not known:
        return f"{one.name} without figures"
    (x0, y0), (x1, y1) = known[0], known[-1]
    return f"{one.name} from {_tick(y0, shares)} at {x_label} {_tick(x0)} to {_tick(y1, shares)} at {_tick(x1)}"


def _tick(value: float, shares: bool = False) -> str:
    if shares:
        return f"{number(100 * value)} %"
    return number(value)


def _either(roomy: Markup, narrow: Markup) -> Markup:
    """Two drawings of one chart, of which the style sheet shows the one that fits the screen: text in it must not shrink with it."""
    return Markup('<div class="roomy">{}</div><div class="tight">{}</div>').format(roomy, narrow)


def _svg(width: float, height: float, title: str, parts: Iterable[Markup]) -> Markup:
    body = Markup("").join(parts)
    frame = Markup('<svg class="chart" viewBox="0 0 {0} {1}" width="{0}" height="{1}" role="img" aria-label="{2}">{3}</svg>')
    return frame.format(width, height, visible(title), body)


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> Markup:
    return Markup('<line class="{}" x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"/>').format(style, x1, y1, x2, y2)


def _rect(x: float, y: float, width: float, height: float, style: str) -> Markup:
    return Markup('<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/>').format(style, x, y, max(width, 0.0), height)


def _text(x: float, y: float, text: str, anchor: str, style: str = "") -> Markup:
    return Markup('<text class="{}" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(style, x, y, anchor, visible(text))
