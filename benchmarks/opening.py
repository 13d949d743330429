"""The time to open a compiled model, and the memory that it holds.

usage: python -m benchmarks.opening MODEL.onnx ... [--times 7]

The model is compiled and saved once, into a temporary folder. Seconds to open, median over ``--times`` processes: from
before ``import polydyn`` (numpy included) to a program that can run, every byte of the file checked; ``loaded`` is the
part of ``polydyn.load``. Warm: the file is in the page cache. Cold: its pages were dropped first (POSIX_FADV_DONTNEED),
and the number of pages really dropped is counted. Caches below this system, of a disk or a hypervisor, stay warm.

Memory: a process's share of resident pages (PSS, which counts mapped weights once) after three runs at each of two
shapes, the smaller one first, divided by its minimum: the weights and the activations (arena, inputs, outputs of the
larger shape). ``loaded``: a process that opened the artifact. ``compiled``: one that compiled the model (from the
cache). Results go to benchmarks/results/opening.json.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import record

SIZES = {"B": (1, 8), "N": (1, 8), "L": (128, 128), "P": (128, 128), "H": (224, 224), "W": (224, 224), "T": (256, 256)}
"""Maps a symbol to its sizes in the two shapes."""
ALLOWED_SECONDS, ALLOWED_MEMORY = 0.5, 1.2
RUNS = 3


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--times", type=int, default=7)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        what, path = args.child
        print(json.dumps({"save": child_save, "run": child_run}[what](args.models[0], path)))
        return
    rows = [measure(m, args.times) for m in args.models]
    print(f"written: {record.save('opening', models=rows).name}")


def measure(path: str, times: int) -> Mapping[str, Any]:
    """Measure one model, every part in its own processes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        artifact = folder / "program"
        start("save", path, folder)
        warm = [open_once(artifact) for _ in range(times)]
        cold, left = [], 1.0
        for _ in range(times):
            left = drop_pages(artifact)
            cold.append(open_once(artifact))
        memory = {kind: start("run", p, folder) for kind, p in (("loaded", str(artifact)), ("compiled", path))}
        size = artifact.stat().st_size
    result = {"warm": medians(warm), "cold": medians(cold), "cold_pages_left": left}
    row = {"model": Path(path).stem, "artifact_mb": size / 1e6, "open": result, "memory": memory}
    report(row)
    return row


def report(row: Mapping[str, Any]) -> None:
    """Print a row."""
    warm, cold = row["open"]["warm"], row["open"]["cold"]
    print(
        f"{row['model']}: {row['artifact_mb']:.0f} MB open in {warm['seconds']:.3f} s (loaded {warm['loaded']:.3f}), "
        f"cold {cold['seconds']:.3f} s ({row['open']['cold_pages_left']:.0%} of its pages still cached); "
        f"allowed {ALLOWED_SECONDS}"
    )
    for kind, shapes in row["memory"].items():
        for m in shapes:
            print(
                f"   {kind} at {m['shape']}: {m['pss_mb']:.0f} MB for {m['weights_mb']:.0f} of weights and "
                f"{m['activations_mb']:.1f} of activations: {m['ratio']:.3f}x (allowed {ALLOWED_MEMORY})"
            )
    sys.stdout.flush()


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of every number."""
    return {key: statistics.median(r[key] for r in runs) for key in runs[0]}


def start(task: str, path: str, folder: Path) -> Any:
    """Start a child process and return the data that it prints."""
    command = [sys.executable, "-m", "benchmarks.opening", path, "--child", task, str(folder)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


def open_once(artifact: Path) -> dict[str, float]:
    """Return the seconds to open the artifact, in a process that does nothing else."""
    code = (
        "import time; a = time.perf_counter(); import polydyn; load = polydyn.load; b = time.perf_counter(); "
        f"load({str(artifact)!r}); c = time.perf_counter(); print(c - a, c - b)"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout
    seconds, loaded = map(float, out.split())
    return {"seconds": seconds, "loaded": loaded}


def drop_pages(path: Path) -> float:
    """Ask the system to drop the file's pages; return the share of them that is still in memory afterwards."""
    with path.open("r+b") as f:
        os.fsync(f.fileno())  # pages that are not written yet cannot be dropped
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return resident(f.fileno())


def resident(file: int) -> float:
    """Return the share of a file's pages that is in memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    with mmap.mmap(file, 0, access=mmap.ACCESS_COPY) as mapped:
        pages = -(-len(mapped) // mmap.PAGESIZE)
        vector = (ctypes.c_ubyte * pages)()
        first = ctypes.c_char.from_buffer(mapped)
        code = libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(mapped)), vector)
        del first  # the mapping cannot be closed while this exists
    if code:
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(b & 1 for b in vector) / pages


# -- children ----------------------------------------------------------------------------------------------------------


def child_save(path: str, folder: str) -> None:
    """Compile and save the model, and inputs for both shapes."""
    import onnx

    import polydyn
    from polydyn.testing.inputs import feeds, symbols

    polydyn.compile(path).save(Path(folder) / "program")
    model = onnx.load(path)
    for k in range(2):
        shape = {s: SIZES[s][k] for s in symbols(model)}
        np.savez(Path(folder) / f"feeds{k}.npz", **feeds(model, shape))  # type: ignore[arg-type]
        (Path(folder) / f"shape{k}.json").write_text(json.dumps(shape))


def child_run(path: str, folder: str) -> list[dict[str, Any]]:
    """Load or compile the model, run it, and measure this process after each shape."""
    import polydyn

    program = polydyn.compile(path, cache=False) if path.endswith(".onnx") else polydyn.load(path)
    seconds = []
    for k in range(2):
        shape = json.loads((Path(folder) / f"shape{k}.json").read_text())
        feeds = dict(np.load(Path(folder) / f"feeds{k}.npz"))
        for _ in range(RUNS):
            out = program.run(feeds)
        live_bytes = sum(a.nbytes for a in (*feeds.values(), *out.values())) + program.counters["arena_bytes"]
        weights, pss = program.weight_bytes, share_of_memory()
        seconds.append({
            "shape": shape, "pss_mb": pss / 1e6, "weights_mb": weights / 1e6, "activations_mb": live_bytes / 1e6,
            "ratio": pss / (weights + live_bytes),
        })  # fmt: skip
    return seconds


def share_of_memory() -> int:
    """Return the bytes of this process in memory; a page that several processes map counts in part."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


if __name__ == "__main__":
    main()
