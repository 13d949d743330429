"""Documents name things that exist: links, files, functions, error classes, make targets."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.paths import ROOT

DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
RECORDS = sorted(ROOT.glob("docs/adr/0*.md"))
NOTES = sorted(ROOT.glob("docs/notes/0*.md"))
FOLDERS = ("polydyn", "schedules", "codegen", "tests", "benchmarks", "docs", "notebooks")
ENTRY = re.compile(r"`([\w/]+\.(?:py|c|h|cuh)):([\w.]+)`")
FILE = re.compile(r"`((?:[\w-]+/)*[\w-]+\.(?:py|c|cuh|cpp|ipynb|md)|(?:[\w-]+/)+[\w-]+\.(?:json|png))`")
CLASS = re.compile(r"^ *class (\w+)\(([^)]*)\)", re.MULTILINE)
PRODUCT = ("polydyn", "schedules", "codegen")
LINK = re.compile(r"\]\(([^)#:]+)\)")


@cache
def files() -> tuple[str, ...]:
    """Return the paths of all files of the repository, each once (links between folders are not followed)."""
    found = [p for f in FOLDERS for p in (ROOT / f).rglob("*") if p.is_file()]
    top = (p.name for p in ROOT.iterdir() if p.suffix in (".md", ".py"))
    return (*(str(p.relative_to(ROOT)) for p in found if not _is_linked(p)), *top)


def _is_linked(path: Path) -> bool:
    inside = path.relative_to(ROOT)
    return any((ROOT / parent).is_symlink() for parent in inside.parents)


def exists(name: str) -> bool:
    """Return whether a file exists, or any whose path ends in this name: documents shorten paths."""
    return any(f == name or f.endswith(f"/{name}") for f in files())


@cache
def definitions(path: str) -> frozenset[str]:
    """Return top-level names of a Python file, and ``Class.method`` of its classes."""
    return frozenset(_definitions(ast.parse((ROOT / path).read_text()).body, ""))


def _definitions(body: list[ast.stmt], prefix: str) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield prefix + node.name
        if isinstance(node, ast.ClassDef):
            yield from _definitions(node.body, f"{node.name}.")
        elif isinstance(node, ast.Assign):
            yield from (prefix + t.id for t in node.targets if isinstance(t, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield prefix + node.target.id


def is_defined(path: str, name: str) -> bool:
    """Return whether a file of the repository defines a name; for C sources, whether the word occurs."""
    if not (ROOT / path).is_file():
        return False
    if path.endswith(".py"):
        return name in definitions(path)
    return re.search(rf"\b{re.escape(name)}\b", (ROOT / path).read_text()) is not None


def test_what_is_defined_is_found_and_nothing_else() -> None:
    assert is_defined("schedules/solution/solve.py", "solve")
    assert is_defined("schedules/solution/matrix.py", "Unknown")
    assert is_defined("polydyn/shapes/context.py", "ShapeContext.unify")
    assert not is_defined("polydyn/shapes/context.py", "unify")
    assert not is_defined("schedules/solution/solve.py", "solv")
    assert not is_defined("schedules/nowhere.py", "solve")
    assert not exists("schedules/nowhere.py")


def test_every_entry_of_the_glossary_exists() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text()
    entries = ENTRY.findall(text)
    assert len(entries) > 60
    wrong = [f"{path}:{name}" for path, name in entries if not is_defined(path, name)]
    assert not wrong, wrong


def test_every_row_of_the_glossary_leads_somewhere() -> None:
    rows = [x for x in (ROOT / "docs" / "glossary.md").read_text().splitlines() if x.startswith("| ")]
    headers = {"| word | paper | meaning | where |", "| word | meaning | where |"}
    empty = [row for row in rows if row not in headers and not ENTRY.search(row)]
    assert not empty, empty


@pytest.mark.parametrize(
    "word",
    ["worklist", "stitch", "trust region", "rKernel", "uKernel", "`?`", "voting", "promotion", "backbone", "CrossPick",
     "SetBound", "dominant", "group-dims", "micro-kernel", "sibling", "wave", "macro-kernel", "index coverage",
     "multi-version", "runtime abstraction layer"],
)  # fmt: skip
def test_a_papers_word_is_in_the_glossary(word: str) -> None:
    rows = (ROOT / "docs" / "glossary.md").read_text().splitlines()
    assert any(word in row.split("|")[1] for row in rows if row.startswith("| ")), word


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_and_files_exist(path: Path) -> None:
    text = path.read_text()
    broken = [x for x in LINK.findall(text) if not (path.parent / x).exists()]
    missing = [x for x in FILE.findall(text) if not exists(x)]
    assert not broken, f"links of {path.name} lead nowhere: {broken}"
    assert not missing, f"{path.name} names files that are not in the repository: {missing}"


def test_make_targets_and_benchmarks_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in DOCUMENTS:
        text = path.read_text()
        asked = set(re.findall(r"`(?:[A-Z]+=\S+ )*make ([a-z-]+)`", text)) - targets
        modules = {m for m in re.findall(r"python -m (benchmarks[\w.]*)", text) if not is_module(m)}
        assert not asked, f"{path.name}: no make target {sorted(asked)}"
        assert not modules, f"{path.name}: no module {sorted(modules)}"


def is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__main__.py").exists()


def test_every_error_class_has_its_section() -> None:
    sections = set(re.findall(r"^### (\w+)$", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE))
    classes = set(error_classes())
    assert classes == sections, f"not described: {classes - sections}; described, not there: {sections - classes}"


def error_classes() -> set[str]:
    """Return public classes that derive from PolydynError, directly or not."""
    sources = ((ROOT / f).read_text() for f in files() if f.endswith(".py") and f.split("/")[0] in PRODUCT)
    bases = {name: set(re.findall(r"\w+", above)) for text in sources for name, above in CLASS.findall(text)}
    errors = {"PolydynError"}
    while more := {c for c, above in bases.items() if above & errors} - errors:
        errors |= more
    return {e for e in errors if not e.startswith("_")} - {"PolydynError"}


@pytest.mark.parametrize("path", RECORDS, ids=lambda p: p.stem)
def test_a_decision_record_has_its_parts(path: Path) -> None:
    text = path.read_text()
    assert re.match(rf"# {path.name[:4]}: ", text)
    assert "\n**Status**: " in text
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings[:2] == ["Context", "Decision"]
    assert any(x.startswith(("What was tried", "What was not chosen")) for x in headings)
    assert path.name in (ROOT / "docs" / "adr" / "README.md").read_text()


@pytest.mark.parametrize("path", RECORDS, ids=lambda p: p.stem)
def test_a_decision_record_is_short(path: Path) -> None:
    """What takes more words (mechanisms, measurements, what was tried) is in ``docs/notes`` under the same number."""
    assert len(path.read_text().split()) <= 800


@pytest.mark.parametrize("path", NOTES, ids=lambda p: p.stem)
def test_notes_and_their_record_link_to_each_other(path: Path) -> None:
    text, record = path.read_text(), ROOT / "docs" / "adr" / path.name
    assert re.match(rf"# Notes on {path.name[:4]}: ", text) and f"](../adr/{path.name})" in text
    assert f"](../notes/{path.name})" in record.read_text()
    assert f"]({path.name})" in (ROOT / "docs" / "notes" / "README.md").read_text()


def test_the_first_page_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150 and len(text.split()) <= 900


def test_the_papers_formulas_name_functions_of_the_product() -> None:
    """``docs/papers.md``'s "form used" names functions that a search or a program runs, not only tests."""
    modules = "cost|select|combine|ukernel|rkernel|microkernel|strategy|explore|space|loop_model|tree"
    forms = set(re.findall(rf"`({modules})\.(\w+)`", (ROOT / "docs" / "papers.md").read_text()))
    assert len(forms) > 20
    inside = [f for f in files() if f.startswith("polydyn/")]
    wrong = [f"{m}.{n}" for m, n in sorted(forms) if not any(is_defined(f, n) for f in inside if Path(f).stem == m)]
    assert not wrong, f"not there: {wrong}"
    product = [(ROOT / f).read_text() for f in files() if f.endswith(".py") and not f.startswith(("tests", "docs"))]
    words = Counter(w for text in product for w in re.findall(r"\w+", text))
    unused = [n for _, n in sorted(forms) if words[n] < 2]
    assert not unused, f"only defined: {unused}"
