"""Building a library from several translation units with the C compiler that was found (``compilers``)."""

from __future__ import annotations

import os
import re
import resource
import select
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from polydyn.build.cache import FileCache, digest, library_file
from polydyn.build.compilers import (
    TARGETS,
    Compiler,
    architecture_of,
    compile_flags,
    environment,
    find_compiler,
    link_flags,
    required_features,
)
from polydyn.build.features import architecture, available_cores, machine_features
from polydyn.clock import seconds_left, section, timed, unit_compiled
from polydyn.errors import BuildError
from polydyn.logs import note, progress

__all__ = [
    "GENERATOR", "TARGETS", "Building", "Compiler", "Library", "architecture_of", "build_library", "compile_flags",
    "find_compiler", "required_features", "why_elsewhere",
]  # fmt: skip

GENERATOR = "1"
"""Part of every cache key. Increase it when old objects must not be reused for the same text."""

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
"""An include of a file that is not the system's; its group is the name."""

POLL_SECONDS = 0.005
"""Seconds between two polls of running compilers, where the system cannot wait for one of several processes."""


@dataclass(frozen=True)
class Library:
    """A built shared library.

    ``compiled``: number of translation units that were compiled; 0 if all came from the cache. ``features``: processor
    features that its code may use.
    """

    data: bytes
    compiled: int
    features: tuple[str, ...]
    compiler: str

    def file(self) -> Path:
        """Return the library as a file of the cache, for dlopen. BuildError: it cannot be written."""
        return library_file(self.data)


def why_elsewhere(target: str) -> str:
    """Return the reason why code for a target does not run on this machine; "" if it does. BuildError: see
    ``required_features``."""
    here = machine_features()
    if architecture_of(target) != architecture():
        return f"target {target} is for {architecture_of(target)}, this is {architecture()}"
    if not target.startswith("cpu:") or target not in TARGETS or not here:
        return ""
    missing = [f for f in required_features(find_compiler(target), target) if f not in here]
    return f"target {target} uses processor features that are missing here: {', '.join(missing)}" if missing else ""


class Building:
    """A library whose first translation units are compiled while others are still being generated.

    A context manager: at its end, running compilers are stopped and temporary files removed. Objects and the library
    are cached by content: text, the headers that it includes, flags, compiler, generator version. Units are compiled in
    parallel, one process per core. Any method may raise BuildError: no compiler, a unit does not compile, or a folder
    is not writable. ``compiled``: the number of units that were compiled so far.
    """

    def __init__(self, headers: Mapping[str, str], target: str = "cpu") -> None:
        """``headers``: file name -> C text."""
        self._compiler, self._headers = find_compiler(target), headers
        self._target = target
        self._features = required_features(self._compiler, target)
        machine = digest(*self._features)  # the meaning of -march=native depends on the machine
        self._common = digest(GENERATOR, *self._compiler.identity, machine)
        self._cache = FileCache("objects")
        self._keys: dict[str, str] = {}
        self._waiting: list[str] = []
        self._running: dict[str, subprocess.Popen[str]] = {}
        self.compiled = 0

    def __enter__(self) -> Building:
        import tempfile  # finding a compiler does not need it

        with _folder_errors():
            self._folder = tempfile.TemporaryDirectory(prefix="polydyn-", ignore_cleanup_errors=True)
            self._work = Path(self._folder.name)
            try:
                for name, text in self._headers.items():
                    (self._work / name).write_text(text, encoding="utf-8")
            except OSError:
                self._folder.cleanup()  # without __enter__ there is no __exit__
                raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self._running):
            self._stop(name)
        self._folder.cleanup()

    @timed("requesting units")
    def request(self, units: Mapping[str, str]) -> None:
        """Request units (file name -> C text) of the library. As many compilers as there are cores start now, others
        when this is called again. A text replaces an earlier one of the same name.
        """
        with _folder_errors():
            for name, text in units.items():
                key = self._key(name, text)
                if self._keys.get(name) == key:
                    continue
                self._stop(name)
                self._keys[name] = key
                (self._work / name).write_text(text, encoding="utf-8")
                known = self._cache.get(key)
                note("cache", "unit %s %s", name, "is compiled" if known is None else "is in the cache")
                if known is None:
                    self._waiting.append(name)
                else:
                    _object(self._work, name).write_bytes(known)
            self._step()

    def compile(self, units: Mapping[str, str]) -> None:
        """Compile these units, as far as their objects are not in the cache, and wait for all that were requested."""
        self.request(units)
        with _folder_errors():
            while left := len(self._waiting) + len(self._running):
                progress("compiling C", len(self._keys) - left, len(self._keys))
                if not self._step():
                    with section("waiting for the C compiler"):
                        _wait_for_one([p.pid for p in self._running.values()])

    def library(self, units: Mapping[str, str]) -> Library:
        """Return the library of these units, whether they were requested before or not."""
        for name in self._keys.keys() - units.keys():
            self._stop(name)
        link_key = digest(self._common, *link_flags(self._compiler), *map(self._key, units.keys(), units.values()))
        library = self._cache.get(link_key)
        if library is None:
            self.compile(units)
            with _folder_errors():
                library = _link(self._compiler, [_object(Path(), n).name for n in units], self._work)
            self._cache.put(link_key, library)
        return Library(library, self.compiled, self._features, self._compiler.version)

    def _key(self, name: str, text: str) -> str:
        return digest(self._common, *self._flags(name), name, text, *_flat(included(text, self._headers)))

    def _flags(self, unit: str) -> tuple[str, ...]:
        return compile_flags(self._compiler, self._target, unit)

    def _step(self) -> bool:
        """Collect finished objects, and start the largest waiting units. Return whether any unit was finished."""
        done = [name for name, process in self._running.items() if _ended(name, process)]
        for name in done:
            if self._running.pop(name).returncode or not _object(self._work, name).exists():
                del self._keys[name]  # if requested again, it is compiled again
                raise _compile_error(self._compiler, name, self._work)
            self._cache.put(self._keys[name], _object(self._work, name).read_bytes())
            self.compiled += 1
        self._waiting.sort(key=lambda n: -(self._work / n).stat().st_size)
        while self._waiting and len(self._running) < available_cores():
            name = self._waiting.pop(0)
            command = [*self._compiler.command, *self._flags(name), "-c", name, "-o", _object(Path(), name).name]
            with (self._work / f"{name}.log").open("w") as log:  # new session, so that child processes are stopped too
                self._running[name] = subprocess.Popen(
                    command, cwd=self._work, env=environment(self._work), stdout=log, stderr=log, text=True,
                    start_new_session=True,
                )  # fmt: skip
        return bool(done)

    def _stop(self, name: str) -> None:
        """Abandon a unit that is not finished."""
        if name in self._waiting:
            self._waiting.remove(name)
        process = self._running.pop(name, None)
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _ended(name: str, process: subprocess.Popen[str]) -> bool:
    """Return whether the compiler of a unit has ended, and record its processor time."""
    before = _children_seconds()
    if process.poll() is None:
        return False
    unit_compiled(name, _children_seconds() - before)
    return True


