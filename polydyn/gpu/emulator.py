"""Strict execution of kernels on the CPU: the Python interface to ``codegen/device/pd_emu.h``.

``compile_emulated`` compiles a CUDA kernel file to a shared object. ``EmulatedModule.launch`` runs one of its kernels
on numpy arrays and returns the counters. The CPU ``libcuda`` loads the same shared objects as "cubins".
"""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from polydyn.build.cache import FileCache, cache_dir
from polydyn.codegen.device import HEADERS
from polydyn.errors import BuildError
from polydyn.gpu.cache import cached, content_key
from polydyn.gpu.errors import DeviceError

__all__ = ["Counters", "EmulatedModule", "compile_emulated", "compile_shared"]

ABI = 3
FIRST_INCLUDE = re.compile(r'(?:\s|//.*\n)*#include "(pd_device\.cuh|pd_hopper\.cuh)"')
"""The device header that a kernel file includes before anything else."""
MESSAGE = 384


@dataclass(frozen=True)
class Counters:
    """The event counts of a launch. ``pd_emu_abi.h`` documents the fields (``enum pdemu_counter``, same order)."""

    mma: int = 0
    wgmma: int = 0
    ldmatrix: int = 0
    ldmatrix_conflicts: int = 0
    cp_async: int = 0
    tma: int = 0
    shared: int = 0
    shared_conflicts: int = 0
    global_: int = 0
    global_sectors: int = 0
    global_sectors_min: int = 0
    barriers: int = 0


COUNTER_NAMES = tuple(Counters.__dataclass_fields__)


class _Range(ctypes.Structure):
    _fields_ = (("lo", ctypes.c_uint64), ("hi", ctypes.c_uint64), ("written", ctypes.c_uint64))


class _Launch(ctypes.Structure):
    _fields_ = (
        ("abi", ctypes.c_uint32), ("grid", ctypes.c_uint32 * 3), ("threads", ctypes.c_uint32),
        ("smem", ctypes.c_uint32), ("reverse", ctypes.c_uint32), ("overlaps", ctypes.c_uint32),
        ("nranges", ctypes.c_uint32),
        ("ranges", ctypes.POINTER(_Range)), ("params", ctypes.c_void_p), ("counters", ctypes.POINTER(ctypes.c_uint64)),
        ("message", ctypes.c_char * MESSAGE),
    )  # fmt: skip


class _Kernel(ctypes.Structure):
    _fields_ = (
        ("abi", ctypes.c_uint32), ("arch", ctypes.c_uint32), ("threads", ctypes.c_uint32), ("nparams", ctypes.c_uint32),
        ("sizes", ctypes.POINTER(ctypes.c_uint32)), ("offsets", ctypes.POINTER(ctypes.c_uint32)),
        ("launch", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Launch))),
    )  # fmt: skip


@functools.cache
def emulator_compiler() -> tuple[str, str]:
    """Return the host C++ compiler and its version line."""
    for name in ("g++", "clang++"):
        path = shutil.which(name)
        if path:
            text = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
            return path, text.splitlines()[0]
    raise BuildError("no C++ compiler found", remedy="install g++ or clang++; emulated kernels are compiled with it")


@functools.cache
def _headers_text(folder: Path) -> str:
    return "".join(p.name + p.read_text() for p in sorted(folder.glob("pd_*.*h")))


@functools.cache
def _precompiled(header: str, command: tuple[str, ...], version: str, folder: Path) -> Path:
    """Precompile a device header with the compiler and options of ``command``; return its file in the cache.

    Parsing the headers takes a third of the time of a small kernel. The compiler takes the file in place of the header
    if all options agree, and the header itself if the file was evicted. ``folder``: of emulated kernels in the cache.
    BuildError: the header does not compile.
    """
    key = content_key("precompiled", header, _headers_text(HEADERS), version, *command)

    def make(scratch: Path) -> bytes:
        out = scratch / f"{header}.gch"
        _compile([*command, "-x", "c++-header", str(HEADERS / header), "-o", str(out)])
        return out.read_bytes()

    cached("emulated", key, make)
    return folder / key


def _compile(command: Sequence[str]) -> None:
    """Run the C++ compiler. BuildError: it failed; contains its message."""
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        raise BuildError(f"the C++ compiler failed to compile a kernel:\n{process.stderr[:4000]}")


