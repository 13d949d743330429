"""Counts tensors with an inferred shape: polydyn, onnx.shape_inference and ONNX Runtime's symbolic_shape_infer.

usage: python -m benchmarks.shape_inference MODEL.onnx ...

All three are counted on the same tensors: the model's inputs and every output of a node of its main graph, by the names
in the file. Initializers and Constant nodes are omitted, because their shapes are given. Shapes that the exporter
stored in the file (of intermediates and outputs) are removed first, so that each tool has to infer them.

``complete``: every dim is a number or an expression over the symbols of the inputs. ``partial``: the rank is known, but
a dim is unknown or a symbol that the tool invented. ``none``: not even the rank is known. ``invented``: the number of
different symbols over all tensors that are not sizes of an input. Results go to
benchmarks/results/shape_inference.json.
"""

from __future__ import annotations

import argparse
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import onnx
import onnx.shape_inference

from benchmarks import record
from polydyn.graph.importer import load_model
from polydyn.graph.propagate import propagate
from polydyn.schedules.names import given_back

Shapes: TypeAlias = "dict[str, list[set[str] | None] | None]"
"""Maps a tensor to the symbols of every dim (None: unknown), or to None if its rank is unknown."""

FUNCTIONS = {"floor", "ceiling", "Max", "Min", "Mod", "Abs", "Piecewise", "sign"}
"""Names that sympy prints inside a dim and that are not symbols."""
NAME = re.compile(r"[^\W\d]\w*")


def tensors(model: onnx.ModelProto) -> list[str]:
    """Return the counted tensors: inputs, then outputs of nodes."""
    constants = {t.name for t in model.graph.initializer}
    names = [x.name for x in model.graph.input if x.name not in constants]
    return names + [o for n in model.graph.node if n.op_type != "Constant" for o in n.output if o]


def symbols(model: onnx.ModelProto) -> set[str]:
    """Return the symbols of the inputs."""
    return {d.dim_param for x in model.graph.input for d in x.type.tensor_type.shape.dim if d.dim_param}


def without_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy without the shapes that its exporter stored; unnamed dims of inputs get a name, the same for all
    tools.
    """
    out = onnx.ModelProto()
    out.CopyFrom(model)
    for x in out.graph.input:
        for axis, d in enumerate(x.type.tensor_type.shape.dim):
            if d.WhichOneof("value") is None:
                d.dim_param = f"{x.name}_{axis}"
    del out.graph.value_info[:]
    for x in out.graph.output:
        x.type.tensor_type.ClearField("shape")
    return out


def of_onnx(model: onnx.ModelProto) -> Shapes:
    """Run onnx.shape_inference with data propagation."""
    return _read(onnx.shape_inference.infer_shapes(model, data_prop=True), symbols(model))


def of_onnxruntime(merge: bool) -> Callable[[onnx.ModelProto], Shapes]:
    """Return symbolic_shape_infer; ``merge``: with auto_merge, which equates undecided dims without a check.

    Its public function raises an error if a shape is missing. The shapes that it infers before count here, so its steps
    are called one by one.
    """

    def infer(model: onnx.ModelProto) -> Shapes:
        from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference

        logging.getLogger("onnxruntime.tools.symbolic_shape_infer").setLevel(logging.CRITICAL)
        tool = SymbolicShapeInference(int_max=2**31 - 1, auto_merge=merge, guess_output_rank=False, verbose=0)
        tool._preprocess(model)
        while tool.run_:
            tool._infer_impl()
        tool._update_output_from_vi()
        return _read(tool.out_mp_, symbols(model))

    return infer


def of_polydyn(model: onnx.ModelProto) -> Shapes:
    """Run polydyn's propagation, before anything is expanded or dropped."""
    typed = propagate(load_model(model))
    return {t: [set(map(given_back, d.symbols())) for d in typed.tensor(t).shape] for t in tensors(model)}


TOOLS: Mapping[str, Callable[[onnx.ModelProto], Shapes]] = {
    "polydyn": of_polydyn,
    "onnx": of_onnx,
    "onnxruntime": of_onnxruntime(False),
    "onnxruntime auto_merge": of_onnxruntime(True),
}


def _read(model: onnx.ModelProto, symbols_of: set[str]) -> Shapes:
    shapes: Shapes = {}
    for x in (*model.graph.input, *model.graph.value_info, *model.graph.output):
        t = x.type.tensor_type
        shapes[x.name] = [_dim(d, symbols_of) for d in t.shape.dim] if t.HasField("shape") else None
    return shapes


def _dim(d: onnx.TensorShapeProto.Dimension, names: set[str]) -> set[str] | None:
    if d.WhichOneof("value") == "dim_value":
        return set()
    if not d.dim_param:
        return None
    return {d.dim_param} if d.dim_param in names else set(NAME.findall(d.dim_param)) - FUNCTIONS


def count(shapes: Shapes, names: Sequence[str], input_symbols: set[str]) -> dict[str, int]:
    """Return the numbers of one tool."""
    out = {"complete": 0, "partial": 0, "none": 0}
    invented: set[str] = set()
    for name in names:
        shape = shapes.get(name)
        if shape is None:
            out["none"] += 1
            continue
        foreign = {s for d in shape for s in d or ()} - input_symbols
        out["partial" if foreign or None in shape else "complete"] += 1
        invented |= foreign
    return out | {"invented": len(invented)}


def measure(path: str) -> dict[str, object]:
    """Return the row of one model."""
    model = without_shapes(onnx.load(path))
    names, input_symbols = tensors(model), symbols(model)
    row: dict[str, object] = {"model": Path(path).stem, "tensors": len(names), "symbols": sorted(input_symbols)}
    print(f"{row['model']}: {len(names)} tensors over {', '.join(sorted(input_symbols)) or 'no symbols'}", flush=True)
    for tool, infer in TOOLS.items():
        start = time.perf_counter()
        try:
            result: dict[str, object] = dict(count(infer(model), names, input_symbols))
        except Exception as e:  # of many classes: an error of another tool is a result
            result = {"failed": f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"}
        result["seconds"] = round(time.perf_counter() - start, 2)
        row[tool] = result
        text = result.get("failed") or "  ".join(f"{k} {n:>4}" for k, n in result.items() if k != "seconds")
        print(f"  {tool:<24}{text}  ({result['seconds']} s)", flush=True)
    return row


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--quick", action="store_true", help="keep the results out of version control")
    args = parser.parse_args()
    rows = [measure(m) for m in args.models]
    saved = record.save("shape_inference", folder=record.SCRATCH if args.quick else record.RESULTS, models=rows)
    print(f"written: {saved.name}")


if __name__ == "__main__":
    main()
