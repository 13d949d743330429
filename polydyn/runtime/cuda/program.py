"""CudaProgram: a compiled model on a CUDA device. Standard library and numpy only."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from polydyn.errors import InputError
from polydyn.runtime.artifact import Artifact
from polydyn.runtime.bound import reject_conversions
from polydyn.runtime.cuda.array import DeviceArray
from polydyn.runtime.cuda.bound import CallStatus, CudaBoundCall
from polydyn.runtime.cuda.dlpack import CPU, CUDA_HOST, View, device_of, view
from polydyn.runtime.cuda.driver import LEGACY, Driver
from polydyn.runtime.cuda.native import ON_DEVICE, ON_HOST, TO_COPY, CudaContext, CudaNative
from polydyn.runtime.cuda.session import Session, open_session
from polydyn.runtime.explain import Device, Explanation, explain
from polydyn.runtime.native import DTYPE_CODES
from polydyn.runtime.program import LaunchTime, Program, check_repeats, launch_times, numpy_dtype
from polydyn.runtime.sharing import reject_folded, reject_sharing

Array = npt.NDArray[Any]

ALIGNED = 16
"""Bytes: kernels read and write vectors of so many."""

GRAPHS, MOST_GRAPHS = 8, 64
"""How many graphs of runs a context keeps at first, and how many it may."""

NODE_BYTES, GRAPH_BYTES = 16 << 10, 64 << 20
"""Bytes of device memory that a node of a graph is counted as, and those that a context's graphs may take at first."""

MULTIPROCESSORS, SHARED_OPT_IN = 16, 97
"""CUdevice_attributes: multiprocessors, bytes of dynamic shared memory that a block may ask for."""


