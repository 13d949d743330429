"""The C compiler: discovery, flags, and a library from several translation units."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from polydyn.build.cache import FileCache, digest, library_file
from polydyn.build.features import MACROS, architecture, available_cores
from polydyn.errors import BuildError

GENERATOR = "1"
"""Part of every cache key; raised when the same text must not reuse older objects."""

FLAGS = (
    "-std=gnu11", "-O2", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-fvisibility=hidden",
    "-w",
)  # fmt: skip
"""No fast-math: NaN, infinities and the order of operations are kept."""

GCC_FLAGS = ("-fno-thread-jumps",)
"""Threading jumps through the tests for partial tiles copies whole loops: up to nine times the compile time and twice
the code, and nothing runs faster.
"""

X86_FLAGS = ("-mprefer-vector-width=512",)

LINK_FLAGS = ("-shared", "-Wl,--build-id=none", "-lm", "-lpthread")

POLL = 0.005
"""Seconds between looks at compilers that run."""

TARGETS = {
    "cpu": ("-march=native",),
    "cpu:baseline": (),
    "cpu:avx2": ("-march=x86-64-v3",),
    "cpu:avx512": ("-march=x86-64-v4",),
    "cpu:neon": ("-march=armv8-a",),
}
"""Target name -> the flags that choose the instruction set."""

ARCHITECTURES = {"cpu:avx2": "x86_64", "cpu:avx512": "x86_64", "cpu:neon": "aarch64"}
"""Target name -> the architecture of its code; other targets have that of this machine."""


@dataclass(frozen=True)
class Compiler:
    """A C compiler: its command and its version line (part of cache keys)."""

    command: tuple[str, ...]
    version: str


@dataclass(frozen=True)
class Library:
    """A built shared library.

    ``compiled``: translation units that had to be compiled, 0 when all came from the cache. ``features``: processor
    features that its code may use.
    """

    data: bytes
    compiled: int
    features: tuple[str, ...]
    compiler: str

    def file(self) -> Path:
        """The library as a file of the cache, for dlopen. BuildError: it cannot be written."""
        return library_file(self.data)


def find_compiler() -> Compiler:
    """``$CC``, else gcc, clang or cc on the path. BuildError: none of them runs."""
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
    """The first line of a compiler's version text; empty when it does not run."""
    try:
        process = subprocess.run([*command, "--version"], capture_output=True, text=True)
    except OSError:
        return ""
    return process.stdout.partition("\n")[0] if process.returncode == 0 else ""


def compile_flags(compiler: Compiler, target: str) -> tuple[str, ...]:
    """All flags of a compiler for a target name. BuildError: unknown target."""
    return (*FLAGS, *(() if "clang" in compiler.version else GCC_FLAGS), *target_flags(target))


def architecture_of(target: str) -> str:
    """The architecture that code for a target runs on; of a CUDA target the host's."""
    return ARCHITECTURES.get(target, architecture())


def target_flags(target: str) -> tuple[str, ...]:
    """The instruction-set flags of a target name. BuildError: unknown."""
    if target not in TARGETS:
        raise BuildError(f"unknown target {target!r}", remedy=f"choose one of {', '.join(TARGETS)}")
    return (*(X86_FLAGS if architecture_of(target) == "x86_64" else ()), *TARGETS[target])


@lru_cache(maxsize=8)
def required_features(compiler: Compiler, target: str) -> tuple[str, ...]:
    """The processor features that code for the target may use, as the compiler's macros say."""
    command = [*compiler.command, *target_flags(target), "-dM", "-E", "-x", "c", os.devnull]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        raise BuildError(f"{shlex.join(command)} failed:\n{process.stderr[-2000:]}", remedy="try another target or CC")
    defined = {words[1] for line in process.stdout.splitlines() if len(words := line.split()) >= 2}
    return tuple(sorted(name for macro, name in MACROS.items() if macro in defined))


