"""report.json for programs, and report.html for people: one file, no scripts, nothing fetched from anywhere."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable
from html import escape
from importlib.resources import files
from pathlib import Path

from triops import _sample
from triops._op import OPERATORS
from triops.acceptance.results import Report, Result, as_json, show_bytes, show_time
from triops.acceptance.roofline import mark, plot

MEASURES = ("diff1", "diff2", "diff3", "diff4")


def write(report: Report, folder: Path) -> tuple[Path, Path]:
    """Write report.html and report.json; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    page, data = folder / "report.html", folder / "report.json"
    data.write_text(json.dumps(as_json(report), indent=1, allow_nan=False) + "\n")
    page.write_text(html(report), encoding="utf-8")
    return page, data


def show_diff(value: float | None) -> str:
    if value is None:
        return "-"
    return "0" if value == 0 else f"{value:.2g}" if 0.01 <= value < 1000 else f"{value:.1e}".replace("e-0", "e-")


def headline(report: Report) -> str:
    """One sentence: what came of it."""
    count, failed = len(report.results), len(report.failed)
    parts = []
    if report.interrupted_of is not None:
        parts.append(f"stopped after {count:,} of {report.interrupted_of:,} cases")
    parts.append(f"{failed:,} of {count:,} cases failed" if failed else f"{_count(count, 'case')} passed")
    judged = [r.efficiency.reached for r in report.results if r.efficiency and r.efficiency.line is not None]
    if judged:
        which = "" if len(judged) == count else " timed cases"
        parts.append(f"{sum(judged):,} of {len(judged):,}{which} reach the efficiency target")
    if report.not_refused:
        parts.append(f"{_count(len(report.not_refused), 'malformed call')} not refused as they should be")
    if report.baseline:
        parts.append(f"{len(report.regressions) or 'none'} slower or larger than in {report.baseline}")
    return "; ".join(parts)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:]


