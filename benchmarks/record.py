"""Results as JSON with what is needed to read them later: date, versions, machine; never host names or paths."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
SCRATCH = Path(__file__).parent / "out" / "results"
"""For quick runs, whose numbers are not worth keeping; not under version control."""
PACKAGES = ("polydyn", "onnx", "onnxruntime", "numpy", "islpy")
FEATURES = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "sve")


def machine() -> dict[str, Any]:
    """Processor, cores, memory, vector features, compiler, Python, kernel release left out."""
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
    """Versions of the packages that take part, as installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def header() -> dict[str, Any]:
    """What every result says of when, with what and where it was measured."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"date": now, "versions": versions(), "machine": machine()}


def save(name: str, *, folder: Path = RESULTS, **fields: Any) -> Path:
    """Writes FOLDER/NAME.json, by default in benchmarks/results, and returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {**header(), **fields}
    path = folder / f"{name}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path
