"""NVRTC through ctypes: compiles kernels in this process without a CUDA toolkit (wheel ``nvidia-cuda-nvrtc``)."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from polydyn.errors import BuildError

__all__ = ["Nvrtc", "find_nvrtc"]


@functools.cache
def find_nvrtc() -> Nvrtc | None:
    """Find NVRTC: ``$POLYDYN_NVRTC``, the loader's path, or the wheels of CUDA 13 and 12. None if not found."""
    candidates = [os.environ["POLYDYN_NVRTC"]] if os.environ.get("POLYDYN_NVRTC") else []
    candidates += ["libnvrtc.so.13", "libnvrtc.so.12"]
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        candidates += [str(p) for p in sorted(Path(root).glob("*/lib/libnvrtc.so.1?"), reverse=True)]
    for candidate in candidates:
        try:
            for builtins in sorted(Path(candidate).parent.glob("libnvrtc-builtins.so.*")) if "/" in candidate else ():
                # NVRTC opens this by its bare name, which the loader finds only if the process has already loaded it.
                ctypes.CDLL(str(builtins), ctypes.RTLD_GLOBAL)
            return Nvrtc(ctypes.CDLL(candidate))
        except OSError:
            continue
    return None


class Nvrtc:
    """The compiler library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._lib = library
        major, minor = ctypes.c_int(), ctypes.c_int()
        library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        self.version = f"nvrtc {major.value}.{minor.value}"

    def compile(self, source: str, headers: Mapping[str, str], options: Sequence[str], kind: str) -> tuple[bytes, str]:
        """Compile one file; return (image, log). ``kind``: "CUBIN" or "PTX". BuildError: with the log."""
        program = ctypes.c_void_p()
        n = len(headers)
        texts = (ctypes.c_char_p * n)(*[t.encode() for t in headers.values()])
        names = (ctypes.c_char_p * n)(*[k.encode() for k in headers])
        code = self._lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", n, texts, names)
        if code:
            raise BuildError(f"NVRTC could not start (error {code})")
        try:
            code = self._lib.nvrtcCompileProgram(
                program, len(options), (ctypes.c_char_p * len(options))(*[o.encode() for o in options])
            )
            log = self._read(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            if code:
                raise BuildError(f"NVRTC failed to compile a kernel:\n{log[:4000]}")
            return self._read(program, kind), log
        finally:
            self._lib.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, kind: str) -> bytes:
        size = ctypes.c_size_t()
        getattr(self._lib, f"nvrtcGet{kind}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(self._lib, f"nvrtcGet{kind}")(program, buffer)
        return buffer.raw
