"""Which C compiler is used, and which flags it understands: gcc, clang, and zig's clang, which pip installs.

All flags stand here. A compiler is asked once which of them it understands, and its answer is cached by its identity.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from polydyn.build.cache import FileCache, cache_root, digest
from polydyn.build.features import MACROS, architecture, machine_features
from polydyn.errors import BuildError

FLAGS = (
    "-std=gnu11", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-fvisibility=hidden",
    "-Werror=implicit-function-declaration", "-Werror=incompatible-pointer-types", "-Werror=int-conversion",
)  # fmt: skip
"""No fast-math: NaN, infinities and the order of operations are kept. What gcc 14 rejects is an error with each gcc."""

OPTIMISATION = {
    "gcc": (
        "-O1", "-fexpensive-optimizations", "-fstrict-aliasing", "-fcaller-saves", "-fcode-hoisting", "-fcrossjumping",
        "-fno-thread-jumps", "-fira-region=one", "--param=avoid-fma-max-bits=0",
    ),
    "clang": ("-O2",),
    "zig": ("-O2", "-fno-sanitize=undefined"),
}  # fmt: skip
"""Kind of compiler -> its flags for speed.

gcc gets the passes of -O2 that make kernels faster, and none that only take time: two thirds of the time of -O2, the
same bits, kernels within 2 % (docs/cpu.md 6). ``-fexpensive-optimizations`` forms fused multiply-adds. Without
``-fcaller-saves`` every vector of a function that calls another one lives in memory: products in 16 registers take 1.2
times as long.
Jump threading through the tests for partial tiles duplicates whole loops. One region for the register allocator takes a
tenth less time for equally fast code.

When gcc tunes for Zen, it multiplies and adds in two instructions where a loop has one sum, and fuses them where it has
several. Without ``avoid-fma-max-bits=0`` the last bits depend on the text around a sum.

zig adds a sanitizer to every level of optimisation that it takes for debugging.
"""

UNIT_FLAGS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "host.c": {"gcc": ("-Og",), "clang": ("-O1",), "zig": ("-O1", "-fno-sanitize=undefined")},
    "setup.c": {"gcc": ("-Og",), "clang": ("-O1",), "zig": ("-O1", "-fno-sanitize=undefined")},
    "host_steps.c": {"gcc": ("-O2",)},
}
"""Name of a unit -> its flags for speed instead of ``OPTIMISATION``.

