"""Packs compiled programs, their inputs, correct outputs and wheels for a GPU machine into one folder or tarball.

    python -m benchmarks.gpu.pack OUT [--target cuda:sm_90a] [--quick] [--models PATH.onnx ...] [--only NAME ...]
                                  [--variants FOLDER] [--pycuda PYTHON | --cpu VERSION]

OUT: a folder, or a name that ends in .tar.xz or .tar.gz. The GPU machine runs ``python -m benchmarks.gpu.run_all --pack
OUT`` with this repository and numpy; it does not need the compiler's requirements. One process per core compiles
programs; a program that does not compile is named and left out.

``--pycuda``: an interpreter of the GPU machine's version. pycuda with its requirements, and islpy, the only requirement
of polydyn's compiler besides torch and onnx that is missing there, are built for it as wheels. That takes a minute and
needs the package index. ``--cpu``: another pack, with only the wheels that the CPU run (``cpu``) needs in that version
of Python, including ONNX Runtime. ``--variants``: kernels edited by hand (``variants``). The exit status is 1 if a case
is not in the pack, or the pack is larger than ``MAX_MIB``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import polydyn
from benchmarks.gpu import conformance, cpu, launch_order, pycuda_wheels, variants
from benchmarks.gpu.halves import NUMPY_TYPE
from benchmarks.gpu.launch_programs import programs
from benchmarks.gpu.programs import BOUNDS, KINDS, MODELS, Case, groups, models
from benchmarks.gpu.timed import timed
from polydyn.build.features import available_cores
from polydyn.compiler import compile_artifact
from polydyn.errors import BuildError
from polydyn.gpu.compiler import compiler_version
from polydyn.gpu.targets import EMULATED, architectures
from polydyn.graph.expand import import_model
from polydyn.graph.reference import evaluate
from polydyn.runtime.artifact import Artifact, write_artifact
from polydyn.testing.inputs import feeds, model_inputs

ROOT = Path(__file__).parents[2]
MAX_MIB = 50
"""Maximum size of a pack: together with the repository it must fit into the 64 MiB that can be carried to the machine.
"""
PERIOD = 64 * 1559
"""Elements after which large inputs repeat, so that they take little space in a pack. The repeats of rows of powers of
2 are shifted (1559 is prime), so that reads of a neighbour's row are detected.
"""
WHEELS = "wheels"
"""A pack's folder of wheels."""


def every_case(quick: bool, paths: Sequence[Path]) -> Iterator[Case]:
    """Yield all cases of a pack; those that compile longest come first."""
    yield from timed(quick)
    yield from groups(quick)
    yield from models(paths, quick)


# ---- one case --------------------------------------------------------------------------------------------------------
def inputs(model: onnx.ModelProto, shape: Mapping[str, int]) -> dict[str, Any]:
    """Return the inputs of ``feeds``, and also bytes of the whole range, and bfloat16.

    Numbers repeat after ``PERIOD``.
    """
    rng, given = np.random.default_rng(1), feeds(model, shape)
    for v in model_inputs(model):
        kind, size = v.type.tensor_type.elem_type, given[v.name].shape
        if kind in (KINDS["int8"], KINDS["uint8"]):
            low = -128 if kind == KINDS["int8"] else 0
            given[v.name] = rng.integers(low, low + 256, size, given[v.name].dtype)
        if kind == KINDS["bfloat16"]:
            given[v.name] = rng.standard_normal(size).astype(NUMPY_TYPE["bfloat16"])
        if given[v.name].dtype.kind not in "iub" or given[v.name].dtype.itemsize == 1:
            given[v.name] = np.resize(given[v.name].reshape(-1)[:PERIOD], size)
    return given


def stored(a: Any) -> Any:
    """Return an array in a form that numpy alone can read: bfloat16 as the uint16 of its bits, as programs take it."""
    return a.view(np.uint16) if a.dtype == NUMPY_TYPE["bfloat16"] else a


