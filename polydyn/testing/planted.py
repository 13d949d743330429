"""Plant faults in the sources of the compiler, and count how many of them the campaign of random models finds.

usage: python -m polydyn.testing.planted [--faults 40] [--seed 0] [--models 3000] [--first 0] [--cell array] [--list]

A fault changes one operation in a line that a few models execute: a comparison, an operator, a condition or a small
number, in the layers import, fusion, plan, loop IR and run time, equally many in each. Texts, estimates and notes are
left out. For every fault the campaign runs on a copy of the sources, until a model fails or is rejected that the
unchanged sources compute. Prints the faults with the first seed that finds them. Exit code 1: more than one in ten are
not found. A fault that changes no result is not found; ``--list`` prints all faults without running them.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
LAYERS: Mapping[str, tuple[str, ...]] = {
    "import": ("polydyn/graph/operators", "polydyn/graph/functions", "polydyn/graph/importer.py",
               "polydyn/graph/propagate.py", "polydyn/graph/expand.py", "polydyn/shapes"),
    "fusion": ("polydyn/fusion", "polydyn/graph/passes"),
    "plan": ("polydyn/program", "polydyn/lowering"),
    "loop IR": ("codegen/passes", "codegen/cpu", "codegen/printers"),
    "run time": ("polydyn/runtime",),
}  # fmt: skip
"""Layer -> its folders and files."""
WORDS = re.compile(r"show|note|reason|explain|estimat|cost|repr|message|html|trace|profil|timing|refus|error|declin")
"""Functions and files with these words in their names make texts or estimates, which change no result."""
PROBES = 6
"""Models that say which lines are executed."""
SWAPS: Mapping[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
Lines = Mapping[str, set[int]]
"""File, relative to the sources -> lines that were executed."""


@dataclass(frozen=True)
class Fault:
    """A change of one expression. ``span``: its first and last position in the file, in bytes."""

    layer: str
    file: str
    line: int
    span: tuple[int, int]
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.layer}, {self.file}:{self.line}: {self.before}  ->  {self.after}"

    def plant(self, root: Path) -> None:
        """Change the file in a copy of the sources."""
        data = (ROOT / self.file).read_bytes()
        text = b"(" + self.after.encode() + b")"
        (root / self.file).write_bytes(data[: self.span[0]] + text + data[self.span[1] :])

    def remove(self, root: Path) -> None:
        """Restore the file."""
        shutil.copyfile(ROOT / self.file, root / self.file)


# -- faults ------------------------------------------------------------------------------------------------------------


def changed(node: ast.AST) -> ast.expr | None:
    """Return an expression with one operation changed, or None if the node is not an operation."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPS:
        return ast.Compare(node.left, [SWAPS[type(node.ops[0])]()], node.comparators)
    if isinstance(node, ast.BinOp) and type(node.op) in SWAPS and not isinstance(node.left, ast.JoinedStr):
        return ast.BinOp(node.left, SWAPS[type(node.op)](), node.right)
    if isinstance(node, ast.BoolOp):
        return ast.BoolOp(SWAPS[type(node.op)](), node.values)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return node.operand
    if isinstance(node, ast.IfExp):
        return ast.IfExp(node.test, node.orelse, node.body)
    if isinstance(node, ast.Constant) and type(node.value) is int and 0 <= node.value <= 2:
        return ast.Constant(node.value + 1)
    return None


def faults_in(layer: str, file: str, lines: set[int]) -> Iterator[Fault]:
    """Yield the possible faults in executed lines of a file."""
    data = (ROOT / file).read_bytes()
    starts = [0]
    for row in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(row))
    for function in ast.walk(ast.parse(data)):
        if not isinstance(function, ast.FunctionDef) or WORDS.search(function.name):
            continue
        for node in (x for statement in function.body for x in _expressions(statement)):
            if not isinstance(node, ast.expr) or node.lineno not in lines:
                continue
            made = changed(node)
            if made is None or node.end_col_offset is None or node.end_lineno is None:
                continue
            span = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
            yield Fault(layer, file, node.lineno, span, ast.unparse(node), ast.unparse(made))


