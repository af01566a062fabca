"""What the documentation says is true: its examples run, its links lead somewhere, its pages are on the site."""

from __future__ import annotations

import ast
import doctest
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
import trials  # noqa: E402  (scripts of benchmarks are no package)

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]

NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
OPERATORS = sorted((DOCS / "operators").glob("*.md"))
DESIGN = sorted((DOCS / "operators" / "design").glob("*.md"))
USERS = [page for page in sorted(DOCS.rglob("*.md")) if page.parent.name != "design"]  # others: for those who change it

# A table to look things up in, and pictures side by side: not read from one end to the other.
LONG = {"docs/traceability.md", "docs/gallery.md"}
# What a measured number is written with; "1e-5 apart" and numbers without a unit are left to the reader's eye.
UNITS = (
    r"x\b(?! ?\d)| times (?:as|faster|slower|longer|less|more)| ?%|"
    r" ?(?:us|ms|s|milliseconds|microseconds|seconds|minutes|[KMGT]i?B|tests|passed|failed)\b"
)
# Numbers with such a unit that are limits or definitions: a page of them, and single ones.
RULES = {"docs/acceptance.md"}
LIMITS = {
    "CHANGELOG.md": ["rounds of 256 MiB"],
    "docs/operators/design/border_align.md": ["at most 250 MiB"],
    "docs/operators/design/nms.md": ["the bits take 2 MiB"],
    "docs/operators/design/roi_align.md": ["at most 256 MB"],
    "docs/operators/design/roiaware_pool3d.md": ["64 MiB at most", "Beyond 128 MiB"],
    "docs/operators/design/sparse_conv.md": ["sums of 128 KiB"],
    "docs/reliability.md": ["more than 256 MB"],
    "docs/traceability.md": ["beyond 2 GiB", "an efficiency of 50 %"],
}

DOCUMENTED = (ast.ClassDef, ast.FunctionDef, ast.Module)

