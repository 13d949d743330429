"""Run random ONNX models (``random_onnx``) through the whole compiler, against ONNX Runtime and onnx.reference.

usage: python -m polydyn.testing.fuzz_models [SEEDS] [--first N] [--jobs 1] [--compile 3] [--plan 1]
                                             [--foreign 1] [--theme NAME] [--cell CELL] [--out FOLDER]

Every model is imported and its graph evaluated after every pass. For every ``--plan``-th model (0: none) kernels are
made as text, and its plan is interpreted; for every ``--foreign``-th of them, decisions about sizes, order and memory
are recomputed by sympy and networkx (``foreign/``). Every ``--compile``-th model is compiled and run at several sizes:
without optimisation and with one and with two threads, or as ``--cell`` says (``cells``); with ``--cell array`` each
seed has a cell of the pairwise array, as with ``polydyn fuzz``. A model that fails is minimised and, with ``--out``,
written with its inputs and a script; failures of one kind are minimised once. Three kinds of models are only counted:
models that no authority runs, calls that both reject, and answers in which the authorities differ or which rounding
decides. Exit code 1: a model gives wrong numbers, an error that is not a rejection by name, or rejects every call.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import onnx

from polydyn.cli.minimise import Search
from polydyn.errors import ModelError
from polydyn.testing.campaign import Campaign, Finding, Kinds, Result, fresh_cache, parser_of, seeds_of
from polydyn.testing.cells import Cell, here, rows
from polydyn.testing.drafts import Case
from polydyn.testing.model_check import ANY, Call, Check, Depth, Outcome, everything
from polydyn.testing.random_onnx import THEMES, random_case, theme_of

TRIES = 60
MINIMISING = 20
"""Seconds for the minimisation of a model."""
ARRAY = "array"
"""Stands for the cells of the pairwise array."""
CELL, SEED, PREFIX = "cell", "seed", "polydyn.fuzz."
"""Keys in the metadata of a model that is written."""
SCRIPT = '''"""{message}

