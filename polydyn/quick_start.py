"""``start="quick"``: another implementation answers calls while a process compiles the model.

The stand-in is ONNX Runtime if it is installed, else the evaluator of ``graph/reference.py``. Its results equal those
of the program up to rounding. A process compiles the model; then the compiled program takes over between two calls. A
call that the stand-in cannot answer waits for the compiled program, so errors are the program's own. Everything else
that a ``Program`` offers waits too (docs/adr/0037-quick-start.md).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

import numpy as np

from polydyn.arguments import check_threads, checked_out
from polydyn.build.compiler import TARGETS, why_elsewhere
from polydyn.errors import InputError, PolydynError, UnsupportedError
from polydyn.onnx_runtime import ort_session
from polydyn.program_key import Arguments, registrations
from polydyn.program_store import stored_program
from polydyn.runtime.artifact import read_artifact
from polydyn.runtime.opening import open_program
from polydyn.runtime.program import Array, Program, numpy_dtype
from polydyn.runtime.tables import html_table
from polydyn.shapes.sizes import sizes_by_name

if TYPE_CHECKING:
    from polydyn.graph.importer import ModelLike

log = logging.getLogger("polydyn.start")

POLL_SECONDS = 0.1
"""Minimum seconds between two looks for the program in a process that was forked."""
DTYPES = {"float": "float32", "double": "float64"}
"""Element types of ONNX Runtime with another name."""


class StandIn(Protocol):
    """Answers calls until the program is compiled. ``name``: for people."""

    name: str

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Any]:
        """Return the outputs. Any exception means that this call has to wait for the compiled program."""

    def arguments(self, kind: str) -> list[dict[str, Any]]:
        """Return ``inputs`` or ``outputs``, as ``Program.arguments`` does."""


class OnnxRuntime:
    """ONNX Runtime on the CPU."""

    name = "ONNX Runtime"

    def __init__(self, model: bytes | str, arguments: Arguments, threads: int) -> None:
        self._session = ort_session(model, threads=threads, spin=False)
        self._sizes = sizes_by_name(arguments.dims)

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Any]:
        """Return the outputs by name."""
        for i in self._session.get_inputs():
            for name, size in zip(i.shape, np.shape(feeds[i.name]), strict=True):
                if name in self._sizes and not self._sizes[name].holds(size):
                    raise InputError(f"{name} is {size}")
        outputs = [o.name for o in self._session.get_outputs()]
        return dict(zip(outputs, self._session.run(outputs, dict(feeds)), strict=True))

    def arguments(self, kind: str) -> list[dict[str, Any]]:
        """Return the inputs or outputs, with the model's names of dims; none for ``optional``."""
        every = {"inputs": self._session.get_inputs, "outputs": self._session.get_outputs}
        return [
            {"name": a.name, "dtype": _dtype(a.type), "shape": ["?" if d is None else str(d) for d in a.shape]}
            for a in (every[kind]() if kind in every else ())
        ]


class Evaluator:
    """The evaluator of the graph of primitives in numpy, for models of one part."""

    name = "the evaluator"

    def __init__(self, model: ModelLike, arguments: Arguments) -> None:
        from polydyn.graph.expand import import_model

        self._graph = import_model(model, arguments.dims, arguments.symbols)
        for name in (*self._graph.inputs, *self._graph.outputs):
            dtype = self._graph.tensors[name].dtype
            if str(numpy_dtype(dtype)) != dtype:
                raise UnsupportedError(f"numpy has no {dtype}", tensor=name)

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Any]:
        """Return the outputs by name."""
        from polydyn.graph.reference import evaluate

        if feeds.keys() != set(self._graph.inputs):
            raise InputError("other inputs")
        return evaluate(self._graph, feeds)

    def arguments(self, kind: str) -> list[dict[str, Any]]:
        """Return the inputs or outputs with symbolic shapes; none for ``optional``."""
        names = {"inputs": self._graph.inputs, "outputs": self._graph.outputs}.get(kind, ())
        tensors = [(n, self._graph.tensors[n]) for n in names]
        return [{"name": n, "dtype": t.dtype, "shape": list(map(str, t.shape))} for n, t in tensors]


