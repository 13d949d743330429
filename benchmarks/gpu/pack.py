"""What a machine with a GPU needs, in one folder or tarball: compiled programs, their inputs and right outputs, wheels.

    python -m benchmarks.gpu.pack OUT [--target cuda] [--quick] [--models PATH.onnx ...] [--pycuda PYTHON]

OUT: a folder, or a name that ends in .tar.gz (then with polydyn's own wheel). That machine runs ``python -m
benchmarks.gpu.run_all --pack OUT`` with this repository and numpy; the compiler's own requirements stay here.
``--pycuda``: an interpreter of the version that is there; pycuda and what it imports are built for it as wheels, which
takes a minute and the package index.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import polydyn
from benchmarks.gpu import conformance, pycuda_wheels
from benchmarks.gpu.halves import NUMPY_TYPE
from benchmarks.models.inputs import feeds, model_inputs, shapes
from polydyn.errors import BuildError
from polydyn.gpu.targets import EMULATED, architectures
from polydyn.graph.expand import import_model
from polydyn.graph.reference import evaluate

ROOT = Path(__file__).parents[2]
KINDS = {
    "float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16,
    "int64": TensorProto.INT64, "int8": TensorProto.INT8, "uint8": TensorProto.UINT8,
}  # fmt: skip
LIMITS = {"float32": 1e-4, "float16": 4e-3}
"""Tolerated error of the norm; float16 is rounded at every node by the reference, sums are float32 in both."""
BOUNDS = LIMITS | {"bfloat16": 3e-2, "tf32": 2e-3, "int8": 0.0}
"""The same for what only products and attention are tried in."""
EDGES = (1, 7, 63, 64, 65, 129)
TRANSFORMER = ((768, 768), (3072, 768), (768, 3072), (1024, 1024), (4096, 1024), (1024, 4096))
"""(N, K) of the dense layers of BERT base and large."""
ROWS = (1, 4, 8, 16, 77, 128, 384, 512, 1024, 2048, 4096)
STITCH = ((1024, 1024), (4096, 768), (1023, 1021), (77, 3000), (1, 100), (8192, 128))


@dataclass(frozen=True)
class Case:
    """A program and the shapes it is run at. ``kind``: kernels, models (checked), gemm, stitch (checked and timed)."""

    name: str
    kind: str
    model: onnx.ModelProto
    shapes: Sequence[Mapping[str, int]]
    dtype: str = "float32"
    checked: int = field(default=10**6)
    """How many of the shapes come with inputs and right outputs; the others are timed only."""


def model(nodes: Sequence[onnx.NodeProto], inputs: Mapping[str, tuple[str, Sequence[Any]]], **constants: Any) -> Any:
    """A model with one output, ``y``; ``inputs``: name -> dtype, dims."""
    graph = helper.make_graph(
        list(nodes), "g", [helper.make_tensor_value_info(n, KINDS[t], list(d)) for n, (t, d) in inputs.items()],
        [onnx.ValueInfoProto(name="y")], [numpy_helper.from_array(np.asarray(a), n) for n, a in constants.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])


def node(op: str, *inputs: str, to: str = "y", **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, list(inputs), [to], name=f"{op}_{to}", **attributes)


def groups(quick: bool) -> Iterator[Case]:
    """One group of each kind, at the edges of tiles."""
    edges = EDGES[1::3] if quick else EDGES
    square = [{"M": a, "N": b, "K": c} for a, b, c in zip(edges, reversed(edges), [*edges[1:], 200], strict=True)]
    matrices = {t: {"a": (t, ["M", "K"]), "b": (t, ["K", "N"])} for t in LIMITS}
    biased = [node("MatMul", "a", "b", to="t"), node("Add", "t", "c", to="u"), node("Relu", "u")]
    for t in LIMITS:
        yield Case(f"gemm_{t}", "kernels", model([node("MatMul", "a", "b")], matrices[t]), square, t)
        yield Case(f"gemm_bias_{t}", "kernels", model(biased, matrices[t] | {"c": (t, ["N"])}), square, t)
    yield from tensor_cores(edges)
    rows = [{"M": m, "N": n} for m, n in zip(edges, reversed(edges), strict=True)] + [{"M": 3, "N": 5000}]
    for t in LIMITS:
        x = {"x": (t, ["M", "N"])}
        yield Case(f"softmax_{t}", "kernels", model([node("Softmax", "x", axis=-1)], x), rows, t)
        yield Case(f"column_sum_{t}", "kernels", model([node("ReduceSum", "x", "axis")], x, axis=[0]), rows, t)
    vectors = {"x": ("float32", ["M", "N"]), "s": ("float32", ["N"]), "b": ("float32", ["N"])}
    normal = model([node("LayerNormalization", "x", "s", "b", axis=-1)], vectors)
    yield Case("layernorm", "kernels", normal, rows)
    broadcast = [node("Mul", "x", "s", to="t"), node("Erf", "t", to="u"), node("Add", "u", "b")]
    yield Case("broadcast", "kernels", model(broadcast, vectors), rows)
    image = {"x": ("float32", ["B", 3, "H", "W"]), "w": ("float32", [8, 3, 3, 3])}
    conv = model([node("Conv", "x", "w", pads=[1, 1, 1, 1], strides=[2, 2])], image)
    yield Case("convolution", "kernels", conv, [{"B": 1, "H": 9, "W": 12}, {"B": 2, "H": 31, "W": 17}])
    table = {"x": ("float32", [50, "N"]), "i": ("int64", ["M"])}
    yield Case("gather", "kernels", model([node("Gather", "x", "i", axis=0)], table), rows)
    yield from narrow(square)
    yield from attention(quick)


def narrow(square: Sequence[Mapping[str, int]]) -> Iterator[Case]:
    """Products on the other tensor cores' types."""
    product = [node("MatMul", "a", "b")]
    for t, bound in (("bfloat16", "bfloat16"), ("float32", "tf32")):
        made = model(product, {"a": (t, ["M", "K"]), "b": (t, ["K", "N"])})
        yield Case(f"gemm_{bound}", "kernels", made, square, bound)
    whole = [node("MatMulInteger", "a", "b")]
    for a in ("int8", "uint8"):
        made = model(whole, {"a": (a, ["M", "K"]), "b": ("int8", ["K", "N"])})
        yield Case(f"gemm_{a}_int8", "kernels", made, square, "int8")


