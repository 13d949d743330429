"""Run random ONNX models (``random_onnx``) through the whole compiler, against ONNX Runtime and onnx.reference.

usage: python -m polydyn.testing.fuzz_models [SEEDS] [--first N] [--jobs 1] [--compile 3] [--plan 1]
                                             [--foreign 1] [--theme NAME] [--out FOLDER]

Every model is imported and its graph evaluated after every pass. For every ``--plan``-th model (0: none) kernels are
made as text, and its plan is interpreted; for every ``--foreign``-th of them, decisions about sizes, order and memory
are recomputed by sympy and networkx (``foreign/``). Every ``--compile``-th model is compiled without optimisation and
run at several sizes with one and with two threads. A model that fails is minimised and, with ``--out``, written with
its inputs and a script; failures of one kind are minimised once. Three kinds of models are only counted: models that
no authority runs, calls that both reject, and answers in which the authorities differ or which rounding decides.
Exit code 1: a model gives wrong numbers, an error that is not a rejection by name, or rejects every call.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, TimeoutError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import onnx

from polydyn.cli.minimise import Search
from polydyn.testing.drafts import Case
from polydyn.testing.model_check import Call, Check, Depth, Finding, everything
from polydyn.testing.random_onnx import THEMES, random_case, theme_of

SECONDS = 300
"""Maximum seconds of one model, including its minimisation."""
TRIES = 60
MINIMISING = 20
"""Seconds for the minimisation of a model."""
FRESH = 150
"""Number of models after which a process is replaced by a new one, which has loaded no program yet."""
SCRIPT = '''"""{message}"""
import numpy as np, onnxruntime, polydyn
feeds = dict(np.load("{name}.npz"))
print("onnxruntime", onnxruntime.InferenceSession("{name}.onnx").run(None, feeds))
print("polydyn", polydyn.compile("{name}.onnx").run(feeds))
'''


@dataclass
class Result:
    """The result of the model of a seed, for the process that prints."""

    seed: int
    name: str
    counts: Counter[str] = field(default_factory=Counter)
    finding: Finding | None = None
    refusal: str = ""
    nodes: tuple[str, ...] = ()
    """Operators of the smallest model that fails in this way."""
    files: str = ""


def run_seed(
    seed: int, theme: str, depth: Depth, out: str, known: frozenset[tuple[str, ...]], foreign: bool = True
) -> Result:
    """Make and check the model of a seed; minimise it if it fails in an unknown way."""
    try:
        case = random_case(seed, theme)
    except Exception as e:  # the generator's own fault
        return Result(seed, f"seed{seed}", Counter({"generator": 1}), refusal=f"{type(e).__name__}: {e}")
    calls = list(case.feeds())
    done = Check(case.model, calls, depth, foreign).run()
    result = Result(seed, case.name, done.counts, done.finding, done.refusal)
    if done.finding is not None:
        result.nodes = tuple(n.op_type for n in case.model.graph.node)
        if out and done.finding.kind != "refuses" and (done.finding.kind, done.finding.message[:60]) not in known:
            model, small = minimised(case, calls, done.finding)
            result.nodes = tuple(n.op_type for n in model.graph.node)
            result.files = write(Path(out) / case.name, model, small, done.finding)
    return result


def ask(seed: int, theme: str) -> None:
    """Run the model of a seed by the authorities only."""
    case = random_case(seed, theme)
    Check(case.model, list(case.feeds()), Depth.PASSES).ask()


def minimised(case: Case, calls: Sequence[Call], finding: Finding) -> tuple[onnx.ModelProto, Call]:
    """Return the smallest part of the model that fails in this way, with the values computed there as inputs."""
    known = everything(case.model, calls[finding.call][1])
    depth = {"program": Depth.PROGRAM, "two threads": Depth.PROGRAM, "plan": Depth.PLAN,
             "host plan": Depth.PLAN, "decided again": Depth.PLAN}.get(finding.stage, Depth.PASSES)  # fmt: skip
    end = time.monotonic() + MINIMISING

    def part_calls(m: onnx.ModelProto) -> list[Call]:
        sizes, _ = calls[finding.call]
        return [(sizes, {x.name: known[x.name] for x in m.graph.input if x.name in known})]

    def fails(m: onnx.ModelProto) -> str | None:
        if time.monotonic() > end:
            return None
        try:
            found = Check(m, part_calls(m), depth).run().finding
        except Exception:
            return None
        return str(found.same) if found is not None else None

    search = Search(case.model, fails, str(finding.same), TRIES, lambda _: None)
    model = search.part(search.smallest())
    return model, part_calls(model)[0]


def write(path: Path, model: onnx.ModelProto, call: Call, finding: Finding) -> str:
    """Write a failing model, its inputs, and a script that runs both; return the path of the script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".onnx").write_bytes(model.SerializeToString())
    np.savez(path.with_suffix(".npz"), allow_pickle=False, **{n: np.asarray(a) for n, a in call[1].items()})
    message = f"{finding.kind}, {finding.stage}: {finding.message}".replace('"""', "'").replace("\\", "/")
    path.with_suffix(".py").write_text(SCRIPT.format(message=message, name=path.name))
    return str(path.with_suffix(".py"))


