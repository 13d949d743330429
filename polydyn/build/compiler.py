"""The C compiler: its command, flags, and building a library from several translation units."""

from __future__ import annotations

import os
import resource
import select
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from polydyn.build.cache import FileCache, digest, library_file
from polydyn.build.features import MACROS, architecture, available_cores, machine_features
from polydyn.clock import section, timed, unit_compiled
from polydyn.errors import BuildError
from polydyn.logs import note, progress

GENERATOR = "1"
"""Part of every cache key. Increase it when old objects must not be reused for the same text."""

FLAGS = (
    "-std=gnu11", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-fvisibility=hidden",
    "-Werror=implicit-function-declaration", "-Werror=incompatible-pointer-types", "-Werror=int-conversion",
)  # fmt: skip
"""No fast-math: NaN, infinities and the order of operations are kept. What gcc 14 rejects is an error with each gcc."""

OPTIMISATION = {
    "clang": ("-O2",),
    "gcc": (
        "-O1", "-fexpensive-optimizations", "-fstrict-aliasing", "-fcaller-saves", "-fcode-hoisting", "-fcrossjumping",
        "-fno-thread-jumps", "-fira-region=one", "--param=avoid-fma-max-bits=0",
    ),
}  # fmt: skip
"""Compiler -> its flags for speed.

gcc gets the passes of -O2 that make kernels faster, and none that only take time: two thirds of the time of -O2, the
same bits, kernels within 2 % (docs/cpu.md 6). ``-fexpensive-optimizations`` forms fused multiply-adds. Without
``-fcaller-saves`` every vector of a function that calls another one lives in memory: products in 16 registers take 1.2
times as long.
Jump threading through the tests for partial tiles duplicates whole loops. One region for the register allocator takes a
tenth less time for equally fast code.

When gcc tunes for Zen, it multiplies and adds in two instructions where a loop has one sum, and fuses them where it has
several. Without ``avoid-fma-max-bits=0`` the last bits depend on the text around a sum.
"""

UNIT_FLAGS = {"host.c": ("-Og",), "setup.c": ("-Og",), "host_steps.c": ("-O2",)}
"""Name of a unit -> its flags for speed instead of ``OPTIMISATION``.

The host program is straight-line arithmetic on sizes, and ``setup.c`` checks and remembers sizes. -Og compiles them in
half the time of -O1, to calls as short. Kernels contain vectors, so ``OPTIMISATION`` does not vectorize loops.
``host_steps.c`` needs vectors: suppression takes 4 to 8 times as long without.
"""

X86_FLAGS = ("-mprefer-vector-width=512",)

LINK_FLAGS = ("-shared", "-Wl,--build-id=none", "-Wl,-z,defs", "-lm", "-lpthread")

POLL_SECONDS = 0.005
"""Seconds between two polls of running compilers, where the system cannot wait for one of several processes."""

TARGETS = {
    "cpu": ("-march=native",),
    "cpu:baseline": (),
    "cpu:avx2": ("-march=x86-64-v3",),
    "cpu:avx512": ("-march=x86-64-v4",),
    "cpu:amx": ("-march=sapphirerapids",),
    "cpu:amx-emulated": ("-march=x86-64-v4", "-DPD_AMX_EMULATED"),
    "cpu:neon": ("-march=armv8-a",),
}
"""Target name -> the flags that choose the instruction set."""

ARCHITECTURES = {
    **dict.fromkeys(("cpu:avx2", "cpu:avx512", "cpu:amx", "cpu:amx-emulated"), "x86_64"), "cpu:neon": "aarch64"
}  # fmt: skip
"""Target name -> the architecture of its code. Code for other targets has the architecture of this machine."""


@dataclass(frozen=True)
class Compiler:
    """A C compiler: its command and its version line (part of cache keys)."""

    command: tuple[str, ...]
    version: str


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


