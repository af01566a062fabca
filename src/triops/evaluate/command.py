"""What `triops eval` does."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from triops._arguments import UsageError, choose_device, writable_file
from triops._terminal import Progress, styled, table, wrapped
from triops.evaluate import report
from triops.evaluate.kitti_protocol import KittiResult, kitti
from triops.evaluate.sources import BadFrame


def run(options: Namespace, progress: Callable[[str], AbstractContextManager[Progress]]) -> int:
    """Evaluate, show and write. Returns the exit status: 1 where a frame was left out or had no predictions."""
    device = choose_device(options.device)
    for option, path in (("--json", options.json), ("--html", options.html)):
        writable_file(path, option)
    frames = _split(options.split) if options.split else None
    try:
        with progress("reading") as line:
            result = kitti(
                str(options.ground_truth), str(options.predictions), classes=options.classes, frames=frames,
                device=device, strict=options.strict, progress=line.advance,
            )  # fmt: skip
    except BadFrame as error:
        print(styled(wrapped(f"stopped: {error}"), "red"))
        return 1
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from None
    except OSError as error:
        raise UsageError(f"{error.filename} cannot be read ({error.strerror})") from None
    _show(result)
    if options.json:
        options.json.write_text(json.dumps(result.as_json(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        print(wrapped(f"wrote {options.json}"))
    if options.html:
        title = f"{options.predictions} against {options.ground_truth}"
        options.html.write_text(report.html(result, title), encoding="utf-8")
        print(wrapped(f"wrote {options.html}"))
    return 1 if result.problems else 0


def _split(path: Path) -> list[str]:
    try:
        names = path.read_text(encoding="utf-8-sig").split()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--split: {path} cannot be read ({getattr(error, 'strerror', None) or error})") from None
    if not names:
        raise UsageError(f"--split: {path} names no frames")
    return names


def _show(result: KittiResult) -> None:
    print(wrapped("average precision in percent, at 40 and at 11 recall positions"))
    print(table(report.HEADS, report.rows(result), numbers=report.NUMBERS, optional=report.OPTIONAL))
    for text in result.remarks:
        print(wrapped(f"note: {text}", "  "))
    for text in report.shown_problems(result.problems):
        print(styled(wrapped(text, "  "), "red"))
    print(wrapped(report.headline(result)))