The host program is straight-line arithmetic on sizes, and ``setup.c`` checks and remembers sizes. -Og compiles them in
half the time of -O1, to calls as short; clang and zig have no such level. Kernels contain vectors, so ``OPTIMISATION``
does not vectorize loops. ``host_steps.c`` needs vectors: suppression takes 4 to 8 times as long without.
"""

LINK_FLAGS = ("-shared", "-Wl,--build-id=none", "-Wl,-z,defs", "-lm", "-lpthread")
ZIG_LINK_FLAGS = ("-mcpu=baseline", "-O2", "-s")
"""zig compiles its runtime library once for each processor and level that it links for; without -O2 that takes five
times as long. Its library is linked with its symbols, which nobody needs."""

X86_FLAGS = (("-mprefer-vector-width=512",), ())
"""Flags of x86-64, as alternatives: a compiler gets the first that it understands."""

V3 = ("-mavx2", "-mfma", "-mbmi", "-mbmi2", "-mf16c", "-mlzcnt", "-mmovbe")
V4 = (*V3, "-mavx512f", "-mavx512bw", "-mavx512cd", "-mavx512dq", "-mavx512vl")
_V3 = (("-march=x86-64-v3",), ("-march=x86_64_v3",), V3)
_V4 = (("-march=x86-64-v4",), ("-march=x86_64_v4",), V4)
_BASE = {
    "x86_64": ((), ("-march=x86_64",)), "aarch64": (("-march=armv8-a",), ("-mcpu=generic",)),
}  # fmt: skip

TARGETS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "cpu": (("-march=native",), ("-mcpu=native",)),
    "cpu:baseline": ((),),
    "cpu:avx2": _V3,
    "cpu:avx512": _V4,
    "cpu:amx": (("-march=sapphirerapids",), (*V4, "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-bf16",
                                             "-mamx-int8")),
    "cpu:amx-emulated": tuple((*flags, "-DPD_AMX_EMULATED") for flags in _V4),
    "cpu:neon": _BASE["aarch64"],
}  # fmt: skip
"""Target name -> the flags that choose the instruction set, as alternatives. gcc knows the levels of x86-64 from 11 on,
clang from 12 on, and zig writes them with underscores."""

ARCHITECTURES = {
    **dict.fromkeys(("cpu:avx2", "cpu:avx512", "cpu:amx", "cpu:amx-emulated"), "x86_64"), "cpu:neon": "aarch64"
}  # fmt: skip
"""Target name -> the architecture of its code. Code for other targets has the architecture of this machine."""

ELF = b"\x7fELF"
"""The first bytes of an executable of the system."""

WHEEL = "ziglang"
"""The Python package that contains a C compiler: ``pip install polydyn[compiler]``."""


class Compiler(NamedTuple):
    """A C compiler: its command and its version (both part of cache keys), and its kind: gcc, clang or zig.

    ``why``: the reason why this one was chosen.
    """

    command: tuple[str, ...]
    version: str
    kind: str = "gcc"
    why: str = ""

    @property
    def identity(self) -> tuple[str, ...]:
        """What two compilers differ in: their commands, versions and, of the executable, its size and time."""
        found = shutil.which(self.command[0])
        facts = os.stat(found) if found else None
        return (*self.command, self.version, self.kind, f"{facts.st_size} {facts.st_mtime_ns}" if facts else "")


class Understood(NamedTuple):
    """What a compiler understands for a target: the flags of the instruction set, and the processor features that its
    code may then use."""

    flags: tuple[str, ...]
    features: tuple[str, ...]


def architecture_of(target: str) -> str:
    """Return the architecture that code for a target runs on. For a CUDA target: that of the host."""
    return ARCHITECTURES.get(target, architecture())


def find_compiler(target: str = "cpu") -> Compiler:
    """Return the compiler for a target: ``$CC``, else the first of gcc, clang, cc and zig on the path, else zig of the
    Python package ziglang. Code for another architecture is compiled by its own gcc, or by zig.

    BuildError: none of them runs.
    """
    path = os.environ.get("PATH", "")
    return _find(os.environ.get("CC", ""), path, architecture_of(target), wheel_command())


def wheel_command() -> tuple[str, ...]:
    """Return the command of the compiler that pip installed; empty if there is none."""
    try:
        spec = find_spec(WHEEL)
    except (ImportError, ValueError):
        return ()
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for name in ("zig", "zig.exe"):
            if os.access(Path(folder) / name, os.X_OK):
                return (str(Path(folder) / name), "cc")
    return ()


@lru_cache(maxsize=16)
def _find(cc: str, path: str, arch: str, wheel: tuple[str, ...]) -> Compiler:
    tried = []
    for command, why in _candidates(cc, path, arch, wheel):
        tried.append(command[0] if command[:1] != wheel[:1] else WHEEL)
        if shutil.which(command[0], path=path) and (found := _described(command, why, arch)):
            return found
    install = "" if wheel or cc.strip() else ", or pip install polydyn[compiler]"
    raise BuildError(
        f"no C compiler found: tried {', '.join(tried)}",
        remedy=f"install gcc (or clang){install}, or set CC to the compiler's command; running a saved program needs "
        "none",
    )


def _candidates(cc: str, path: str, arch: str, wheel: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield commands and why each of them would be used. BuildError: CC is not a command."""
    if cc.strip():
        import shlex

        try:
            words = tuple(shlex.split(cc))
        except ValueError as e:
            raise BuildError(f"CC is not a command: {cc!r} ({e})", remedy="set CC to the compiler's command") from e
        yield words, "CC names it"
        return
    ordinary = ("gcc", "clang", "cc") if arch == architecture() else (f"{arch}-linux-gnu-gcc",)
    names = [(name,) for name in ordinary] + [("zig", "cc")]
    listed = ", ".join(map(" ".join, names))
    for name in names:
        yield name, f"the first on the path of {listed}"
    if wheel:
        yield wheel, f"of the Python package {WHEEL}; none of {listed} is on the path"


def _described(command: tuple[str, ...], why: str, arch: str) -> Compiler | None:
    """Return a compiler with its version and kind; None if it does not run."""
    version = _version(command)
    if not version:
        return None
    kind = "clang" if "clang" in version else "gcc"
    if "cc" in command[1:] and (zig := _first_line((*command[: command.index("cc", 1)], "version"))):
        kind, version = "zig", f"zig {zig} ({version})"
        if arch != architecture() and "-target" not in command:
            command = (*command, "-target", f"{arch}-linux-gnu")
    return Compiler(command, version, kind, why)


def _version(command: tuple[str, ...]) -> str:
    """Return the version that a compiler prints, or printed before; empty if it does not run.

    Only the version of gcc's own executable is cached: it is a text in that file. A script, ccache and clang's driver
    print what other files determine.
    """
    file = os.path.realpath(shutil.which(command[0]) or "")
    if "gcc" not in os.path.basename(file) or not _is_elf(file):
        return _first_line((*command, "--version"))
    facts = os.stat(file)
    state = [file, facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns]
    key = digest("version", json.dumps([command, state]))
    try:
        cache = FileCache("compilers")
        if (stored := cache.get(key)) is not None:
            return stored.decode()
        if version := _first_line((*command, "--version")):
            cache.put(key, version.encode())
        return version
    except BuildError:  # asking needs no cache
        return _first_line((*command, "--version"))


