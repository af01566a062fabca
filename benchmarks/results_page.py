"""Write docs/results.md from benchmarks/results/*.json.

    python benchmarks/results_page.py [--check]

With --check nothing is written; the exit status is 1 when the page is stale.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "results.md"

HEAD = """# Measured results

Generated from `benchmarks/results/*.json` by `python benchmarks/results_page.py`; do not edit.
Numbers of other machines are welcome: see [how they are taken](acceptance.md#performance).
"""

GPU_WORDS = """
Microseconds. **graph**: the median replay of a CUDA graph, which is what the kernels cost (an empty replay reads about
4.5). **eager**: a plain call, host work included. The host's cores are shared: the same call may take twice as long
where others are busy, and where the results file has a `python_us`, 600 to 650 of it says that nobody was. **floor**:
the bytes that must move, at the bandwidth of a large copy on the same machine. **efficiency**: floor over graph.
**bar**: what this library holds itself to; a time over it is marked "over". **reference**, where it was timed: the
plain-torch reference on the same GPU.
"""

CPU_WORDS = """
Ratios taken in one process, interleaved, on one thread unless said: how many times longer the other takes.
**bar**: what this library holds itself to; a ratio below it is marked "under".
"""


THREAD_WORDS = """
How many times faster two threads are than one, where one takes at least 0.4 ms: `benchmarks/threads.py`. The machine is
noisy: ratios differ by 0.2 and more between runs.
"""

NETWORK_WORDS = """
Detectors of mmdetection3d, unmodified, from the configs it ships, with random weights: see [the page](dropin.md).
Scenes are synthetic, of the size of the data set's own. **triops**: the share of the time that the operators of this
library take, host work included; the rest is torch and mmdetection3d.
"""


def page() -> str:
    """The whole page."""
    every = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    files = [file for file in every if "cases" in file]
    parts = [HEAD]
    for machine in dict.fromkeys(f["machine"] for f in files if _is_gpu(f)):
        parts += [f"\n## {machine}\n{GPU_WORDS}", *(_gpu(f) for f in files if f["machine"] == machine and _is_gpu(f))]
    for machine in dict.fromkeys(f["machine"] for f in files if not _is_gpu(f)):
        parts += [
            f"\n## {machine}\n{CPU_WORDS}",
            *(_cpu(f) for f in files if f["machine"] == machine and not _is_gpu(f)),
        ]
    for file in every:
        if "threads" in file and "cases" not in file and "networks" not in file:
            parts += [f"\n## A second thread\n{THREAD_WORDS}", _threads(file)]
    networks = [file for file in every if "networks" in file]
    if networks:
        parts += [f"\n## Whole networks\n{NETWORK_WORDS}", *(_networks(file) for file in networks)]
    return "".join(parts)


def _threads(file: dict[str, Any]) -> str:
    lines = ["| operator | case | one, ms | two, ms | ratio |", "| --- | --- | ---: | ---: | ---: |"]
    for row in file["threads"]:
        under = " (under)" if row["ratio"] < file["must_ratio"] else ""
        cells = [row["operator"], _cell(row["case"]), _number(row["one_ms"]), _number(row["two_ms"])]
        lines.append(f"| {' | '.join(cells)} | {_number(row['ratio'])}x{under} |")
    versions = f"torch {file['torch']}, numba {file['numba']}"
    words = f"{file['machine']}, {file['date']}, {versions}. Bar {_number(file['must_ratio'])}x."
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
    return f"\n### {file['machine']}\n\n" + "\n".join(lines) + f"\n\n<small>{' '.join(notes)}</small>\n"


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
    """One table an operator; columns without a single value are left out."""
    versions = ", ".join(f"{name} {file[name]}" for name in ("torch", "triton", "numba") if name in file)
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
        parts.append(f"\n### {operator}\n\n" + "\n".join(lines) + "\n")
    notes = [f"{file['date']}, {versions}.", *(f"{file[key]}." for key in ("timer", "note") if file.get(key))]
    return "".join(parts) + f"\n<small>{' '.join(_sentence(n) for n in notes)}</small>\n"


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


def main() -> int:
    fresh = page()
    if "--check" in sys.argv[1:]:
        stale = not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != fresh
        print(f"{PAGE.name} is {'stale: run python benchmarks/results_page.py' if stale else 'up to date'}")
        return int(stale)
    PAGE.write_text(fresh, encoding="utf-8")
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
