"""CudaProgram: a compiled model on a CUDA device. Standard library and numpy only."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from polydyn.arguments import check_repeats, checked_feeds, checked_integer, checked_out
from polydyn.errors import InputError, UnknownNameError
from polydyn.runtime.artifact import Artifact
from polydyn.runtime.bound import reject_conversions
from polydyn.runtime.cuda.array import DeviceArray
from polydyn.runtime.cuda.bound import CallStatus, CudaBoundCall
from polydyn.runtime.cuda.dlpack import CPU, CUDA_HOST, View, device_of, view
from polydyn.runtime.cuda.driver import LEGACY, Driver
from polydyn.runtime.cuda.native import ON_DEVICE, ON_HOST, TO_COPY, CudaContext, CudaNative
from polydyn.runtime.cuda.session import Session, open_session
from polydyn.runtime.explain import Device, Explanation, explain
from polydyn.runtime.launch_times import LaunchTime, launch_times
from polydyn.runtime.native import DTYPE_CODES
from polydyn.runtime.program import Program, numpy_dtype
from polydyn.runtime.sharing import reject_folded, reject_sharing
from polydyn.runtime.tables import Table

Array = npt.NDArray[Any]

ALIGNMENT = 16
"""Alignment in bytes: kernels read and write vectors of this size."""

GRAPHS, MAX_GRAPHS = 8, 64
"""Default and maximum number of CUDA graphs that a context caches."""

NODE_BYTES, GRAPH_BYTES = 16 << 10, 64 << 20
"""Assumed bytes of device memory per graph node, and the default limit for all graphs of a context."""

MULTIPROCESSORS, SHARED_OPT_IN = 16, 97
"""CUdevice_attributes: number of SMs, maximum bytes of dynamic shared memory per block."""


class CudaProgram(Program):
    """A compiled model on a device.

    ``run`` takes numpy arrays and tensors in device memory (DLPack or ``__cuda_array_interface__``), also mixed. If one
    of them is in device memory, outputs are too: as ``DeviceArray``, which DLPack can export without a copy. The first
    call opens the device: ``$POLYDYN_LIBCUDA`` or ``libcuda.so.1``, the primary context.
    """

    def __init__(self, artifact: Artifact, *, session: Session | None = None, compilations: int = 0) -> None:
        """``session``: the device, by default that of ``open_session()``, opened by the first call."""
        super().__init__(artifact, threads=1, compilations=compilations)
        self._chosen = session
        self._loading = threading.RLock()  # a bound call that is freed while it is held acquires it again
        self._idle: list[CudaContext] = []
        self._graphs, self._graph_bytes = GRAPHS, GRAPH_BYTES

    def _open_library(self, artifact: Artifact) -> CudaNative:
        self._cuda = CudaNative(artifact)
        return self._cuda

    def _output_dtype(self, name: str) -> str:
        dtype: str = next(o["dtype"] for o in self.manifest["outputs"] if o["name"] == name)
        return dtype

    def _placed(self, name: str, feeds: Mapping[str, Any], stream: int) -> Array | View:
        """Return an input in place, with the declared dtype."""
        if name not in feeds:
            self._reject_names(feeds)
        declared = self._declared(name)["dtype"]
        dtype = numpy_dtype(declared)
        value = feeds[name]
        if _on_host(value):
            array = self._convert(name, dtype, value)
            return array if array.flags.aligned else array.copy()
        a = view(value, stream, self.session.driver.device)
        if a.dtype not in (declared, str(dtype)):
            raise InputError(f"input '{name}' is {a.dtype}, the program takes {declared}", tensor=name)
        return a

    def _given(self, name: str, a: Any, stream: int) -> Array | View:
        """Return the caller's output in place. InputError: numpy would have to copy it."""
        if not _on_host(a):
            return view(a, stream, self.session.driver.device)
        if not isinstance(a, np.ndarray) and not hasattr(a, "__dlpack__"):
            raise InputError(f"out['{name}'] is not an array", tensor=name, remedy="pass a numpy array")
        return np.asarray(a)

    @property
    def session(self) -> Session:
        """The device's session, opened on first use. DriverMissingError: there is no driver."""
        if self._chosen is None:
            self._chosen = open_session()
        return self._chosen

    # -- running -----------------------------------------------------------------------------------------------------

    def run(
        self, feeds: Mapping[str, Any], out: Mapping[str, Any] | None = None, *, stream: Any = None
    ) -> dict[str, Any]:
        """Compute the outputs.

        ``feeds``: input name -> numpy array or tensor in device memory (dense; a tensor that is not aligned to 16
        bytes is copied). ``out``: arrays or tensors for some or all outputs. ``stream``: a CUstream, or a stream of
        torch, cupy or pycuda that is not capturing. The run is enqueued there; if no output is on the host, it is not
        waited for. Then errors of its kernels and indices outside their axis are raised later: in ``numpy()`` of an
        output, or in a later call, which does nothing else. Without ``stream`` the run has its own stream and is
        complete on return. Returns output name -> array. InputError; DeviceError: a failing kernel, no memory, no
        driver.
        """
        session = self.session
        handle = stream_handle(stream)
        with session.use() as driver:
            reject_capture(driver, handle)
            context = self._take_ready(session)
            try:
                context.keep(self._graphs, self._graph_bytes)
                call = Call(self, context, feeds, checked_out(out), handle)
                context.run_on(call.inputs, call.outputs, handle, handle != 0)
                if handle and self._looks:
                    call.attach(CallStatus(partial(self._call_status, context, context.calls)))
                return call.results()
            finally:
                self._idle.append(context)

    def bind(
        self, feeds: Mapping[str, Any], out: Mapping[str, Any] | None = None, *, stream: Any = None
    ) -> CudaBoundCall:
        """Return ``run`` on these arrays for repeated calls. It is recorded here as a CUDA graph, which a call
        launches.

        ``feeds``, ``out``, ``stream``: as for ``run``, but inputs on the host must be numpy arrays that need no
        conversion. Between calls the arrays' elements may change, but not their shapes. Device work that changes them
        must be complete, or be on ``stream``; for arrays without DLPack (pycuda's) it may also be on the stream that
        they name, or on the default stream. InputError; DeviceError: no memory, or a driver before CUDA 11.4.
        """
        session, handle = self.session, stream_handle(stream)
        with session.use() as driver:
            reject_capture(driver, handle)
            context = self._take_ready(session)
            try:
                call = Call(self, context, feeds, checked_out(out), handle)
                call.reject_conversions(feeds)
                context.record(call.inputs, call.outputs)
                bound = CudaBoundCall(session, context.replay(handle, handle != 0), self._cuda.check, call)
                if handle and self._looks:
                    call.attach(bound.status(context.wait))
            except BaseException:
                self._idle.append(context)
                raise
        weakref.finalize(bound, self._give_back, context).atexit = False  # the finalizer keeps the program alive
        return bound

    def _give_back(self, context: CudaContext) -> None:
        """Release the context of a freed bound call, unless it was lost with the device's context."""
        with self._loading:
            if self._cuda.generation == self.session.generation and context in self._contexts:
                context.release()
                self._idle.append(context)

    @property
    def _looks(self) -> bool:
        """Whether the device checks indices."""
        return any("launch" in c for c in self.manifest["index_checks"])

    def _call_status(self, context: CudaContext, number: int) -> None:
        """Raise InputError if call ``number`` of a context read an index outside its axis.

        Do nothing if the context is busy or has made another call since, because that call reports the error.
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
        """Return a free context, after loading kernels if the device's context is new."""
        with self._loading:
            if self._cuda.generation != session.generation:
                self._load(session)
        try:
            return self._idle.pop()
        except IndexError:
            return self._new_cuda_context()

    def _load(self, session: Session) -> None:
        """Load the program into a new device context. No thread is in a call: they left before the old one ended."""
        if self._cuda.generation >= 0:
            self._cuda.forget_context()
            lost = list(self._contexts)
            self._contexts.clear()  # first, because a bound call may be freed meanwhile
            self._idle.clear()
            for context in lost:
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
        """The maximum number of CUDA graphs that a context caches, 0 to 64, by default 8.

        When ``run`` gets the same sizes for the second time, with device arrays at the same addresses, it records its
        work as a graph. From then on such a call is a single launch. A new value takes effect at a context's next run.
        InputError: another number.
        """
        return self._graphs

    @graphs.setter
    def graphs(self, count: int) -> None:
        if not 0 <= count <= MAX_GRAPHS:
            raise InputError(f"graphs is {count}", remedy=f"pass 0 to {MAX_GRAPHS}")
        self._graphs = count

    @property
    def graph_bytes(self) -> int:
        """The maximum bytes of device memory for all graphs of a context, by default 64 MiB.

        The driver does not report the memory of graphs. A node is counted as 16 KiB, slightly more than others have
        measured (``graph_node_bytes`` of ``benchmarks.gpu.run_all`` measures it). A run with more nodes is not
        recorded. Bound calls are not counted. A new value takes effect at a context's next run. InputError: less than
        0.
        """
        return self._graph_bytes

    @graph_bytes.setter
    def graph_bytes(self, count: int) -> None:
        if checked_integer(count, "graph_bytes") < 0:
            raise InputError(f"graph_bytes is {count}", remedy="pass an integer >= 0")
        self._graph_bytes = count

    # -- inspection --------------------------------------------------------------------------------------------------

    @property
    def counters(self) -> dict[str, int]:
        """Implement ``Program.counters``; ``choices``: launches whose version was chosen rather than remembered. For
        runs as graphs: cached ``graphs``, their ``graph_nodes``, and the ``graph_bytes`` that these count as. Runs that
        were ``recorded``, ``replayed``, or ``not_recorded``: the device had no memory or no graphs, and the context
        stops recording, or they have too many nodes (``graph_bytes``).
        """
        names = ("graphs", "graph_nodes", "recorded", "replayed", "not_recorded")
        with self._loading:  # contexts of a lost device are removed meanwhile
            contexts = [c for c in list(self._contexts) if isinstance(c, CudaContext)]
            counts = [c.graphs() for c in contexts]
            sums = {name: sum(c[i] for c in counts) for i, name in enumerate(names)}
            sums |= {"choices": sum(c.choices() for c in contexts)}
            return super().counters | sums | {"graph_bytes": sums["graph_nodes"] * NODE_BYTES}

    def profile(
        self, feeds: Mapping[str, Any], repeats: int = 5, out: Mapping[str, Array] | None = None
    ) -> Table[LaunchTime]:  # fmt: skip
        """Return the device time of every launch (median over ``repeats`` calls after a warm-up call), in order.

        ``out``: as for ``run``.
        """
        check_repeats(repeats)
        session = self.session
        with session.use():
            context = self._take_ready(session)
            try:
                call = Call(self, context, feeds, checked_out(out), 0)
                count = len(self.manifest["launches"])
                times = [context.profile(call.inputs, call.outputs, count) for _ in range(repeats + 1)][1:]
                infos = [context.launch(k) for k in range(count)]
            finally:
                self._idle.append(context)
        return launch_times(infos, times)

    def explain(self, /, **dims: int) -> Explanation:
        """Explain every launch at a shape without running: the selected version and the reasons, blocks, registers.

        Like ``Program.explain``, but tasks are blocks and threads are threads per block. The device is the open one, or
        else the one whose times are estimated.
        """
        described = self.manifest["estimates"]
        device = Device(described["shared"], described["special"])
        count: int = described["multiprocessors"]
        if self._cuda.session is not None:
            driver = self._cuda.session.driver
            device = Device(driver.attribute(SHARED_OPT_IN), self._cuda.special, self._cuda.lacking)
            count = driver.attribute(MULTIPROCESSORS)
        return explain(self.manifest, dims, count, device)

    @property
    def images(self) -> list[str]:
        """The architectures that the program has kernels for, ``ptx`` for any newer device; empty if it has sources."""
        return list(self.manifest["cuda"]["images"])

    @property
    def resources(self) -> dict[str, Mapping[str, Mapping[str, int]]]:
        """Maps kernel -> architecture -> registers per thread, spills, stack and static shared memory in bytes."""
        return {k["name"]: k["resources"] for k in self.manifest["kernels"]}


