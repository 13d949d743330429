"""The process that compiles for the provider. ``c/worker.c`` starts it and describes the protocol.

The model of a request is ``<path>.onnx``. ``check`` writes ``<path>.sets`` (``partition``), ``compile`` writes
``<path>.ep`` (``program_file``), or ``<path>.failed`` if the same request would fail again.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from polydyn.errors import FallbackWarning, InputError, ModelError, PolydynError, ShapeError, UnsupportedError

NICENESS = 5
"""Niceness of a process that compiles in the background: calls come first."""
INTERRUPTS, INTERRUPT_SECONDS = 3, 1.0
"""How often the process is interrupted before it is ended, and the seconds between."""
LASTING_ERRORS = (ModelError, ShapeError, UnsupportedError)
"""Errors that the same request would raise again."""


class Busy:
    """Whether a request is being worked on."""

    is_busy = False


def main() -> None:
    """Answer the requests from standard input, a socket, until it is closed."""
    warnings.simplefilter("ignore", FallbackWarning)
    link, busy = socket.socket(fileno=os.dup(0)), Busy()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored in the other process
    threading.Thread(target=_end_with, args=(link, busy), daemon=True).start()
    lines = link.makefile("r", encoding="utf-8", errors="surrogateescape", newline="\n")
    with contextlib.suppress(KeyboardInterrupt, OSError):
        while wanted := read_request(lines):
            busy.is_busy = True
            answer = answer_of(wanted)
            busy.is_busy = False
            link.sendall(f"{answer}\n".encode(errors="surrogateescape"))
    os._exit(0)  # without the time that the end of an interpreter takes


def read_request(lines: IO[str]) -> dict[str, str]:
    """Return the next request: lines ``name=value`` up to an empty line. It is empty at the end of the input."""
    found: dict[str, str] = {}
    for line in lines:
        if line == "\n":
            return found
        name, _, value = line.rstrip("\n").partition("=")
        found[name] = value
    return {}


def answer_of(wanted: Mapping[str, str]) -> str:
    """Do a request; return ``ok``, ``failed <text>``, or ``wrong <text>`` for a wrong option, in one line."""
    if wanted["nice"] == "1" and os.nice(0) < NICENESS:
        os.nice(NICENESS)
    path = wanted["path"]
    options = {n.removeprefix("option."): v for n, v in wanted.items() if n.startswith("option.")}
    try:
        {"check": check, "compile": compile_model}[wanted["task"]](path, wanted.get("whole", ""), options)
    except Exception as e:
        text = str(e) if isinstance(e, PolydynError) else f"{type(e).__name__}: {e}"
        if wanted["task"] == "compile" and isinstance(e, LASTING_ERRORS):
            _write(path, ".failed", text.encode(errors="replace"))
        kind = "wrong" if isinstance(e, InputError) else "failed"
        return f"{kind} " + text.replace("\r", " ").replace("\n", "\r")
    return "ok"


def check(path: str, _: str, options: Mapping[str, str]) -> None:
    """Write which nodes of a model are compiled, in which sets."""
    import onnx

    from polydyn.ort.partition import MIN_NODES, partition
    from polydyn.ort.settings import arguments_of

    arguments = arguments_of(options)
    exclude = list(filter(None, options.get("exclude", "").split(",")))
    model = onnx.ModelProto.FromString(Path(f"{path}.onnx").read_bytes())
    try:
        found = partition(model, arguments.dims, exclude, int(options.get("min_nodes", MIN_NODES)))
    except ShapeError as e:
        if e.dim not in arguments.dims:
            raise
        raise InputError(e.message, dim=e.dim, rule=e.rule, remedy=e.remedy) from e  # an option is wrong
    _write(path, ".sets", found.text().encode(errors="replace"))


def compile_model(path: str, whole: str, options: Mapping[str, str]) -> None:
    """Compile a model, or take its program from the cache, and write the program's file. ``whole``: the path of the
    graph that it is a part of."""
    from dataclasses import replace

    from polydyn.ort.program_file import SUFFIX, write_program_file
    from polydyn.ort.settings import arguments_of
    from polydyn.program_cache import cached_program

    arguments, source = arguments_of(options), Path(f"{path}.onnx")
    if whole:
        data, names = _with_shapes(source, Path(f"{whole}.sets"))
        arguments = replace(arguments, dims={n: s for n, s in arguments.dims.items() if n in names})
        program = cached_program(data, arguments, threads=1)
    else:
        program = cached_program(source, arguments, threads=1)
    written = Path(f"{path}{SUFFIX}")
    _count(written, write_program_file(program._artifact, written))


def _with_shapes(model: Path, sets: Path) -> tuple[bytes, set[str]]:
    """Return a model whose inputs have the shapes that are known in the whole graph, and the names of its dims."""
    import onnx

    from polydyn.ort.partition import shapes_in

    proto = onnx.ModelProto.FromString(model.read_bytes())
    shapes = shapes_in(sets.read_text()) if sets.exists() else {}
    for value in proto.graph.input:
        if value.name not in shapes:
            continue
        shape = value.type.tensor_type.shape
        del shape.dim[:]
        for size in shapes[value.name]:
            dim = shape.dim.add()
            if isinstance(size, int):
                dim.dim_value = size
            else:
                dim.dim_param = size
    names = {d.dim_param for v in proto.graph.input for d in v.type.tensor_type.shape.dim}
    return proto.SerializeToString(deterministic=True), names


def _write(path: str, suffix: str, data: bytes) -> None:
    from polydyn.build.cache import write_atomically

    written = Path(f"{path}{suffix}")
    write_atomically(written, data)
    _count(written, len(data))


def _count(path: Path, size: int) -> None:
    """Add a file to the count of the cache's size, if it is in the cache."""
    from polydyn.build.cache import cache_root
    from polydyn.build.eviction import grown

    root = cache_root()
    if path.parent == root / "ort":
        with contextlib.suppress(OSError):
            size += Path(f"{path.with_suffix('')}.onnx").stat().st_size  # the other process wrote it
        grown(root, size)


def _end_with(link: socket.socket, busy: Busy) -> None:
    """Wait until the other end is closed. End this process, or interrupt its work first, so that it stops compilers."""
    ends = select.poll()
    ends.register(link, select.POLLRDHUP)
    ends.poll()
    for _ in range(INTERRUPTS if busy.is_busy else 0):  # libraries may swallow one
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(INTERRUPT_SECONDS)
    os._exit(1)
