"""The cells of the matrix in which random models run: target, passes, tiles, way of opening, precision, and more.

``DIMENSIONS`` lists the values. ``rows`` returns the cells that cover every pair of values that is possible here
(``pairwise``); ``missing`` names the values that this machine lacks, with the reason.
"""

from __future__ import annotations

import os
import random
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any
from unittest import mock

import polydyn.compiler as compiler
from polydyn.backends import Options, launches
from polydyn.build import compilers as build
from polydyn.build.compiler import why_elsewhere
from polydyn.build.features import architecture
from polydyn.errors import BuildError, InputError
from polydyn.fusion.pipeline import NAMES
from polydyn.gpu.emulator import emulator_compiler
from polydyn.program.plan import Candidate, HostPlan
from polydyn.schedules.index import Index
from polydyn.testing.pairwise import CoveringArray, Row, covering_array

ARM, DEVICE = "cpu:neon", "cuda:emulated"
QEMU = ("qemu-aarch64", "qemu-aarch64-static")
SYSROOT = "/usr/aarch64-linux-gnu"
"""The libraries of arm64 of Debian's packages; QEMU_LD_PREFIX, which qemu reads, names another folder."""
DIMENSIONS: Mapping[str, tuple[str, ...]] = {
    "target": ("cpu", "cpu:avx512", "cpu:avx2", "cpu:amx", "cpu:amx-emulated", ARM, DEVICE),
    "passes": ("all", "half", "none"),
    "tiles": ("default", "random", "search", "written"),
    "opened": ("built", "saved", "cached"),
    "precision": ("full", "bf16", "tf32", "3xtf32"),
    "compiler": ("gcc", "clang", "zig"),
    "threads": ("1", "2", "3"),
    "verify": ("0", "2"),
    "flags": ("quick", "product"),
}
"""Name of a dimension -> its values.

``passes``: the passes over the graph and the groups that are on. ``tiles``: the compiler's choice, random tiles in
records, the records of a search on a simulated machine, or a random schedule written by hand; on a device ``random``
prefers kernel versions in a random order. ``opened``: the program that was built, one
saved to a file and loaded, or one from the program cache. ``verify``: the level of POLYDYN_VERIFY. ``flags``: kernels
without optimisation by the C compiler, or with the product's flags.
"""
ROUNDING = {"full": 0.0, "bf16": 2.0**-8, "tf32": 2.0**-10, "3xtf32": 2.0**-20}
"""Largest relative error of an operand of a product, by precision."""
NO_OPTIMISATION = {
    kind: ("-O0", *(f for f in flags if f.startswith("-fno-sanitize"))) for kind, flags in build.OPTIMISATION.items()
}
"""Kind of compiler -> its flags in quick cells. zig without optimisation would add a sanitizer."""
SHARED_OUT = Index.of(10**9)
RANK_FACTORS = (0, 4, 8, 12, 16, 20)
"""Binary digits of the factors of estimates, by rank in a random order; the last one is for all other ranks."""