def find_compiler() -> Compiler:
    """Return ``$CC``, else gcc, clang or cc on the path. BuildError: none of them runs."""
    return _find(os.environ.get("CC", ""), os.environ.get("PATH", ""))


@lru_cache(maxsize=8)
def _find(cc: str, path: str) -> Compiler:
    try:
        candidates = [tuple(shlex.split(cc))] if cc.strip() else [("gcc",), ("clang",), ("cc",)]
    except ValueError as e:
        raise BuildError(f"CC is not a command: {cc!r} ({e})", remedy="set CC to the compiler's command") from e
    for command in candidates:
        version = _version(command) if shutil.which(command[0], path=path) else ""
        if version:
            return Compiler(command, version)
    raise BuildError(
        f"no C compiler found: tried {', '.join(c[0] for c in candidates)}",
        remedy="install gcc (or clang), or set CC to the compiler's command; running a saved program needs none",
    )


def _version(command: tuple[str, ...]) -> str:
    """Return the first line of a compiler's version text; empty if the compiler does not run."""
    try:
        process = subprocess.run([*command, "--version"], capture_output=True, text=True)
    except OSError:
        return ""
    return process.stdout.partition("\n")[0] if process.returncode == 0 else ""


def compile_flags(compiler: Compiler, target: str, unit: str = "") -> tuple[str, ...]:
    """Return all flags of a compiler for a target name and a unit. BuildError: unknown target."""
    kind = "clang" if "clang" in compiler.version else "gcc"
    return (*FLAGS, *UNIT_FLAGS.get(unit, OPTIMISATION[kind]), *target_flags(target))


def architecture_of(target: str) -> str:
    """Return the architecture that code for a target runs on. For a CUDA target: that of the host."""
    return ARCHITECTURES.get(target, architecture())


def target_flags(target: str) -> tuple[str, ...]:
    """Return the instruction-set flags of a target name. BuildError: unknown target."""
    if target not in TARGETS:
        raise BuildError(f"unknown target {target!r}", remedy=f"choose one of {', '.join(TARGETS)}")
    return (*(X86_FLAGS if architecture_of(target) == "x86_64" else ()), *TARGETS[target])


@lru_cache(maxsize=8)
def required_features(compiler: Compiler, target: str) -> tuple[str, ...]:
    """Return the processor features that code for the target may use, according to the compiler's macros."""
    command = [*compiler.command, *target_flags(target), "-dM", "-E", "-x", "c", os.devnull]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        raise BuildError(f"{shlex.join(command)} failed:\n{process.stderr[-2000:]}", remedy="try another target or CC")
    defined = {words[1] for line in process.stdout.splitlines() if len(words := line.split()) >= 2}
    return tuple(sorted(name for macro, name in MACROS.items() if macro in defined))


def why_elsewhere(target: str) -> str:
    """Return the reason why code for a target does not run on this machine; "" if it does. BuildError: see
    ``required_features``."""
    here = machine_features()
    if architecture_of(target) != architecture():
        return f"target {target} is for {architecture_of(target)}, this is {architecture()}"
    if not target.startswith("cpu:") or target not in TARGETS or not here:
        return ""
    missing = [f for f in required_features(find_compiler(), target) if f not in here]
    return f"target {target} uses processor features that are missing here: {', '.join(missing)}" if missing else ""


