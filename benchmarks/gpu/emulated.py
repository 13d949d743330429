"""Runs whole models on the CPU libcuda and compares them with ONNX Runtime, at shapes around the tiles.

    python -m benchmarks.gpu.emulated tests/data/bert_tiny.onnx [...] [--dtype float32 float16 bfloat16 dynamic QDQ]
                                      [--quick] [--driver ctypes|pycuda] [--jobs 2]

A model is compiled once in each type (target ``cuda:emulated``); models of a family in ``QUANTIZATION`` are also
quantized to bytes by ONNX Runtime's tools. The host program runs it through our own driver interface: kernels are
executed strictly (late copies, NaN poison, bounds, alignment, divergence), at every shape with warps in forward order
and, as a bound call, in reverse order. Requirements: results within the type's bound of the float32 model, or for bytes
within the bound of ONNX Runtime on the same model; equal bits in both orders; no bank conflicts. Results are added to
benchmarks/results/gpu_emulated.json, with their commit, and replace earlier ones of the same model and type; the exit
status is the number of failures.

``--jobs``: models and types that run at once, each in its own process; by default the number of cores. The C++ compiler
takes most of the time.

``--driver pycuda``: the context is pycuda's, and bound calls read arrays that pycuda made, on a stream of pycuda's. The
results are in gpu_pycuda.json.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import polydyn
from benchmarks import record
from benchmarks.gpu.halves import BOUND, NUMPY_TYPE, of_type
from polydyn.build.features import available_cores
from polydyn.gpu.emulator import Counters
from polydyn.runtime.cuda.program import CudaProgram
from polydyn.runtime.cuda.session import LIBRARY, open_session
from polydyn.testing.accuracy import error, reference
from polydyn.testing.inputs import Shape, family, feeds, shapes
from polydyn.testing.quantizer import quantize

Arrays = dict[str, np.ndarray[Any, Any]]
FILES = {"ctypes": "gpu_emulated", "pycuda": "gpu_pycuda"}
QUANTIZATION = {"bert": ("dynamic", "QDQ"), "resnet": ("QDQ",), "mobilenet_v2": ("QDQ",)}
"""Maps a family to its kinds of quantization (``polydyn.testing.quantizer``), by channel."""
BYTES_TOLERANCE = 0.1
"""Tolerated error of bytes, relative to the scale of the output: a number that rounds the other way changes all values
computed from it.
"""
REVERSE = "PDEMU_REVERSE"
"""The CPU libcuda's setting for the order of warps."""

_TEXT: list[Shape] = [
    {"B": b, "L": n}
    for b, n in ((1, 1), (1, 7), (2, 13), (1, 63), (1, 64), (1, 65), (1, 127), (2, 64), (3, 43), (1, 131), (2, 157))
]
_PAST: list[Shape] = [
    {"B": b, "L": n, "P": p, "T": p + n}
    for b, n, p in ((1, 1, 0), (1, 1, 62), (2, 7, 0), (3, 1, 63), (1, 64, 1), (1, 17, 114))
]
_IMAGES: list[Shape] = [
    {"N": n, "H": h, "W": w}
    for n, h, w in ((1, 1, 1), (1, 31, 47), (2, 33, 32), (1, 14, 18), (1, 16, 16), (1, 10, 26), (1, 2, 254),
                    (1, 16, 32), (1, 6, 86))
]  # fmt: skip
SHAPES: dict[str, list[Shape]] = {
    "bert": _TEXT, "albert": _TEXT, "gpt2": _TEXT, "t5": _TEXT, "gpt2_past": _PAST, "resnet": _IMAGES,
}  # fmt: skip
"""Shapes by family: sizes 1, primes, one less and one more than tiles of 64 and 128 rows (tokens, or pixels of the
first convolution), keys beyond a ring's stages. Other families run at four of their stored shapes.
"""
LONG_PAST: dict[str, list[Shape]] = {"llama": [{"B": 1, "L": 1, "P": 1000, "T": 1001}]}
"""Shapes by family, in float32: a long past that uses split-KV. In 16 bits the angles of such positions are useless."""


def shapes_of(path: Path, dtype: str, quick: bool) -> Sequence[Shape]:
    """Return the shapes at which a model of a type is run."""
    kind = family(path.stem)
    every = SHAPES.get(kind) or shapes(path.stem)[:4]
    return every[:2] if quick else [*every, *(LONG_PAST.get(kind, []) if dtype == "float32" else [])]


def counters(library: str) -> Counters:
    """Return the counters of all launches so far."""
    names = Counters.__dataclass_fields__
    return Counters(*(ctypes.c_uint64 * len(names)).in_dll(ctypes.CDLL(library), "pdemu_counters"))


def bound(program: CudaProgram, feeds: Arrays) -> Arrays:
    """Return the result of a bound call; with pycuda on its arrays and its stream, else on numpy's."""
    driver = program.session.driver
    if driver.name != "pycuda":
        return program.bind(feeds)()
    pycuda, gpuarray = (importlib.import_module(f"pycuda.{n}") for n in ("driver", "gpuarray"))
    context = pycuda.Device(0).retain_primary_context()  # like pycuda.autoprimaryctx
    context.push()
    try:
        stream = pycuda.Stream()
        call = program.bind({n: gpuarray.to_gpu(a) for n, a in feeds.items()}, stream=stream)
        out = call()
        stream.synchronize()
        return {n: a.numpy() for n, a in out.items()}
    finally:
        context.pop()


