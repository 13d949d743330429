"""A program of several parts: ordinary programs, and between them what only the host can do (docs/adr/0027-parts.md).

Sizes that data decide are known when a step has run. Later parts have them as sizes of their inputs, so their guards,
memory and kernels are those of any program. Standard library and numpy only.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

from polydyn.errors import InputError, PolydynError, UnsupportedError
from polydyn.runtime.artifact import Artifact
from polydyn.runtime.bound import BoundCall, refuse_conversions
from polydyn.runtime.explain import Explanation
from polydyn.runtime.expressions import Expression, evaluate
from polydyn.runtime.fallback_step import other_runtime
from polydyn.runtime.frames import Frame, Layout
from polydyn.runtime.native import NativeOfParts, address_of, failure
from polydyn.runtime.program import (
    Array,
    LaunchTime,
    Program,
    check_repeats,
    check_threads,
    launch_times,
    numpy_dtype,
)  # fmt: skip
from polydyn.runtime.sequence import STOP_PYTHON
from polydyn.runtime.sharing import refuse_sharing


class PartsProgram(Program):
    """A compiled model with sizes that data decide. Used as every ``Program``.

    What a call needs beside its results is in a ``Frame``. It stays for later calls; calls at the same time have
    one each.
    """

    def __init__(
        self, artifact: Artifact, parts: Sequence[Program], *, threads: int | None = None, compilations: int = 0
    ) -> None:
        """``parts``: the programs of the artifact's parts. ``threads``: per call, as theirs."""
        self._artifact = artifact
        self.compilations = compilations
        self.threads = check_threads(threads)
        self._requested = threads
        manifest = artifact.manifest
        self._inputs = [(i["name"], d, d.itemsize - 1) for i in manifest["inputs"] for d in [numpy_dtype(i["dtype"])]]
        self._outputs = [(o["name"], numpy_dtype(o["dtype"])) for o in manifest["outputs"]]
        self._strided, self._pairs = [], set()
        self._parts = list(parts)
        runs = leaves(self._parts)
        for other in runs[1:]:
            other._lender = runs[0]
        self._native = NativeOfParts(artifact, [p._native for p in self._parts])
        self._order: list[Mapping[str, Any]] = manifest["order"]
        self._results = [(o["name"], o["of"], o["dims"]) for o in manifest["outputs"]]
        self._takes = {
            i["name"]: (p, numpy_dtype(i["dtype"])) for p in self.parts for i in p.manifest["inputs"]
        }  # fmt: skip
        self._layout = Layout.of(manifest)
        self._dense = {n for s in self._order if "step" in s for n in s["inputs"]}
        self._frames: list[Frame] = []
        self._free_frames: list[Frame] = []
        close = weakref.finalize(self, _close_around, self._native, self._frames, self._parts)
        close.atexit = False  # as that of a program of one part

    # -- running -----------------------------------------------------------------------------------------------------

    def run(self, feeds: Mapping[str, Any], out: Mapping[str, Array] | None = None) -> dict[str, Array]:
        """Computes the outputs, as ``Program.run``; results are copied to the arrays of ``out``.

        InputError also: data that give sizes which a guard refuses, said between two parts; then nothing is written.
        """
        try:
            results = self._run(feeds, None)
            return _given(results, out) if out else results
        except InputError:
            if not self._repeats(feeds):
                raise
        return self.general.run(feeds, out)  # type: ignore[union-attr]

    def _run(self, feeds: Mapping[str, Any], rows: list[LaunchTime] | None) -> dict[str, Array]:
        """``rows``, where somebody asks, gets the launches and steps."""
        if self._artifact.file is not None:
            self._artifact.file.check()
        arrays = self._arrays(feeds)
        frame = self._take_frame()
        try:
            times = None if rows is None else self._new_times()
            frame.begin(arrays, None if times is None else address_of(times))
            while code := frame.run():
                if code != STOP_PYTHON:
                    raise self._failure(frame, code)
                self._run_step(frame, times)
            if rows is not None and times is not None:
                rows += self._rows(frame, times)
            return self._named(frame)
        finally:
            frame.arrays = {}
            self._free_frames.append(frame)

    def _named(self, frame: Frame) -> dict[str, Array]:
        """The outputs."""
        sizes, made = self._sizes(frame), frame.results()
        return {
            n: made[of] if n == of else made[of].reshape([_size(d, sizes) for d in dims])
            for n, of, dims in self._results
        }

    def _sizes(self, frame: Frame) -> dict[str, int]:
        """The value of every symbol; of those that are not known yet what they were before."""
        return dict(zip(self._layout.symbols, frame.values, strict=False))

    def _take_frame(self) -> Frame:
        """A frame for one call. Several threads may ask at once."""
        try:
            return self._free_frames.pop()
        except IndexError:
            frame = Frame(self._layout, self._native, self.threads)
            self._frames.append(frame)
            return frame

    def _arrays(self, feeds: Mapping[str, Any]) -> dict[str, Array]:
        """The inputs as parts and steps take them."""
        if len(feeds) != len(self._inputs) or any(n not in feeds for n, _, _ in self._inputs):
            self._refuse_names(feeds)
        arrays = {}
        for name, dtype, misaligned in self._inputs:
            array = feeds[name]
            if type(array) is not np.ndarray or array.dtype is not dtype:
                array = self._convert(name, dtype, array)
            if name in self._dense and not array.flags.c_contiguous:
                array = np.ascontiguousarray(array)
            arrays[name] = array.copy() if address_of(array) & misaligned else array
        self._check_ranks(list(arrays.values()))
        return arrays

    def _failure(self, frame: Frame, code: int) -> PolydynError:
        """The error of the stage that has failed: after which sizes, or of which node."""
        error, failed = failure(code, frame.message), self._order[frame.stage : frame.stage + 1]
        if frame.entered and failed and "step" in failed[0]:
            return type(error)(str(error), node=failed[0]["origin"])
        if not isinstance(error, InputError) or not frame.entered:
            return error
        sizes = self._sizes(frame)
        found = [s for before in self._order[: frame.stage] for s in before.get("symbols", ())]
        return InputError("\n".join([str(error), *(f"  after {s} = {sizes[s]}" for s in found)])) if found else error

    def _run_step(self, frame: Frame, times: Array | None) -> None:
        """The next step, which is a region in ONNX Runtime."""
        begun, k = time.perf_counter_ns(), frame.stage
        stage = self._order[k]
        given = [frame.array(n) if n else None for n in stage["inputs"]]
        try:
            made, found = other_runtime(given, stage["settings"])
        except PolydynError as e:
            raise type(e)(str(e), node=stage["origin"]) if e.node is None else e from None
        for symbol, n in zip(stage["symbols"], found, strict=True):
            frame.values[self._layout.symbols[symbol]] = int(n)
        named = zip(stage["outputs"], made, strict=bool(stage["outputs"]))
        frame.go_on({name: self._checked(name, array) for name, array in named if name})
        if times is not None:
            times[sum(map(self._count, self._order[:k]))] = time.perf_counter_ns() - begun

    def _checked(self, name: str, array: Array) -> Array:
        """What a step gives, as the parts take it."""
        part, dtype = self._takes.get(name, (self, array.dtype))
        array = array if array.dtype is dtype else part._convert(name, dtype, array)
        return array if array.flags.aligned else array.copy()

    def _count(self, stage: Mapping[str, Any]) -> int:
        """How many times a stage has: of its launches, or its own."""
        return len(self._parts[stage["part"]].manifest["launches"]) if "part" in stage else 1

    def _new_times(self) -> Array:
        return np.zeros(sum(map(self._count, self._order)), np.int64)

    def _rows(self, frame: Frame, times: Array) -> list[LaunchTime]:
        """The launches and steps of a call, with their times."""
        infos = [self._native.launch(frame.handle, k) for k in range(len(times))]
        return launch_times(infos, [times.tolist()])

    def bind(self, feeds: Mapping[str, Any], out: Mapping[str, Array] | None = None) -> BoundCall:
        """``run`` on these very arrays, to be repeated. Sizes that data decide may differ from call to call, so
        ``outputs`` has new arrays after every call; ``out`` is refused. UnsupportedError: ``out`` is given.
        """
        if out:
            raise UnsupportedError(
                "a bound call of a program whose sizes data decide makes its own outputs", rule="bind with out",
                remedy="leave out away, or use run()",
            )  # fmt: skip
        arrays = self._arrays(feeds)
        refuse_conversions(list(arrays), feeds, [address_of(a) for a in arrays.values()])
        call = BoundCall(lambda: 0, lambda code: None, list(arrays.values()), {})

        def run() -> int:
            call.outputs.clear()
            call.outputs.update(self._run(arrays, None))
            return 0

        call._run = run
        return call

    # -- looking inside ----------------------------------------------------------------------------------------------

    @property
    def parts(self) -> tuple[Program, ...]:
        """The programs between which the host has its steps."""
        return tuple(self._parts[: self.manifest["own_parts"]])

    @property
    def bodies(self) -> dict[str, Program]:
        """The models that steps run, by node and role."""
        inside = [(s["origin"], s["bodies"]) for s in self._order if "step" in s]
        return {f"{origin}.{role}": self._parts[k] for origin, own in inside for role, k in own.items()}

    @property
    def steps(self) -> list[str]:
        """What the host does between the parts, in order."""
        return [_label(s) for s in self._order if "step" in s]

    @property
    def symbols(self) -> dict[str, str]:
        """Symbol -> where its value comes from."""
        late = {s: f"data: {_label(t)}" for t in self._order if "step" in t for s in t["symbols"]}
        inputs = [s for s in self.manifest["symbols"] if s["input"]]
        early = {s["symbol"]: f"axis {s['axis']} of input '{s['input']}'" for s in inputs}
        return early | late

    @property
    def weight_bytes(self) -> int:
        """Bytes of the constants in their final form."""
        return int(self._artifact.weights.size)

    @property
    def counters(self) -> dict[str, int]:
        """Sums of the parts' counters; arena_bytes with what lies between parts, compilations those of the whole."""
        frames = list(self._frames)
        every = [p.counters for p in self._parts] + [self._native.statistics(f.handle) for f in frames]
        names = ("contexts", "arena_bytes", "evaluations", "bytes_copied", "runs_not_logged")
        sums = {n: sum(c.get(n, 0) for c in every) for n in names}
        return {"compilations": self.compilations} | sums | {"contexts": len(frames)}

    def shapes_seen(self) -> list[dict[str, Any]]:
        """Of the first part: the shapes of the inputs that calls had."""
        return self._parts[0].shapes_seen() if self._parts else []

    def profile(self, feeds: Mapping[str, Any], repeats: int = 5) -> list[LaunchTime]:
        """The time of every launch and of every step of the host, in order of execution; see ``Program.profile``."""
        check_repeats(repeats)
        calls: list[list[LaunchTime]] = []
        for _ in range(repeats + 1):
            rows: list[LaunchTime] = []
            self._run(feeds, rows)
            calls.append(rows)
        times = [round(median(c[k].nanoseconds for c in calls[1:])) for k in range(len(calls[0]))]
        return [replace(r, nanoseconds=t) for r, t in zip(calls[0], times, strict=True)]

    def explain(self, /, **dims: int) -> Explanation:
        """What every launch would do at a shape; sizes that data decide are given by name, see ``symbols``."""
        unknown = sorted(dims.keys() - self.symbols.keys())
        if unknown:
            remedy = f"dims: {', '.join(self.symbols)}"
            raise InputError(f"the program has no dim '{unknown[0]}'", dim=unknown[0], remedy=remedy)
        made = [p.explain(**{s: n for s, n in dims.items() if s in p.symbols}) for p in self.parts]
        launches = tuple(x for e in made for x in e.launches)
        notes = tuple(dict.fromkeys([*self.manifest["notes"], *(n for e in made for n in e.notes)]))
        sizes = {k: v for e in made for k, v in e.sizes.items()}
        return Explanation(self.manifest["name"], dict(dims), self.threads, launches, notes, sizes)


