"""Write docs/results.md, its chart and the tables of all pages that have marks for them from benchmarks/results.

    python benchmarks/results_page.py [--check]

With --check nothing is written; the exit status is 1 when a page is stale.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

import trials

ROOT = Path(__file__).parent.parent
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "results.md"
CHART = ROOT / "docs" / "images" / "results.svg"

HEAD = """# Measured results

How fast each operator is, against whom, and where it is slower than this library wants it to be. First a summary, then
what was measured, case by case. Numbers of other machines are welcome: see
[how they are taken](acceptance.md#performance).

<!-- Generated from benchmarks/results/*.json by `python benchmarks/results_page.py`; do not edit. -->
"""

SUMMARY_WORDS = """
**ratio**: how many times longer the other takes: for each operator the median over its cases, and of these the median,
the lowest and the highest. **bar**: the least ratio, or on a GPU the longest time, that this library accepts for a
case; many cases have one. **torch**: the same function written with torch's own operators, or the reference of triops,
on the same device. On a GPU times are of plain calls, host work included; compiled code there has a
[section of its own](#plain-calls-on-an-nvidia-h200).
"""

ROWS_WORDS = """
**ratio**: the median over the cases, with the lowest and the highest. **misses**: the cases that do not reach their
bar, of those that have one. "plain torch": the reference of triops on the same device.
"""

CHART_WORDS = """
![Median ratios on a logarithmic scale, without those against plain torch](images/results.svg)
"""

GPU_WORDS = """
Microseconds. **graph**: the median replay of a CUDA graph, which is what the kernels cost and the launch of the graph.
**eager**: a plain call, host work included. The host's cores are shared: the same call may take twice as long where
others are busy; `python_us` in the results file, a loop of plain Python timed beside the call, says how busy they were
({lowest} to {highest}). **floor**: the bytes that must move, at the bandwidth of a large copy on the same machine.
**efficiency**: floor over graph. **bar**: the longest time that this library accepts; a time over it is marked "over".
**reference**, where it was timed: the plain-torch reference on the same GPU.
"""

CPU_WORDS = """
Ratios taken in one process, interleaved, on one thread unless said: how many times longer the other takes.
**bar**: the least ratio that this library accepts; a ratio below it is marked "under".
"""


THREAD_WORDS = """
How many times faster two threads are than one, where one takes at least 0.4 ms: `benchmarks/threads.py`. The machine is
shared, so ratios differ from run to run.
"""

EAGER_WORDS = """
Microseconds of a plain call in a loop, host work included, small sizes and large ones, against the compiled kernels of
mmcv, called through its Python layer, and of torchvision: `benchmarks/eager.py`. The shapes are the same at every call:
from the 17th on triops repeats what it did on the host. **forward and backward** includes a sum and autograd's own
work; a gradient of triops goes through Python, one of torchvision does not.
"""

NETWORK_WORDS = """
Detectors of mmdetection3d, unmodified, from the configs it ships, with random weights:
[how they run](dropin/mmdetection.md). Scenes are synthetic, of the size of the data set's own. **triops**: the share of
the time that the operators of this library take, host work included; the rest is torch and mmdetection3d.
"""

COMPILED = re.compile("mmcv|spconv|torchvision(?! formula)|C loop")  # whom a row is against: code that others compiled


class Row(NamedTuple):
    """A line of the summary."""

    operator: str
    machine: str
    against: str
    ratios: list[float]
    misses: int
    bars: int


def read() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]


def rows() -> list[Row]:
    """The summary: one line per operator, machine and peer."""
    groups: dict[tuple[str, str, str], list[tuple[float, int | None]]] = {}
    for file in read():
        for case in file.get("cases", []):
            for against, ratio, missed in _ratios(case, _is_gpu(file)):
                groups.setdefault((case["operator"], file["machine"], against), []).append((ratio, missed))
    return [
        Row(*key, [ratio for ratio, _ in found], sum(m or 0 for _, m in found), sum(m is not None for _, m in found))
        for key, found in sorted(groups.items())
    ]


def _ratios(case: dict[str, Any], gpu: bool) -> Iterator[tuple[str, float, int | None]]:
    """(against whom, ratio, whether the bar was missed or None without one) of a case."""
    if not gpu:
        if case.get("ratio"):
            yield case.get("against", ""), case["ratio"], int(_under(case)) if case.get("must_ratio") else None
        return
    time = case.get("eager_us") or case.get("graph_us")  # the others' times are of plain calls
    if case.get("reference_us"):
        bar = case.get("must_us") or case.get("eager_must_us")
        missed = _over(case) or _over(case, "eager_us", "eager_must_us")
        yield "plain torch", case["reference_us"] / time, int(missed) if bar else None
    if case.get("peer_us"):
        yield str(case["peer"]), case["peer_us"] / time, None


def _summary() -> str:
    missed = [row for row in rows() if row.misses]
    parts = ["\n## Summary\n", SUMMARY_WORDS, "\n", _overview()]
    if missed:
        parts += [_folded("The operators of which cases miss their bar", "\n" + _rows(missed))]
    return "".join([*parts, CHART_WORDS, _folded("Every operator", ROWS_WORDS + "\n" + _rows(rows()))])


def _overview() -> str:
    """A line per machine and kind of opponent: the median over operators of their ratios."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows():
        if row.against != "one thread":  # of the same operator
            kind = "compiled code: mmcv, spconv, torchvision" if COMPILED.search(row.against) else "torch"
            groups.setdefault((row.machine, kind), []).append(row)
    lines = [
        "| machine | against | operators | ratio | lowest | highest | misses |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for (machine, kind), found in groups.items():
        ratios = [median(row.ratios) for row in found]
        numbers = " | ".join(f"{_number(value)}x" for value in (median(ratios), min(ratios), max(ratios)))
        operators = len({row.operator for row in found})
        misses = f"{sum(row.misses for row in found)} of {sum(row.bars for row in found)}"
        lines.append(f"| {machine} | {kind} | {operators} | {numbers} | {misses} |")
    return "\n".join(lines) + "\n"


def _rows(found: list[Row]) -> str:
    lines = ["| operator | machine | against | ratio | misses |", "| --- | --- | --- | ---: | ---: |"]
    for row in found:
        low, high = (f"{_number(value)}x" for value in (min(row.ratios), max(row.ratios)))
        span = f" ({low} to {high})" if len(row.ratios) > 1 else ""
        misses = f"{row.misses} of {row.bars}" if row.bars else ""
        ratio = f"{_number(median(row.ratios))}x{span}"
        lines.append(f"| {row.operator} | {row.machine} | {_cell(row.against)} | {ratio} | {misses} |")
    return "\n".join(lines) + "\n"


def chart() -> str:
    """An SVG of the median ratios against others than plain torch, longest first."""
    found = sorted((row for row in rows() if row.against != "plain torch"), key=lambda row: -median(row.ratios))
    left, right, line = 230, 830, 14
    most = math.ceil(math.log10(max(median(row.ratios) for row in found)))
    scale = (right - left) / most

    def at(ratio: float) -> float:
        return left + scale * max(math.log10(ratio), 0)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1000 {line * len(found) + 40}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="1000" height="{line * len(found) + 40}" fill="white"/>',
    ]
    for power in range(most + 1):
        x = f"{left + scale * power:.0f}"
        parts.append(f'<line x1="{x}" x2="{x}" y1="24" y2="{line * len(found) + 30}" stroke="#ccc"/>')
        parts.append(f'<text x="{x}" y="16" text-anchor="middle" fill="#555">{10**power:,}x</text>')
    for number, row in enumerate(found):
        y, end = 30 + line * number, at(median(row.ratios))
        against = row.against if len(row.against) <= 30 else row.against[:28] + "..."
        parts.append(f'<rect x="{left}" y="{y}" width="{end - left:.0f}" height="11" fill="#3f51b5"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 10}" text-anchor="end">{escape(row.operator)}</text>')
        parts.append(f'<text x="{end + 5:.0f}" y="{y + 9}" fill="#555" font-size="10">{escape(against)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def page() -> str:
    """The whole page."""
    every = read()
    files = [file for file in every if "cases" in file]
    parts = [HEAD, _summary()]
    for machine in dict.fromkeys(f["machine"] for f in files if _is_gpu(f)):
        cases = [_gpu(f) for f in files if f["machine"] == machine and _is_gpu(f)]
        words = GPU_WORDS.format(lowest=min(_host(files)), highest=f"{max(_host(files)):,}")
        parts += [f"\n## {machine}\n{words}", _folded("All cases, by operator", "".join(cases))]
    for machine in dict.fromkeys(f["machine"] for f in files if not _is_gpu(f)):
        cases = [_cpu(f) for f in files if f["machine"] == machine and not _is_gpu(f)]
        parts += [f"\n## {machine}\n{CPU_WORDS}", _folded("All cases, by operator", "".join(cases))]
    for file in every:
        if "threads" in file and "cases" not in file and "networks" not in file:
            reached = sum(row["ratio"] >= file["must_ratio"] for row in file["threads"])
            words = f"{reached} of {len(file['threads'])} cases reach the bar of {_number(file['must_ratio'])}x.\n"
            parts += [f"\n## A second thread\n{THREAD_WORDS}{words}", _folded("All operators", _threads(file))]
    parts.append(_eager())
    networks = [file for file in every if "networks" in file]
    if networks:
        parts += [f"\n## Whole networks\n{NETWORK_WORDS}", *(_networks(file) for file in networks)]
    return "".join(parts)


def _host(files: list[dict[str, Any]]) -> list[int]:
    """What a loop of plain Python took beside each case on a GPU."""
    return [case["python_us"] for file in files for case in file["cases"] if "python_us" in case]


def _eager() -> str:
    """Plain calls on a GPU beside those of compiled peers, the lowest ratio first."""
    file = json.loads((RESULTS / "eager" / "h200.json").read_text())
    peers = ("mmcv", "torchvision")
    lines = [
        "| call | | triops | mmcv | torchvision | best peer over triops |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    found = []
    for row in file["rows"]:
        best = min(row[f"{peer}_us"] for peer in peers if f"{peer}_us" in row) / row["triops_us"]
        way = "forward" if row["way"] == "fwd" else "forward and backward"
        times = " | ".join(_us(row.get(f"{name}_us")) for name in ("triops", *peers))
        found.append((best, row["way"] == "fwd", f"| {_cell(row['case'])} | {way} | {times} | {best:.2f} |"))
    lines += [line for *_, line in sorted(found)]
    counts = []
    for is_forward, words in ((True, "forward calls"), (False, "of forward and backward")):
        ratios = [best for best, forward, _ in found if forward == is_forward]
        counts.append(f"{sum(r >= 1 for r in ratios)} of {len(ratios)} {words}, median {_number(median(ratios))}x")
    versions = f"{file['date']}, torch {file['torch']}, mmcv {file['mmcv']}, torchvision {file['torchvision']}"
    notes = f"<small>{versions}. {_sentence(file['note'])}.</small>"
    words = f"\ntriops is the quickest in {' and '.join(counts)}.\n"
    title = f"\n## Plain calls on an {file['machine']}\n{EAGER_WORDS}{words}"
    return title + _folded("All calls, the lowest ratio first", "\n" + "\n".join(lines) + f"\n\n{notes}\n")


def _threads(file: dict[str, Any]) -> str:
    lines = ["| operator | case | one, ms | two, ms | ratio |", "| --- | --- | ---: | ---: | ---: |"]
    for row in file["threads"]:
        under = " (under)" if row["ratio"] < file["must_ratio"] else ""
        cells = [row["operator"], _cell(row["case"]), _number(row["one_ms"]), _number(row["two_ms"])]
        lines.append(f"| {' | '.join(cells)} | {_number(row['ratio'])}x{under} |")
    versions = f"torch {file['torch']}, numba {file['numba']}"
    words = f"{file['machine']}, {file['date']}, {versions}."
    return "\n" + "\n".join(lines) + f"\n\n<small>{words}</small>\n"


def _networks(file: dict[str, Any]) -> str:
    lines = [
        "| network | points a scene | | batch | ms | scenes a second | triops | of which | peak memory, MiB |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | --- | ---: |",
    ]
    for row in file["networks"]:
        for what in ("predict", "train"):
            run = row[what]
            most = [f"{name} {share * 100:.0f} %" for name, share in list(run["share_by_operator"].items())[:3]]
            cells = [
                row["network"], f"{row['points']:,}", what, str(run["batch"]), _number(run["ms"]),
                _number(run["scenes_per_second"]), f"{run['triops_share'] * 100:.0f} %", ", ".join(most),
                _us(run.get("peak_memory_mib")),
            ]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    notes = [f"{file['date']}, torch {file['torch']}.", *([f"{file['note']}."] if file.get("note") else [])]
    return _folded(file["machine"], "\n" + "\n".join(lines) + f"\n\n<small>{' '.join(notes)}</small>\n")


def _is_gpu(file: dict[str, Any]) -> bool:
    return any("graph_us" in case or "eager_us" in case for case in file["cases"])


def _gpu(file: dict[str, Any]) -> str:
    columns = {
        "graph": lambda c: _us(c.get("graph_us")) + (" (over)" if _over(c) else ""),
        "eager": lambda c: _us(c.get("eager_us")) + (" (over)" if _over(c, "eager_us", "eager_must_us") else ""),
        "floor": lambda c: _us(c.get("floor_us")),
        "efficiency": _efficiency,
        "reference": lambda c: _us(c.get("reference_us")),
        "best peer": lambda c: " ".join(filter(None, (str(c.get("peer", "")), _us(c.get("peer_us"))))),
        "bar": lambda c: _us(c.get("must_us")),
        "aim": lambda c: _us(c.get("aim_us")),
        "bar, eager": lambda c: _us(c.get("eager_must_us")),
    }
    return _tables(file, columns)


def _cpu(file: dict[str, Any]) -> str:
    columns = {
        "threads": lambda c: str(c.get("threads", 1)),
        "triops": lambda c: _us(c.get("triops_us")),
        "against": lambda c: str(c.get("against", "")),
        "takes": lambda c: _us(c.get("against_us")),
        "ratio": lambda c: f"{_number(c.get('ratio'))}x" + (" (under)" if _under(c) else "") if c.get("ratio") else "",
        "bar": lambda c: f"{_number(c['must_ratio'])}x" if c.get("must_ratio") else "",
    }
    return _tables(file, columns)


def _over(case: dict[str, Any], time: str = "graph_us", bar: str = "must_us") -> bool:
    return bool(case.get(bar) and case.get(time) and case[time] > case[bar])


def _under(case: dict[str, Any]) -> bool:
    return bool(case.get("must_ratio") and case["ratio"] < case["must_ratio"])


def _efficiency(case: dict[str, Any]) -> str:
    if not (case.get("floor_us") and case.get("graph_us")):
        return ""
    return f"{case['floor_us'] / case['graph_us'] * 100:.0f} %"


def _tables(file: dict[str, Any], columns: dict[str, Any]) -> str:
    """One folded table per operator; columns without a single value are left out."""
    versions = ", ".join(f"{name} {file[name]}" for name in ("torch", "triton", "numba") if name in file)
    notes = [f"{file['date']}, {versions}.", *(f"{file[key]}." for key in ("timer", "note") if file.get(key))]
    words = f"<small>{' '.join(_sentence(n) for n in notes)}</small>"
    parts = []
    for operator in dict.fromkeys(case["operator"] for case in file["cases"]):
        cases = [case for case in file["cases"] if case["operator"] == operator]
        cells = {name: [show(case) for case in cases] for name, show in columns.items()}
        cells = {name: values for name, values in cells.items() if any(values)}
        lines = [
            "| case | dtype | " + " | ".join(cells) + " |",
            "| --- | --- |" + "".join(" --- |" if name in ("against", "best peer") else " ---: |" for name in cells),
        ]
        for i, case in enumerate(cases):
            values = " | ".join(column[i] for column in cells.values())
            lines.append(f"| {_cell(case['case'])} | {case.get('dtype', '')} | {values} |")
        parts.append(_folded(operator, "\n" + "\n".join(lines) + f"\n\n{words}\n"))
    return "".join(parts)


def _folded(title: str, text: str) -> str:
    """Text that opens at a click, on the site and on code hosts alike."""
    return f'\n<details markdown="1"><summary>{title}</summary>\n{text}\n</details>\n'


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].replace("..", ".")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _us(value: float | None) -> str:
    return "" if value is None else _number(value)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def encoders() -> dict[str, str]:
    """The tables of whole encoders on docs/speed.md, on a GPU and on a CPU."""
    kinds = ["triops", "fused", "captured", "spconv"]
    columns = [("wall_ms", "{:.2f}"), ("busy_ms", "{:.2f}"), ("launches", "{}"), ("peak_mib", "{:.0f}")]
    gpu, cpu = (json.loads((RESULTS / "encoders" / name).read_text()) for name in ("h200.json", "cpu.json"))
    lines = ["| | wall ms: plain / fused / captured / spconv | spconv's over these | busy ms | launches | peak MiB |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for row in gpu["rows"]:
        cells = [
            " / ".join(form.format(row[kind][key]) if kind in row else "-" for kind in kinds) for key, form in columns
        ]
        wall = row["spconv"]["wall_ms"]
        cells.insert(1, " / ".join(f"{wall / row[k]['wall_ms']:.2f}" if k in row else "-" for k in kinds[:3]))
        lines.append(f"| {row['network']}, {row['voxels']:,} voxels | {' | '.join(cells)} |")
    on_cpu = ["| | threads | plain, ms | fused, ms | plain over fused |", "| --- | --- | --- | --- | --- |"]
    for row in cpu["rows"]:
        cells = f"{row['threads']} | {row['plain_ms']:.0f} | {row['fused_ms']:.0f} | {row['ratio']:.2f}"
        on_cpu.append(f"| {row['network']}, {row['voxels']:,} voxels | {cells} |")
    tables = (("encoders", lines, gpu), ("encoders on a CPU", on_cpu, cpu))
    return {name: "\n".join(table) + f"\n\n<small>{_taken(file)}</small>\n" for name, table, file in tables}


def _taken(file: dict[str, Any]) -> str:
    """Where, when and with what, in a line."""
    versions = [f"{name} {file[name]}" for name in ("torch", "triton", "spconv") if name in file]
    note = f" {_sentence(file['note'])}." if file.get("note") else ""
    return f"{file['machine']}, {', '.join([file['date'], *versions])}.{note}"


def main() -> int:
    stale = False
    computed = encoders()
    with_tables = [(path, trials.filled(path, computed)) for path in trials.pages()]
    for path, fresh in ((PAGE, page()), (CHART, chart()), *with_tables):
        old = path.is_file() and path.read_text(encoding="utf-8") == fresh
        if "--check" in sys.argv[1:]:
            stale |= not old
            print(f"{path.name} is {'up to date' if old else 'stale: run python benchmarks/results_page.py'}")
        else:
            path.write_text(fresh, encoding="utf-8")
            print(f"wrote {path}")
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