# -- the campaign ------------------------------------------------------------------------------------------------------


class Campaign:
    """The models of many seeds, each in a process that may die."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.known = args, set[tuple[str, ...]]()
        self.counts: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.failures = 0

    def run(self) -> int:
        """Run all seeds; return the exit code."""
        seeds = list(range(self.args.first, self.args.first + self.args.seeds))
        start = time.monotonic()
        for done, result in enumerate(self._results(seeds), 1):
            self._note(result)
            if done % 100 == 0 or done == len(seeds):
                spent = time.monotonic() - start
                print(
                    f"{done} models, {self.failures} failures, {spent:.0f} s; {dict(sorted(self.counts.items()))}",
                    flush=True,
                )
        for why, n in self.refusals.most_common():
            print(f"refused {n} times: {why}")
        return 1 if self.failures else 0

    def _results(self, seeds: Sequence[int]) -> Iterator[Result]:
        rest = list(seeds)
        while rest:
            batch = rest[: FRESH * self.args.jobs]
            with ProcessPoolExecutor(self.args.jobs, get_context("spawn")) as pool:
                yield from self._batch(pool, batch)
            rest = [s for s in rest if s not in self.seen]

    def _batch(self, pool: ProcessPoolExecutor, batch: Sequence[int]) -> Iterator[Result]:
        """Yield the results of one pool.

        A process that dies or hangs ends the pool; the seeds after it are run again.
        """
        self.seen = set[int]()
        rest, running = iter(batch), deque[tuple[int, Future[Result]]]()
        while True:
            for s in islice(rest, self.args.jobs - len(running)):
                running.append((s, self._submit(pool, s)))
            if not running:
                return
            s, future = running.popleft()
            self.seen.add(s)
            try:
                yield future.result(SECONDS)
            except (BrokenProcessPool, TimeoutError) as e:
                for p in list((pool._processes or {}).values()):
                    p.kill()
                yield self._died(s, e)
                return

    def _died(self, seed: int, e: Exception) -> Result:
        """Return the result for a process that died or hung. It is not a finding if the authorities alone also fail."""
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            try:
                self._ask(pool, seed)
            except BrokenProcessPool:
                return Result(seed, f"seed{seed}", Counter({"an authority dies": 1}))
        return Result(seed, f"seed{seed}", finding=Finding("error", "process", f"{type(e).__name__}: crash or hang"))

    def _ask(self, pool: ProcessPoolExecutor, seed: int) -> None:
        pool.submit(ask, seed, self.args.theme).result()

    def _submit(self, pool: ProcessPoolExecutor, seed: int) -> Future[Result]:
        known, again = frozenset(self.known), bool(self.args.foreign) and seed % self.args.foreign == 0
        return pool.submit(run_seed, seed, self.args.theme, self._depth(seed), self.args.out, known, again)

    def _depth(self, seed: int) -> Depth:
        """Return the depth to which the model of a seed is checked."""
        rarely = (THEMES[self.args.theme] if self.args.theme else theme_of(seed)).rarely
        for every, depth in ((self.args.compile, Depth.PROGRAM), (self.args.plan, Depth.PLAN)):
            if every and seed % (every * rarely) == 0:
                return depth
        return Depth.PASSES

    def _note(self, r: Result) -> None:
        self.counts += r.counts
        if r.refusal:
            self.refusals[_kind_of(r.refusal)] += 1
        if r.finding is None:
            return
        self.failures += 1
        f = r.finding
        self.counts[f"{f.kind} ({f.stage})"] += 1
        self.known.add((f.kind, f.message[:60]))
        text = " ".join(f.message.split())[:400]
        print(f"{r.name}: {f.kind}, {f.stage}, call {f.call}: {text}\n    {' '.join(r.nodes)} {r.files}", flush=True)


def _kind_of(refusal: str) -> str:
    """Return a rejection without names of nodes and numbers."""
    first = refusal.splitlines()[0]
    return "".join("#" if c.isdigit() else c for c in first)[:110]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", type=int, nargs="?", default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--compile", type=int, default=3, metavar="N", help="compile every N-th model; 0: none")
    parser.add_argument("--plan", type=int, default=1, metavar="N", help="plan every N-th model; 0: none")
    parser.add_argument("--foreign", type=int, default=1, metavar="N", help="recheck every N-th plan; 0: none")
    parser.add_argument("--theme", default="", choices=["", *THEMES])
    parser.add_argument("--out", default="", help="folder for models that fail; without it they are not minimised")
    args = parser.parse_args(argv)
    with contextlib.ExitStack() as stack:
        if "POLYDYN_CACHE" not in os.environ:
            os.environ["POLYDYN_CACHE"] = stack.enter_context(tempfile.TemporaryDirectory(prefix="polydyn-fuzz-"))
        return Campaign(args).run()


if __name__ == "__main__":
    sys.exit(main())