def _is_elf(file: str) -> bool:
    """Return whether a file is an executable of the system, not a script; False if it cannot be read."""
    try:
        with open(file, "rb", buffering=0) as f:
            return f.read(len(ELF)) == ELF
    except OSError:
        return False


def _first_line(command: Sequence[str]) -> str:
    """Return the first line that a command prints; empty if it does not run."""
    import subprocess  # with it a stored program would open more slowly

    try:
        process = subprocess.run(command, capture_output=True, text=True, env=environment())
    except OSError:
        return ""
    return process.stdout.partition("\n")[0].strip() if process.returncode == 0 else ""


def environment(work: Path | None = None) -> dict[str, str]:
    """Return the environment of a compiler. It puts temporary files into ``work``, which is removed afterwards; zig
    keeps the parts of the C library that it compiles in the cache of polydyn, unless ZIG_GLOBAL_CACHE_DIR says
    otherwise."""
    variables = {**os.environ}
    variables.setdefault("ZIG_GLOBAL_CACHE_DIR", str(cache_root() / "zig"))
    if work is not None:
        variables |= {"TMPDIR": str(work), "ZIG_LOCAL_CACHE_DIR": str(work / "zig")}
    return variables


def compile_flags(compiler: Compiler, target: str, unit: str = "") -> tuple[str, ...]:
    """Return all flags of a compiler for a target name and a unit. BuildError: unknown target, or the compiler cannot
    make code for it."""
    speed = UNIT_FLAGS.get(unit, {}).get(compiler.kind, OPTIMISATION[compiler.kind])
    return (*FLAGS, *speed, *understood(compiler, target).flags)


def link_flags(compiler: Compiler) -> tuple[str, ...]:
    """Return the flags that link a library."""
    return (*LINK_FLAGS, *(ZIG_LINK_FLAGS if compiler.kind == "zig" else ()))


def required_features(compiler: Compiler, target: str) -> tuple[str, ...]:
    """Return the processor features that code for the target may use, according to the compiler's macros."""
    return understood(compiler, target).features


def alternatives(target: str) -> Iterator[tuple[str, ...]]:
    """Yield the flags that choose a target's instruction set, the preferred ones first. BuildError: unknown target."""
    if target not in TARGETS:
        raise BuildError(f"unknown target {target!r}", remedy=f"choose one of {', '.join(TARGETS)}")
    of_x86 = X86_FLAGS if architecture_of(target) == "x86_64" else ((),)
    for flags in TARGETS[target]:
        for extra in of_x86:
            yield (*extra, *flags)


@lru_cache(maxsize=32)
def understood(compiler: Compiler, target: str) -> Understood:
    """Return what a compiler understands for a target, from the cache or by asking it.

    BuildError: the target is unknown, or the compiler understands none of its flags.
    """
    offered = tuple(alternatives(target))
    # -march=native means another processor on another machine, and the cache may be on a shared disk
    machine = sorted(machine_features()) if target == "cpu" else []
    key = digest("understood 2", target, json.dumps([compiler.identity, offered, MACROS, machine]))
    try:
        cache = FileCache("compilers")
        stored = cache.get(key)
    except BuildError:  # asking needs no cache
        cache, stored = None, None
    if stored is not None:
        flags, features = json.loads(stored)
        return Understood(tuple(flags), tuple(features))
    found = _ask(compiler, target, offered)
    if cache is not None:
        cache.put(key, json.dumps([found.flags, found.features]).encode())
    return found


def _ask(compiler: Compiler, target: str, offered: Sequence[tuple[str, ...]]) -> Understood:
    """Return the first flags that the compiler understands. BuildError: it understands none of them."""
    import shlex
    import subprocess

    said = ""
    for flags in offered:
        # zig without a name of a processor makes code for this one
        given = (*flags, "-mcpu=baseline") if compiler.kind == "zig" and target == "cpu:baseline" else flags
        command = [*compiler.command, *given, "-Werror", "-dM", "-E", "-x", "c", os.devnull]
        process = subprocess.run(command, capture_output=True, text=True, env=environment())
        defined = {words[1] for line in process.stdout.splitlines() if len(words := line.split()) >= 2}
        arch = architecture_of(target)
        if process.returncode == 0 and f"__{arch}__" not in defined:
            said = said or f"{shlex.join(compiler.command)} does not make code for {arch}"
        elif process.returncode == 0:
            return Understood(given, tuple(sorted(name for macro, name in MACROS.items() if macro in defined)))
        said = said or f"{shlex.join(command)} failed:\n{process.stderr[-2000:]}"
    raise BuildError(said, remedy="try another target or CC")