def attention(quick: bool) -> Iterator[Case]:
    """Two heads of 64, one kernel."""
    nodes = [
        node("Transpose", "k", to="t", perm=[0, 1, 3, 2]), node("MatMul", "q", "t", to="s"),
        node("Mul", "s", "c", to="u"), node("Softmax", "u", to="w", axis=-1), node("MatMul", "w", "v"),
    ]  # fmt: skip
    lengths = ((1, 1, 1), (2, 65, 129)) if quick else ((1, 1, 1), (1, 64, 64), (2, 65, 129), (1, 7, 300), (3, 130, 63))
    wanted = [{"B": b, "L": n, "T": t} for b, n, t in lengths]
    for t in (*LIMITS, "bfloat16"):
        dims = {"q": (t, ["B", 2, "L", 64]), "k": (t, ["B", 2, "T", 64]), "v": (t, ["B", 2, "T", 64])}
        made = model(nodes, dims, c=np.asarray(0.125, helper.tensor_dtype_to_np_dtype(KINDS[t])))
        yield Case(f"attention_{t}", "kernels", made, wanted, t)


def tensor_cores(edges: Sequence[int]) -> Iterator[Case]:
    """tf32 and bytes, as warps and warpgroups multiply them, at the edges of tiles; rows of multiples of 16 bytes."""
    turned = [node("Transpose", "b", to="t", perm=[1, 0]), node("MatMul", "a", "t")]
    sizes = [{"M": a, "N": b, "K": 4 * c} for a, b, c in zip(edges, reversed(edges), (*edges[1:], 41), strict=True)]
    single = model(turned, {"a": ("float32", ["M", "K"]), "b": ("float32", ["N", "K"])})
    yield Case("gemm_tf32_along_k", "kernels", single, [*sizes, {"M": 520, "N": 392, "K": 528}], "tf32")
    quantized = [node("QuantizeLinear", "x", "scale", "zero", to="q"), node("MatMulInteger", "q", "w")]
    w = np.random.default_rng(0).integers(-128, 128, (656, 392), np.int8)
    bytes_ = model(quantized, {"x": ("float32", ["M", 656])}, scale=np.float32(0.02), zero=np.int8(0), w=w)
    yield Case("gemm_int8_weights", "kernels", bytes_, [{"M": m} for m in (*edges, 520)], "int8")


def timed(quick: bool) -> Iterator[Case]:
    """Products over the range of transformers, rows and softmax: what is compared with the vendor."""
    dims = TRANSFORMER[:1] if quick else TRANSFORMER
    rows = (5, 128) if quick else ROWS
    matrices = {"a": ("float16", ["M", "K"]), "b": ("float16", ["K", "N"])}
    ranges = [{"M": 33, "N": 64, "K": 72}] + [{"M": m, "N": n, "K": k} for n, k in dims for m in rows]
    yield Case("gemm", "gemm", model([node("MatMul", "a", "b")], matrices), ranges, "float16", 1)
    turned = [node("Transpose", "b", to="t"), node("MatMul", "a", "t")]
    yield Case("gemm_nt", "gemm", model(turned, matrices | {"b": ("float16", ["N", "K"])}), ranges[::5], "float16", 1)
    some = [{"M": m, "N": n} for m, n in (((3, 70), (16, 256)) if quick else ((3, 70), *STITCH))]
    for t in LIMITS:
        x = {"x": (t, ["M", "N"])}
        yield Case(f"softmax_{t}", "stitch", model([node("Softmax", "x", axis=-1)], x), some, t, 1)
        vectors = x | {"s": (t, ["N"]), "b": (t, ["N"])}
        normal = model([node("LayerNormalization", "x", "s", "b", axis=-1)], vectors)
        yield Case(f"layernorm_{t}", "stitch", normal, some, t, 1)