class CudaProgram(Program):
    """A compiled model on a device.

    ``run`` takes numpy arrays and tensors in device memory (DLPack or ``__cuda_array_interface__``), also mixed. When
    one of them is in device memory, outputs are too: ``DeviceArray``, which DLPack takes further without a copy. The
    device is opened by the first call: ``$POLYDYN_LIBCUDA`` or ``libcuda.so.1``, the primary context.
    """

    def __init__(self, artifact: Artifact, *, session: Session | None = None, compilations: int = 0) -> None:
        """``session``: the device, by default that of ``open_session()``, opened by the first call."""
        super().__init__(artifact, threads=1, compilations=compilations)
        self._chosen = session
        self._loading = threading.RLock()  # taken again by a bound call that ends while it is held
        self._idle: list[CudaContext] = []
        self._graphs, self._graph_bytes = GRAPHS, GRAPH_BYTES

    def _open_library(self, artifact: Artifact) -> CudaNative:
        self._cuda = CudaNative(artifact)
        return self._cuda

    def _output_dtype(self, name: str) -> str:
        found: str = next(o["dtype"] for o in self.manifest["outputs"] if o["name"] == name)
        return found

    def _placed(self, name: str, feeds: Mapping[str, Any], stream: int) -> Array | View:
        """An input where it lies, of the declared dtype."""
        if name not in feeds:
            self._reject_names(feeds)
        declared = self._declared(name)["dtype"]
        dtype = numpy_dtype(declared)
        given = feeds[name]
        if _on_host(given):
            array = self._convert(name, dtype, given)
            return array if array.flags.aligned else array.copy()
        a = view(given, stream, self.session.driver.device)
        if a.dtype not in (declared, str(dtype)):
            raise InputError(f"input '{name}' is {a.dtype}, the program takes {declared}", tensor=name)
        return a

    def _given(self, name: str, a: Any, stream: int) -> Array | View:
        """An output of the caller's where it lies: what numpy would make a copy of is none."""
        if not _on_host(a):
            return view(a, stream, self.session.driver.device)
        if not isinstance(a, np.ndarray) and not hasattr(a, "__dlpack__"):
            raise InputError(f"out['{name}'] is no array", tensor=name, remedy="pass a numpy array")
        return np.asarray(a)

    @property
    def session(self) -> Session:
        """The device's session, opened when it is first asked for. DriverMissingError: there is none."""
        if self._chosen is None:
            self._chosen = open_session()
        return self._chosen

    # -- running -----------------------------------------------------------------------------------------------------

    def run(
        self, feeds: Mapping[str, Any], out: Mapping[str, Any] | None = None, *, stream: Any = None
    ) -> dict[str, Any]:
        """Computes the outputs.

        ``feeds``: input name -> numpy array or tensor in device memory (dense; a tensor that is not aligned to 16
        bytes is copied). ``out``: arrays or tensors for some or all outputs. ``stream``: a CUstream, or a stream of
        torch, cupy or pycuda that is not capturing: the run is put on it and, when no output is on the host, not waited
        for; errors of its kernels and indices outside their axis then appear later: in ``numpy()`` of an output, or at
        a later call, which does nothing else. Without it the run has a stream of its own and is over when this returns.
        Returns output name -> array. InputError; DeviceError: a failing kernel, no memory, no driver.
        """
        session = self.session
        handle = stream_handle(stream)
        with session.use() as driver:
            refuse_capture(driver, handle)
            context = self._take_ready(session)
            try:
                context.keep(self._graphs, self._graph_bytes)
                call = Call(self, context, feeds, out or {}, handle)
                context.run_on(call.inputs, call.outputs, handle, handle != 0)
                if handle and self._looks:
                    call.attach(CallStatus(partial(self._call_status, context, context.calls)))
                return call.results()
            finally:
                self._idle.append(context)

    def bind(
        self, feeds: Mapping[str, Any], out: Mapping[str, Any] | None = None, *, stream: Any = None
    ) -> CudaBoundCall:
        """``run`` on these very arrays, to be repeated: recorded as a CUDA graph here, which a call launches.

        ``feeds``, ``out``, ``stream`` as for ``run``, but inputs on the host must be numpy arrays that need no
        conversion. Whoever calls the result may change the arrays' elements in between, not their shapes; work on the
        device that changes them must have ended, or be on ``stream``; of arrays without DLPack (pycuda's) it may also
        be on the stream they name, the default one when none. InputError; DeviceError: no memory, or a driver before
        CUDA 11.4.
        """
        session, handle = self.session, stream_handle(stream)
        with session.use() as driver:
            refuse_capture(driver, handle)
            context = self._take_ready(session)
            try:
                call = Call(self, context, feeds, out or {}, handle)
                call.reject_conversions(feeds)
                context.record(call.inputs, call.outputs)
                bound = CudaBoundCall(session, context.replay(handle, handle != 0), self._cuda.check, call)
                if handle and self._looks:
                    call.attach(bound.status(context.wait))
            except BaseException:
                self._idle.append(context)
                raise
        weakref.finalize(bound, self._give_back, context).atexit = False  # until then this keeps the program
        return bound

    def _give_back(self, context: CudaContext) -> None:
        """A bound call is gone: its context is free again, unless it went with the device's."""
        with self._loading:
            if self._cuda.generation == self.session.generation and context in self._contexts:
                context.release()
                self._idle.append(context)

    @property
    def _looks(self) -> bool:
        """Whether the device looks for indices outside their axis."""
        return any("launch" in c for c in self.manifest["index_checks"])

    def _call_status(self, context: CudaContext, number: int) -> None:
        """InputError when that call of a context read an index outside its axis.

        Nothing when the context is busy or has made another call since: that one has said so, or will.
        """
        try:
            self._idle.remove(context)
        except ValueError:
            return
        try:
            if context.calls == number:
                context.wait()
        finally:
            self._idle.append(context)

    def _take_ready(self, session: Session) -> CudaContext:
        """A free context, after loading kernels when that was not done in this generation of the device's context."""
        with self._loading:
            if self._cuda.generation != session.generation:
                self._load(session)
        try:
            return self._idle.pop()
        except IndexError:
            return self._new_cuda_context()

    def _load(self, session: Session) -> None:
        """Nobody is inside a call: those of the last generation have left before it ended."""
        if self._cuda.generation >= 0:
            self._cuda.forget_context()
            gone = list(self._contexts)
            self._contexts.clear()  # first: a bound call may end meanwhile
            self._idle.clear()
            for context in gone:
                self._cuda.library.pd_context_free(context.handle)
        self._cuda.open(self._artifact, session)

    def _new_cuda_context(self) -> CudaContext:
        manifest = self._artifact.manifest
        inputs = [(DTYPE_CODES.index(i["dtype"]), len(i["shape"])) for i in manifest["inputs"]]
        ranks = [len(o["shape"]) for o in manifest["outputs"]]
        count = self.session.driver.attribute(MULTIPROCESSORS)
        context = CudaContext(self._cuda, count, inputs, ranks, [k for k, _, _ in self._strided])
        self._contexts.append(context)
        return context

    @property
    def graphs(self) -> int:
        """How many CUDA graphs of runs a context keeps, 0 to 64, at first 8.

        When ``run`` gets the same sizes for the second time, and those arrays that lie on the device at the same
        addresses, it records what it does, and is one launch from then on. It holds
        from a context's next run on. InputError: another number.
        """
        return self._graphs

    @graphs.setter
    def graphs(self, most: int) -> None:
        if not 0 <= most <= MOST_GRAPHS:
            raise InputError(f"graphs is {most}", remedy=f"0 to {MOST_GRAPHS}")
        self._graphs = most

    @property
    def graph_bytes(self) -> int:
        """How many bytes of device memory a context's graphs may take together, at first 64 MiB.

        No call of the driver tells what they take: a node is counted as 16 KiB, somewhat more than what others have
        found (``graph_node_bytes`` of ``benchmarks.gpu.run_all`` measures it). A run with more nodes is not recorded.
        Bound calls are not counted. It holds from a context's next run on. InputError: less than 0.
        """
        return self._graph_bytes

    @graph_bytes.setter
    def graph_bytes(self, most: int) -> None:
        if most < 0:
            raise InputError(f"graph_bytes is {most}", remedy="0 or more")
        self._graph_bytes = most

    # -- looking inside ----------------------------------------------------------------------------------------------

    @property
    def counters(self) -> dict[str, int]:
        """As ``Program.counters``; ``choices``: launches whose version was chosen, not remembered. Of runs as graphs:
        ``graphs`` that are kept now, their ``graph_nodes``, and the ``graph_bytes`` that these are counted as; runs
        that were ``recorded``, ``replayed``, ``not_recorded``: the device had no memory or no graphs, and the context
        keeps none any more, or they have too many nodes (``graph_bytes``).
        """
        names = ("graphs", "graph_nodes", "recorded", "replayed", "not_recorded")
        with self._loading:  # contexts of a device that was lost go meanwhile
            contexts = [c for c in list(self._contexts) if isinstance(c, CudaContext)]
            counts = [c.graphs() for c in contexts]
            found = {name: sum(c[i] for c in counts) for i, name in enumerate(names)}
            found |= {"choices": sum(c.choices() for c in contexts)}
            return super().counters | found | {"graph_bytes": found["graph_nodes"] * NODE_BYTES}

    def profile(self, feeds: Mapping[str, Any], repeats: int = 5) -> list[LaunchTime]:
        """The device's time of every launch (median over ``repeats`` calls after one that warms up), in order."""
        check_repeats(repeats)
        session = self.session
        with session.use():
            context = self._take_ready(session)
            try:
                call = Call(self, context, feeds, {}, 0)
                count = len(self.manifest["launches"])
                times = [context.profile(call.inputs, call.outputs, count) for _ in range(repeats + 1)][1:]
                infos = [context.launch(k) for k in range(count)]
            finally:
                self._idle.append(context)
        return launch_times(infos, times)

    def explain(self, /, **dims: int) -> Explanation:
        """What every launch would do at a shape, without running: the version that is taken and why, blocks, registers.

        As ``Program.explain``; tasks are blocks, threads are those of a block. The device is the one that is open, else
        the one that times are estimated for.
        """
        supposed = self.manifest["estimates"]
        device = Device(supposed["shared"], supposed["special"])
        count: int = supposed["multiprocessors"]
        if self._cuda.session is not None:
            driver = self._cuda.session.driver
            device = Device(driver.attribute(SHARED_OPT_IN), self._cuda.special, self._cuda.lacking)
            count = driver.attribute(MULTIPROCESSORS)
        return explain(self.manifest, dims, count, device)

    @property
    def images(self) -> list[str]:
        """Architectures that the program has kernels for, ``ptx`` for any newer device; none: they are sources."""
        return list(self.manifest["cuda"]["images"])

    @property
    def resources(self) -> dict[str, Mapping[str, Mapping[str, int]]]:
        """Kernel -> architecture -> registers per thread, spills, stack and static shared memory in bytes."""
        return {k["name"]: k["resources"] for k in self.manifest["kernels"]}


