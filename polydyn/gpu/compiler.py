"""Compiling CUDA text to cubin or PTX with NVRTC or nvcc, cached by content, with ptxas's report for each kernel.

The dispatcher's occupancy model needs registers, spills and static shared memory from the report. The generator
computes dynamic shared memory itself. No GPU is needed.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from polydyn.codegen.device import HEADERS
from polydyn.errors import BuildError, UnsupportedError
from polydyn.gpu.cache import cached, content_key
from polydyn.gpu.nvrtc import Nvrtc, find_nvrtc
from polydyn.gpu.targets import ARCHITECTURES

__all__ = [
    "ARCHITECTURES", "Compiled", "KernelUse", "compile_cuda", "compiler_version", "device_headers", "find_nvcc",
    "parse_ptxas",
]  # fmt: skip


@dataclass(frozen=True)
class KernelUse:
    """The resources of one kernel from ``ptxas -v``: in bytes, except registers (per thread).

    ``serialised``: warnings C75xx. ptxas waits for each warpgroup product of such a kernel before the next one begins.
    """

    registers: int
    spill_stores: int = 0
    spill_loads: int = 0
    stack: int = 0
    static_smem: int = 0
    barriers: int = 0
    serialised: int = 0


@dataclass(frozen=True)
class Compiled:
    """A compiled file: its image, its kernels (none for PTX, which the driver assembles), the compiler's log."""

    arch: str
    image: bytes
    kernels: Mapping[str, KernelUse]
    log: str


def parse_ptxas(log: str) -> dict[str, KernelUse]:
    """Parse the output of ``ptxas -v``. Return kernel name -> use."""
    uses: dict[str, KernelUse] = {}
    serialised = Counter(re.findall(r"\(C75\d\d\).*?in (?:the )?function '([^']+)'", log))
    parts = re.split(r"Compiling entry function '([^']+)'", log)
    for name, text in zip(parts[1::2], parts[2::2], strict=True):

        def number(pattern: str, text: str = text) -> int:
            match = re.search(pattern, text)
            return int(match.group(1)) if match else 0

        uses[name] = KernelUse(
            registers=number(r"Used (\d+) registers"),
            spill_stores=number(r"(\d+) bytes spill stores"),
            spill_loads=number(r"(\d+) bytes spill loads"),
            stack=number(r"(\d+) bytes stack frame"),
            static_smem=number(r"(\d+) bytes smem"),
            barriers=number(r"used (\d+) barriers"),
            serialised=serialised[name],
        )
    return uses


@functools.cache
def find_nvcc() -> tuple[str, str] | None:
    """Return (path, version line) of nvcc from PATH, ``$CUDA_HOME`` or ``/usr/local/cuda``; None if not found."""
    homes = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    for candidate in ("nvcc", *(f"{h}/bin/nvcc" for h in homes if h)):
        path = shutil.which(candidate)
        if path:
            text = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
            return path, text.strip().splitlines()[-1]
    return None


def compiler_version(prefer: str | None = None) -> str:
    """Return the version of the compiler that ``compile_cuda`` uses. BuildError: there is none."""
    tool = _compiler(prefer)
    return tool.version if isinstance(tool, Nvrtc) else tool[1]


def _compiler(prefer: str | None) -> Nvrtc | tuple[str, str]:
    """Return the compiler. NVRTC is preferred, because it is faster and requires no toolkit."""
    if prefer not in (None, "nvcc", "nvrtc"):
        raise BuildError(f"unknown CUDA compiler {prefer!r}", remedy='use "nvcc" or "nvrtc"')
    tool = (find_nvrtc() if prefer != "nvcc" else None) or (find_nvcc() if prefer != "nvrtc" else None)
    if tool is None:
        name = prefer or "CUDA compiler"
        raise BuildError(f"no {name} found", remedy="pip install nvidia-cuda-nvrtc, or install the CUDA toolkit")
    return tool


@functools.cache
def device_headers() -> dict[str, str]:
    """Return the headers that kernels may include, by name, without those that only the emulation needs."""
    paths = sorted(p for p in HEADERS.glob("pd_*.*h") if not p.name.startswith("pd_emu"))
    return {p.name: p.read_text() for p in paths}


def compile_cuda(
    source: str,
    arch: str,
    defines: Mapping[str, int | str] | None = None,
    *,
    kind: str = "cubin",
    compiler: str | None = None,
) -> Compiled:
    """Compile the text of a kernel file for one architecture.

    ``kind``: "cubin" runs on that architecture's family only; "ptx" (terminated by a zero byte, as the driver requires)
    also runs on newer devices. ``compiler``: "nvrtc", "nvcc", or None for the first one found.

    UnsupportedError: unknown architecture. BuildError: there is no compiler, or compiling failed.
    """
    if arch not in ARCHITECTURES:
        raise UnsupportedError(f"unknown CUDA architecture {arch}", remedy=f"use one of {', '.join(ARCHITECTURES)}")
    if kind not in ("cubin", "ptx"):
        raise BuildError(f"unknown image kind {kind!r}", remedy='use "cubin" or "ptx"')
    tool = _compiler(compiler)
    flags = [f"-D{k}={v}" for k, v in sorted((defines or {}).items())]
    version = tool.version if isinstance(tool, Nvrtc) else tool[1]
    key = content_key(source, *device_headers().values(), arch, kind, version, *flags)

    def make(scratch: Path) -> bytes:
        if isinstance(tool, Nvrtc):
            image, log = _run_nvrtc(tool, source, arch, kind, flags)
        else:
            image, log = _run_nvcc(tool[0], source, arch, kind, flags, scratch)
        return len(image).to_bytes(8, "little") + image + log.encode()

    entry = cached("cuda", key, make)
    end = 8 + int.from_bytes(entry[:8], "little")
    log = entry[end:].decode()
    return Compiled(arch, entry[8:end], parse_ptxas(log) if kind == "cubin" else {}, log)


def _run_nvrtc(tool: Nvrtc, source: str, arch: str, kind: str, flags: list[str]) -> tuple[bytes, str]:
    target = arch if kind == "cubin" else arch.replace("sm_", "compute_")
    options = ["-std=c++17", "-default-device", f"-arch={target}", *flags]
    if kind == "cubin":
        options.append("--ptxas-options=-v")
    return tool.compile(source, device_headers(), options, kind.upper())


def _run_nvcc(path: str, source: str, arch: str, kind: str, flags: list[str], scratch: Path) -> tuple[bytes, str]:
    for name, text in device_headers().items():
        (scratch / name).write_text(text)
    (scratch / "kernel.cu").write_text(source)
    compute = arch.replace("sm_", "compute_")
    target = f"arch={compute},code={arch if kind == 'cubin' else compute}"
    command = [
        path,
        "-std=c++17",
        "-O3",
        f"-{kind}",
        "-gencode",
        target,
        "-Xptxas",
        "-v",
        *flags,
        "kernel.cu",
        "-o",
        "image",
    ]
    process = subprocess.run(command, capture_output=True, text=True, cwd=scratch)
    if process.returncode:
        raise BuildError(f"nvcc failed to compile a kernel for {arch}:\n{(process.stderr + process.stdout)[:4000]}")
    image = (scratch / "image").read_bytes()
    return (image if kind == "cubin" else image + b"\0"), process.stderr + process.stdout