def models(paths: Sequence[Path], quick: bool) -> Iterator[Case]:
    """Whole models at two of their shapes."""
    for path in paths:
        chosen = [shapes(path.stem)[k] for k in ((1,) if quick else (1, 3))]
        yield Case(path.stem, "models", onnx.load(path), chosen)


def inputs(model: onnx.ModelProto, shape: Mapping[str, int]) -> dict[str, Any]:
    """As ``feeds``; bytes of the whole range, and numbers in bfloat16 too."""
    rng, given = np.random.default_rng(1), feeds(model, shape)
    for v in model_inputs(model):
        kind, size = v.type.tensor_type.elem_type, given[v.name].shape
        if kind in (KINDS["int8"], KINDS["uint8"]):
            low = -128 if kind == KINDS["int8"] else 0
            given[v.name] = rng.integers(low, low + 256, size, given[v.name].dtype)
        if kind == KINDS["bfloat16"]:
            given[v.name] = rng.standard_normal(size).astype(NUMPY_TYPE["bfloat16"])
    return given


def stored(a: Any) -> Any:
    """An array as numpy alone can read it: bfloat16 as the uint16 of its bits, as programs take it."""
    return a.view(np.uint16) if a.dtype == NUMPY_TYPE["bfloat16"] else a


def write(case: Case, folder: Path, target: str) -> dict[str, Any]:
    """Compiles a case into the folder; its entry in the list."""
    name = f"{case.kind}-{case.name}"
    program: Any = polydyn.compile(case.model, target=target, options=polydyn.Options(tf32=case.dtype == "tf32"))
    program.save(folder / f"{name}.polydyn")
    graph = import_model(case.model)
    arrays: dict[str, Any] = {}
    for k, shape in enumerate(case.shapes[: case.checked]):
        given = inputs(case.model, shape)
        arrays |= {f"{k}/in/{n}": stored(a) for n, a in given.items()}
        arrays |= {f"{k}/out/{n}": stored(a) for n, a in evaluate(graph, given).items()}
    np.savez_compressed(folder / f"{name}.npz", **arrays)
    return {
        "name": case.name, "kind": case.kind, "file": name, "shapes": [dict(s) for s in case.shapes],
        "checked": min(case.checked, len(case.shapes)), "limit": BOUNDS[case.dtype], "dtype": case.dtype,
        "images": program.images,
    }  # fmt: skip


def pack(folder: Path, target: str, quick: bool, paths: Sequence[Path], only: Sequence[str] = ()) -> None:
    """Fills a folder; ``cases.json`` is written last. ``only``: names of cases, none for all."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for case in (*groups(quick), *timed(quick), *models(paths, quick)):
        if only and case.name not in only:
            continue
        start = time.perf_counter()
        entries.append(write(case, folder, target))
        print(f"{case.kind:8} {case.name:20} {time.perf_counter() - start:6.1f} s", flush=True)
    write_conformance(folder / "conformance", architectures(target))
    made = {"made": time.strftime("%Y-%m-%d %H:%M:%S"), "polydyn": polydyn.__version__, "target": target}
    (folder / "cases.json").write_text(json.dumps(made | {"cases": entries}, indent=1) + "\n")


def write_conformance(folder: Path, archs: tuple[str, ...]) -> None:
    """The kernels of ``benchmarks.gpu.conformance``, compiled; nothing where there is no compiler."""
    if archs == (EMULATED,):
        return
    folder.mkdir(exist_ok=True)
    try:
        for name, image in conformance.images(archs):
            (folder / name).write_bytes(image)
    except BuildError as e:
        print(f"the conformance kernels are not in the pack: {e}")


def main() -> int:
    """Makes the folder or the tarball."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", default="cuda", help="cuda is every architecture; cuda:sm_90a is quicker")
    parser.add_argument("--quick", action="store_true", help="few shapes")
    parser.add_argument("--models", nargs="*", type=Path, default=sorted((ROOT / "tests/data").glob("*_tiny.onnx")))
    parser.add_argument("--only", nargs="*", default=[], help="names of cases")
    parser.add_argument("--pycuda", metavar="PYTHON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        archive = options.out.name.endswith(".tar.gz")
        folder = Path(scratch) / "pack" if archive else options.out
        pack(folder, options.target, options.quick, options.models, options.only)
        wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
        if archive:
            subprocess.run([*wheel, str(folder / "wheels"), str(ROOT)], check=True)
        if options.pycuda:
            pycuda_wheels.build(options.pycuda, folder / "wheels")
        if archive:
            with tarfile.open(options.out, "w:gz") as tar:
                tar.add(folder, "pack")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
