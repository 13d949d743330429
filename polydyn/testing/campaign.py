"""The frame of all fuzzers: cases by seed in processes that may die, counts, rejections, and failures.

A fuzzer is a function of a seed that returns a ``Result``. ``Campaign`` runs it for many seeds, ``parser_of`` has the
arguments that every fuzzer takes, and ``fresh_cache`` keeps kernels without optimisation out of the user's cache.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, TimeoutError
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing import get_context

SECONDS = 900
"""Maximum seconds of one case and its minimisation: verified plans of a device take minutes on a busy machine."""
FRESH = 150
"""Number of cases after which a process is replaced by a new one, which has loaded no program yet."""
REPORT_EVERY = 100

Kinds = frozenset[tuple[str, ...]]
"""Kinds of failures that were seen before: kind and begin of the message."""


@dataclass(frozen=True)
class Finding:
    """A failure of a model.

    ``kind``: ``wrong``, ``error`` (not a rejection by name) or ``refuses`` (every call that an authority runs).
    ``stage``: the pass before it, or ``program``.
    """

    kind: str
    stage: str
    message: str
    call: int = 0

    @property
    def same(self) -> tuple[str, str]:
        """Key that is equal for failures of one kind, independent of the model's names."""
        head = self.message.split(":")[0] if self.kind == "error" else ""
        return f"{self.kind} {self.stage if self.kind == 'error' else ''}", head


@dataclass
class Result:
    """The result of the case of a seed, for the process that prints."""

    seed: int
    name: str
    counts: Counter[str] = field(default_factory=Counter)
    finding: Finding | None = None
    refusal: str = ""
    nodes: tuple[str, ...] = ()
    """Operators of the smallest model that fails in this way."""
    files: str = ""
    reached: Counter[tuple[str, ...]] = field(default_factory=Counter)
    """What the case reached (``coverage``)."""
    where: str = ""
    """The cell of the case (``cells``), if it has one."""

    @property
    def kind(self) -> tuple[str, ...]:
        """Key of the kind of failure."""
        return (self.finding.kind, self.finding.message[:60]) if self.finding else ()


Run = Callable[[int, Kinds], Result]
"""Runs the case of a seed. It is passed to another process: a function of a module, or a ``partial`` of one."""


class Campaign:
    """The cases of many seeds, each in a process that may die.

    ``ask`` runs the authorities of a seed only: if they die too, polydyn did not kill the process. Without it a process
    that dies is a failure.
    """

    def __init__(
        self, run: Run, seeds: Sequence[int], jobs: int = 1, ask: Callable[[int], None] | None = None,
        unit: str = "models", say: Callable[[str], None] = lambda text: print(text, flush=True),
    ) -> None:  # fmt: skip
        """``unit``: the word for cases. ``say`` prints a line."""
        self.run_seed, self.seeds, self.jobs, self.ask, self.unit, self.say = run, seeds, jobs, ask, unit, say
        self.stops: Callable[[Result], bool] = lambda _: False
        """Returns whether a result ends the campaign."""
        self.seen_kinds = set[tuple[str, ...]]()
        self.counts: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.reached: Counter[tuple[str, ...]] = Counter()
        self.failures: list[Result] = []

    def run(self) -> int:
        """Run all seeds; return the exit code."""
        try:
            self._run_all()
        except KeyboardInterrupt:  # what was found so far is worth keeping
            self.say(f"ended by Ctrl-C; {len(self.failures)} failures; {dict(sorted(self.counts.items()))}")
        for why, n in self.refusals.most_common():
            self.say(f"refused {n} times: {why}")
        return 1 if self.failures else 0

    def _run_all(self) -> None:
        start = time.monotonic()
        for done, result in enumerate(self._results(self.seeds), 1):
            self._note(result)
            if done % REPORT_EVERY == 0 or done == len(self.seeds):
                spent = time.monotonic() - start
                counts = dict(sorted(self.counts.items()))
                self.say(f"{done} {self.unit}, {len(self.failures)} failures, {spent:.0f} s; {counts}")
            if self.stops(result):
                break

    def _results(self, seeds: Sequence[int]) -> Iterator[Result]:
        rest = list(seeds)
        while rest:
            batch = rest[: FRESH * self.jobs]
            with ProcessPoolExecutor(self.jobs, get_context("spawn")) as pool:
                yield from self._batch(pool, batch)
            rest = [s for s in rest if s not in self.seen]

    def _batch(self, pool: ProcessPoolExecutor, batch: Sequence[int]) -> Iterator[Result]:
        """Yield the results of one pool.

        A process that dies or hangs ends the pool; the seeds after it are run again.
        """
        self.seen = set[int]()
        rest, running = iter(batch), deque[tuple[int, Future[Result]]]()
        while True:
            for s in islice(rest, self.jobs - len(running)):
                running.append((s, pool.submit(self.run_seed, s, frozenset(self.seen_kinds))))
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
        if self.ask is not None:
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                try:
                    pool.submit(self.ask, seed).result()
                except BrokenProcessPool:
                    return Result(seed, f"seed{seed}", Counter({"an authority dies": 1}))
        return Result(seed, f"seed{seed}", finding=Finding("error", "process", f"{type(e).__name__}: crash or hang"))

    def _note(self, r: Result) -> None:
        self.counts += r.counts
        self.reached += r.reached
        if r.refusal:
            self.refusals[_kind_of(r.refusal)] += 1
        if r.finding is None:
            return
        self.failures.append(r)
        f = r.finding
        self.counts[f"{f.kind} ({f.stage})"] += 1
        self.seen_kinds.add(r.kind)
        text = " ".join(f.message.split())[:400]
        where = f"\n    cell {r.where}" if r.where else ""
        self.say(f"{r.name}: {f.kind}, {f.stage}, call {f.call}: {text}\n    {' '.join(r.nodes)} {r.files}{where}")


def _kind_of(refusal: str) -> str:
    """Return a rejection without names of nodes and numbers."""
    first = refusal.splitlines()[0]
    return "".join("#" if c.isdigit() else c for c in first)[:110]


def parser_of(about: str | None, seeds: int = 100) -> argparse.ArgumentParser:
    """Return a parser with the arguments that every fuzzer takes. ``about``: the docstring of its module."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", type=int, nargs="?", default=seeds, help="number of cases")
    parser.add_argument("--first", type=int, default=0, help="seed of the first case")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    return parser


def seeds_of(args: argparse.Namespace) -> range:
    """Return the seeds of a command line."""
    return range(args.first, args.first + args.seeds)


@contextmanager
def fresh_cache() -> Iterator[None]:
    """Use a temporary cache, unless POLYDYN_CACHE names one."""
    if "POLYDYN_CACHE" in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="polydyn-fuzz-") as folder:
        os.environ["POLYDYN_CACHE"] = folder
        try:
            yield
        finally:
            del os.environ["POLYDYN_CACHE"]
