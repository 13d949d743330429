"""A ``libcuda.so.1`` that runs on the CPU, so that unmodified driver code (ours, pycuda) is tested without a GPU.

It lives beside the drivers, not with the device headers: it is the other end of a driver, and of the
code generator it needs only the small C interface of an emulated kernel (``codegen/device/pd_emu_abi.h``).
"""

from __future__ import annotations

import re
from pathlib import Path

from polydyn.gpu.emulator import compile_shared

__all__ = ["build"]

HERE = Path(__file__).parent
PARTS = ("state.cpp", "libcuda.cpp", "graphs.cpp")
"""One translation unit, in this order."""


def build() -> Path:
    """Compiles the library (about 3 s, cached) and returns its path.

    Every other symbol of cuda.h is there too and answers NOT_SUPPORTED, or pycuda would not load. To use it for
    pycuda, load it first with ``ctypes.CDLL(path, ctypes.RTLD_GLOBAL)``: it says itself that it is libcuda.so.1.
    """
    source = "\n".join(f'#line 1 "{name}"\n{(HERE / name).read_text()}' for name in PARTS)
    defined = set(re.findall(r"^API\((\w+)\)", source, re.MULTILINE))
    missing = sorted(set((HERE / "names.txt").read_text().split()) - defined)
    stubs = "\n".join(f'API({name})() {{ return pdemu_unsupported("{name}"); }}' for name in missing)
    flags = ["-Wl,-soname,libcuda.so.1", "-ldl", "-pthread"]
    return compile_shared(f"{source}\n{stubs}\n", flags, "libcuda")
