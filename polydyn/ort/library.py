"""The library of the execution provider: its sources, and the built library in the cache."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import sys
from pathlib import Path

import polydyn
from polydyn.arguments import check_threads
from polydyn.build.cache import digest
from polydyn.build.compiler import Library, architecture_of, build_library, find_compiler
from polydyn.build.features import architecture, data_cache, machine_features
from polydyn.errors import BuildError
from polydyn.program_key import code_digest

NAME = "PolydynExecutionProvider"
"""Name of the execution provider."""
FILE_NAME = "libonnxruntime_providers_polydyn.so"
"""File name of the library outside the cache, as of the providers of others."""
OLDEST_ORT = (1, 23)
"""First version of ONNX Runtime with the interface that the provider needs, ``ORT_API`` of abi.h."""
UNITS = (
    "provider.c", "sets.c", "unit.c", "inner.c", "context.c", "program.c", "worker.c", "settings.c", "graph.c",
    "message.c",
)  # fmt: skip
HEADERS = ("provider.h", "graph.h", "message.h", "abi.h")


def get_ep_name() -> str:
    """Return the name of the execution provider."""
    return NAME


def get_ep_names() -> list[str]:
    """Return the names of all execution providers of the library."""
    return [NAME]


def get_library_path() -> str:
    """Return the path of the library, built at the first call. BuildError: no C compiler, or no writable cache.

    The library is also loaded into this process and told which Python compiles: this one.
    """
    path = str(library().file())
    _set_defaults(path)
    return path


@functools.cache
def _set_defaults(path: str) -> None:
    """Tell the loaded library the command of the compiling process, and the number of threads of calls."""
    code = f"import sys; sys.path[:] = {sys.path!r}; from polydyn.ort.worker import main; main()"
    set_defaults = ctypes.CDLL(path).PolydynSetDefaults
    set_defaults.restype = None
    set_defaults(os.fsencode(sys.executable), code.encode(), ctypes.c_int(check_threads(None)))


@functools.cache
def library(target: str = "cpu:baseline") -> Library:
    """Return the built library, which runs on every processor of an architecture. BuildError: it cannot be built.

    ``target``: "cpu:neon" builds it for arm64 if ``CC`` names a compiler for that.
    """
    units, headers = sources()
    return build_library(units | {"stamp.c": _stamp_source()}, headers, target)


def library_for(artifact_target: str) -> Library:
    """Return the library for the architecture of a program's target."""
    return library("cpu:baseline" if architecture_of(artifact_target) == architecture() else artifact_target)


def sources() -> tuple[dict[str, str], dict[str, str]]:
    """Return the translation units and the headers: file name to C text."""
    here = Path(__file__).parent / "c"
    headers = {h: (here / h).read_text(encoding="utf-8") for h in HEADERS}
    headers["polydyn.h"] = (here.parents[1] / "runtime" / "c" / "polydyn.h").read_text(encoding="utf-8")
    return {u: (here / u).read_text(encoding="utf-8") for u in UNITS}, headers


def stamp() -> str:
    """Return the digest of everything except the model and the options that determines a program.

    It is part of the library, which computes the names of stored programs without Python.
    """
    try:
        compiler = find_compiler()
        compiled_by = [*compiler.command, compiler.version]
    except BuildError:
        compiled_by = []
    return digest(code_digest(), json.dumps([sorted(machine_features()), data_cache(2), compiled_by]))


def _stamp_source() -> str:
    return (
        f'const char polydyn_stamp[] = "{stamp()}";\n'
        f'const char polydyn_version[] = "{polydyn.__version__}";\n'
    )  # fmt: skip