def run(program: CudaProgram, inputs: Mapping[str, Any], dtype: str, reverse: bool) -> Arrays:
    """Run with the warps in one of both orders, with floats of a type; numpy itself has no name for bfloat16.

    In reverse order it is a bound call, which must return the same bits.
    """
    kind = np.dtype(NUMPY_TYPE.get(dtype, np.float32))
    plain = np.dtype(np.uint16) if dtype == "bfloat16" else kind
    feeds = {n: a.astype(kind).view(plain) if a.dtype == np.float32 else a for n, a in inputs.items()}
    os.environ[REVERSE] = str(int(reverse))
    try:
        got = bound(program, feeds) if reverse else program.run(feeds)
        return {n: a.view(kind) if a.dtype == plain else a for n, a in got.items()}
    finally:
        del os.environ[REVERSE]


def quantized(path: Path, scheme: str, folder: str) -> Path:
    """Quantize a model to bytes, calibrated at two of its shapes."""
    to, original = Path(folder) / f"{path.stem}_{scheme}.onnx", onnx.load(path)
    more: dict[str, Any] = {"weight_type": "QInt8"}
    more |= {} if scheme == "dynamic" else {"activation_type": "QUInt8", "per_channel": True}
    quantize(str(path), to, scheme, [feeds(original, s, seed=3) for s in shapes(path.stem)[1:3]], **more)
    return to


def check(path: Path, dtype: str, shapes_to_run: Sequence[Shape], driver: str = "ctypes") -> dict[str, Any]:
    """Compile a model of a type once and run it at shapes; return the result."""
    start, bound_of = time.perf_counter(), BOUND.get(dtype, BYTES_TOLERANCE)
    session = open_session(prefer=driver)
    with tempfile.TemporaryDirectory() as folder:
        source = path if dtype in BOUND else quantized(path, dtype, folder)
        original, expected = onnx.load(source), reference(str(source), shapes_to_run)
        model = of_type(path, dtype) if dtype in BOUND else original
    program = CudaProgram(polydyn.compile(model, target="cuda:emulated")._artifact, session=session)
    compiling = time.perf_counter() - start
    rows: list[dict[str, Any]] = []
    used: set[str] = set()
    for shape, want in zip(shapes_to_run, expected, strict=True):
        given = feeds(original, shape)
        before = counters(session.library)
        got, again = run(program, given, dtype, False), run(program, given, dtype, True)
        after = counters(session.library)
        conflicts = sum(getattr(after, c) - getattr(before, c) for c in ("shared_conflicts", "ldmatrix_conflicts"))
        same = all(a.tobytes() == again[n].tobytes() for n, a in got.items())
        off = error({n: got[n].astype(w.dtype) for n, w in want.items()}, want)
        right = off <= bound_of and same and not conflicts
        rows.append({"shape": dict(shape), "error": off, "equal_bits": same, "conflicts": conflicts, "right": right})
        used |= {x.kernel for x in program.explain(**shape).launches if x.tasks}
    versions = {v["kernel"]: v["name"] for x in program.manifest["launches"] for v in x["candidates"]}
    return {
        "model": path.stem, "dtype": dtype, "driver": session.driver.name, "commit": record.commit(),
        "launches": len(program.manifest["launches"]), "kernels": len(used),
        "versions": sorted({versions.get(k, k) for k in used}), "bound": bound_of, "shapes": rows,
        "right": all(r["right"] for r in rows), "compile_seconds": round(compiling, 1),
        "seconds": round(time.perf_counter() - start, 1),
    }  # fmt: skip


def save(result: dict[str, Any], folder: Path) -> None:
    """Replace or add the result of a model of a type."""
    file = FILES[result["driver"]]
    path = folder / f"{file}.json"
    old = json.loads(path.read_text())["results"] if path.exists() else []
    key = ("model", "dtype")
    kept = [r for r in old if any(r[k] != result[k] for k in key)]
    about = {"versions": record.versions() | {"pycuda": metadata.version("pycuda")}} if file == "gpu_pycuda" else {}
    record.save(file, folder=folder, **about, results=sorted([*kept, result], key=lambda r: [r[k] for k in key]))


def main() -> int:
    """Print a line for each model and type; return the number of wrong ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--dtype", nargs="+", choices=(*BOUND, "dynamic", "QDQ"))
    parser.add_argument("--quick", action="store_true", help="two shapes each, results under benchmarks/out")
    parser.add_argument("--driver", default="ctypes", choices=FILES)
    parser.add_argument("--jobs", type=int, default=available_cores())
    options = parser.parse_args()
    os.environ[LIBRARY] = "emulated"
    folder, wrong = record.SCRATCH if options.quick else record.RESULTS, 0
    every = [(p, d) for p in options.models for d in options.dtype or (*BOUND, *QUANTIZATION.get(family(p.stem), ()))]
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        jobs = [pool.submit(check, p, d, shapes_of(p, d, options.quick), options.driver) for p, d in every]
        for job in as_completed(jobs):
            r = job.result()
            wrong += not r["right"]
            save(r, folder)
            rows = r["shapes"]
            print(f"{r['model']:18} {r['dtype']:9} {r['launches']:3} launches, {r['kernels']:3} kernels, "
                  f"{len(rows)} shapes, error {max(x['error'] for x in rows):.1e}, "
                  f"equal bits {all(x['equal_bits'] for x in rows)}, "
                  f"{sum(x['conflicts'] for x in rows)} bank conflicts, {r['seconds']:.0f} s"
                  f"{'' if r['right'] else '  WRONG'}", flush=True)  # fmt: skip
    return wrong


if __name__ == "__main__":
    raise SystemExit(main())