def compile_shared(source: str, flags: Sequence[str], kind: str, precompile: bool = False) -> Path:
    """Compile C++ text to a shared object, cached by text, device headers, flags and compiler.

    ``precompile``: let g++ parse the device header that the text begins with only once for all texts with these flags.
    The file ends with a hash, which loaders ignore. BuildError: compiling failed; contains the compiler's message.
    """
    path, version = emulator_compiler()
    warnings = ("-Wall", "-Wextra", "-Wno-unused-function", "-Wno-unknown-pragmas")
    options = ("-std=c++17", "-O1", "-ftree-vectorize", "-fPIC", "-shared", "-fwrapv", "-fvisibility=hidden", *warnings)
    command = (path, *options, f"-I{HEADERS}", *flags)
    key = content_key(source, _headers_text(HEADERS), version, *options, *flags)

    def make(scratch: Path) -> bytes:
        text, out = scratch / "kernel.cpp", scratch / "kernel.so"
        text.write_text(source)
        first = FIRST_INCLUDE.match(source)
        if precompile and first and "clang" not in version:  # g++ looks for it next to the source first
            (scratch / f"{first[1]}.gch").symlink_to(_precompiled(first[1], command, version, cache_dir("emulated")))
        _compile([*command, str(text), "-o", str(out)])
        return out.read_bytes()

    cached(kind, key, make)
    return FileCache(kind).path(key)


def compile_emulated(source: str, defines: Mapping[str, int | str] | None = None, arch: int = 80) -> Path:
    """Compile the text of a ``.cu`` file for emulation; return the path of the shared object.

    ``arch``: the compute capability that the module declares (80, 90, ...). The CPU libcuda rejects it on an older
    "device".
    """
    flags = [
        "-DPD_EMU",
        f"-DPD_ARCH={arch}",
        "-march=native",
        *(f"-D{k}={v}" for k, v in sorted((defines or {}).items())),
    ]
    return compile_shared(source, flags, "emulated", precompile=not defines)


class EmulatedModule:
    """The kernels of one emulated shared object."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))

    def _kernel(self, name: str) -> _Kernel:
        try:
            return _Kernel.in_dll(self._library, "pdemu_kernel_" + name)
        except ValueError:
            raise DeviceError(
                f"the module has no kernel {name}", node=name, remedy="end its file with PD_EXPORT"
            ) from None

    def launch(
        self,
        name: str,
        grid: int | tuple[int, int, int],
        threads: int,
        args: Sequence[np.ndarray[Any, Any] | np.generic | bytes],
        *,
        smem: int = 0,
        reverse: bool = False,
        extra: Sequence[np.ndarray[Any, Any]] = (),
    ) -> Counters:
        """Run a kernel to its end.

        ``args``: arrays are passed as pointers (with ``extra``, they are the only global memory that the kernel may
        access), numpy scalars and bytes by value. ``reverse`` runs warps and lanes in reverse order; a correct kernel
        returns the same bits. DeviceError: states the violated rule, source line, block and thread.
        """
        kernel = self._kernel(name)
        if len(args) != kernel.nparams:
            raise DeviceError(f"{name} takes {kernel.nparams} arguments, not {len(args)}", node=name)
        arrays = [a for a in (*args, *extra) if isinstance(a, np.ndarray)]
        spans = sorted({(a.ctypes.data, a.ctypes.data + a.nbytes) for a in arrays if a.nbytes})
        values: list[Any] = []
        for i, a in enumerate(args):
            raw = argument_bytes(a)
            if len(raw) != kernel.sizes[i]:
                raise DeviceError(
                    f"argument {i} of {name} has {len(raw)} bytes, the kernel takes {kernel.sizes[i]}", node=name
                )
            values.append(aligned_bytes(raw))
        params = (ctypes.c_void_p * max(len(values), 1))(*[ctypes.addressof(v) for v in values])
        counters = (ctypes.c_uint64 * len(COUNTER_NAMES))()
        gx, gy, gz = (grid, 1, 1) if isinstance(grid, int) else grid
        launch = _Launch(
            ABI, (ctypes.c_uint32 * 3)(gx, gy, gz), threads, smem, int(reverse), 0, len(spans),
            (_Range * max(len(spans), 1))(*[_Range(*span) for span in spans]), ctypes.addressof(params), counters,
        )  # fmt: skip
        code = kernel.launch(ctypes.byref(launch))
        if code:
            raise DeviceError(f"kernel {name}: {launch.message.decode()}", code=code, node=name)
        return Counters(*counters)


def argument_bytes(a: np.ndarray[Any, Any] | np.generic | bytes) -> bytes:
    """Return the bytes of a kernel argument: an array's address, or a scalar's value."""
    if isinstance(a, np.ndarray):
        return int(a.ctypes.data).to_bytes(8, "little")
    return a if isinstance(a, bytes) else a.tobytes()


def aligned_bytes(raw: bytes, align: int = 64) -> Any:
    """Return a ctypes array with the content ``raw`` at an aligned address (tensor maps need 64)."""
    room = (ctypes.c_char * (len(raw) + align))()
    offset = -ctypes.addressof(room) % align
    view = (ctypes.c_char * len(raw)).from_buffer(room, offset)
    ctypes.memmove(view, raw, len(raw))
    return view
