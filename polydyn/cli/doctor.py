"""Report what polydyn needs and can use on this machine."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import polydyn
from polydyn.build.cache import cache_dir
from polydyn.build.compiler import find_compiler, required_features
from polydyn.build.eviction import KINDS, cache_limit, entries
from polydyn.build.features import architecture, available_cores, machine_features
from polydyn.errors import PolydynError
from polydyn.program_key import sources_changed

REQUIRED_PACKAGES = ("numpy", "islpy", "onnx", "click", "rich")
EXTRAS = {
    "compiler": ("ziglang",),
    "fallback": ("onnxruntime",),
    "explore": ("sympy", "networkx", "ipywidgets"),
    "generate": ("tokenizers",),
    "jobs": ("dask", "distributed", "pyyaml"),
    "test": (
        "dask", "distributed", "pyyaml", "mypy", "pytest", "pytest-xdist", "setuptools", "hypothesis", "onnxruntime",
        "sympy", "networkx", "tokenizers",
    ),
    "lint": ("ruff", "mypy"),
    "bench": ("onnxruntime", "psutil", "matplotlib", "sympy"),
    "export": ("torch", "torchvision", "transformers", "onnxscript"),
    "torch": ("torch", "onnxscript"),
    "serve": ("fastapi", "uvicorn"),
    "docs": ("zensical", "mkdocstrings", "ruff"),
    "browser": ("playwright",),
    "gpu": ("pycuda",),
}  # fmt: skip
"""Maps an extra to the packages that it installs, as in setup.cfg."""

REPORTED_FEATURES = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "sve", "i8mm", "bf16")
"""Processor features that are reported."""


@dataclass(frozen=True)
class Finding:
    """One line of the report: the subject, the result, whether polydyn can work with it, and whether something optional
    is absent."""

    what: str
    text: str
    ok: bool = True
    absent: bool = False

    def __str__(self) -> str:
        mark = "--" if not self.ok else "no" if self.absent else "ok"
        return f"{mark}  {self.what}: {self.text}"


def findings() -> Iterator[Finding]:
    """Yield all findings, the most important first."""
    yield Finding("polydyn", f"{polydyn.__version__}, Python {platform.python_version()}")
    yield _compiler()
    features = machine_features()
    reported = [f for f in REPORTED_FEATURES if f in features]
    text = f"{architecture()}, {available_cores()} cores, {' '.join(reported) or 'no known features'}"
    yield Finding("processor", text)
    yield _cache()
    yield from _provider()
    yield _packages("packages", REQUIRED_PACKAGES, needed=True)
    for extra, names in EXTRAS.items():
        yield _packages(f"extra [{extra}]", names, needed=False)


def _compiler() -> Finding:
    try:
        compiler = find_compiler()
        features = required_features(compiler, "cpu")
    except PolydynError as e:
        return Finding("compiler", str(e), ok=False)
    text = f"{' '.join(compiler.command)}: {compiler.version}, {compiler.why}; uses {len(features)} features"
    return Finding("compiler", text)


def _cache() -> Finding:
    try:
        root, limit = cache_dir("objects").parent, cache_limit()
    except PolydynError as e:
        return Finding("cache", str(e), ok=False)
    sizes = [e.bytes for kind in KINDS for e in entries(root, kind)]
    room = f"{sum(sizes) / 1e6:.1f} MB of at most {limit / 1e6:g}"
    text = f"{root}, {len(sizes)} files, {room} (POLYDYN_CACHE and POLYDYN_CACHE_LIMIT change it)"
    if sources_changed():
        text += "; programs are not stored, because a file of polydyn is dated in the future: set its date (touch)"
    return Finding("cache", text)


def _provider() -> Iterator[Finding]:
    """Yield the state of the provider of ONNX Runtime, and what it did for the last models."""
    from polydyn.ort.report import last_sessions, state_or_error

    text, ok, absent = state_or_error()
    yield Finding("provider", text, ok=ok, absent=absent)
    for line in last_sessions():
        yield Finding("provider", line)


def _packages(subject: str, names: tuple[str, ...], needed: bool) -> Finding:
    installed, missing = [], []
    for name in names:
        try:
            installed.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    text = ", ".join([*installed, *(f"{m} is not installed" for m in missing)])
    return Finding(subject, text, ok=not (needed and missing), absent=bool(missing))