@dataclass(frozen=True)
class Cell:
    """One value of every dimension. The default is this machine, without optimisation by the C compiler."""

    target: str = "cpu"
    passes: str = "all"
    tiles: str = "default"
    opened: str = "built"
    precision: str = "full"
    compiler: str = ""
    threads: str = "2"
    verify: str = ""
    flags: str = "quick"

    def __str__(self) -> str:
        return ",".join(f"{name}={value}" for name, value in asdict(self).items() if value)

    @classmethod
    def parse(cls, text: str) -> Cell:
        """Return the cell that ``str`` wrote; a dimension that is left out has its default. InputError: unknown."""
        values = dict(part.partition("=")[::2] for part in text.split(",") if part)
        for name, value in values.items():
            if value not in DIMENSIONS.get(name, ()):
                known = "; ".join(f"{n}={'|'.join(v)}" for n, v in DIMENSIONS.items())
                raise InputError(f"unknown cell {name}={value}", rule="cells of the campaign", remedy=known)
        if not possible(values):
            why = " ".join(str(possible.__doc__).split())
            raise InputError(f"the cell {text} is impossible", rule="cells of the campaign", remedy=why)
        return cls(**values)

    @property
    def on_device(self) -> bool:
        """Whether the target is a device."""
        return self.target.startswith("cuda")

    @property
    def by_emulator(self) -> bool:
        """Whether an emulator of another processor runs the programs."""
        return self.target == ARM

    @property
    def rounding(self) -> float:
        """Largest relative error of an operand of a product."""
        return ROUNDING[self.precision]

    def options(self, seed: int) -> Options:
        """Return the options of a compilation. ``seed``: chooses the passes that are off."""
        off: Sequence[str] = NAMES if self.passes == "none" else ()
        if self.passes == "half":
            off = random.Random(f"{seed} passes").sample(NAMES, len(NAMES) // 2)
        precision = self.precision if self.precision in ("bf16", "3xtf32") else None
        return Options(frozenset(off), tf32=self.precision == "tf32", precision=precision)

    @contextmanager
    def environment(self, seed: int) -> Iterator[None]:
        """Set the C compiler, the level of verification, the flags, and how launches are shared out."""
        variables = {"CC": c_compiler(self.compiler, self.target)} if self.compiler else {}
        variables |= {"POLYDYN_VERIFY": self.verify} if self.verify else {}
        variables |= {"POLYDYN_LIBCUDA": "emulated"} if self.on_device else {}
        prefer = seed if self.on_device and self.tiles == "random" else None
        with ExitStack() as stack:
            stack.enter_context(mock.patch.dict(os.environ, variables))
            stack.enter_context(shared_out(prefer))
            if self.flags == "quick":
                stack.enter_context(mock.patch.object(build, "OPTIMISATION", NO_OPTIMISATION))
            yield


@contextmanager
def quick_build() -> Iterator[None]:
    """Compile kernels without optimisation, and share out every launch among threads, however small."""
    with Cell().environment(0):
        yield


@contextmanager
def shared_out(prefer: int | None = None) -> Iterator[None]:
    """Share out every launch among threads, however small. ``prefer``: the seed of ``preferring``."""
    plan = launches.host_plan

    def shared(*args: Any, **more: Any) -> Any:
        made = plan(*args, **more)
        made = replace(made, launches=tuple(replace(x, work=SHARED_OUT) for x in made.launches))
        return made if prefer is None else preferring(made, prefer)

    with mock.patch.object(compiler, "host_plan", shared):
        yield


def preferring(plan: HostPlan, seed: int) -> HostPlan:
    """Return the plan with the versions of each launch preferred in a random order, nearly independent of estimates."""
    numbers = random.Random(f"{plan.name} {seed}")

    def ranked(c: Candidate, rank: int) -> Candidate:
        factor = 1 << RANK_FACTORS[min(rank, len(RANK_FACTORS) - 1)]
        return c if c.block is None else replace(c, block=replace(c.block, factor=factor))

    made = []
    for x in plan.launches:
        order = numbers.sample(range(len(x.candidates)), len(x.candidates))
        versions = tuple(ranked(c, r) for c, r in zip(x.candidates, order, strict=True))
        made.append(replace(x, candidates=versions))
    return replace(plan, launches=tuple(made))


# -- what can be combined, and what is here ----------------------------------------------------------------------------


def possible(row: Row) -> bool:
    """Return whether values can be combined.

    Precision bf16 is for CPUs, tf32 and 3xtf32 are for devices, records and written schedules for CPUs. Programs for
    arm64 are saved files, compiled by gcc or zig. Verified compilations are never taken from the program cache.
    """
    device, arm = row.get("target") == DEVICE, row.get("target") == ARM
    cpu = "target" in row and not device
    tiles, opened = row.get("tiles"), row.get("opened")
    return not (
        (device and (row.get("precision") == "bf16" or tiles in ("search", "written")))
        or (cpu and row.get("precision") in ("tf32", "3xtf32"))
        or (arm and (opened in ("built", "cached") or row.get("compiler") == "clang"))
        or (opened == "cached" and (row.get("verify") == "2" or tiles == "written"))
    )


def c_compilers() -> dict[str, str]:
    """Return the command of every C compiler, by its name; an empty command if it is not here."""
    names = {"gcc": ["gcc"], "clang": ["clang", *(f"clang-{n}" for n in range(30, 11, -1))]}
    found = {name: next(filter(shutil.which, spellings), "") for name, spellings in names.items()}
    return found | {"zig": "zig cc" if shutil.which("zig") else shlex.join(build.wheel_command())}


def c_compiler(name: str, target: str = "cpu") -> str:
    """Return the command of a C compiler for a target; empty if it is not here."""
    if build.architecture_of(target) == architecture():
        return c_compilers()[name]
    cross = f"{build.architecture_of(target)}-linux-gnu-gcc"
    if name == "gcc":
        return cross if shutil.which(cross) else ""
    zig = c_compilers()["zig"] if name == "zig" else ""
    return f"{zig} -target {build.architecture_of(target)}-linux-gnu" if zig else ""


def qemu() -> list[str]:
    """Return the command that runs a program for arm64; empty if it is not here."""
    found = next(filter(shutil.which, QEMU), "")
    sysroot = ["-L", SYSROOT] if os.path.isdir(SYSROOT) and "QEMU_LD_PREFIX" not in os.environ else []
    return [found, *sysroot] if found else []


@cache
def missing() -> dict[tuple[str, str], str]:
    """Return (dimension, value) -> the reason why this machine lacks it."""
    found = {("compiler", n): "it is not installed" for n, command in c_compilers().items() if not command}
    for target in DIMENSIONS["target"]:
        if why := _lacks(target):
            found["target", target] = why
    return found


def _lacks(target: str) -> str:
    try:
        if target == DEVICE:
            emulator_compiler()
            return ""
        why = why_elsewhere(target)
    except BuildError as e:
        return e.message
    if target != ARM or not why:
        return why
    needed = {"qemu-aarch64 is not installed": qemu(), "no C compiler for aarch64 is installed": _arm_compilers()}
    return ", ".join(reason for reason, there in needed.items() if not there)


def _arm_compilers() -> list[str]:
    return [n for n in ("gcc", "zig") if c_compiler(n, ARM)]


def available(row: Row) -> bool:
    """Return whether values can be combined on this machine."""
    compiler, arm = row.get("compiler"), row.get("target") == ARM
    return possible(row) and not (arm and compiler in ("gcc", "zig") and not c_compiler(compiler, ARM))


def here(cell: Cell) -> Cell:
    """Return the cell with defaults in place of what this machine lacks; the default cell if the rest does not fit."""
    lacks = {name for name, value in asdict(cell).items() if (name, value) in missing()}
    made = replace(cell, **{name: getattr(Cell(), name) for name in lacks})
    return made if available({n: v for n, v in asdict(made).items() if v}) else Cell()


def array() -> CoveringArray:
    """Return the rows that cover every pair of values that is possible on this machine."""
    here = {n: [v for v in values if (n, v) not in missing()] for n, values in DIMENSIONS.items()}
    return covering_array(here, available)


@cache
def rows() -> tuple[Cell, ...]:
    """Return the cells of the array. The model of a seed runs in cell ``seed % len(rows())``."""
    return tuple(Cell(**row) for row in array().rows)
