"""Compile one model, run it at several sizes with one and two threads, and compare it with ONNX's definition."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any
from unittest import mock

import numpy as np
import onnx

import polydyn.compiler as compiler
from polydyn.backends import launches, target_of
from polydyn.build import compilers as build
from polydyn.compiler import compile_artifact
from polydyn.errors import InputError, PolydynError, ShapeError, UnsupportedError
from polydyn.graph.expand import import_parts
from polydyn.runtime.opening import open_program
from polydyn.schedules.index import Index
from polydyn.testing.after_passes import stages
from polydyn.testing.authorities import (
    Array,
    Arrays,
    Refused,
    Runtime,
    difference,
    distance,
    nudged,
    second_opinion,
)
from polydyn.testing.disputes import disputed_node, goes_beyond, stretches

Call = tuple[Mapping[str, int], Arrays]
REFUSALS = (UnsupportedError, ShapeError)
SHARED_OUT = Index.of(10**9)
NUDGES = 6
REPEATS = 3
"""Number of calls with two threads: a race shows only now and then."""


class Depth(IntEnum):
    """Depth of a check: passes over graph and groups, kernels as text, or a running program."""

    PASSES, PLAN, PROGRAM = range(3)


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
class Outcome:
    """The result of one model: counts by kind (models and calls), and the failure."""

    counts: Counter[str] = field(default_factory=Counter)
    finding: Finding | None = None
    refusal: str = ""


@contextmanager
def all_shared_out() -> Iterator[None]:
    """Share out every launch among threads, however small."""
    plan = launches.host_plan

    def shared(*args: Any, **more: Any) -> Any:
        made = plan(*args, **more)
        return replace(made, launches=tuple(replace(x, work=SHARED_OUT) for x in made.launches))

    with mock.patch.object(compiler, "host_plan", shared):
        yield


@contextmanager
def quick_build() -> Iterator[None]:
    """Compile kernels without optimisation, and share out every launch among threads, however small."""
    none = dict.fromkeys(build.OPTIMISATION, ("-O0",))
    with mock.patch.object(build, "OPTIMISATION", none), all_shared_out():
        yield


class Check:
    """Checks a model with ``run``. ``depth``: depth of the check.

    ``foreign``: decisions made while planning are recomputed by sympy and networkx.
    """

    def __init__(
        self, model: onnx.ModelProto, calls: Sequence[Call], depth: Depth = Depth.PROGRAM, foreign: bool = True
    ) -> None:
        self.model, self.calls, self.depth, self.foreign = model, calls, depth, foreign
        self.out = Outcome()
        self.expected: list[Mapping[str, Array] | None] = []
        self.runtime: Runtime | None = None

    def run(self) -> Outcome:
        """Run the check and return the result."""
        self.ask()
        if not any(e is not None for e in self.expected):
            self.out.counts["no authority runs it"] += 1
            return self.out
        for part in (self._passes, *((), (self._plan,), (self._program,))[self.depth]):
            try:
                part()
            except REFUSALS as e:
                self._refused(e)
                return self.out
            except Exception as e:
                self.record_finding("error", part.__name__.strip("_"), f"{type(e).__name__}: {e}")
            if self.out.finding is not None:
                return self.out
        self.out.counts["models right"] += 1
        return self.out

    def record_finding(self, kind: str, stage: str, message: str, call: int = 0) -> None:
        """Record the first failure."""
        if self.out.finding is None:
            self.out.finding = Finding(kind, stage, message, call)

    def _refused(self, e: Exception) -> None:
        self.out.counts[f"models refused ({type(e).__name__})"] += 1
        self.out.refusal = f"{type(e).__name__}: {e}"

    def ask(self) -> None:
        """Compute ONNX Runtime's results, None for calls that it rejects."""
        try:
            self.runtime = Runtime(self.model)
        except Refused:
            return
        for _, feeds in self.calls:
            try:
                self.expected.append(self.runtime.run(feeds))
            except Refused:
                self.expected.append(None)

    # -- stages ------------------------------------------------------------------------------------------------------

    def _passes(self) -> None:
        """Evaluate the graph after every pass, by the reference."""
        graph = import_parts(self.model)
        if graph.steps:  # several parts: only as a program
            self.out.counts["models of several parts"] += 1
            return
        for stage in stages(graph):
            refused = 0
            for k, (_, feeds) in enumerate(self.calls):
                want = self.expected[k]
                if want is None or (stage.name != "import" and 0 < k < len(self.calls) - 1):
                    continue
                try:
                    got = stage.run(feeds)
                except InputError as e:
                    message = str(e)
                    refused += self._may_refuse(k, message)
                    continue
                except PolydynError as e:  # a subscript that the authority accepts
                    self.record_finding("error", stage.name, f"{type(e).__name__}: {e}", k)
                    return
                if not self._agrees(got, k, stage.name):
                    return
            if stage.name == "import" and refused and refused == sum(e is not None for e in self.expected):
                self.record_finding("refuses", stage.name, message)
                return

    def _plan(self) -> None:
        """Run all stages without a C compiler: plans, recomputed decisions, and interpretation at the first and last
        sizes.
        """
        # Imported here because `benchmarks.detection` runs these fuzzers on revisions whose plans have other forms.
        from polydyn.testing.foreign.arithmetic import checked
        from polydyn.testing.foreign.expressions import ForeignError
        from polydyn.testing.foreign.plans import check_planned_again
        from polydyn.testing.plan.check import check_programs, dims_of
        from polydyn.testing.plan.framed import programs_of

        sizes = [dict(s) for s, _ in (self.calls[0], self.calls[-1])]
        try:
            with checked() if self.foreign else nullcontext():
                programs = programs_of(import_parts(self.model), target_of("cpu", None))
            for planned in programs.plans if self.foreign else ():
                check_planned_again(planned)
        except ForeignError as e:
            self.record_finding("wrong", "decided again", str(e))
            return
        for faulty in check_programs(programs, dims_of(self.model), sizes):
            self.record_finding("wrong", "host plan", str(faulty))

    def _program(self) -> None:
        """Run the compiled program: with one thread, and with two, several times."""
        with quick_build():
            artifact, _ = compile_artifact(self.model)
            one, two = open_program(artifact, threads=1), open_program(artifact, threads=2)
        refused, message = 0, ""
        for k, (_, feeds) in enumerate(self.calls):
            want = self.expected[k]
            try:
                first = one.run(dict(feeds))
            except InputError as e:
                refused, message = refused + self._may_refuse(k, str(e)), str(e)
                want = self.expected[k]
                self.out.counts["calls refused" if want is not None else "calls both refuse"] += 1
                continue
            if want is None:
                self.out.counts["calls that no authority runs"] += 1
                continue
            self.out.counts["calls compared"] += 1
            if not self._agrees(first, k, "program"):
                return
            for _ in range(REPEATS):
                again = two.run(dict(feeds))
                for name, a in first.items():
                    if np.asarray(a).tobytes() != np.asarray(again[name]).tobytes():
                        self.record_finding("wrong", "two threads", f"{name} has other bits with two threads", k)
                        return
        if refused and refused == sum(e is not None for e in self.expected):
            self.record_finding("refuses", "program", message)

    def _may_refuse(self, call: int, message: str) -> int:
        """Return 1 if a rejected call is legal and an authority runs it, else 0."""
        if self.expected[call] is None:
            return 0
        arrays = everything(self.model, self.calls[call][1])
        why = "calls beyond ONNX" if goes_beyond(self.model, arrays) else ""
        why = why or "calls that stretch an axis of size 1" * stretches(self.model, arrays, message)
        if why:
            self.out.counts[why] += 1
            self.expected[call] = None
        return int(not why)

    # -- comparing ---------------------------------------------------------------------------------------------------

    def _agrees(self, got: Mapping[str, Any], call: int, stage: str) -> bool:
        """Return whether an answer is right; if not, check again whether it counts as wrong."""
        want = self.expected[call]
        assert want is not None
        arrays = {n: np.asarray(a) for n, a in got.items()}
        if stage not in (
            "import",
            "program",
        ):  # passes may keep an output in the shape that it has before a last reshape
            arrays = {n: a.reshape(want[n].shape) if a.size == want[n].size else a for n, a in arrays.items()}
        message = difference(arrays, want)
        if not message:
            return True
        if self._sensitive(arrays, call):
            self.out.counts["calls that rounding decides"] += 1
            self.expected[call] = None
            return True
        feeds = self.calls[call][1]
        try:
            if not difference(arrays, second_opinion(self.model, feeds)):
                ops = ", ".join(sorted({n.op_type for n in self.model.graph.node}))
                self.out.counts[f"disputed ({ops})" if len(ops) < 40 else "disputed"] += 1
                self.expected[call] = None
                return True
        except Refused:
            pass
        if operator := disputed_node(self.model, everything(self.model, feeds)):
            self.out.counts[f"disputed ({operator})"] += 1
            self.expected[call] = None
            return True
        if overflows(arrays, want):
            self.out.counts["calls that overflow"] += 1
            self.expected[call] = None
            return True
        if _computed_zero(self.model, feeds):
            self.out.counts["calls with a computed 0 in a Reshape"] += 1
            self.expected[call] = None
            return True
        self.record_finding("wrong", stage, message, call)
        return False

    def _sensitive(self, got: Arrays, call: int) -> bool:
        """Return whether the authority itself moves about as far if its inputs move by a rounding error."""
        want, feeds = self.expected[call], self.calls[call][1]
        assert want is not None and self.runtime is not None
        off = {n: distance(got[n], w) for n, w in want.items() if n in got and difference({n: got[n]}, {n: w})}
        moved = dict.fromkeys(off, 0.0)
        for k in range(NUDGES):
            try:
                model, arrays = nudged(self.model, feeds, k)
                again = Runtime(model).run(arrays)
            except Refused:
                return False
            moved = {n: max(m, distance(again[n], want[n])) for n, m in moved.items()}
        shapes = all(got[n].shape == want[n].shape and got[n].dtype == want[n].dtype for n in off)
        return shapes and all(m > 0 and m >= off[n] / 50 for n, m in moved.items())