def build_library(units: Mapping[str, str], headers: Mapping[str, str], target: str = "cpu") -> Library:
    """Compiles translation units (file name -> C text) and links them into one shared library.

    Objects and the library are cached by content: text, headers, flags, compiler, generator version. Units are
    compiled in parallel, one process per core. BuildError: no compiler, or it refuses a unit.
    """
    compiler = find_compiler()
    flags = compile_flags(compiler, target)
    features = required_features(compiler, target)
    machine = digest(*features)  # -march=native means something else on another machine
    common = digest(GENERATOR, *compiler.command, compiler.version, machine, *flags, *_flat(headers))
    keys = {name: digest(common, name, text) for name, text in units.items()}
    link_key = digest(common, *LINK_FLAGS, *keys.values())
    cache = FileCache("objects")
    library = cache.get(link_key)
    if library is not None:
        return Library(library, 0, features, compiler.version)
    cached = {name: cache.get(key) for name, key in keys.items()}
    missing = [name for name, data in cached.items() if data is None]
    try:
        with tempfile.TemporaryDirectory(prefix="polydyn-", ignore_cleanup_errors=True) as folder:
            work = Path(folder)
            for name, text in (*headers.items(), *units.items()):
                (work / name).write_text(text, encoding="utf-8")
            for name, data in cached.items():
                if data is not None:
                    _object(work, name).write_bytes(data)
            _compile(compiler, flags, missing, work)
            for name in missing:
                cache.put(keys[name], _object(work, name).read_bytes())
            library = _link(compiler, [_object(Path(), n).name for n in units], work)
    except OSError as e:
        raise BuildError(
            f"building in a temporary folder failed: {e}", remedy="set TMPDIR to a writable folder with free space"
        ) from e
    cache.put(link_key, library)
    return Library(library, len(missing), features, compiler.version)


def _object(work: Path, unit: str) -> Path:
    """Where a unit's object file goes."""
    return (work / unit).with_suffix(".o")


def _flat(files: Mapping[str, str]) -> list[str]:
    return [part for name, text in sorted(files.items()) for part in (name, text)]


def _environment(work: Path) -> dict[str, str]:
    """The environment of a compiler: its temporary files lie in the folder that is always removed."""
    return {**os.environ, "TMPDIR": str(work)}


def _compile(compiler: Compiler, flags: Sequence[str], names: Sequence[str], work: Path) -> None:
    """Compiles the named units of the folder, as many at once as there are cores; all stop at the first failure."""
    waiting = sorted(names, key=lambda n: -(work / n).stat().st_size)
    running: dict[str, subprocess.Popen[str]] = {}
    environment = _environment(work)
    try:
        while waiting or running:
            while waiting and len(running) < available_cores():
                name = waiting.pop(0)
                command = [*compiler.command, *flags, "-c", name, "-o", _object(Path(), name).name]
                with (work / f"{name}.log").open("w") as log:  # a session of its own: stopped with all that it starts
                    running[name] = subprocess.Popen(
                        command, cwd=work, env=environment, stdout=log, stderr=log, text=True, start_new_session=True
                    )
            done = [name for name, process in running.items() if process.poll() is not None]
            for name in done:
                if running.pop(name).returncode or not _object(work, name).exists():
                    raise _refusal(compiler, name, work)
            if not done:
                time.sleep(POLL)
    finally:
        for process in running.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _refusal(compiler: Compiler, name: str, work: Path) -> BuildError:
    """Why a unit has no object, in the compiler's words."""
    text = (work / f"{name}.log").read_text(errors="replace")
    return BuildError(
        f"{shlex.join(compiler.command)} refused {name}:\n{text[:4000]}",
        remedy="this is a bug in the generated code, or the compiler is too old (gcc >= 9, clang >= 10)",
    )


def _link(compiler: Compiler, objects: Sequence[str], work: Path) -> bytes:
    command = [*compiler.command, *objects, *LINK_FLAGS, "-o", "lib.so"]
    process = subprocess.run(command, cwd=work, env=_environment(work), capture_output=True, text=True)
    if process.returncode or not (work / "lib.so").exists():
        raise BuildError(
            f"{shlex.join(compiler.command)} could not link:\n{process.stderr[:4000]}",
            remedy="a kernel may be missing or defined twice; this is a bug in the generated code",
        )
    return (work / "lib.so").read_bytes()