# Pages whose examples need something that the tests do not have.
NOT_RUN = {
    "docs/acceptance.md": "a line of samples.py",
    "docs/datasets.md": "Ray Data, and frames in a folder",
    "docs/evaluate.md": "labels and predictions in folders: tests/test_evaluate.py calls the same functions",
    "docs/sparse.md": "run by tests/test_nn_sparse.py",
}


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def examples_of(page: Path) -> list[str]:
    """Python blocks of a page, those in tabs too."""
    blocks = re.findall(r"^( *)```python\n(.*?)^\1```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [re.sub(f"^{indent}", "", code, flags=re.MULTILINE) for indent, code in blocks]


@pytest.mark.parametrize("page", [page for page in PAGES if examples_of(page)], ids=name_of)
def test_the_examples_of_a_page_run(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In their order, each with what those before it have made."""
    if name_of(page) in NOT_RUN:
        pytest.skip(NOT_RUN[name_of(page)])
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "example"}
    for code in examples_of(page):
        if ">>>" in code:
            test = doctest.DocTestParser().get_doctest(code, names, name_of(page), str(page), 0)
            failed = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test).failed
            assert failed == 0
        else:
            exec(compile(code, name_of(page), "exec"), names)
    printed = capsys.readouterr().out
    if page.name == "README.md":
        assert "points lie in a box" in printed
    if page.name == "start.md":
        assert float(printed.split("loss")[1]) < 0.1


@pytest.mark.parametrize("book", NOTEBOOKS, ids=name_of)
def test_a_notebook_runs_from_top_to_bottom(book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells in one namespace, without a kernel; it is kept without outputs."""
    monkeypatch.setenv("MPLBACKEND", "Agg")
    cells = json.loads(book.read_text(encoding="utf-8"))["cells"]
    title, _, purpose = "".join(cells[0]["source"]).split("\n")[:3]
    assert title.startswith("# ")
    assert purpose
    names: dict[str, Any] = {"__name__": "example"}
    for cell in cells:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
            exec(compile("".join(cell["source"]), name_of(book), "exec"), names)


def test_pages_without_examples_that_run_have_some() -> None:
    assert all(examples_of(ROOT / name) for name in NOT_RUN)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    missing = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert not missing


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=name_of)
def test_a_page_begins_with_its_title_and_then_its_purpose(page: Path) -> None:
    title, empty, purpose = page.read_text(encoding="utf-8").split("\n")[:3]
    assert title.startswith("# ")
    assert empty == ""
    assert purpose
    assert not re.match(r"[#|<>*-]|```", purpose)


@pytest.mark.parametrize("source", [*PAGES, *sorted((ROOT / "src/triops").rglob("*.py"))], ids=name_of)
def test_shapes_with_a_star_are_code(source: Path) -> None:
    """Two of them in a paragraph may be read as emphasis: [*kernel_size, C], also in docstrings of the API pages."""
    text = source.read_text(encoding="utf-8")
    docs = [text]
    if source.suffix == ".py":
        docs = [ast.get_docstring(n) or "" for n in ast.walk(ast.parse(text)) if isinstance(n, DOCUMENTED)]
    for doc in docs:
        for paragraph in re.sub(r"```.*?```", "", doc, flags=re.DOTALL).split("\n\n"):
            if ">>>" not in paragraph:
                assert not re.search(r"\[\*\w[^*]*[^\s*]\*", re.sub(r"`[^`]*`", "", paragraph))


def test_every_page_is_on_the_site() -> None:
    """The pages of operators and of notebooks and the changelog are added by docs/site.py."""
    navigation = re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    added = {*OPERATORS, *DESIGN}
    pages = [page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md") if page not in added]
    books = [book.relative_to(DOCS).with_suffix(".md").as_posix() for book in NOTEBOOKS]
    assert sorted(navigation) == sorted([*pages, *books, "changelog.md"])


@pytest.mark.parametrize("page", OPERATORS, ids=name_of)
def test_an_operator_has_a_page_for_users_and_one_on_how_it_works(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == ["Call", "Guarantees", "Limits", "Speed"]
    assert examples_of(page)
    assert f"](design/{page.name})" in text
    assert f"](../{page.name})" in (page.parent / "design" / page.name).read_text(encoding="utf-8")
    found = re.search(r"^<!-- results: (.*) -->$", text, re.MULTILINE)
    assert found is not None
    assert all((ROOT / "src/triops/ops" / folder / "reference.py").exists() for folder in found[1].split(", "))


def test_every_operator_has_its_pages() -> None:
    """A rulebook's operators are those of get_indice_pairs and sparse_conv."""
    folders = {page.parent.name for page in (ROOT / "src/triops/ops").glob("*/reference.py")} - {"rulebook"}
    assert {page.stem for page in OPERATORS} == folders
    assert {page.stem for page in DESIGN} == folders


@pytest.mark.parametrize("page", [page for page in USERS if name_of(page) not in LONG], ids=name_of)
def test_a_page_for_users_fits_on_three_screens(page: Path) -> None:
    """Of 50 lines of 120 characters each; what is folded takes one line, a picture 15."""
    text = page.read_text(encoding="utf-8")
    while "<details" in text:
        text = re.sub(r"<details(?:(?!<details).)*?</details>", "folded", text, flags=re.DOTALL)
    lines = [-(-len(line) // 120) or 1 for line in text.splitlines()]
    assert sum(lines) + 15 * text.count("![") <= 150


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=name_of)
def test_measured_figures_are_written_by_a_script(page: Path) -> None:
    """Between marks that benchmarks/results_page.py fills, or on a page that it writes."""
    text = page.read_text(encoding="utf-8")
    if "<!-- Generated from" in text or name_of(page) in RULES:
        return
    for limit in LIMITS.get(name_of(page), ()):
        assert limit in text, f"{limit}: no longer there, remove it from LIMITS"
        text = text.replace(limit, "")
    assert not figures_by_hand(text), "they go to benchmarks/results/trials (benchmarks/trials.py), a limit to LIMITS"


def figures_by_hand(text: str) -> list[str]:
    """Numbers with a measuring unit outside of marks and code; in comments of code, too."""
    text = re.sub(r"```.*?```", _comments, trials.TABLE.sub("", text), flags=re.DOTALL)
    text = re.sub(r"`[^`]*`", "", text)
    return re.findall(rf"\b[\d.,]*\d(?:{UNITS})", text)


def _comments(code: re.Match[str]) -> str:
    return "\n".join(re.findall(r"#.*", code[0]))


def test_a_figure_by_hand_is_found() -> None:
    table = "<!-- table: cpu -->\n| 7 us |\n<!-- end -->\n"
    assert figures_by_hand("```bash\nmake demo SECONDS=5  # 20 s\n```") == ["20 s"]
    assert figures_by_hand(table + "29 us (3x), 1.4 times as long, 12 to 40 % more; `4 ms`; 2 x 3") == [
        "29 us", "3x", "1.4 times as", "40 %"
    ]  # fmt: skip


def test_columns_without_a_heading_are_all_in_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row keeps each of its cells where two columns are called the same."""
    table = {"taken": "today", "columns": ["", ""], "rows": [["losses", "1e-7"]]}
    (tmp_path / "page.json").write_text(json.dumps({"runs": table}))
    (tmp_path / "page.md").write_text("<!-- table: runs -->\n<!-- end -->\n")
    monkeypatch.setattr(trials, "TRIALS", tmp_path)
    assert "\n| losses | 1e-7 |\n" in trials.filled(tmp_path / "page.md", {})


def test_every_table_of_trials_is_on_its_page() -> None:
    pages = {page.stem.lower(): trials.TABLE.findall(page.read_text(encoding="utf-8")) for page in trials.pages()}
    on_pages = {stem: {name for _, name in found} for stem, found in pages.items()}
    for file in trials.TRIALS.glob("*.json"):
        assert on_pages[file.stem] == set(json.loads(file.read_text(encoding="utf-8"))), file.name


def test_the_readme_says_how_many_of_mmcvs_own_tests_pass() -> None:
    rows = json.loads((trials.TRIALS / "mmcv.json").read_text(encoding="utf-8"))["tests"]["rows"]
    (_, *cpu), (_, *gpu) = rows[0], rows[-1]
    assert "on an H200" in rows[-1][0]
    said = f"{cpu[0]} pass and {cpu[1]} fails on CPU, {gpu[0]} pass and {gpu[1]} fail on an H200"
    assert said in (ROOT / "README.md").read_text(encoding="utf-8")


def test_make_installs_what_the_extra_for_the_site_names() -> None:
    extra = re.search(r"^docs = \[(.*)\]", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert extra is not None
    named = [re.split("[>=<]", name)[0] for name in re.findall(r'"(.*?)"', extra[1])]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert " ".join(name if "[" not in name else f"'{name}'" for name in named) in makefile
