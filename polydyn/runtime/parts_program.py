"""A program of several parts: ordinary programs, and host steps between them (docs/adr/0027-parts.md).

Data-dependent sizes are known after a step has run. Later parts have them as input sizes, so their guards, memory and
kernels are like those of any program. Standard library and numpy only.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from polydyn.arguments import check_repeats, check_threads, checked_feeds, checked_out
from polydyn.errors import InputError, PolydynError, UnknownNameError, UnsupportedError
from polydyn.runtime.artifact import Artifact
from polydyn.runtime.bound import BoundCall, reject_conversions, wrong_memory, wrong_output
from polydyn.runtime.fallback_step import other_runtime
from polydyn.runtime.frames import Frame, Layout
from polydyn.runtime.launch_times import LaunchTime, launch_times, times_table
from polydyn.runtime.native import NativeOfParts, address_of, failure
from polydyn.runtime.plain_expressions import Expression, evaluate
from polydyn.runtime.program import Array, Program, numpy_dtype
from polydyn.runtime.sequence import STOP_PYTHON
from polydyn.runtime.sharing import reject_sharing
from polydyn.runtime.tables import Table

if TYPE_CHECKING:
    from polydyn.runtime.explain import Explanation


class PartsProgram(Program):
    """A compiled model with data-dependent sizes. It is used like any ``Program``.

    A ``Frame`` holds the memory of a call except its results. It is reused by later calls; simultaneous calls have
    separate frames.
    """

    def __init__(
        self, artifact: Artifact, parts: Sequence[Program], *, threads: int | None = None, compilations: int = 0
    ) -> None:
        """``parts``: the programs of the artifact's parts. ``threads``: threads per call, as for the parts."""
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
        close.atexit = False  # like a program of one part

    # -- running -----------------------------------------------------------------------------------------------------

    def run(self, feeds: Mapping[str, Any], out: Mapping[str, Array] | None = None) -> dict[str, Array]:
        """Implement ``Program.run``; results are copied to the arrays of ``out``.

        InputError also: a data-dependent size breaks a guard, reported between two parts; then nothing is written.
        """
        out = checked_out(out)
        try:
            return _copy_to(self._run(feeds, None), out)
        except InputError:
            if not self._repeats(feeds):
                raise
        return self.general.run(feeds, out)  # type: ignore[union-attr]

    def _run(self, feeds: Mapping[str, Any], rows: list[LaunchTime] | None) -> dict[str, Array]:
        """Run a call. ``rows``: if given, receives the launches and steps."""
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
        """Return the outputs by name."""
        sizes, tensors = self._sizes(frame), frame.results()
        return {
            n: tensors[of] if n == of else tensors[of].reshape([_size(d, sizes) for d in dims])
            for n, of, dims in self._results
        }

    def _sizes(self, frame: Frame) -> dict[str, int]:
        """Return the value of every symbol; unknown symbols have their earlier values."""
        return dict(zip(self._layout.symbols, frame.values, strict=False))

    def _take_frame(self) -> Frame:
        """Return a frame for one call. Several threads may call this at once."""
        try:
            return self._free_frames.pop()
        except IndexError:
            frame = Frame(self._layout, self._native, self.threads)
            self._frames.append(frame)
            return frame

    def _arrays(self, feeds: Mapping[str, Any]) -> dict[str, Array]:
        """Return the inputs as parts and steps take them."""
        if len(checked_feeds(feeds)) != len(self._inputs) or any(n not in feeds for n, _, _ in self._inputs):
            self._reject_names(feeds)
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
        """Return the error of the failed stage, with the sizes computed before, or with its node."""
        error, failed = failure(code, frame.message), self._order[frame.stage : frame.stage + 1]
        if frame.entered and failed and "step" in failed[0]:
            return type(error)(str(error), node=failed[0]["origin"])
        if not isinstance(error, InputError) or not frame.entered:
            return error
        sizes = self._sizes(frame)
        late = [s for stage in self._order[: frame.stage] for s in stage.get("symbols", ())]
        return InputError("\n".join([str(error), *(f"  after {s} = {sizes[s]}" for s in late)])) if late else error

    def _run_step(self, frame: Frame, times: Array | None) -> None:
        """Run the next step, a region in ONNX Runtime."""
        begun, k = time.perf_counter_ns(), frame.stage
        stage = self._order[k]
        inputs = [frame.array(n) if n else None for n in stage["inputs"]]
        try:
            outputs, sizes = other_runtime(inputs, stage["settings"])
        except PolydynError as e:
            raise type(e)(str(e), node=stage["origin"]) if e.node is None else e from None
        for symbol, n in zip(stage["symbols"], sizes, strict=True):
            frame.values[self._layout.symbols[symbol]] = int(n)
        named = zip(stage["outputs"], outputs, strict=bool(stage["outputs"]))
        frame.go_on({name: self._checked(name, array) for name, array in named if name})
        if times is not None:
            times[sum(map(self._count, self._order[:k]))] = time.perf_counter_ns() - begun

    def _checked(self, name: str, array: Array) -> Array:
        """Convert a step's output to the form that the parts take."""
        part, dtype = self._takes.get(name, (self, array.dtype))
        array = array if array.dtype is dtype else part._convert(name, dtype, array)
        return array if array.flags.aligned else array.copy()

    def _count(self, stage: Mapping[str, Any]) -> int:
        """Return the number of times that a stage reports: one per launch, or one."""
        return len(self._parts[stage["part"]].manifest["launches"]) if "part" in stage else 1

    def _new_times(self) -> Array:
        return np.zeros(sum(map(self._count, self._order)), np.int64)

    def _rows(self, frame: Frame, times: Array) -> Table[LaunchTime]:
        """Return the launches and steps of a call, with their times."""
        infos = [self._native.launch(frame.handle, k) for k in range(len(times))]
        return launch_times(infos, [times.tolist()])

    def bind(self, feeds: Mapping[str, Any], out: Mapping[str, Array] | None = None) -> BoundCall:
        """Return ``run`` on these arrays for repeated calls. Data-dependent sizes may differ between calls, so
        ``outputs`` has new arrays after every call. UnsupportedError: ``out`` is given.
        """
        if checked_out(out):
            raise UnsupportedError(
                "a bound call of a program with data-dependent sizes allocates its outputs", rule="bind with out",
                remedy="leave out away, or use run()",
            )  # fmt: skip
        arrays = self._arrays(feeds)
        reject_conversions(list(arrays), feeds, [address_of(a) for a in arrays.values()])
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
        """The programs between the host steps."""
        return tuple(self._parts[: self.manifest["own_parts"]])

    @property
    def bodies(self) -> dict[str, Program]:
        """The models that steps run, by node and role."""
        inside = [(s["origin"], s["bodies"]) for s in self._order if "step" in s]
        return {f"{origin}.{role}": self._parts[k] for origin, bodies in inside for role, k in bodies.items()}

    @property
    def steps(self) -> list[str]:
        """The host steps between the parts, in order."""
        return [_label(s) for s in self._order if "step" in s]

    @property
    def symbols(self) -> dict[str, str]:
        """Maps a symbol to the source of its value."""
        late = {s: f"data: {_label(t)}" for t in self._order if "step" in t for s in t["symbols"]}
        inputs = [s for s in self.manifest["symbols"] if s["input"]]
        early = {s["symbol"]: f"axis {s['axis']} of input '{s['input']}'" for s in inputs}
        return early | late

    @property
    def weight_bytes(self) -> int:
        """The size of the constants in bytes, in their final form."""
        return int(self._artifact.weights.size)

    @property
    def counters(self) -> dict[str, int]:
        """The sums of the parts' counters; arena_bytes includes tensors between parts, compilations is the total."""
        frames = list(self._frames)
        every = [p.counters for p in self._parts] + [self._native.statistics(f.handle) for f in frames]
        names = ("contexts", "arena_bytes", "evaluations", "bytes_copied", "runs_not_logged")
        sums = {n: sum(c.get(n, 0) for c in every) for n in names}
        return {"compilations": self.compilations} | sums | {"contexts": len(frames)}

    def shapes_seen(self) -> list[dict[str, Any]]:
        """Return the input shapes of the calls, from the first part."""
        return self._parts[0].shapes_seen() if self._parts else []

    def profile(
        self, feeds: Mapping[str, Any], repeats: int = 5, out: Mapping[str, Array] | None = None
    ) -> Table[LaunchTime]:  # fmt: skip
        """Return the time of every launch and of every host step, in execution order; see ``Program.profile``."""
        check_repeats(repeats)
        calls: list[list[LaunchTime]] = []
        for _ in range(repeats + 1):
            rows: list[LaunchTime] = []
            _copy_to(self._run(feeds, rows), checked_out(out))
            calls.append(rows)
        from statistics import median  # its import takes longer than opening a program

        times = [round(median(c[k].nanoseconds for c in calls[1:])) for k in range(len(calls[0]))]
        return times_table(replace(r, nanoseconds=t) for r, t in zip(calls[0], times, strict=True))

    def explain(self, /, **dims: int) -> Explanation:
        """Explain every launch at a shape; data-dependent sizes are given by name, see ``symbols``."""
        unknown = sorted(dims.keys() - self.symbols.keys())
        if unknown:
            remedy = f"dims: {', '.join(self.symbols)}"
            raise UnknownNameError(f"the program has no dim '{unknown[0]}'", dim=unknown[0], remedy=remedy)
        parts = [p.explain(**{s: n for s, n in dims.items() if s in p.symbols}) for p in self.parts]
        launches = tuple(x for e in parts for x in e.launches)
        notes = tuple(dict.fromkeys([*self.manifest["notes"], *(n for e in parts for n in e.notes)]))
        sizes = {k: v for e in parts for k, v in e.sizes.items()}
        from polydyn.runtime.explain import Explanation  # loads the decisions of the schedules

        return Explanation(self.manifest["name"], dict(dims), self.threads, launches, notes, sizes)