class Building:
    """A library whose first translation units are compiled while others are still being generated.

    A context manager: at its end, running compilers are stopped and temporary files removed. Objects and the library
    are cached by content: text, headers, flags, compiler, generator version. Units are compiled in parallel, one
    process per core. Any method may raise BuildError: no compiler, a unit does not compile, or a folder is not
    writable.
    """

    def __init__(self, headers: Mapping[str, str], target: str = "cpu") -> None:
        """``headers``: file name -> C text."""
        self._compiler, self._headers = find_compiler(), headers
        self._target = target
        self._features = required_features(self._compiler, target)
        machine = digest(*self._features)  # the meaning of -march=native depends on the machine
        command = (*self._compiler.command, self._compiler.version)
        self._common = digest(GENERATOR, *command, machine, *_flat(headers))
        self._cache = FileCache("objects")
        self._keys: dict[str, str] = {}
        self._waiting: list[str] = []
        self._running: dict[str, subprocess.Popen[str]] = {}
        self._compiled = 0

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

    def library(self, units: Mapping[str, str]) -> Library:
        """Return the library of these units, whether they were requested before or not."""
        for name in self._keys.keys() - units.keys():
            self._stop(name)
        link_key = digest(self._common, *LINK_FLAGS, *map(self._key, units.keys(), units.values()))
        library = self._cache.get(link_key)
        if library is None:
            self.request(units)
            with _folder_errors():
                while left := len(self._waiting) + len(self._running):
                    progress("compiling C", len(self._keys) - left, len(self._keys))
                    if not self._step():
                        with section("waiting for the C compiler"):
                            _wait_for_one([p.pid for p in self._running.values()])
                library = _link(self._compiler, [_object(Path(), n).name for n in units], self._work)
            self._cache.put(link_key, library)
        return Library(library, self._compiled, self._features, self._compiler.version)

    def _key(self, name: str, text: str) -> str:
        return digest(self._common, *self._flags(name), name, text)

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
            self._compiled += 1
        self._waiting.sort(key=lambda n: -(self._work / n).stat().st_size)
        while self._waiting and len(self._running) < available_cores():
            name = self._waiting.pop(0)
            command = [*self._compiler.command, *self._flags(name), "-c", name, "-o", _object(Path(), name).name]
            with (self._work / f"{name}.log").open("w") as log:  # new session, so that child processes are stopped too
                self._running[name] = subprocess.Popen(
                    command, cwd=self._work, env=_environment(self._work), stdout=log, stderr=log, text=True,
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
    """Wait until one of some child processes ends, or for a moment."""
    ends = select.poll()
    with ExitStack() as opened:
        for process in processes:
            try:
                end = os.pidfd_open(process)
            except (AttributeError, OSError):
                time.sleep(POLL_SECONDS)
                return
            opened.callback(os.close, end)
            ends.register(end, select.POLLIN)
        ends.poll()


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


def _object(work: Path, unit: str) -> Path:
    """Return the path of a unit's object file."""
    return (work / unit).with_suffix(".o")


def _flat(files: Mapping[str, str]) -> list[str]:
    return [part for name, text in sorted(files.items()) for part in (name, text)]


def _environment(work: Path) -> dict[str, str]:
    """Return the environment of a compiler, which makes it put temporary files into a folder that is removed."""
    return {**os.environ, "TMPDIR": str(work)}


def _compile_error(compiler: Compiler, name: str, work: Path) -> BuildError:
    """Return the error for a unit that does not compile, with the compiler's output from the first error on."""
    lines = (work / f"{name}.log").read_text(errors="replace").splitlines()
    errors = [k for k, line in enumerate(lines) if "error:" in line]
    before = [line for line in lines[: errors[0]] if "In function" in line][-1:] if errors else []
    text = "\n".join([*before, *lines[errors[0] if errors else 0 :]])
    return BuildError(
        f"{shlex.join(compiler.command)} failed to compile {name}:\n{text[:4000]}",
        remedy="this is a bug in the generated code, or the compiler is too old (gcc >= 9, clang >= 10)",
    )


@timed("linking")
def _link(compiler: Compiler, objects: Sequence[str], work: Path) -> bytes:
    command = [*compiler.command, *objects, *LINK_FLAGS, "-o", "lib.so"]
    process = subprocess.run(command, cwd=work, env=_environment(work), capture_output=True, text=True)
    if process.returncode or not (work / "lib.so").exists():
        raise BuildError(
            f"{shlex.join(compiler.command)} could not link:\n{process.stderr[:4000]}",
            remedy="a kernel may be missing or defined twice; this is a bug in the generated code",
        )
    return (work / "lib.so").read_bytes()
