"""A ``libcuda.so.1`` that runs on the CPU, to test unmodified driver code (polydyn's and pycuda) without a GPU.

From the code generator it needs only the small C interface of an emulated kernel (``codegen/device/pd_emu_abi.h``).
"""

from __future__ import annotations

import re
from pathlib import Path

from polydyn.gpu.emulator import compile_shared

__all__ = ["build"]

HERE = Path(__file__).parent
PARTS = ("state.cpp", "libcuda.cpp", "graphs.cpp")
"""The files, in this order, form one translation unit."""


def build() -> Path:
    """Compile the library (about 3 s, cached) and return its path.

    pycuda requires all symbols of cuda.h. Those that are not implemented return NOT_SUPPORTED. For pycuda, load the
    library first with ``ctypes.CDLL(path, ctypes.RTLD_GLOBAL)``: its name (soname) is libcuda.so.1.
    """
    source = "\n".join(f'#line 1 "{name}"\n{(HERE / name).read_text()}' for name in PARTS)
    defined = set(re.findall(r"^API\((\w+)\)", source, re.MULTILINE))
    missing = sorted(set((HERE / "names.txt").read_text().split()) - defined)
    stubs = "\n".join(f'API({name})() {{ return pdemu_unsupported("{name}"); }}' for name in missing)
    flags = ["-Wl,-soname,libcuda.so.1", "-ldl", "-pthread"]
    return compile_shared(f"{source}\n{stubs}\n", flags, "libcuda")
