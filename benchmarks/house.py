"""The structure of the code in numbers, to compare two commits: python -m benchmarks.house [ROOT]

Python files without tests, benchmarks and notebooks. *Pairs*: files whose paths differ only in words for a target
(cpu, cuda, gpu, c, device). *Coordinate and statement names*: string literals that look like names in a schedule tree
(``p_i``, ``B_k``, ``DONE0``) outside the modules that define names. *Floors*: the longest chain of imports between
modules, with each import cycle as one module; *circles*: sets of modules that import each other, type-only imports
included.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx as nx

FOLDERS = ("polydyn", "schedules", "codegen")
TARGET_WORDS = {"cpu", "cuda", "gpu", "c", "device"}
TREE_NAME = re.compile(
    r"[abcefgpqsvw]_[a-z]\d?|[BCEFGPVWQ]_[a-z]\d?|(INIT|ACC|DONE|LOAD|SAVE|PACK|FILL|STAGE)\d?(_\d)?|(COPY|FRAG)_[AB]|ROW_\w*"
)
MARKS = re.compile(r"task|kblock|micro\d?|reduce|promote|fill|share|block|rows?|stage|tile|pipeline|copy|multiply|"
                   r"epilogue|store|instruction")  # fmt: skip


def files(root: Path) -> list[Path]:
    """Return each Python file once: linked folders are visited only at their target.

    ``polydyn/testing`` counts as tests.
    """
    return sorted(
        p for f in FOLDERS for p in (root / f).rglob("*.py")
        if "testing" not in p.relative_to(root).parts
        and not any((root / x).is_symlink() for x in list(p.relative_to(root).parents)[:-1])
    )  # fmt: skip


def module(root: Path, path: Path) -> str:
    """Return the dotted name that imports a file."""
    parts = path.relative_to(root).with_suffix("").parts
    parts = parts if parts[0] == "polydyn" else ("polydyn", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def pairs(root: Path) -> list[list[Path]]:
    """Return files whose paths differ only in a target."""
    paths: dict[tuple[str, ...], list[Path]] = defaultdict(list)
    for p in files(root):
        words = [w for part in p.relative_to(root).with_suffix("").parts for w in part.split("_")]
        plain = tuple(w for w in words if w not in TARGET_WORDS and w != "polydyn")
        if p.name != "__init__.py":
            paths[plain].append(p)
    return [ps for ps in paths.values() if len(ps) > 1]


def literals(tree: ast.AST) -> Iterator[str]:
    """Yield string literals other than docstrings."""
    docs = {
        id(n.body[0].value) for n in ast.walk(tree)
        if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef)) and n.body and isinstance(n.body[0], ast.Expr)
    }  # fmt: skip
    for n in ast.walk(tree):
        if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in docs:
            yield n.value


def graph(root: Path) -> nx.DiGraph[str]:
    """Build the graph from each module to the modules that it imports, anywhere in the file."""
    names = {module(root, p): p for p in files(root)}
    g: nx.DiGraph[str] = nx.DiGraph()
    g.add_nodes_from(names)
    for name, path in names.items():
        for n in ast.walk(parse(path)):
            if isinstance(n, ast.ImportFrom) and n.module:
                wanted = [n.module, *(f"{n.module}.{a.name}" for a in n.names)]
            elif isinstance(n, ast.Import):
                wanted = [a.name for a in n.names]
            else:
                continue
            g.add_edges_from((name, w) for w in wanted if w in names and w != name and w != "polydyn")
    return g


def circles(g: nx.DiGraph[str]) -> list[list[str]]:
    """Return sets of modules that import each other."""
    return [sorted(c) for c in nx.strongly_connected_components(g) if len(c) > 1]


@cache
def parse(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text())


def measure(root: Path) -> dict[str, object]:
    """Return the value of each measure by name."""
    lines = {p: p.read_text().count("\n") for p in files(root)}
    trees = [parse(p) for p in lines]
    classes = [(n.end_lineno - n.lineno + 1, n.name) for t in trees for n in ast.walk(t)
               if isinstance(n, ast.ClassDef) and n.end_lineno]  # fmt: skip
    functions = [(n.end_lineno - n.lineno + 1, n.name) for t in trees for n in ast.walk(t)
                 if isinstance(n, ast.FunctionDef) and n.end_lineno]  # fmt: skip
    rooms = [p for p in lines if p.relative_to(root).parts[0] in ("schedules", "codegen") or "lowering" in p.parts]
    named = Counter(x for p in rooms for x in literals(parse(p)) if TREE_NAME.fullmatch(x))
    marks = Counter(x for p in rooms for x in literals(parse(p)) if MARKS.fullmatch(x))
    g = graph(root)
    condensed = nx.condensation(g)
    twins = pairs(root)
    return {
        "files": len(lines),
        "lines": sum(lines.values()),
        "longest file": max((n, str(p.relative_to(root))) for p, n in lines.items()),
        "longest class": max(classes),
        "longest function": max(functions),
        "files that differ in a target only": f"{len(twins)} sets, {sum(map(len, twins))} files, "
        f"{sum(lines[p] for ps in twins for p in ps)} lines",
        "literals that name coordinates, extents, statements": f"{named.total()} ({len(named)} names)",
        "literals that name marks": f"{marks.total()} ({len(marks)} names)",
        "types of a kernel to be launched": sorted(
            {n.name for t in trees for n in ast.walk(t) if isinstance(n, ast.ClassDef)} & LAUNCH_TYPES
        ),
        "floors": nx.dag_longest_path_length(condensed) + 1,
        "circles": circles(g),
        "goldens": sum(1 for p in (root / "tests" / "golden").rglob("*") if p.is_file()),
    }


LAUNCH_TYPES = {
    "Kernel", "CudaKernel", "KernelSource", "Variant", "Version", "Choice", "Alternatives", "PlacedKernel",
    "PlacedCuda", "TunedBuilders", "Kept", "TileFactors", "Candidate", "Block", "Placed", "PlacedGroup",
}  # fmt: skip
"""Names that such types had or have."""


def main() -> int:
    """Run the command line."""
    for name, value in measure(Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()).items():
        print(f"{name}: {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