def quick_program(
    model: ModelLike, arguments: Arguments, threads: int | None, compile_now: Callable[[], Program], key: str
) -> Program:
    """Return a program that answers calls at once while a process compiles the model.

    ``compile_now`` compiles in this process, if that process fails. ``key``: the program's key, "" without the cache.
    UnsupportedError: the target is not the CPU.
    """
    if arguments.target.partition(":")[0] != "cpu":
        raise UnsupportedError(
            f"a quick start is for the CPU, not for {arguments.target}", rule="start", remedy="leave out start='quick'"
        )
    if arguments.target not in TARGETS or why_elsewhere(arguments.target) or registrations() != "":
        return compile_now()  # it raises an error, or needs operators that another process does not know
    sizes_by_name(arguments.dims)
    data = model if isinstance(model, (str, os.PathLike)) else _bytes(model)
    stand_in = _stand_in(data, arguments, check_threads(threads))
    return compile_now() if stand_in is None else QuickProgram(data, arguments, threads, compile_now, key, stand_in)


class QuickProgram(Program):
    """A program whose calls a stand-in answers until it is compiled.

    ``run`` and calls never wait for the compilation if the stand-in can answer; ``inputs``, ``outputs`` and
    ``arguments`` are the stand-in's. Every other attribute is the compiled program's, which it waits for.
    """

    def __init__(
        self, model: bytes | str | os.PathLike[str], arguments: Arguments, threads: int | None,
        compile_now: Callable[[], Program], key: str, stand_in: StandIn,
    ) -> None:  # fmt: skip
        self.threads, self._begun, self._calls = check_threads(threads), time.monotonic(), 0
        self._compile_now, self._key, self._pid, self._looked = compile_now, key, os.getpid(), 0.0
        self._program: Program | None = None
        self._stand_in: StandIn | None = stand_in
        self._name = stand_in.name
        self._process = _Compiling(model, arguments, threads, bool(key))
        weakref.finalize(self, self._process.close)
        self._report = f"{stand_in.name} answers calls while the model is compiled"
        log.info(self._report)
        self._taking_over = threading.Thread(target=_take_over, args=(weakref.ref(self), self._process), daemon=True)
        self._taking_over.start()

    def __getattribute__(self, name: str) -> Any:
        if name in _OWN or name.startswith(("__", "_repr_", "_ipython_")):  # notebooks look for these
            return object.__getattribute__(self, name)
        return getattr(self.compiled(), name)

    def __repr__(self) -> str:
        return f"<QuickProgram: {self._report}>" if self._program is None else repr(self._program)

    def _repr_html_(self) -> str:
        return html_table(repr(self)[1:-1], (), ()) if self._program is None else self._program._repr_html_()

    def run(self, feeds: Mapping[str, Any], out: Mapping[str, Array] | None = None) -> dict[str, Array]:
        """Compute the outputs, by the compiled program if it is ready; see ``Program.run``."""
        program = self._program or self._forked()
        if program is None and (stand_in := self._stand_in) is not None:
            try:
                results = stand_in.run({n: np.asarray(a) for n, a in feeds.items()})
                _copy(results, checked_out(out))
            except Exception as e:  # a wrong call, or one that only the program can answer
                log.info("a call waits for the compiled program: %s", e)
            else:
                self._calls += 1
                return results | dict(checked_out(out))
        return (program or self.compiled()).run(feeds, out)

    def compiled(self) -> Program:
        """Return the compiled program; wait until it is compiled. Raises the errors of ``polydyn.compile``."""
        if self._program is None and self._pid == os.getpid():
            self._taking_over.join()
        if self._program is None:
            self._switch(self._forked() or self._compile_now())
        assert self._program is not None
        return self._program

    @property
    def start(self) -> str:
        """What answers calls, and since when: text for people."""
        return self._report

    def arguments(self, kind: str) -> list[dict[str, Any]]:
        """Return ``Program.arguments``; before the program is compiled, those of the stand-in."""
        if self._program is None and self._stand_in is not None and kind != "optional":
            return self._stand_in.arguments(kind)
        return self.compiled().arguments(kind)

    def _forked(self) -> Program | None:
        """Return the program from the cache in a process that was forked, where no thread waits for it."""
        if self._pid == os.getpid():
            return None
        if isinstance(self._stand_in, OnnxRuntime):  # its threads do not exist here
            self._stand_in = None
        if not self._key or (now := time.monotonic()) - self._looked < POLL_SECONDS:
            return None
        self._looked = now
        program = stored_program(self._key, threads=self.threads)
        if program is not None:
            self._switch(program)
        return program

    def _switch(self, program: Program) -> None:
        """Let the compiled program answer from now on."""
        passed = time.monotonic() - self._begun
        self._report = f"the compiled program answers, after {self._calls} calls and {passed:.1f} s"
        note = f"quick start: {self._name} answered calls before this program ({self._calls}), with other rounding"
        if self._calls:  # ``inspect`` shows it; the stored program has no such note
            artifact = program._artifact
            notes = {"notes": [*artifact.manifest["notes"], note]}
            program._artifact = replace(artifact, manifest=dict(artifact.manifest) | notes)
        self._program, self._stand_in = program, None
        log.info(self._report)


