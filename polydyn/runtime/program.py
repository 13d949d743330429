"""Program: a compiled model, ready to run. Standard library and numpy only."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from polydyn.arguments import check_repeats, check_threads, checked_feeds, checked_flag, checked_out
from polydyn.errors import InputError, PolydynError, UnknownNameError, WrongTypeError
from polydyn.runtime.artifact import Artifact, described, write_artifact
from polydyn.runtime.bound import BoundCall, as_array, reject_conversions, wrong_memory, wrong_output
from polydyn.runtime.native import BITS, DTYPE_CODES, Context, Native, address_of, close_program, new_output
from polydyn.runtime.plain_expressions import evaluate
from polydyn.runtime.shapes_log import write_log
from polydyn.runtime.sharing import described_caches, positions_of, reject_sharing, surely_apart
from polydyn.runtime.tables import Table

if TYPE_CHECKING:
    from polydyn.runtime.explain import Explanation
    from polydyn.runtime.launch_times import LaunchTime
    from polydyn.runtime.spans import Span
    from polydyn.timing import Timing

Array = npt.NDArray[Any]


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """Return the numpy dtype for a program's dtype. A dtype that numpy lacks is stored in unsigned integers."""
    return np.dtype("uint16" if dtype == "bfloat16" else "uint8" if dtype in BITS else dtype)


KINDS = ("inputs", "outputs", "optional")
"""Values of ``Program.arguments``."""