def _close_around(native: NativeOfParts, frames: list[Frame], parts: list[Program]) -> None:
    """Close the program, then release the programs that it uses."""
    for frame in frames:
        frame.free()
    frames.clear()
    native.library.pd_close(native.program)
    parts.clear()


def leaves(parts: Sequence[Program]) -> list[Program]:
    """Return the programs of one part that these consist of, including those of bodies."""
    return [x for p in parts for x in (leaves(p._parts) if isinstance(p, PartsProgram) else [p])]


def _copy_to(results: dict[str, Array], out: Mapping[str, Array]) -> dict[str, Array]:
    """Return the results, copied to the caller's arrays."""
    for name, target in out.items():
        result = results.get(name)
        if result is None:
            known = f"its outputs are {', '.join(results)}"
            raise UnknownNameError(f"the program has no output '{name}'", tensor=name, remedy=known)
        if not isinstance(target, np.ndarray) or target.dtype != result.dtype or target.shape != result.shape:
            raise wrong_output(name, result.dtype, result.shape)
        if not (target.flags.c_contiguous and target.flags.writeable and target.flags.aligned):
            raise wrong_memory(name)
    reject_sharing({}, out, ())
    for name, result in results.items():
        if any(np.may_share_memory(result, target) for target in out.values()):  # the result is (part of) an input
            results[name] = result.copy()
    for name, target in out.items():
        target[...] = results[name]
        results[name] = target
    return results


def _size(dim: Expression, sizes: Mapping[str, int]) -> int:
    return dim if type(dim) is int else sizes[dim] if type(dim) is str else evaluate(dim, sizes)


def _label(stage: Mapping[str, Any]) -> str:
    return f"{stage['step']} of {stage['origin']}"