def _children_seconds() -> float:
    """Return the processor seconds of all child processes that ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _wait_for_one(processes: Sequence[int]) -> None:
    """Wait until one of some child processes ends, or for a moment. DeadlineExceeded: no time is left."""
    ends = select.poll()
    with ExitStack() as opened:
        for process in processes:
            try:
                end = os.pidfd_open(process)
            except (AttributeError, OSError):
                seconds_left()
                time.sleep(POLL_SECONDS)
                return
            opened.callback(os.close, end)
            ends.register(end, select.POLLIN)
        left = seconds_left()
        ends.poll(None if left is None else 1000 * left)
    seconds_left()


def build_library(units: Mapping[str, str], headers: Mapping[str, str], target: str = "cpu") -> Library:
    """Compile translation units (file name -> C text) and link them into one library. Errors as for ``Building``."""
    with Building(headers, target) as building:
        return building.library(units)


@contextmanager
def _folder_errors() -> Iterator[None]:
    """Raise BuildError if the folder of sources and objects cannot be used."""
    try:
        yield
    except OSError as e:
        raise BuildError(
            f"building in a temporary folder failed: {e}", remedy="set TMPDIR to a writable folder with free space"
        ) from e


def included(text: str, headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers (file name -> C text) that a text includes, and those that they include."""
    found: dict[str, str] = {}
    waiting = [text]
    while waiting:
        for name in INCLUDE.findall(waiting.pop()):
            if name in headers and name not in found:
                found[name] = headers[name]
                waiting.append(headers[name])
    return found


def _object(work: Path, unit: str) -> Path:
    """Return the path of a unit's object file."""
    return (work / unit).with_suffix(".o")


def _flat(files: Mapping[str, str]) -> list[str]:
    return [part for name, text in sorted(files.items()) for part in (name, text)]


def _compile_error(compiler: Compiler, name: str, work: Path) -> BuildError:
    """Return the error for a unit that does not compile, with the compiler's output from the first error on."""
    lines = (work / f"{name}.log").read_text(errors="replace").splitlines()
    errors = [k for k, line in enumerate(lines) if "error:" in line]
    before = [line for line in lines[: errors[0]] if "In function" in line][-1:] if errors else []
    text = "\n".join([*before, *lines[errors[0] if errors else 0 :]])
    return BuildError(
        f"{shlex.join(compiler.command)} failed to compile {name}:\n{text[:4000]}",
        remedy="this is a bug in the generated code, or the compiler is too old (gcc >= 9, clang >= 12)",
    )


@timed("linking")
def _link(compiler: Compiler, objects: Sequence[str], work: Path) -> bytes:
    command = [*compiler.command, *objects, *link_flags(compiler), "-o", "lib.so"]
    process = subprocess.run(command, cwd=work, env=environment(work), capture_output=True, text=True)
    seconds_left()
    if process.returncode or not (work / "lib.so").exists():
        raise BuildError(
            f"{shlex.join(compiler.command)} could not link:\n{process.stderr[:4000]}",
            remedy="report this: a kernel may be missing or defined twice, a bug in the generated code",
        )
    return (work / "lib.so").read_bytes()