class Call:
    """The arrays of one call, bound to a context: the required addresses, and the results."""

    def __init__(
        self, program: CudaProgram, context: CudaContext, feeds: Mapping[str, Any], out: Mapping[str, Any], stream: int
    ) -> None:
        """Prepare the context for the shapes. InputError: an array does not fit."""
        self._program, self._context, self._stream = program, context, stream
        order = stream or context.stream
        checked_feeds(feeds)
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
        """Return the streams of tensors that the reader must wait for. InputError: a tensor is of another context."""
        driver = self._program.session.driver
        waiting = [(n, a) for x in (self._arrays, self._out) for n, a in x.items() if isinstance(a, View) and a.after]
        for name, a in waiting:
            if 0 not in a.shape and driver.owner(a.pointer) not in (0, driver.context):
                remedy = "make it in the device's primary context (with pycuda: import pycuda.autoprimaryctx)"
                raise InputError(f"'{name}' is in memory of another CUDA context", tensor=name, remedy=remedy)
        return list({a.after: None for _, a in waiting if a.after != order})

    def follow(self) -> None:
        """Make the call's stream wait for the current work of the exporters' streams."""
        if self._after:
            reject_capture(self._program.session.driver, self._order)
        for after in self._after:
            self._program.session.driver.order(self._order, after)

    def reject_conversions(self, feeds: Mapping[str, Any]) -> None:
        """Raise InputError for an input on the host that is not read in place, because changes would be missed."""
        host = {n: _address(a) for n, a in self._arrays.items() if isinstance(a, np.ndarray)}
        reject_conversions(list(host), feeds, list(host.values()))

    def attach(self, status: Callable[[], None]) -> None:
        """Attach ``status`` to new outputs: they call it before they are copied to the host."""
        for target in self._targets.values():
            if isinstance(target, DeviceArray):
                target.status = status

    def results(self) -> dict[str, Any]:
        """Return output name -> array, including the caller's arrays."""
        for name, target in self._targets.items():
            array = self.named[name]
            if isinstance(array, np.ndarray) and array is not target:
                np.copyto(array, np.asarray(target))  # the caller's array is not dense
        return self.named

    def _key(self) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
        """Return shapes and strides as required by ``Context.prepare``, and the locations of arrays."""
        key: list[tuple[int, ...]] = []
        places: list[int] = []
        for name, a in self._arrays.items():
            key += [a.shape, a.strides]
            if isinstance(a, View) and not a.dense and name not in self._appendable():
                raise InputError(f"input '{name}' is in device memory and not dense", tensor=name, remedy="copy it")
            places.append(ON_HOST if not isinstance(a, View) else TO_COPY if a.pointer % ALIGNMENT else ON_DEVICE)
        for _, name, rank in self._program._strided:
            array = self._out.get(name)
            if array is not None and array.ndim != rank:
                raise InputError(f"out['{name}'] must be an array of {rank} axes", tensor=name)
            key.append(array.strides if isinstance(array, View) else ())
        for name, _ in self._program._outputs:
            host = isinstance(self._out[name], np.ndarray) if name in self._out else not self._on_device
            places.append(ON_HOST if host else ON_DEVICE)
        return key, tuple(places)

    def _appendable(self) -> set[str]:
        return {name for name, _ in self._program._pairs}

    def _target(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array | View | DeviceArray:
        """Return the target of an output: the caller's array, or a new one."""
        declared = self._program._output_dtype(name)
        array = self._out.get(name)
        if array is None and self._on_device:
            order = self._stream or 0
            return DeviceArray(self._program.session, shape, declared, dtype.itemsize, order)
        if array is None:
            return np.empty(shape, dtype)
        dtypes = {declared, str(dtype)}
        if array.shape != shape or str(array.dtype) not in dtypes:
            raise InputError(f"out['{name}'] must be {declared} of shape {shape} in this call", tensor=name)
        if isinstance(array, View):
            if not array.dense and name not in {n for _, n, _ in self._program._strided}:
                raise InputError(f"out['{name}'] must be dense", tensor=name)
            return array
        if not (array.flags.writeable and array.flags.aligned):
            raise InputError(f"out['{name}'] must be aligned and writeable", tensor=name)
        return array if array.flags.c_contiguous else np.empty(shape, dtype)

    def _check_overlap(self) -> None:
        unknown = [n for n in self._out if n not in self._targets]
        if unknown:
            names = ", ".join(self._targets)
            text = f"the program has no output '{unknown[0]}'"
            raise UnknownNameError(text, tensor=unknown[0], remedy=f"its outputs are {names}")
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


def reject_capture(driver: Driver, stream: int) -> None:
    """Raise InputError for a capturing stream, before any call that would end the capture."""
    if stream and driver.captures(stream):
        raise InputError("the stream is capturing a graph, whose replays would use memory of other calls",
                         remedy="bind the call instead, and call it outside the capture")  # fmt: skip


def stream_handle(stream: Any) -> int:
    """Return the CUstream of a library's stream object; 0 for None. InputError: it is not a stream."""
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
        message = f"{stream!r} is not a CUDA stream"
        raise InputError(message, remedy="pass a CUstream, or a stream of torch, cupy or pycuda")
    return stream or LEGACY