def write(case: Case, folder: Path, target: str, edited: Path | None = None) -> list[dict[str, Any]]:
    """Compile a case, and its variants, into the folder; return their entries in the list."""
    name = f"{case.kind}-{case.name}"
    options = polydyn.Options(tf32=case.dtype == "tf32")
    made, _ = compile_artifact(case.model, target=target, dims=ranges(case), options=options)
    artifact = for_one_device(made)
    write_artifact(artifact, folder / f"{name}.polydyn")
    entry = {
        "name": case.name, "kind": case.kind, "file": name, "shapes": [dict(s) for s in case.shapes],
        "checked": min(case.checked, len(case.shapes)), "dtype": case.dtype, "rival": case.rival,
        "limit": BOUNDS[case.dtype] if case.limit is None else case.limit,
    }  # fmt: skip
    arrays(case, folder / f"{name}.npz", int(entry["checked"]))
    return [entry, *varied(case, entry, artifact, folder, edited)]


def for_one_device(artifact: Artifact) -> Artifact:
    """Return a program without PTX if it has kernels for the device: PTX serves devices that it does not name."""
    cuda = artifact.manifest["cuda"]
    kept = [i for i in cuda["images"] if i != "ptx"]
    if not kept:
        return artifact
    images = {n: i for n, i in artifact.images.items() if not n.startswith("ptx/")}
    return replace(artifact, manifest={**artifact.manifest, "cuda": {**cuda, "images": kept}}, images=images)


def ranges(case: Case) -> dict[str, tuple[int, int]]:
    """Return ranges up to the power of 2 from each dim's largest size on, so that most cases need no 64-bit indices."""
    return {dim: (0, 1 << (max(s[dim] for s in case.shapes) - 1).bit_length()) for dim in case.shapes[0]}


def arrays(case: Case, path: Path, count: int) -> None:
    """Write the inputs and correct outputs of the first shapes."""
    found: dict[str, Any] = {}
    graph = import_model(case.reference or case.model) if count else None
    for k, shape in enumerate(case.shapes[:count]):
        assert graph is not None
        given = inputs(case.model, shape)
        found |= {f"{k}/in/{n}": stored(a) for n, a in given.items()}
        if case.reference is not None:  # the float32 model's outputs are the reference
            given = {n: a.astype(np.float32) if a.dtype.itemsize == 2 else a for n, a in given.items()}
        found |= {f"{k}/out/{n}": stored(a) for n, a in evaluate(graph, given).items()}
    np.savez(path, **found)  # the tarball compresses better


def varied(
    case: Case, entry: Mapping[str, Any], artifact: Artifact, folder: Path, edited: Path | None
) -> Iterator[dict[str, Any]]:
    """Write the variants of a case whose edits change something; yield their entries."""
    if case.kind not in variants.OF:
        return
    for name, edit in variants.edits(case.name, edited):
        try:
            changed = variants.edited(artifact, edit)
        except BuildError as e:  # the case itself stays
            yield {"name": f"{case.name}~{name}", "failed": f"{type(e).__name__}: {e}"}
            continue
        if changed is None:
            continue
        file = f"variant-{case.name}-{name}"
        write_artifact(for_one_device(changed), folder / f"{file}.polydyn")
        shapes = entry["shapes"][: variants.SHAPES]
        yield dict(entry) | {"name": f"{case.name}~{name}", "kind": "variants", "file": file, "shapes": shapes,
                             "checked": 0, "original": entry["file"]}  # fmt: skip


# ---- all cases ------------------------------------------------------------------------------------------------------
def work(options: argparse.Namespace) -> None:
    """Compile the cases that no other process has begun."""
    for number, case in enumerate(every_case(options.quick, options.models)):
        if options.only and case.name not in options.only:
            continue
        path = options.out / f"{number:03}.entry"
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        start, worked, said = time.perf_counter(), cpu_seconds(), ""
        try:
            entries = write(case, options.out, options.target, options.variants)
        except Exception as e:  # a pack without it beats no pack: it is named, here and in the report of the day
            why = f"{type(e).__name__}: {e}"
            entries, said = [{"name": case.name, "failed": why}], f"  is not packed: {why.splitlines()[0]}"
        path.write_text(json.dumps(entries))
        took = f"{time.perf_counter() - start:6.1f} s {cpu_seconds() - worked:6.1f} s of a core"
        print(f"{case.kind:9} {case.name:28} {took}{said}", flush=True)


def cpu_seconds() -> float:
    """Return the CPU time of this process and its finished children: the time of a quiet machine on one core."""
    return sum(os.times()[:4])