def everything(model: onnx.ModelProto, feeds: Arrays) -> dict[str, Array]:
    """Return all tensors of a call that the authority computes outside of bodies, or only inputs if it rejects that."""
    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    there = {o.name for o in whole.graph.output}
    made = [o for n in whole.graph.node for o in n.output if o]
    whole.graph.output.extend(onnx.ValueInfoProto(name=o) for o in made if o not in there)
    try:
        return {**feeds, **Runtime(whole).run(feeds)}
    except Refused:
        return dict(feeds)


def overflows(got: Arrays, want: Arrays) -> bool:
    """Return whether outputs differ only in integers at an end of the authority's type: ONNX leaves that open."""
    for name, w in want.items():
        if name in got and not difference({name: got[name]}, {name: w}):
            continue
        if w.dtype.kind not in "iu" or name not in got or got[name].shape != w.shape or w.dtype.itemsize < 4:
            return False
        wrong = w[got[name] != w]
        if not np.isin(wrong, [np.iinfo(w.dtype).min, np.iinfo(w.dtype).max]).all():
            return False
    return True


def _computed_zero(model: onnx.ModelProto, feeds: Arrays) -> bool:
    """Return whether a Reshape has a computed 0: a size here, a dim to copy for ONNX Runtime (docs/adr/0008-sizes.md).
    """
    shapes = [n.input[1] for n in model.graph.node if n.op_type == "Reshape" and len(n.input) > 1]
    if not shapes:
        return False
    record_finding = everything(model, feeds)
    return any((record_finding[s] == 0).any() for s in shapes if s in record_finding)
