"""A KITTI result for people: rows for the terminal, and one HTML file with precision-recall plots, nothing fetched."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files

import numpy as np

from triops.data.kitti_labels import Floats
from triops.evaluate.kitti_protocol import DIFFICULTIES, METRICS, OVERLAP_SETS, KittiResult

HEADS = ("", *(f"{d} R{points}" for points in (40, 11) for d in ("easy", "mod.", "hard")))
NUMBERS = HEADS[1:]
OPTIONAL = HEADS[:3:-1]  # R11, where the terminal is narrow
SHOWN_PROBLEMS = 20

METRIC_NAMES = {"2D": "2D boxes", "BEV": "bird's-eye view", "3D": "3D boxes", "AOS": "orientation (AOS)"}
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 336, 250, 46, 12, 10, 38
STYLE = """
.curves { display: grid; grid-template-columns: repeat(auto-fill, minmax(300px, 1fr)); gap: 8px 24px; }
.curves figure { margin: 0; } .curves figcaption { font-weight: 600; font-size: 14px; }
.curves .plot { max-width: 400px; } .curves .plot text { font-size: 12px; }
.curve { fill: none; stroke-width: 2; stroke-linejoin: round; }
.easy { stroke: var(--good); } .moderate { stroke: var(--bar); } .hard { stroke: var(--low); }
.loose { stroke-dasharray: 5 4; stroke-width: 1.5; opacity: .8; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; color: var(--dim); font-size: 14px; }
.legend svg { width: 26px; height: 10px; margin-right: 6px; vertical-align: 1px; }
"""


def rows(result: KittiResult) -> list[tuple[str, list[tuple[str, ...]]]]:
    """Groups of rows under `HEADS`, one group per class. "-" where there is nothing to find, or no angles."""
    groups = []
    for c, name in enumerate(result.classes):
        lines = []
        for m, metric, s, limit in _lines(result, c):
            cells = [
                _percent(values[c, m, s, d], result.objects[c, d])
                for values in (result.r40, result.r11)
                for d in range(len(DIFFICULTIES))
            ]
            lines.append((f"{metric} at {limit:.2f}", *cells))
        objects = " / ".join(f"{count:,}" for count in result.objects[c])
        groups.append((f"{name}: {objects} objects {' / '.join(DIFFICULTIES)}", lines))
    return groups


def _lines(result: KittiResult, c: int) -> list[tuple[int, str, int, float]]:
    """Metric and overlap set of each line; a loose overlap that is the strict one is not repeated."""
    found = []
    for s in range(len(OVERLAP_SETS)):
        for m, metric in enumerate(METRICS):
            limit = float(result.min_overlaps[c, m, s])
            if s == 0 or limit != result.min_overlaps[c, m, 0]:
                found.append((m, metric, s, limit))
    return found


def _percent(value: float, objects: int) -> str:
    return "-" if np.isnan(value) or not objects else f"{value:.2f}"


def headline(result: KittiResult) -> str:
    """One sentence: how much was evaluated, and whether anything was wrong."""
    wrong = len(result.problems)
    said = f"; {wrong:,} {'problem' if wrong == 1 else 'problems'}" if wrong else ""
    return f"{result.frames:,} {'frame' if result.frames == 1 else 'frames'} evaluated{said}"


def shown_problems(problems: Sequence[str]) -> list[str]:
    """The first ones, and how many more there are."""
    more = len(problems) - SHOWN_PROBLEMS
    return [*problems[:SHOWN_PROBLEMS], *([f"and {more:,} more"] if more > 0 else [])]


def html(result: KittiResult, title: str = "KITTI evaluation") -> str:
    """One HTML page."""
    style = files("triops.acceptance").joinpath("report.css").read_text(encoding="utf-8") + STYLE
    verdict = "bad" if result.problems else ""
    body = [
        f'<header><p class="name">triops eval kitti</p><h1>{escape(title)}</h1>',
        f'<p class="{verdict}">{escape(headline(result))}.</p></header>',
        _notes(result),
        *(_class_section(result, c) for c in range(len(result.classes))),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body><main>{''.join(body)}</main></body></html>\n"
    )


def _notes(result: KittiResult) -> str:
    lines = "".join(f"<li>{escape(text)}</li>" for text in result.problems)
    problems = f'<section class="failures"><h2>Problems</h2><ul>{lines}</ul></section>' if lines else ""
    return problems + "".join(f'<p class="dim">{escape(text)}</p>' for text in result.remarks)


def _class_section(result: KittiResult, c: int) -> str:
    heads = "".join(f"<th class=n>{escape(head)}</th>" for head in HEADS[1:])
    title, lines = rows(result)[c]
    table = "".join(
        f"<tr><td>{escape(row[0])}</td>{''.join(f'<td class=n>{cell}</td>' for cell in row[1:])}</tr>" for row in lines
    )
    plots = "".join(_figure(result, c, m) for m in range(len(METRICS)))
    return (
        f"<section><h2>{escape(title)}</h2>"
        f'<div class="scroll"><table><thead><tr><th></th>{heads}</tr></thead><tbody>{table}</tbody></table></div>'
        f'{_legend()}<div class="curves">{plots}</div></section>'
    )


def _legend() -> str:
    def entry(kind: str, words: str) -> str:
        return f'<span><svg viewBox="0 0 26 10"><path class="curve {kind}" d="M0 5H26"/></svg>{escape(words)}</span>'

    entries = [entry(d, d) for d in DIFFICULTIES]
    return f'<p class="legend">{"".join(entries)}{entry("moderate loose", "dashed: loose overlap")}</p>'


def _figure(result: KittiResult, c: int, m: int) -> str:
    metric = METRICS[m]
    lines, limits = [], []
    for index, _, s, limit in _lines(result, c):
        if index != m:
            continue
        limits.append(f"{limit:.2f}")
        for d, difficulty in enumerate(DIFFICULTIES):
            values = result.precision[c, m, s, d]
            kind = f"{difficulty} {OVERLAP_SETS[s] if s else ''}".strip()
            ap = _percent(result.r40[c, m, s, d], result.objects[c, d])
            lines.append(_curve(values, kind, f"{difficulty}, overlap {limit:.2f}: AP {ap}"))
    name = f"{METRIC_NAMES[metric]} at {' and '.join(limits)}"
    upward = "similarity" if metric == "AOS" else "precision"
    return (
        f"<figure><figcaption>{escape(name)}</figcaption>"
        f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(name)}">'
        f"{_axes(upward)}{''.join(lines)}</svg></figure>"
    )


def _x(recall: float) -> float:
    return LEFT + recall * (WIDTH - LEFT - RIGHT)


def _y(precision: float) -> float:
    return TOP + (1 - precision) * (HEIGHT - TOP - BOTTOM)


def _axes(upward: str) -> str:
    parts = []
    for k in range(5):
        share = k / 4
        parts.append(f'<path class="grid" d="M{_x(0):.1f} {_y(share):.1f}H{_x(1):.1f}"/>')
        parts.append(f'<path class="grid" d="M{_x(share):.1f} {_y(0):.1f}V{_y(1):.1f}"/>')
        parts.append(f'<text x="{_x(0) - 6:.1f}" y="{_y(share) + 4:.1f}" text-anchor="end">{share:g}</text>')
        parts.append(f'<text x="{_x(share):.1f}" y="{_y(0) + 15:.1f}" text-anchor="middle">{share:g}</text>')
    middle = (_y(0) + _y(1)) / 2
    parts.append(f'<text x="{(_x(0) + _x(1)) / 2:.1f}" y="{HEIGHT - 6}" text-anchor="middle">recall</text>')
    parts.append(
        f'<text x="12" y="{middle:.1f}" text-anchor="middle" transform="rotate(-90 12 {middle:.1f})">{upward}</text>'
    )
    return "".join(parts)


def _curve(values: Floats, kind: str, words: str) -> str:
    """A line to the highest recall that is reached."""
    reached = np.flatnonzero(np.nan_to_num(values) > 0)
    if not len(reached):
        return ""
    samples = len(values) - 1
    points = " ".join(f"{_x(i / samples):.1f},{_y(float(values[i])):.1f}" for i in range(int(reached[-1]) + 1))
    return f'<polyline class="curve {kind}" points="{points}"><title>{escape(words)}</title></polyline>'
