"""The roofline plot as inline SVG: operations a second against operations a byte, both logarithmic."""

from __future__ import annotations

import math
from html import escape

from triops.acceptance.ceilings import Ceilings
from triops.acceptance.results import Result

_COLOURS = ("#2a78c8", "#d9622b", "#2b9a66", "#a04bbf", "#c03a4b", "#8a6d1d", "#1c98a8", "#6b7280")
_WIDTH, _HEIGHT = 520, 350
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 508, 12, 298


def mark(index: int) -> str:
    """The small sign of an operator, for headings and legends."""
    return f'<svg class="mark" viewBox="-8 -8 16 16" aria-hidden="true">{_shape(0, 0, index)}</svg>'


def _shape(x: float, y: float, index: int, size: float = 5) -> str:
    colour, kind = _COLOURS[index % len(_COLOURS)], index // len(_COLOURS) % 3
    if kind == 0:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size}" fill="{colour}"/>'
    if kind == 1:
        s = size * 1.3
        return f'<path d="M{x:.1f} {y - s:.1f}l{s} {s}l-{s} {s}l-{s} -{s}z" fill="{colour}"/>'
    return f'<rect x="{x - size:.1f}" y="{y - size:.1f}" width="{2 * size}" height="{2 * size}" fill="{colour}"/>'


def plot(results: list[Result], operators: list[str], ceilings: Ceilings, only: str | None = None) -> str:
    """All timed cases; with `only`, that operator's in colour and the others as grey ground."""
    points = [
        (r.ops / r.bytes, r.ops / r.seconds, r) for r in results if r.seconds and r.bytes > 0 and r.ops > 0
    ]  # fmt: skip
    if not points:
        return ""
    ridge = ceilings.vector / ceilings.bandwidth
    x_low = math.floor(math.log10(min(*(p[0] for p in points), ridge)))
    x_high = math.ceil(math.log10(max(*(p[0] for p in points), ridge) * 2))
    y_low = math.floor(math.log10(min(p[1] for p in points)))
    y_high = math.ceil(math.log10(max(*(p[1] for p in points), ceilings.vector) * 1.2))

    def x(value: float) -> float:
        return _LEFT + (math.log10(value) - x_low) / (x_high - x_low) * (_RIGHT - _LEFT)

    def y(value: float) -> float:
        return _BOTTOM - (math.log10(value) - y_low) / (y_high - y_low) * (_BOTTOM - _TOP)

    parts = [f'<svg class="plot" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="Roofline plot">']
    for decade in range(x_low, x_high + 1):
        at = x(10.0**decade)
        parts.append(f'<line class="grid" x1="{at:.1f}" y1="{_TOP}" x2="{at:.1f}" y2="{_BOTTOM}"/>')
        parts.append(f'<text x="{at:.1f}" y="{_BOTTOM + 19}" text-anchor="middle">{_power(decade)}</text>')
    step = max(1, (y_high - y_low) // 5)
    for decade in range(y_low, y_high + 1, step):
        at = y(10.0**decade)
        parts.append(f'<line class="grid" x1="{_LEFT}" y1="{at:.1f}" x2="{_RIGHT}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{_power(decade - 9)}</text>')
    parts.append(f'<text x="{(_LEFT + _RIGHT) / 2}" y="{_HEIGHT - 8}" text-anchor="middle">operations a byte</text>')
    middle = (_TOP + _BOTTOM) / 2
    parts.append(f'<text transform="translate(13 {middle}) rotate(-90)" text-anchor="middle">')
    parts.append("G operations a second</text>")
    # The roof meets the left border either on the slope or, if that is below the plot, on the bottom.
    start = max(10.0**x_low, 10.0**y_low / ceilings.bandwidth)
    corner = f"{x(ridge):.1f},{y(ceilings.vector):.1f}"
    parts.append(
        f'<polyline class="roof" points="{x(start):.1f},{y(start * ceilings.bandwidth):.1f} {corner} '
        f'{_RIGHT},{y(ceilings.vector):.1f}"/>'
    )
    order = sorted(points, key=lambda p: (p[2].operator == only, p[2].scale == "network"))
    for intensity, rate, r in order:
        words = f"{r.operator}, {r.case}, {r.dtype}: {r.seconds * 1e6:,.1f} us" if r.seconds else ""
        index = operators.index(r.operator)
        faded = ' class="faded"' if only is not None and r.operator != only else ""
        shape = _shape(x(intensity), y(rate), index, 5 if r.scale == "network" else 2.2)
        parts.append(f"<g{faded}><title>{escape(words)}</title>{shape}</g>")
    parts.append("</svg>")
    return "".join(parts)


def _power(decade: int) -> str:
    if -3 <= decade <= 3:
        return f"{10.0**decade:g}"
    return f'10<tspan dy="-5" font-size="9">{decade}</tspan>'