def _expressions(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes except texts, annotations, raised errors, and nested functions."""
    if isinstance(node, (ast.JoinedStr, ast.Raise, ast.FunctionDef, ast.AnnAssign, ast.Assert)):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _expressions(child)


def sample(lines: Lines, count: int, seed: int) -> list[Fault]:
    """Return faults, equally many of each layer, each in a function of its own as far as possible."""
    numbers, found = random.Random(seed), list[Fault]()
    for k, (layer, places) in enumerate(LAYERS.items()):
        files = [f for f in sorted(lines) if f.startswith(places) and not WORDS.search(f)]
        every = [fault for f in files for fault in faults_in(layer, f, lines[f])]
        share = count // len(LAYERS) + (k < count % len(LAYERS))
        found += numbers.sample(every, min(share, len(every)))
    return found


def executed(seeds: Sequence[int]) -> Lines:
    """Return the lines of the layers that the models of some seeds execute, in this process."""
    from polydyn.testing.fuzz_models import Settings, run_seed  # a fault may break the import

    places = tuple(x for every in LAYERS.values() for x in every)
    seen: dict[str, set[int]] = defaultdict(set)
    files: dict[str, str] = {}

    def name_of(path: str) -> str:
        if path not in files:
            real = Path(path).resolve()
            inside = str(real.relative_to(ROOT)) if real.is_relative_to(ROOT) else ""
            files[path] = inside if inside.startswith(places) else ""
        return files[path]

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        name = name_of(frame.f_code.co_filename)
        if not name:
            return None
        seen[name].add(frame.f_lineno)
        return trace

    settings = Settings(compile=1, foreign=0)
    for seed in seeds:
        sys.settrace(trace)
        try:
            run_seed(seed, settings=settings)
        finally:
            sys.settrace(None)
    return seen


# -- running -----------------------------------------------------------------------------------------------------------


def first_found(root: Path, seeds: Sequence[int], cell: str, known: dict[int, str]) -> tuple[int, str] | None:
    """Run the campaign on the sources in a folder. Return the first seed that fails or is rejected there and not with
    the unchanged sources, with its message, or None. ``known``: outcomes of the unchanged sources so far.
    """
    rest = list(seeds)
    while rest:
        seed, text = _run(root, rest, cell, known)
        if not text:
            return None
        if seed not in known:
            known[seed] = _run(ROOT, [seed], cell, {})[1]
        if _kind(text) != _kind(known[seed]):
            return seed, text
        rest = rest[rest.index(seed) + 1 :]
    return None


def _kind(text: str) -> str:
    return text.partition(":")[0]


def _run(root: Path, seeds: Sequence[int], cell: str, known: Mapping[int, str]) -> tuple[int, str]:
    """Return the first seed with an outcome of another kind than known, and its failure or rejection; "" for none."""
    arguments = {"seeds": list(seeds), "cell": cell, "known": known}
    with tempfile.TemporaryDirectory(prefix="polydyn-planted-") as cache:
        environment = {**os.environ, "PYTHONPATH": str(root), "POLYDYN_CACHE": cache, "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "polydyn.testing.planted", "--child"], input=json.dumps(arguments), cwd=root,
            env=environment, capture_output=True, text=True,
        )  # fmt: skip
    if done.returncode:  # the sources cannot even be imported
        return seeds[0], f"error: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"
    seed, text = json.loads(done.stdout.splitlines()[-1])
    return int(seed), str(text)


def _child() -> None:
    """Run a campaign until an outcome is of another kind than known, and print it."""
    from polydyn.testing.campaign import Result
    from polydyn.testing.fuzz_models import Settings, campaign

    arguments = json.loads(sys.stdin.read())
    known = {int(s): _kind(text) for s, text in arguments["known"].items()}
    last: tuple[int, str] = (-1, "")

    def stops(r: Result) -> bool:
        nonlocal last
        text = f"{r.finding.kind}: {r.finding.message}" if r.finding else f"rejects: {r.refusal}" if r.refusal else ""
        other = bool(text) and _kind(text) != known.get(r.seed, "")
        last = (r.seed, text if other else "")
        return other

    runs = campaign(Settings(cell=arguments["cell"], compile=1, foreign=0), arguments["seeds"])
    runs.say, runs.stops = lambda _: None, stops
    runs.run()
    print(json.dumps(last))


def copied(folder: Path) -> Path:
    """Copy the sources into a folder."""
    for name in ("polydyn", "schedules", "codegen"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0, help="chooses the faults")
    parser.add_argument("--models", type=int, default=3000, help="most models for one fault")
    parser.add_argument("--first", type=int, default=0, help="seed of the first model")
    parser.add_argument("--cell", default="array", help="as with polydyn fuzz")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        _child()
        return 0
    faults = sample(executed(range(args.first, args.first + PROBES)), args.faults, args.seed)
    if args.list:
        print(*faults, sep="\n")
        return 0
    seeds = range(args.first, args.first + args.models)
    known: dict[int, str] = {}
    lost = 0
    with tempfile.TemporaryDirectory(prefix="polydyn-planted-") as folder:
        root = copied(Path(folder))
        for fault in faults:
            fault.plant(root)
            found = first_found(root, seeds, args.cell, known)
            fault.remove(root)
            lost += found is None
            said = f"seed {found[0]}: {' '.join(found[1].split())[:160]}" if found else "not found"
            print(f"{fault}\n    {said}", flush=True)
    print(f"{len(faults) - lost} of {len(faults)} faults found, {args.models} models from seed {args.first}")
    return int(lost * 10 > len(faults))


if __name__ == "__main__":
    sys.exit(main())