def html(report: Report) -> str:
    style = files("triops.acceptance").joinpath("report.css").read_text(encoding="utf-8")
    names = list(dict.fromkeys(r.operator for r in report.results))
    machine = report.environment["gpu" if report.device == "cuda" else "cpu"]
    scope = "quick: small cases, and the demo's at network scale" if report.quick else "full"
    verdict = "good" if report.passed else "bad"
    sentence = escape(_sentence(headline(report)))
    body = [
        f'<header><p class="name">triops check</p><h1 class="{verdict}">{sentence}</h1>',
        f"<p>{escape(report.device)}: {escape(machine)}. {scope}"
        f"{f', seed {report.seed}' if report.seed else ''}. {datetime.datetime.now():%Y-%m-%d %H:%M}.</p></header>",
        _tiles(report),
        _failures(report),
        _networks(report),
        _overview(report, names),
        *(_operator(report, name, i) for i, name in enumerate(names)),
        _bad_calls(report),
        _environment(report),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>triops check: {escape(headline(report))}</title><style>{style}</style></head>"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _tiles(report: Report) -> str:
    timed = [r for r in report.results if r.seconds is not None]
    network = [r for r in timed if r.scale == "network"]
    reached = sum(1 for r in network or timed if r.efficiency and r.efficiency.reached)
    which = "network-scale cases" if network else "timed cases"
    tiles = [
        (f"{len(report.results) - len(report.failed):,} / {len(report.results):,}", "cases right", not report.failed),
        (f"{reached} / {len(network or timed)}", f"{which} reach their efficiency", None),
    ]
    if report.bad_calls:
        refused = len(report.bad_calls) - len(report.not_refused)
        tiles.insert(1, (f"{refused:,} / {len(report.bad_calls):,}", "malformed calls refused", not report.not_refused))
    if report.baseline:
        tiles.append((str(len(report.regressions)), "slower or larger than before", not report.regressions))
    cells = []
    for number, words, good in tiles:
        mood = "" if good is None else " good" if good else " bad"
        cells.append(f'<div class="tile{mood}"><b>{number}</b><span>{words}</span></div>')
    return f'<section class="tiles">{"".join(cells)}</section>'


def _failures(report: Report) -> str:
    rows = [
        f"<li><b>{escape(r.operator)}</b> {escape(r.case)}, {r.dtype}, {r.backend}: "
        f"{escape('; '.join(r.failures))}</li>"
        for r in report.failed
    ]
    rows += [f"<li><b>{escape(b.name)}</b>: {escape(b.failure)}</li>" for b in report.not_refused]
    rows += [
        f"<li><b>{escape(r.operator)}</b> {escape(r.case)}, {r.dtype}: {escape('; '.join(r.regressions))}</li>"
        for r in report.regressions
    ]
    return f'<section class="failures"><h2>What fails</h2><ul>{"".join(rows)}</ul></section>' if rows else ""


def _networks(report: Report) -> str:
    if not report.networks:
        return ""
    rows = []
    for network in report.networks:
        slowest = sorted(network.results, key=lambda r: -r.calls * (r.seconds or 0))[:3]
        shares = ", ".join(
            f"{_breakable(r.operator)} {r.calls * r.seconds / network.seconds:.0%}" for r in slowest if r.seconds
        )
        left_out = (
            f"<small>{_count(network.not_run, 'case')} not made up from shapes</small>" if network.not_run else ""
        )
        rows.append(
            f"<tr><td>{escape(network.name)}<small>most time: {shares or 'not timed'}</small>{left_out}</td>"
            f"<td class='n wide'>{network.operators}</td><td class=n>{len(network.results):,}</td>"
            f"<td class=n>{network.calls:,}</td><td class='n wide'>{show_time(network.seconds or None)}</td>"
            f"<td>{_verdict(not network.wrong, f'{network.wrong} wrong')}</td></tr>"
        )
    table = _table(("network", "nw:operators", "n:cases", "n:calls", "nw:time of all calls", "accuracy"), rows)
    words = "What the recorded programs called: each different call is a case, checked and timed once."
    return f"<section><h2>Networks</h2><p>{words}</p>{table}</section>"


def _overview(report: Report, names: list[str]) -> str:
    rows = []
    for i, name in enumerate(names):
        results = [r for r in report.results if r.operator == name]
        wrong = sum(not r.passed for r in results)
        best = [r for r in results if r.efficiency and r.scale == "network"] or [r for r in results if r.efficiency]
        share = max((r.efficiency.best for r in best if r.efficiency), default=None)
        rows.append(
            f'<tr><td class=op>{mark(i)}<a href="#{name}">{_breakable(name)}</a></td>'
            f"<td class='n wide'>{len(results)}</td><td>{_verdict(not wrong, f'{wrong} wrong')}</td>"
            f"<td class=n>{_bar(share, None)}</td></tr>"
        )
    table = _table(("operator", "nw:cases", "accuracy", "n:best efficiency"), rows)
    if not report.ceilings:
        return f"<section><h2>Operators</h2>{table}</section>"
    c = report.ceilings
    words = (
        "Each mark is a timed case, small where the case is. The line is the most this machine gives, measured in "
        f"this run: {c.bandwidth / 1e9:,.0f} GB/s by a large copy, {c.vector / 1e9:,.0f} G float32 operations a "
        "second by a product of matrices. A mark above the line worked in the caches, or avoids work that the theory "
        "counts; one far below is too small, or waits for something other than bandwidth and arithmetic."
    )
    return (
        f"<section><h2>Operators</h2>{table}<h3>How near the machine's limits</h3><p>{words}</p>"
        f"{plot(report.results, names, c)}</section>"
    )


def _operator(report: Report, name: str, index: int) -> str:
    results = [r for r in report.results if r.operator == name]
    timed = [r for r in results if r.seconds is not None]
    standard = _sample.standard_of(OPERATORS[name])
    kinds = dict.fromkeys(j.kind for r in results for j in r.judgements)
    thresholds = f"{show_diff(standard.float32)} in float32 and {show_diff(standard.half)} in half types"
    words = {
        "exact": "index outputs equal the reference bit for bit",
        "static": f"float outputs within {thresholds} of the float64 reference (diff1, diff2, peak)",
        "dynamic": "float outputs within ten times what plain torch loses at the same dtype against the float64 "
        f"reference, or {thresholds}",
    }
    if standard.floats == "exact":
        words["exact"] = "every output equals the reference bit for bit"
    asked = "; ".join(words[k] for k in kinds)
    flips = sum(r.flips for r in results)
    parts = [f'<section id="{name}"><h2>{mark(index)}{_breakable(name)}</h2>']
    parts.append(f"<p>{asked[:1].upper()}{asked[1:]}.")
    if flips:
        values = f"{flips:,} values" if flips > 1 else "one value"
        parts.append(f" In {values} float64 decides otherwise: a rounding flips a predicate or overflows.")
    parts.append(f" {_stability_words(results)}</p>")
    if timed:
        parts.append(_times(timed, report.device))
        if report.ceilings:
            names = list(dict.fromkeys(r.operator for r in report.results))
            picture = plot(report.results, names, report.ceilings, name)
            parts.append(f"<details><summary>Roofline of {escape(name)}</summary>{picture}</details>")
    wrong = sum(not r.passed for r in results)
    summary = f"{len(results)} cases, {f'{wrong} wrong' if wrong else 'all right'}: accuracy of each"
    parts.append(
        f"<details{' open' if wrong else ''}><summary>{summary}</summary>{_accuracy(results)}</details></section>"
    )
    return "".join(parts)


def _stability_words(results: list[Result]) -> str:
    """How much results change from run to run, and with the number of CPU threads."""
    found = [r.stability for r in results if r.stability]
    if not found:
        return ""
    runs, across = max(s.run_to_run for s in found), [s.across_threads for s in found if s.across_threads is not None]
    threads = max(across, default=0.0)
    if not runs and not threads:
        return f"The same bits on every run{' and with every number of threads' if across else ''}."
    words = f"From run to run a value changes by at most {show_diff(runs)} of the largest"
    return f"{words}; with the number of threads, by {show_diff(threads)}." if across else f"{words}."


def _times(timed: list[Result], device: str) -> str:
    rows = []
    graphs = device == "cuda"  # elsewhere a call has only one time
    for r in timed:
        e = r.efficiency
        assert e is not None
        assert r.seconds is not None
        worse = f"<small class=bad>{escape('; '.join(r.regressions))}</small>" if r.regressions else ""
        eager = f"<td class='n wide'>{show_time(r.eager_seconds)}</td>"
        gigabytes, operations = r.bytes / r.seconds / 1e9, r.ops / r.seconds / 1e9
        rows.append(
            f"<tr><td>{escape(r.case)}<small>{r.scale}, {r.dtype}</small>{worse}</td>"
            f"<td class=n>{show_time(r.seconds)}</td>{eager if graphs else ''}"
            f"<td class='n wide'>{show_bytes(r.workspace)}</td><td class='n wide'>{gigabytes:,.1f}</td>"
            f"<td class='n wide'>{operations:,.1f}</td><td class=wide>{e.bound}</td>"
            f"<td class=n>{_bar(e.best, e.line)}</td></tr>"
        )
    eager_head = ["nw:eager"] if graphs else []
    rates = ("nw:workspace", "nw:GB/s", "nw:Gop/s", "w:bound by", "n:efficiency")
    heads = ("case", "n:time", *eager_head, *rates)
    reasons: dict[str, list[str]] = {}
    for r in timed:
        if r.efficiency and not r.efficiency.reached:
            reasons.setdefault(r.efficiency.why, []).append(f"{r.case} ({r.dtype})")
    notes = "".join(
        f"<li>{escape(why)}: <span class=dim>{escape('; '.join(cases))}</span></li>" for why, cases in reasons.items()
    )
    below = ""
    if count := sum(map(len, reasons.values())):
        shown = " open" if count <= 6 else ""
        summary = f"{count} of {len(timed)} below the line, and why"
        below = f"<details class=below{shown}><summary>{summary}</summary><ul>{notes}</ul></details>"
    return _table(heads, rows) + below


def _accuracy(results: list[Result]) -> str:
    rows = []
    for r in results:
        baseline = "/".join(dict.fromkeys(j.baseline for j in r.judgements))
        diffs = "".join(
            f"<td class='n{'' if m == 'diff1' else ' wide'}'>{show_diff(r.worst(m))}</td>" for m in MEASURES
        )
        note = f"<small class=bad>{escape('; '.join(r.failures))}</small>" if r.failures else ""
        rows.append(
            f"<tr><td>{escape(r.case)}<small>{r.scale}, {r.backend}, {r.dtype}</small>{note}</td>{diffs}"
            f"<td class=wide>{baseline}</td><td class='n wide'>{r.flips or ''}</td>"
            f"<td class='n wide'>{show_diff(r.stability.worst) if r.stability else ''}</td>"
            f"<td>{_verdict(r.passed, 'wrong')}</td></tr>"
        )
    diffs_heads = ("n:diff1", "nw:diff2", "nw:diff3", "nw:diff4")
    return _table(
        ("case", *diffs_heads, "w:baseline", "nw:decided otherwise", "nw:change from run to run", "verdict"), rows
    )


def _bad_calls(report: Report) -> str:
    if not report.bad_calls:
        return ""
    rows = [
        f"<tr><td>{escape(b.name)}</td><td>{escape(b.error)}</td><td>{_verdict(not b.failure, 'not refused')}</td></tr>"
        for b in report.bad_calls
    ]
    table = _table(("malformed call", "error", "verdict"), rows)
    return (
        f"<section><h2>Malformed calls</h2><p>Each must raise this error and say what is wrong.</p>"
        f"<details><summary>{len(rows)} calls</summary>{table}</details></section>"
    )


def _environment(report: Report) -> str:
    pairs = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in report.environment.items())
    return f"<section><h2>Environment</h2><dl>{pairs}</dl></section>"


