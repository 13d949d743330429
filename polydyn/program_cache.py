"""``polydyn.compile``, and the disk cache of programs: one model with the same arguments is compiled once per machine.

``polydyn.compile``, the command line, sessions, the torch backend and offline jobs use this cache. ``program_key``
computes the names of its files (docs/adr/0035-one-key.md). The compiler is imported only if a program is not stored.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from polydyn.arguments import check_threads, checked_flag, checked_path, checked_report, checked_text
from polydyn.backends.options import Options
from polydyn.clock import DeadlineExceeded, measuring, section, timed, until
from polydyn.debug import is_observed
from polydyn.errors import (
    InputError,
    PolydynError,
    UnsupportedError,
    needing_packages,
)
from polydyn.logs import Report, activate, note, reporting
from polydyn.program_key import Arguments, program_key, sources_changed
from polydyn.program_store import store_program, stored_program
from polydyn.runtime.program import Program

if TYPE_CHECKING:
    from polydyn.graph.dynamic import Symbols
    from polydyn.graph.importer import ModelLike
    from polydyn.schedules.handmade.document import Source, Written
    from polydyn.shapes.sizes import Dims

__all__ = ["Arguments", "cached_program", "compile"]

_SAID = {
    (True, True): "the program is in the cache: %s",
    (True, False): "the program is not in the cache: %s",
    (False, False): "the program has no key%s: it is compiled and not stored",
}
"""(has a key, is stored) -> the note about a program."""
STARTS = ("full", "quick")
"""Values of ``start``."""
UNKEYED = (PolydynError, TypeError, ValueError, AttributeError)
"""Errors of ``program_key`` for a wrong model or argument, which the compiler reports; and ValueError for an
``onnx.ModelProto`` of more than 2 GB, which has no serialized form.
"""


def compile(
    model: ModelLike,
    *,
    target: str = "cpu",
    dims: Dims | None = None,
    threads: int | None = None,
    options: Options | None = None,
    records: str | os.PathLike[str] | None = None,
    symbols: Symbols | None = None,
    schedules: Source | Iterable[Source] = (),
    cache: bool = True,
    start: str = "full",
    report: Report | None = None,
    deadline: float | None = None,
) -> Program:
    """Compile an ONNX model once, for every shape.

    ``model``: path, bytes or ``onnx.ModelProto``. ``target``: ``cpu`` (this machine), ``cpu:avx512``, ``cpu:avx2``,
    ``cpu:amx`` (AVX-512 and tiles, ``cpu:amx-emulated`` with tiles in C), ``cpu:neon`` (arm64); ``cuda:sm_80`` (86, 89,
    90a, 100), ``cuda`` (all of them), ``cuda:emulated`` (docs/adr/0011-cuda-runtime.md). ``dims``: facts about dynamic
    dims by name, an inclusive range (low, high) or ``polydyn.Sizes`` with a multiple and likely sizes. Every call
    checks ranges and multiples; no range means [0, inf). ``threads``: threads per call, by default all cores of this
    process. ``records``: a file of ``polydyn.tune``, which is only read; equal records give equal programs. Among
    results tuned for several numbers of threads, a call uses those for its own number. For a GPU, the records of its
    architecture are used. ``symbols``: makes a static export dynamic, as in ``{"input_ids": ("B", "L")}``: a name for
    each axis of an input, None for an axis that does not change. ShapeError names the first constant that contradicts.
    ``schedules``: schedules written by hand with ``polydyn.explore``, or files of them. Each is proven again and
    computes all groups of the structure that it was written for (docs/schedules.md). InputError: one fits no group.
    ``cache``: use the program cache. A model that was compiled before (same model with its external data, arguments,
    records, polydyn and compiler) opens without being compiled again, and a new program is stored. With False it is
    always compiled (kernels still come from the cache of objects). ``start``: with "quick" this returns at once if the
    program is not stored. ONNX Runtime, if it is installed, or an evaluator in numpy answers calls while a process
    compiles the model; then the compiled program takes over (docs/adr/0037-quick-start.md). ``report`` is called with
    each step of a compilation in this process (``polydyn.logs.CompileProgress``: stage, k of n, seconds). ``deadline``:
    seconds after which the compilation is given up with UnsupportedError. Raises PolydynError, see ``polydyn.errors``.
    """
    check_start(start)
    if records is not None:
        checked_path(records, "records")
    arguments = Arguments(
        checked_text(target, "target"),
        {} if dims is None else dims,
        Options() if options is None else options,
        records,
        {} if symbols is None else symbols,
        _read_schedules(schedules),
    )
    with within(deadline), reporting(checked_report(report)):
        if checked_flag(cache, "cache"):
            return cached_program(model, arguments, threads=threads, start=start)
        if start == "quick":
            return _quick(model, arguments, threads, "")
        return _compile(model, arguments, threads)


def _read_schedules(schedules: Source | Iterable[Source]) -> tuple[Written, ...]:
    """Return written schedules. ScheduleError: see ``read_schedules``."""
    if isinstance(schedules, (tuple, list)) and not schedules:
        return ()
    from polydyn.schedules.handmade.document import read_schedules  # few programs have them

    return read_schedules(schedules if isinstance(schedules, Iterable) else [schedules])


@contextlib.contextmanager
def within(deadline: float | None) -> Iterator[None]:
    """Limit the compilations of the block to ``deadline`` seconds; None is no limit.

    InputError: it is not a positive number. UnsupportedError: the time is over.
    """
    if deadline is None:
        yield
        return
    if not (isinstance(deadline, (int, float)) and deadline > 0):
        remedy = "pass a positive number of seconds, or None"
        raise InputError(f"deadline is {deadline!r}", rule="deadline", remedy=remedy)
    try:
        with until(deadline):
            yield
    except DeadlineExceeded as e:
        raise UnsupportedError(
            f"the compilation takes longer than {deadline:g} s", rule="deadline",
            remedy="allow more time; what was compiled so far is in the cache",
        ) from e  # fmt: skip


def cached_program(
    model: ModelLike, arguments: Arguments | None = None, *, threads: int | None = None, start: str = "full"
) -> Program:
    """Return the program of a model from the cache, or compile and store it.

    ``start`` as for ``compile``. ``Program.compilations`` is 0 for a cached program. It is always compiled if its
    compilation is observed (``polydyn.debug``). Raises the errors of ``polydyn.compile``; a cache that cannot be
    written, or a damaged entry, is not an error here.
    """
    check_threads(threads)
    check_start(start)
    activate()
    arguments = arguments or Arguments()
    with measuring() as clock:
        key = _key(model, arguments)
        program = stored_program(key, threads=threads) if key else None
        note("cache", _SAID[bool(key), program is not None], key[:12])
        if program is not None and program.manifest.get("dims"):
            _warn(program)
        if program is None and start == "quick":
            return _quick(model, arguments, threads, key)
        if program is None:
            program = _compile(model, arguments, threads)
            if key and key == _key(model, arguments):  # the model's file did not change meanwhile
                store_program(program, key)
    program.read_timing = clock.reading()
    return program


def _warn(program: Program) -> None:
    """Repeat the warnings of the compilation about ranges that the model refuses."""
    from polydyn.runtime.explain import refused_sizes

    for sentence in refused_sizes(program.manifest).values():
        from logging import getLogger

        getLogger("polydyn").warning(sentence)


def check_start(start: str) -> str:
    """Return a value of ``start``. InputError: it is unknown."""
    if not isinstance(start, str) or start not in STARTS:
        raise InputError(f"start is {start!r}", rule="start", remedy=f"pass {' or '.join(map(repr, STARTS))}")
    return start


def _quick(model: ModelLike, arguments: Arguments, threads: int | None, key: str) -> Program:
    from polydyn.quick_start import quick_program  # only needed here

    def compile_now() -> Program:
        return cached_program(model, arguments, threads=threads) if key else _compile(model, arguments, threads)

    return quick_program(model, arguments, threads, compile_now, key)


def _compile(model: ModelLike, arguments: Arguments, threads: int | None) -> Program:
    with section("loading polydyn"), needing_packages("polydyn.compile"):
        from polydyn import compiler  # all passes: a stored program needs none

    return compiler.compile(model, threads=threads, **vars(arguments))


@timed("key of the program")
def _key(model: ModelLike, arguments: Arguments) -> str:
    """Return the key of a program; "" if it must be compiled, or if it cannot be computed."""
    if is_observed() or sources_changed():
        return ""
    with contextlib.suppress(*UNKEYED):
        return program_key(model, arguments)
    return ""