def _close_around(native: NativeOfParts, frames: list[Frame], parts: list[Program]) -> None:
    """Closes the program, then lets go of those around which it was opened."""
    for frame in frames:
        frame.free()
    frames.clear()
    native.library.pd_close(native.program)
    parts.clear()


def leaves(parts: Sequence[Program]) -> list[Program]:
    """The programs of one part that these are made of, those of bodies included."""
    return [x for p in parts for x in (leaves(p._parts) if isinstance(p, PartsProgram) else [p])]


def _given(results: dict[str, Array], out: Mapping[str, Array]) -> dict[str, Array]:
    """The results, in the arrays that the caller gave for them."""
    for name, given in out.items():
        made = results.get(name)
        if made is None:
            known = f"outputs: {', '.join(results)}"
            raise InputError(f"the program has no output '{name}'", tensor=name, remedy=known)
        if not isinstance(given, np.ndarray) or given.dtype != made.dtype or given.shape != made.shape:
            what = f"an array of {made.dtype} and shape {made.shape}"
            raise InputError(f"out['{name}'] must be {what} in this call", tensor=name)
        if not (given.flags.c_contiguous and given.flags.writeable and given.flags.aligned):
            raise InputError(f"out['{name}'] must be C-contiguous, aligned and writeable", tensor=name)
    refuse_sharing({}, out, ())
    for name, made in results.items():
        if any(np.may_share_memory(made, given) for given in out.values()):  # it is an input, or a part of one
            results[name] = made.copy()
    for name, given in out.items():
        given[...] = results[name]
        results[name] = given
    return results


def _size(dim: Expression, sizes: Mapping[str, int]) -> int:
    return dim if type(dim) is int else sizes[dim] if type(dim) is str else evaluate(dim, sizes)


def _label(stage: Mapping[str, Any]) -> str:
    return f"{stage['step']} of {stage['origin']}"