def _table(heads: Iterable[str], rows: list[str]) -> str:
    """A head is `flags:words`; n: a number, w: left out on a narrow screen."""
    cells = []
    for head in heads:
        flags, _, words = head.rpartition(":")
        kind = " ".join(c for f, c in (("n", "n"), ("w", "wide")) if f in flags)
        cells.append(f"<th class='{kind}'>{words}</th>")
    head, body = f"<thead><tr>{''.join(cells)}</tr></thead>", f"<tbody>{''.join(rows)}</tbody>"
    return f'<div class="scroll"><table>{head}{body}</table></div>'


def _breakable(name: str) -> str:
    return escape(name).replace("_", "_<wbr>")


def _verdict(good: bool, otherwise: str) -> str:
    return '<span class="good">right</span>' if good else f'<span class="bad">{otherwise}</span>'


def _bar(share: float | None, line: float | None) -> str:
    """A share of the machine as a number and a bar, with a tick where the case should be."""
    if share is None:
        return "<span class=dim>not timed</span>"
    low = " low" if line is not None and share < line else ""
    tick = f'<i style="left:{line * 100:.0f}%"></i>' if line is not None else ""
    return (
        f'<span class="share{low}">{share * 100:.{0 if share >= 0.1 else 1}f} %</span>'
        f'<span class="bar{low}"><em style="width:{min(share, 1) * 100:.1f}%"></em>{tick}</span>'
    )