class Call:
    """One call's arrays, bound to a context: the addresses it needs, and the results it gives."""

    def __init__(
        self, program: CudaProgram, context: CudaContext, feeds: Mapping[str, Any], out: Mapping[str, Any], stream: int
    ) -> None:
        """Prepares the context for the shapes. InputError: an array does not fit."""
        self._program, self._context, self._stream = program, context, stream
        order = stream or context.stream
        self._arrays = {n: program._placed(n, feeds, order) for n, _, _ in program._inputs}
        if len(feeds) != len(self._arrays):
            program._reject_names(feeds)
        program._check_ranks(list(self._arrays.values()))
        self._out = {n: program._given(n, a, order) for n, a in out.items()}
        self._on_device = any(isinstance(a, View) for a in (*self._arrays.values(), *self._out.values()))
        self._order, self._after = order, self._exporters(order)
        self.follow()
        key, places = self._key()
        if context.key != [*key, places]:
            context.prepare_at(key, places)
        self.inputs = [_address(a) for a in self._arrays.values()]
        self.named: dict[str, Any] = {}
        self._targets: dict[str, Array | View | DeviceArray] = {}
        for (name, dtype), shape in zip(program._outputs, context.output_shapes, strict=True):
            self._targets[name] = self._target(name, dtype, shape)
            self.named[name] = out.get(name, self._targets[name])
        self._check_overlap()
        self.outputs = [_address(a) for a in self._targets.values()]

    def _exporters(self, order: int) -> list[int]:
        """Streams of tensors whose exporters leave waiting to the reader. InputError: one is of another context."""
        driver = self._program.session.driver
        waiting = [(n, a) for x in (self._arrays, self._out) for n, a in x.items() if isinstance(a, View) and a.after]
        for name, a in waiting:
            if 0 not in a.shape and driver.owner(a.pointer) not in (0, driver.context):
                remedy = "make it in the device's primary context (with pycuda: import pycuda.autoprimaryctx)"
                raise InputError(f"'{name}' is in memory of another CUDA context", tensor=name, remedy=remedy)
        return list({a.after: None for _, a in waiting if a.after != order})

    def follow(self) -> None:
        """Puts the stream of the call behind what exporters have on theirs by now."""
        if self._after:
            refuse_capture(self._program.session.driver, self._order)
        for after in self._after:
            self._program.session.driver.order(self._order, after)

    def reject_conversions(self, feeds: Mapping[str, Any]) -> None:
        """InputError for an input on the host that is not read where the caller has it: changes would not be seen."""
        host = {n: _address(a) for n, a in self._arrays.items() if isinstance(a, np.ndarray)}
        reject_conversions(list(host), feeds, list(host.values()))

    def attach(self, status: Callable[[], None]) -> None:
        """Outputs that were made for this call ask ``status`` how it ended, before they are copied to the host."""
        for target in self._targets.values():
            if isinstance(target, DeviceArray):
                target.status = status

    def results(self) -> dict[str, Any]:
        """Output name -> array, those of the caller included."""
        for name, target in self._targets.items():
            given = self.named[name]
            if isinstance(given, np.ndarray) and given is not target:
                np.copyto(given, np.asarray(target))  # a view with strides of its own
        return self.named

    def _key(self) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
        """Shapes and strides as ``Context.prepare`` wants them, and where arrays lie."""
        key: list[tuple[int, ...]] = []
        places: list[int] = []
        for name, a in self._arrays.items():
            key += [a.shape, a.strides]
            if isinstance(a, View) and not a.dense and name not in self._appendable():
                raise InputError(f"input '{name}' is in device memory and not dense", tensor=name, remedy="copy it")
            places.append(ON_HOST if not isinstance(a, View) else TO_COPY if a.pointer % ALIGNED else ON_DEVICE)
        for _, name, rank in self._program._strided:
            given = self._out.get(name)
            if given is not None and given.ndim != rank:
                raise InputError(f"out['{name}'] must be an array of {rank} axes", tensor=name)
            key.append(given.strides if isinstance(given, View) else ())
        for name, _ in self._program._outputs:
            host = isinstance(self._out[name], np.ndarray) if name in self._out else not self._on_device
            places.append(ON_HOST if host else ON_DEVICE)
        return key, tuple(places)

    def _appendable(self) -> set[str]:
        return {name for name, _ in self._program._pairs}

    def _target(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array | View | DeviceArray:
        """Where an output is written: the caller's array, or a new one."""
        declared = self._program._output_dtype(name)
        given = self._out.get(name)
        if given is None and self._on_device:
            order = self._stream or 0
            return DeviceArray(self._program.session, shape, declared, dtype.itemsize, order)
        if given is None:
            return np.empty(shape, dtype)
        dtypes = {declared, str(dtype)}
        if given.shape != shape or str(given.dtype) not in dtypes:
            raise InputError(f"out['{name}'] must be {declared} of shape {shape} in this call", tensor=name)
        if isinstance(given, View):
            if not given.dense and name not in {n for _, n, _ in self._program._strided}:
                raise InputError(f"out['{name}'] must be dense", tensor=name)
            return given
        if not (given.flags.writeable and given.flags.aligned):
            raise InputError(f"out['{name}'] must be aligned and writeable", tensor=name)
        return given if given.flags.c_contiguous else np.empty(shape, dtype)

    def _check_overlap(self) -> None:
        unknown = [n for n in self._out if n not in self._targets]
        if unknown:
            names = ", ".join(self._targets)
            raise InputError(f"the program has no output '{unknown[0]}'", tensor=unknown[0], remedy=f"outputs: {names}")
        if not self._out:
            return
        host_in = {n: a for n, a in self._arrays.items() if isinstance(a, np.ndarray)}
        host_out = {n: a for n, a in self._out.items() if isinstance(a, np.ndarray)}
        reject_sharing(host_in, host_out, self._program._pairs)
        for n, a in self._out.items():
            if isinstance(a, View):
                reject_folded(n, a.shape, a.strides, a.itemsize)
        views = [(n, a, False) for n, a in self._arrays.items() if isinstance(a, View)]
        views += [(n, a, True) for n, a in self._out.items() if isinstance(a, View)]
        for k, (n, a, _) in enumerate(views):
            for m, b, written in views[k + 1 :]:
                begins = (n, m) in self._program._pairs and a.pointer == b.pointer  # strides: pd_check_shared
                if written and _meet(a.span, b.span) and not begins:
                    raise InputError(f"out['{m}'] shares memory with '{n}'", tensor=m, remedy="pass a copy")


def _meet(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] < b[1] and b[0] < a[1] and a[0] != a[1] and b[0] != b[1]


def _on_host(a: Any) -> bool:
    return isinstance(a, np.ndarray) or device_of(a) in (CPU, CUDA_HOST)


def _address(a: Array | View | DeviceArray) -> int:
    if isinstance(a, np.ndarray):
        return int(a.__array_interface__["data"][0])
    return a.pointer


def refuse_capture(driver: Driver, stream: int) -> None:
    """InputError for a stream that captures, before anything is done that would end the capture."""
    if stream and driver.captures(stream):
        raise InputError("the stream is capturing a graph, whose replays would use memory of other calls",
                         remedy="bind the call instead, and call it outside the capture")  # fmt: skip


def stream_handle(stream: Any) -> int:
    """The CUstream of what libraries call a stream; 0 for None. InputError: it is none."""
    if stream is None:
        return 0
    for name in ("cuda_stream", "handle", "ptr"):  # torch, pycuda, cupy
        if hasattr(stream, name):
            stream = getattr(stream, name)
            break
    else:
        if hasattr(stream, "__cuda_stream__"):
            stream = stream.__cuda_stream__()[1]
    if not isinstance(stream, int):
        raise InputError(f"{stream!r} is no stream", remedy="pass a CUstream, or a stream of torch, cupy or pycuda")
    return stream or LEGACY