Seed {seed}, cell {cell}. Repeat it: polydyn fuzz --again {name}.onnx
Keep it as a test: copy {name}.onnx and {name}.npz to tests/data/fuzz (tests/models/test_fuzzed_models.py).
"""
import numpy as np, onnxruntime, polydyn
feeds = dict(np.load("{name}.npz"))
print("onnxruntime", onnxruntime.InferenceSession("{name}.onnx").run(None, feeds))
print("polydyn", polydyn.compile("{name}.onnx").run(feeds))
'''


@dataclass(frozen=True)
class Settings:
    """How the models of a campaign are checked; the fields are arguments of the command line.

    ``compile``, ``plan``, ``foreign``: every N-th model is; 0: none. ``cell``: one cell for all, or ``ARRAY``.
    """

    theme: str = ""
    cell: str = ""
    compile: int = 3
    plan: int = 1
    foreign: int = 1
    out: str = ""

    def depth(self, seed: int) -> Depth:
        """Return the depth to which the model of a seed is checked."""
        rarely = (THEMES[self.theme] if self.theme else theme_of(seed)).rarely
        for every, depth in ((self.compile, Depth.PROGRAM), (self.plan, Depth.PLAN)):
            if every and seed % (every * rarely) == 0:
                return depth
        return Depth.PASSES

    def cell_of(self, seed: int) -> Cell:
        """Return the cell of a seed. Blocks of seeds have all cells, each block in another order."""
        if self.cell != ARRAY:
            return Cell.parse(self.cell)
        return rows()[(seed + seed // len(rows())) % len(rows())]


USUAL = Settings()


def run_seed(seed: int, seen_kinds: Kinds = frozenset(), settings: Settings = USUAL) -> Result:
    """Make and check the model of a seed; minimise it if it fails in an unknown way."""
    cell, depth = settings.cell_of(seed), settings.depth(seed)
    try:
        case = random_case(seed, settings.theme)
    except Exception as e:  # the generator's own fault
        return Result(seed, f"seed{seed}", Counter({"generator": 1}), refusal=f"{type(e).__name__}: {e}")
    calls = list(case.feeds())
    foreign = bool(settings.foreign) and seed % settings.foreign == 0
    done = Check(case.model, calls, depth, foreign, cell, seed).run()
    if depth == Depth.PROGRAM and done.counts["calls compared"]:
        done.reached.update(("cell", name, value) for name, value in asdict(cell).items() if value)
    result = Result(seed, case.name, done.counts, done.finding, done.refusal, reached=done.reached)
    if done.finding is not None:
        result.where = str(cell) if settings.cell else ""
        result.nodes = tuple(n.op_type for n in case.model.graph.node)
        if settings.out and done.finding.kind != "refuses" and result.kind not in seen_kinds:
            model, small = minimised(case, calls, done.finding, cell)
            result.nodes = tuple(n.op_type for n in model.graph.node)
            result.files = write(Path(settings.out) / case.name, model, small, done.finding, cell, seed)
    return result


def ask(seed: int, theme: str = "") -> None:
    """Run the model of a seed by the authorities only."""
    case = random_case(seed, theme)
    Check(case.model, list(case.feeds()), Depth.PASSES).ask()


def minimised(case: Case, calls: Sequence[Call], finding: Finding, cell: Cell = ANY) -> tuple[onnx.ModelProto, Call]:
    """Return the smallest part of the model that fails in this way, with the values computed there as inputs."""
    known = everything(case.model, calls[finding.call][1])
    depth = {"program": Depth.PROGRAM, "threads": Depth.PROGRAM, "plan": Depth.PLAN,
             "host plan": Depth.PLAN, "decided again": Depth.PLAN}.get(finding.stage, Depth.PASSES)  # fmt: skip
    end = time.monotonic() + MINIMISING

    def part_calls(m: onnx.ModelProto) -> list[Call]:
        sizes, _ = calls[finding.call]
        return [(sizes, {x.name: known[x.name] for x in m.graph.input if x.name in known})]

    def fails(m: onnx.ModelProto) -> str | None:
        if time.monotonic() > end:
            return None
        try:
            found = Check(m, part_calls(m), depth, True, cell, case.seed).run().finding
        except Exception:
            return None
        return str(found.same) if found is not None else None

    search = Search(case.model, fails, str(finding.same), TRIES, lambda _: None)
    model = search.part(search.smallest())
    return model, part_calls(model)[0]


def write(path: Path, model: onnx.ModelProto, call: Call, finding: Finding, cell: Cell, seed: int) -> str:
    """Write a failing model, its inputs, and a script that runs both; return the path of the script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.helper.set_model_props(model, {PREFIX + CELL: str(cell), PREFIX + SEED: str(seed)})
    path.with_suffix(".onnx").write_bytes(model.SerializeToString())
    np.savez(path.with_suffix(".npz"), allow_pickle=False, **{n: np.asarray(a) for n, a in call[1].items()})
    message = f"{finding.kind}, {finding.stage}: {finding.message}".replace('"""', "'").replace("\\", "/")
    path.with_suffix(".py").write_text(SCRIPT.format(message=message, name=path.name, cell=cell, seed=seed))
    return str(path.with_suffix(".py"))


def again(path: Path) -> Outcome:
    """Check a model that ``write`` wrote, in its cell, as far as that is here (``cells.here``).

    ModelError: the inputs next to it cannot be read.
    """
    model = onnx.load(path)
    props = {p.key.removeprefix(PREFIX): p.value for p in model.metadata_props}
    cell = here(Cell.parse(props.get(CELL, "")))
    try:
        with np.load(path.with_suffix(".npz"), allow_pickle=False) as arrays:
            feeds = dict(arrays)
    except (OSError, ValueError) as e:
        remedy = "keep the .npz file that polydyn fuzz wrote next to the model"
        raise ModelError(f"cannot read the inputs of {path}: {e}", rule="polydyn fuzz --again", remedy=remedy) from e
    return Check(model, [({}, feeds)], Depth.PROGRAM, False, cell, int(props.get(SEED, 0))).run()


def campaign(settings: Settings, seeds: Sequence[int], jobs: int = 1) -> Campaign:
    """Return the campaign of random models, ready to run."""
    return Campaign(partial(run_seed, settings=settings), seeds, jobs, partial(ask, theme=settings.theme))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--compile", type=int, default=3, metavar="N", help="compile every N-th model; 0: none")
    parser.add_argument("--plan", type=int, default=1, metavar="N", help="plan every N-th model; 0: none")
    parser.add_argument("--foreign", type=int, default=1, metavar="N", help="recheck every N-th plan; 0: none")
    parser.add_argument("--theme", default="", choices=["", *THEMES])
    parser.add_argument("--cell", default="", help=f"the cell of programs, or {ARRAY}")
    parser.add_argument("--out", default="", help="folder for models that fail; without it they are not minimised")
    args = parser.parse_args(argv)
    settings = Settings(args.theme, args.cell, args.compile, args.plan, args.foreign, args.out)
    with fresh_cache():
        return campaign(settings, seeds_of(args), args.jobs).run()


if __name__ == "__main__":
    sys.exit(main())