_OWN = frozenset((*vars(QuickProgram), "inputs", "outputs", "threads", "_begun", "_calls", "_compile_now", "_pid",
                  "_looked", "_name", "_program", "_report", "_stand_in", "_process", "_taking_over", "_key")) - {
    "__doc__"
}  # fmt: skip
"""Attributes that do not wait for the compiled program."""


def _stand_in(model: bytes | str | os.PathLike[str], arguments: Arguments, threads: int) -> StandIn | None:
    """Return ONNX Runtime, or the evaluator, or None if neither can run the model."""
    try:
        return OnnxRuntime(model if isinstance(model, bytes) else os.fspath(model), arguments, threads)
    except Exception as e:  # ONNX Runtime's errors have no common base class
        log.info("ONNX Runtime does not answer calls: %s", e)
    try:
        return Evaluator(model, arguments)
    except (PolydynError, ImportError) as e:
        log.info("the evaluator does not answer calls: %s", e)
    return None


class _Compiling:
    """A process that compiles a model into a file. It ends when ``close`` is called, or when this process ends."""

    def __init__(
        self, model: bytes | str | os.PathLike[str], arguments: Arguments, threads: int | None, cache: bool
    ) -> None:
        self._folder = tempfile.mkdtemp(prefix="polydyn-start-")
        self.program = Path(self._folder, "program.polydyn")
        text = f"import sys; sys.path[:] = {sys.path!r}; from polydyn.quick_child import child; child(sys.stdin.buffer)"
        self._process = subprocess.Popen(
            [sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
        )
        pipe = self._process.stdin
        assert pipe is not None
        self._close = weakref.finalize(self, _stop, os.getpid(), pipe, self._folder)
        if isinstance(model, bytes):
            data, model = model, Path(self._folder, "model.onnx")
            model.write_bytes(data)
        records = None if arguments.records is None else os.fspath(arguments.records)
        request = {
            "program": str(self.program), "model": os.fspath(model), "threads": threads, "cache": cache,
            "arguments": arguments.to_json() | {"records": records},
        }  # fmt: skip
        with contextlib.suppress(BrokenPipeError):  # it has failed already
            pipe.write(f"{json.dumps(request)}\n".encode())
            pipe.flush()

    def wait(self) -> str:
        """Wait for the program. Return "" or the error."""
        code = self._process.wait()
        errors = Path(self._folder, "error.txt")
        if self.program.exists():
            return ""
        return errors.read_text() if errors.exists() else f"the compiling process ended with {code}"

    def close(self) -> None:
        """Stop the process and remove its files."""
        self._close()


def _stop(owner: int, pipe: IO[bytes], folder: str) -> None:
    """End the compiling process, which reads the pipe, and remove its folder. A forked process does not."""
    if owner == os.getpid():
        with contextlib.suppress(OSError):
            pipe.close()
        shutil.rmtree(folder, ignore_errors=True)


def _take_over(quick: weakref.ref[QuickProgram], process: _Compiling) -> None:
    """Wait for the compiled program and switch to it, or report why there is none."""
    problem = process.wait()
    owner = quick()
    if owner is not None:
        if not problem:
            try:
                artifact = replace(read_artifact(process.program), file=None)  # the file is removed now
                owner._switch(open_program(artifact, threads=owner.threads))
            except PolydynError as e:
                problem = str(e)
        if problem:
            owner._report = f"{owner._report}: that failed, {problem.splitlines()[0]}"
            log.warning("the model could not be compiled: %s", problem)
    process.close()


def _copy(results: Mapping[str, Any], out: Mapping[str, Array]) -> None:
    """Copy results into the caller's arrays. ValueError: one does not fit."""
    for name, array in out.items():
        result = results[name]
        if array.shape != result.shape or array.dtype != result.dtype or not array.flags.c_contiguous:
            raise ValueError(f"out['{name}'] does not fit")
        np.copyto(array, result)


def _dtype(type_name: str) -> str:
    """Return the dtype of ONNX Runtime's type name, as in ``tensor(float)``."""
    inner = type_name.removeprefix("tensor(").removesuffix(")")
    return DTYPES.get(inner, inner)


def _bytes(model: Any) -> bytes:
    """Return the bytes of a model. UnsupportedError: an ``onnx.ModelProto`` of more than 2 GB."""
    if isinstance(model, (bytes, bytearray, memoryview)):
        return bytes(model)
    try:
        data: bytes = model.SerializeToString(deterministic=True)
    except ValueError as e:
        raise UnsupportedError(
            "the model has more than 2 GB", rule="start", remedy="save it to a file and give its path"
        ) from e
    return data