class Program:
    """A compiled model.

    It is immutable and thread-safe. ``run(feeds)`` takes and returns numpy arrays by name. Inputs may have any strides
    and are never written. bfloat16 is passed as uint16 bits.
    """

    general: Program | None = None
    """The version for calls in which sizes that were assumed equal are not, but one of them is 1."""
    _lender: Program | None = None
    """The program whose threads it uses; it is closed after this one."""
    read_timing: Callable[[], Timing] | None = None
    """Returns ``timing``; None for a program from a file."""

    def __init__(self, artifact: Artifact, *, threads: int | None = None, compilations: int = 0) -> None:
        """``threads``: threads per call, including the caller's; default: all cores that this process may use."""
        self._artifact = artifact
        self.compilations = compilations
        """Number of translation units compiled for this program; 0 if it came from the cache or an artifact."""
        self.threads = check_threads(threads)
        self._requested = threads
        self._native = self._open_library(artifact)
        self._contexts: list[Context] = []
        self._free: list[Context] = []
        manifest = artifact.manifest
        self._inputs = [(i["name"], d, d.itemsize - 1) for i in manifest["inputs"] for d in [numpy_dtype(i["dtype"])]]
        self._outputs = [(o["name"], numpy_dtype(o["dtype"])) for o in manifest["outputs"]]
        self._strided = [(k, o["name"], len(o["shape"])) for k, o in enumerate(manifest["outputs"]) if o["strided"]]
        self._pairs = {(a["input"], a["output"]) for a in manifest["appendable"]}
        self._pair_positions = positions_of(self._pairs, manifest["inputs"], manifest["outputs"])
        close = weakref.finalize(self, close_program, self._native, self._contexts)
        close.atexit = False  # threads may still be in calls at exit; the process frees everything

    def _open_library(self, artifact: Artifact) -> Native:
        return Native(artifact)

    def __repr__(self) -> str:
        from polydyn.runtime.views import program_line  # loads the decisions of the schedules

        return program_line(self)

    def _repr_html_(self) -> str:
        from polydyn.runtime.views import program_html

        return program_html(self)

    # -- running -----------------------------------------------------------------------------------------------------

    def run(self, feeds: Mapping[str, Any], out: Mapping[str, Array] | None = None) -> dict[str, Array]:
        """Compute the outputs.

        ``feeds``: input name -> array of the input's dtype and rank (or a value that ``np.asarray`` converts to one).
        ``out``: arrays for some or all outputs, C-contiguous, with the right dtype and shape, without overlap with
        inputs. An output in ``appendable`` may also be a view that begins with the view passed for its input
        (docs/decoding.md). Returns output name -> array, including those of ``out``. InputError: it names the input,
        axis or rule, and the reason. After an index outside its axis (detected while running), arrays in ``out`` may be
        partly written. ArtifactError: the file of the program was overwritten.
        """
        if self._artifact.file is not None:
            self._artifact.file.check()
        context = self._take()
        try:
            arrays, addresses = self._bind(context, feeds, out)
            results, targets = self._allocate(context, out, arrays, addresses)
            context.run(addresses, targets)
            return results
        except (InputError, TypeError):
            if not self._repeats(checked_feeds(feeds)):
                raise
        finally:
            self._free.append(context)
        return self.general.run(feeds, out)  # type: ignore[union-attr]

    def _repeats(self, feeds: Mapping[str, Any]) -> bool:
        """Return whether the general version must run: sizes assumed equal are not, but one of each pair is 1."""
        if self.general is None:
            return False
        try:
            shapes = {n: np.shape(a) for n, a in feeds.items()}
            sizes = {s["symbol"]: shapes[s["input"]][s["axis"]] for s in self.manifest["symbols"] if s["input"]}
            pairs = [[evaluate(x, sizes) for x in p] for p in self.manifest["general"]["pairs"]]
        except (KeyError, IndexError, ValueError):  # the call has another error
            return False
        return any(a != b for a, b in pairs) and all(a == b or 1 in (a, b) for a, b in pairs)

    def __call__(self, feeds: Mapping[str, Any] | None = None, /, **named: Any) -> dict[str, Array]:
        """Call ``run`` with inputs by name, as keyword arguments or in a mapping."""
        return self.run(named if feeds is None else {**checked_feeds(feeds), **named})

    def __copy__(self) -> Program:
        return self  # the program is immutable, and two objects would free the library's program twice

    def __deepcopy__(self, memo: object) -> Program:
        return self

    def __reduce__(self) -> NoReturn:
        raise WrongTypeError(
            "a program cannot be pickled: it is native code with threads and memory", rule="pickle",
            remedy="write it with save(path), and open it with polydyn.load(path) in the other process",
        )  # fmt: skip

    def bind(self, feeds: Mapping[str, Any], out: Mapping[str, Array] | None = None) -> BoundCall:
        """Return ``run`` on these arrays for repeated calls: everything is checked here, and a call only computes.

        ``feeds``, ``out``: as for ``run``, but inputs must be arrays that need no conversion. Between calls the arrays'
        elements may change, but not their shapes.
        """
        context = self._take()
        try:
            arrays, addresses = self._bind(context, feeds, out)
            reject_conversions([name for name, _, _ in self._inputs], feeds, addresses)
            results, targets = self._allocate(context, out, arrays, addresses)
        except BaseException as e:
            self._free.append(context)
            if isinstance(e, InputError | TypeError) and self._repeats(checked_feeds(feeds)):
                return self.general.bind(feeds, out)  # type: ignore[union-attr]
            raise
        contexts = [context]

        def renew() -> Callable[[], int]:
            contexts[0] = self._new_context()
            contexts[0].prepare(list(key))
            return contexts[0].call(addresses, targets)

        key = context.key or []
        run = context.call(addresses, targets)
        call = BoundCall(run, self._native.check, arrays, results, renew, self._artifact.file)
        weakref.finalize(call, self._take_back, contexts).atexit = False  # the finalizer keeps the program alive
        return call

    def _bind(
        self, context: Context, feeds: Mapping[str, Any], out: Mapping[str, Array] | None = None
    ) -> tuple[list[Array], list[int]]:
        """Return the inputs as arrays, and their addresses. Prepare the context for their shapes and for the outputs'
        strides."""
        key: list[tuple[int, ...]] = []
        arrays: list[Array] = []
        addresses: list[int] = []
        if type(feeds) is not dict or (out is not None and type(out) is not dict):
            checked_feeds(feeds), checked_out(out)
        if len(feeds) != len(self._inputs):
            self._reject_names(feeds)
        for name, dtype, misaligned in self._inputs:
            try:
                array = feeds[name]
            except KeyError:
                self._reject_names(feeds)
                raise
            if type(array) is not np.ndarray or array.dtype is not dtype:
                array = self._convert(name, dtype, array)
            address = address_of(array)
            if address & misaligned:
                array = array.copy()
                address = address_of(array)
            arrays.append(array)
            addresses.append(address)
            key.append(array.shape)
            key.append(array.strides)
        for _, name, rank in self._strided:
            array = None if out is None else out.get(name)
            if array is not None and (not isinstance(array, np.ndarray) or array.ndim != rank):
                raise InputError(f"out['{name}'] must be an array of {rank} axes", tensor=name)
            key.append(() if array is None else array.strides)
        if key != context.key:
            self._check_ranks(arrays)
            context.prepare(key)
        return arrays, addresses

    def _allocate(
        self, context: Context, out: Mapping[str, Array] | None, arrays: list[Array], addresses: list[int]
    ) -> tuple[dict[str, Array], list[int]]:
        """Return the outputs by name, allocated if they are not in ``out``, and their addresses."""
        results: dict[str, Array] = {}
        targets: list[int] = []
        count = 0
        for (name, dtype), shape in zip(self._outputs, context.output_shapes, strict=True):
            if not out or name not in out:
                try:
                    array = new_output(shape, dtype)
                except (MemoryError, ValueError) as e:  # ValueError: numpy cannot create an array of this shape
                    raise PolydynError(
                        f"no memory for output '{name}' of shape {shape}: {e}", tensor=name,
                        remedy="pass smaller shapes, or free memory",
                    ) from e  # fmt: skip
            else:
                count, array = count + 1, out[name]
                if not isinstance(array, np.ndarray) or array.dtype != dtype or array.shape != shape:
                    raise wrong_output(name, dtype, shape)
            results[name] = array
            targets.append(address_of(array))
        if out:
            self._check_out(out, count, results, targets, arrays, addresses)
        return results, targets

    def _new_context(self) -> Context:
        manifest = self._artifact.manifest
        inputs = [(DTYPE_CODES.index(i["dtype"]), len(i["shape"])) for i in manifest["inputs"]]
        ranks = [len(o["shape"]) for o in manifest["outputs"]]
        context = Context(self._native, self.threads, inputs, ranks, [k for k, _, _ in self._strided])
        self._contexts.append(context)
        return context

    def _take(self) -> Context:
        """Return a context for one call. Several threads may call this at once."""
        try:
            return self._free.pop()
        except IndexError:
            return self._new_context()

    def _take_back(self, contexts: list[Context]) -> None:
        self._free += contexts

    @contextmanager
    def _context(self) -> Iterator[Context]:
        context = self._take()
        try:
            yield context
        finally:
            self._free.append(context)

    # -- checks of arguments -----------------------------------------------------------------------------------------

    def _reject_names(self, feeds: Mapping[str, Any]) -> None:
        known = [name for name, _, _ in self._inputs]
        remedy = f"pass exactly {', '.join(f'{n}: {t}' for n, t in self.inputs.items()) or 'nothing'}"
        unknown = [n for n in feeds if n not in known]
        if unknown:
            raise UnknownNameError(f"the program has no input '{unknown[0]}'", tensor=str(unknown[0]), remedy=remedy)
        missing = [n for n in known if n not in feeds]
        if missing:
            raise InputError(f"input '{missing[0]}' is missing", tensor=missing[0], remedy=remedy)

    def _convert(self, name: str, dtype: np.dtype[Any], value: Any) -> Array:
        """Return an ndarray of the dtype with the same values. InputError: that would need a conversion."""
        array = as_array(name, value)
        if array.dtype == dtype:
            return array
        declared = self._declared(name)
        if dtype.name != declared["dtype"] == array.dtype.name and array.dtype.itemsize == dtype.itemsize:
            return array.view(dtype)
        raise InputError(
            f"input '{name}' is {array.dtype}, the program takes {declared['dtype']}",
            tensor=name,
            remedy="pass a numpy array" if array.dtype.kind in "OUS" else f"convert it: array.astype({str(dtype)!r})",
        )

    def _declared(self, name: str) -> dict[str, Any]:
        declared: dict[str, Any] = next(i for i in self._artifact.manifest["inputs"] if i["name"] == name)
        return declared

    def _check_ranks(self, arrays: Sequence[Any]) -> None:
        for array, declared in zip(arrays, self._artifact.manifest["inputs"], strict=True):
            if array.ndim != len(declared["shape"]):
                raise InputError(
                    f"input '{declared['name']}' of shape {array.shape} has {array.ndim} axes, "
                    f"the program takes {len(declared['shape'])}: [{', '.join(declared['shape'])}]",
                    tensor=declared["name"],
                    remedy="reshape it",
                )

    def _check_out(
        self,
        out: Mapping[str, Array],
        used: int,
        results: Mapping[str, Array],
        targets: list[int],
        arrays: list[Array],
        addresses: list[int],
    ) -> None:
        """Reject arrays in ``out`` that are unknown (``used`` of them are not), of a wrong layout, or share memory."""
        if used != len(out):
            name = next(n for n in out if n not in results)
            raise UnknownNameError(
                f"the program has no output '{name}'", tensor=name, remedy=f"its outputs are {', '.join(results)}"
            )
        strided = {name for _, name, _ in self._strided}
        for name, array in out.items():
            flags = array.flags
            dense = name in strided or flags.c_contiguous  # pd_shapes has checked the strides of ``strided``
            if not (dense and flags.writeable and flags.aligned):
                raise wrong_memory(name)
        if not surely_apart(arrays, addresses, list(results.values()), targets, self._pair_positions):
            inputs = {name: array for (name, _, _), array in zip(self._inputs, arrays, strict=True)}
            reject_sharing(inputs, out, self._pairs)

    # -- inspection --------------------------------------------------------------------------------------------------

    @property
    def timing(self) -> Timing | None:
        """The times of its compilation by part, or of opening it from the cache; None for a program from a file."""
        return None if self.read_timing is None else self.read_timing()

    @property
    def manifest(self) -> Mapping[str, Any]:
        """The artifact's description of itself, as JSON data."""
        return self._artifact.manifest

    @property
    def sources(self) -> Mapping[str, str]:
        """Maps a file name to C text, for everything in the library."""
        return self._artifact.sources

    @property
    def inputs(self) -> dict[str, str]:
        """Maps an input name to dtype and symbolic shape, e.g. ``float32[B, 2*L]``."""
        return described(self.arguments("inputs"))

    @property
    def outputs(self) -> dict[str, str]:
        """Maps an output name to dtype and symbolic shape."""
        return described(self.arguments("outputs"))

    def arguments(self, kind: str) -> list[dict[str, Any]]:
        """Return ``inputs``, ``outputs`` or ``optional`` (initializers that are inputs): dicts with ``name``, ``dtype``
        and ``shape``, in order. UnknownNameError: another kind."""
        if not isinstance(kind, str) or kind not in KINDS:
            remedy = f"pass {' or '.join(map(repr, KINDS))}"
            raise UnknownNameError(f"a program has no arguments {kind!r}", remedy=remedy)
        return list(self.manifest.get(kind, ()))

    @property
    def appendable(self) -> dict[str, str]:
        """Maps an output to the input that it begins with. Views of one array for both avoid the copy of the input."""
        return {output: name for name, output in sorted(self._pairs)}

    @property
    def caches(self) -> list[dict[str, Any]]:
        """The ``appendable`` pairs in the order of the outputs: dicts with ``output``, ``input``, ``dtype``, ``shape``
        (of the input, as texts) and ``axis``, which grows."""
        return described_caches(self.arguments("inputs"), self.arguments("outputs"), self.appendable)

    @property
    def symbols(self) -> dict[str, str]:
        """Maps a symbol to the source of its value."""
        return {s["symbol"]: f"axis {s['axis']} of input '{s['input']}'" for s in self.manifest["symbols"]}

    @property
    def guards(self) -> list[str]:
        """The conditions on sizes that every call must fulfil (``manifest["index_checks"]`` has conditions on data)."""
        return [f"{g['rule']}: {g['message']}" for g in self.manifest["guards"]]

    @property
    def launches(self) -> list[str]:
        """The labels of the launches in execution order."""
        return [launch["label"] for launch in self.manifest["launches"]]

    @property
    def steps(self) -> list[str]:
        """The host steps between the parts of the program, in order; empty for a program of one part."""
        return []

    @property
    def bodies(self) -> dict[str, Program]:
        """The models that those steps run, by name."""
        return {}

    @property
    def kernel_count(self) -> int:
        """The number of distinct kernels."""
        return len(self.manifest["kernels"])

    @property
    def weight_bytes(self) -> int:
        """The size of the constants in bytes, in their final form."""
        return int(self._artifact.weights.size)

    @property
    def counters(self) -> dict[str, int]:
        """Numbers over all contexts for tests and monitoring: compilations, contexts, arena_bytes, evaluations,
        bytes_copied (moved without computing: parts of concatenations, strided inputs, inputs passed through), and
        runs_not_logged (calls with shapes that did not fit into ``shapes_seen``).
        """
        every = [c.statistics() for c in list(self._contexts)]
        return {
            "compilations": self.compilations,
            "contexts": len(every),
            "arena_bytes": sum(s["arena_bytes"] for s in every),
            "evaluations": sum(s["evaluations"] for s in every),
            "bytes_copied": sum(s["bytes_copied"] for s in every),
            "runs_not_logged": self._native.shapes_seen(len(self.symbols))[1],
        }

    def shapes_seen(self) -> list[dict[str, Any]]:
        """Return the shapes of calls, most frequent first: ``{"dims": {"B": 1, "L": 61}, "count": 12}``.

        ``dims`` has all ``symbols``, including those that a guard makes equal to another. Counts are over all threads
        since the program was opened; ``profile`` is not counted. The first 4096 distinct shapes are counted separately;
        ``counters["runs_not_logged"]`` counts calls with other shapes. Counting takes a few nanoseconds per call, and
        well below a hundred if the shape differs from the context's last one.
        """
        names = list(self.symbols)
        rows, _ = self._native.shapes_seen(len(names))
        ordered = sorted(rows, key=lambda row: (-row[-1], row))
        return [{"dims": dict(zip(names, row, strict=False)), "count": row[-1]} for row in ordered]

    def save_shapes(self, path: str | os.PathLike[str]) -> None:
        """Write ``shapes_seen()`` as JSON, for ``polydyn tune --from-log``."""
        write_log(path, self.shapes_seen())

    def profile(
        self, feeds: Mapping[str, Any], repeats: int = 5, out: Mapping[str, Array] | None = None
    ) -> Table[LaunchTime]:  # fmt: skip
        """Return the time of every launch (median over ``repeats`` calls after a warm-up call), in execution order.

        ``out``: as for ``run``; with caches that grow in place, a step is profiled as it runs.
        """
        from polydyn.runtime.launch_times import launch_times

        check_repeats(repeats)
        with self._context() as context:
            arrays, addresses = self._bind(context, feeds, out)
            _, to = self._allocate(context, out, arrays, addresses)
            count = len(self.manifest["launches"])
            times = [context.profile(addresses, to, count) for _ in range(repeats + 1)][1:]
            infos = [context.launch(k) for k in range(count)]
        return launch_times(infos, times)

    def trace(
        self, feeds: Mapping[str, Any], repeats: int = 5, out: Mapping[str, Array] | None = None
    ) -> Table[Span]:  # fmt: skip
        """Return the work of each thread over time, ordered by begin, from the fastest of ``repeats`` calls after a
        warm-up call. Launches of a wave run in parallel, as in ``run``. ``out``: as for ``run``.

        UnsupportedError: the program is for a device or has parts.
        """
        from polydyn.runtime.spans import reject_trace, shortest

        reject_trace(self.manifest)
        check_repeats(repeats)
        with self._context() as context:
            arrays, addresses = self._bind(context, feeds, out)
            _, to = self._allocate(context, out, arrays, addresses)
            count = len(self.manifest["launches"])
            calls = [context.trace(addresses, to, 8 * count) for _ in range(repeats + 1)][1:]
            return shortest(calls, [context.launch(k) for k in range(count)])

    def explain(self, /, **dims: int) -> Explanation:
        """Explain every launch at a shape without running: kernel, tiles, tasks, threads, work and reasons.

        ``dims``: sizes of the program's symbols; those that follow from others may be left out. ``str()`` of the
        result is a table. InputError: a dim is unknown or missing, or a guard does not hold.
        """
        from polydyn.runtime.explain import explain  # loads the decisions of the schedules

        return explain(self.manifest, dims, self.threads)

    def save(self, path: str | os.PathLike[str], *, with_threads: bool = True) -> None:
        """Write the program as an artifact that ``polydyn.load`` and C programs can run.

        ``with_threads``: also store the number of threads, if one was specified. ``polydyn.load`` then uses it by
        default, instead of all cores.
        """
        kept = checked_flag(with_threads, "with_threads") and self._requested and "cuda" not in self.manifest
        threads = {"threads": self._requested} if kept else {}
        manifest = {n: x for n, x in self.manifest.items() if n != "threads"} | threads
        write_artifact(replace(self._artifact, manifest=manifest), path)