def pack(options: argparse.Namespace) -> int:
    """Fill a folder; ``cases.json`` is written last. Return the number of missing cases."""
    options.out.mkdir(parents=True, exist_ok=True)
    for old in options.out.glob("*.entry"):
        old.unlink()
    asked = ["--target", options.target, *(["--quick"] if options.quick else [])]
    asked += ["--variants", str(options.variants)] if options.variants else []
    asked += ["--models", *map(str, options.models), "--only", *options.only]
    command = [sys.executable, "-m", "benchmarks.gpu.pack", str(options.out), "--worker", *asked]
    workers = [subprocess.Popen(command) for _ in range(available_cores())]
    write_conformance(options.out / "conformance", architectures(options.target))
    if sum(abs(w.wait()) for w in workers):
        raise SystemExit("a process of the pack failed")
    files = sorted(options.out.glob("*.entry"))
    entries = [e for f in files for e in json.loads(f.read_text())]
    for f in files:
        f.unlink()
    made = {"made": time.strftime("%Y-%m-%d %H:%M:%S"), "polydyn": polydyn.__version__, "target": options.target}
    made["compiler"] = compiler(architectures(options.target))
    left = [e for e in entries if "failed" in e]
    there = [e for e in entries if "failed" not in e]
    content = made | {"left_out": left, "cases": there}
    (options.out / "cases.json").write_text(json.dumps(content, indent=1) + "\n")
    return len(left)


def compiler(archs: tuple[str, ...]) -> str:
    """Return the name of the compiler that compiles kernels, or an empty string."""
    try:
        return "" if archs == (EMULATED,) else compiler_version()
    except BuildError:
        return ""


def write_conformance(folder: Path, archs: tuple[str, ...]) -> None:
    """Write compiled kernels of ``conformance`` and ``calibration``, and its programs; write nothing without a
    compiler.
    """
    folder.mkdir(exist_ok=True)
    try:
        for name, image in conformance.images(archs) if archs != (EMULATED,) else ():
            (folder / name).write_bytes(image)
        for arch in archs:
            for name, artifact in programs(f"cuda:{arch}"):
                write_artifact(artifact, folder / launch_order.file_name(name, f"cuda:{arch}"))
    except BuildError as e:
        print(f"the conformance kernels are not in the pack: {e}")


def main() -> int:
    """Make the folder or the tarball; return 1 if a case is not in it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", default="cuda:sm_90a", help="cuda means every architecture and takes much longer")
    parser.add_argument("--quick", action="store_true", help="few shapes")
    parser.add_argument("--models", nargs="*", type=Path, default=[ROOT / f"tests/data/{m}.onnx" for m in MODELS])
    parser.add_argument("--only", nargs="*", default=[], help="names of cases")
    parser.add_argument("--variants", type=Path, help="a folder of kernels edited by hand")
    parser.add_argument("--pycuda", metavar="PYTHON")
    parser.add_argument("--cpu", metavar="VERSION", help="wheels alone, for benchmarks.gpu.cpu and this Python (3.12)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return 0
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        archive = options.out.suffix in (".xz", ".gz")
        folder = Path(scratch) / "pack" if archive else options.out
        left = 0
        if options.cpu:
            cpu.download(folder / WHEELS, options.cpu)
        else:
            left = pack(argparse.Namespace(**vars(options) | {"out": folder}))
        if options.pycuda:
            pycuda_wheels.build(options.pycuda, folder / WHEELS, "islpy")
        if archive:
            left += compress(folder, options.out)
            print(f"{time.monotonic() - start:.0f} s, {cpu_seconds():.0f} s of cores")
    return min(left, 1)


def compress(folder: Path, out: Path) -> bool:
    """Write the tarball of a folder, under the name ``pack``; return whether it is too large."""
    out.parent.mkdir(parents=True, exist_ok=True)
    kind, how = ("w:xz", {"preset": 1}) if out.suffix == ".xz" else ("w:gz", {"compresslevel": 6})
    with tarfile.open(out, kind, **how) as tar:  # type: ignore[call-overload]
        tar.add(folder, "pack")
    mib = out.stat().st_size / 2**20
    print(f"{out}: {mib:.1f} MiB, {'more than' if mib > MAX_MIB else 'at most'} {MAX_MIB} can be carried")
    return mib > MAX_MIB


if __name__ == "__main__":
    raise SystemExit(main())
