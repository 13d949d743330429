"""Results as JSON with the context to read them later: date, versions, machine; never host names or paths."""

from __future__ import annotations

import functools
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import polydyn

RESULTS = Path(__file__).parent / "results"
SCRATCH = Path(__file__).parent / "out" / "results"
"""For quick runs, whose numbers are not worth keeping; not under version control."""
PACKAGES = ("onnx", "onnxruntime", "numpy", "islpy", "torch", "openvino")
FEATURES = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "sve")


def machine() -> dict[str, Any]:
    """Describe processor, cores, memory, vector features, compiler and Python, without the kernel release."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    fields = dict(
        (part.strip() for part in line.split(":", 1)) for line in info.split("\n\n")[0].splitlines() if ":" in line
    )
    flags = fields.get("flags", fields.get("Features", "")).split()
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    compiler = subprocess.run([os.environ.get("CC", "cc"), "-dumpfullversion"], capture_output=True, text=True)
    return {
        "processor": fields.get("model name", platform.machine()),
        "family": f"{fields.get('cpu family', '?')}/{fields.get('model', '?')}",
        "cores": os.cpu_count(),
        "memory_gib": round(pages * page / 2**30, 1),
        "features": [f for f in FEATURES if f in flags],
        "compiler": compiler.stdout.strip(),
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """Return the installed versions of the packages that take part."""
    result = {"polydyn": f"{polydyn.__version__} {commit()}".strip()}
    for name in PACKAGES:
        try:
            result[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            result[name] = "not installed"
    return result


@functools.cache
def commit() -> str:
    """Return the measured commit, with ``-dirty`` if files other than results differ; empty outside a clone."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=RESULTS.parent.parent, capture_output=True, text=True).stdout

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
        return git("rev-parse", "--short", "HEAD").strip() + ("-dirty" if changed else "")
    except OSError:
        return ""


def now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def header() -> dict[str, Any]:
    """Return the fields of every result: when, with which versions, and on which machine it was measured."""
    return {"date": now(), "versions": versions(), "machine": machine()}


def save(name: str, *, folder: Path = RESULTS, **fields: Any) -> Path:
    """Write FOLDER/NAME.json, by default in benchmarks/results, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {**header(), **fields}
    path = folder / f"{name}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


class Results:
    """The rows of a benchmark in one file, written after every part: an interrupted run keeps its measurements.

    A part is one case on one number of threads. A new measurement replaces the earlier rows of the same part and keeps
    all others. Every part has the date and the commit of its measurement.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.path = folder / f"{name}.json"
        content = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.parts: list[dict[str, Any]] = content.get("parts", [])
        self.rows: list[dict[str, Any]] = content.get("rows", [])

    def add(self, case: str, threads: int, rows: Sequence[Mapping[str, Any]], **about: Any) -> None:
        """Add the rows of a part with the facts ``about`` it, and write the file."""

        def other_parts(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return [x for x in parts if (x["case"], x["threads"]) != (case, threads)]

        part = {"case": case, "threads": threads, "date": now(), "versions": versions(), **about}
        self.parts = [*other_parts(self.parts), part]
        self.rows = [*other_parts(self.rows), *({**r, "case": case, "threads": threads} for r in rows)]
        save(self.path.stem, folder=self.path.parent, parts=self.parts, rows=self.rows)
