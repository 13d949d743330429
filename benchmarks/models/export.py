"""Exports models to ONNX with symbolic shapes and seeded random weights.

usage: python -m benchmarks.models.export OUT NAME...     NAME: a model, ``all`` (full size), ``vision`` or ``tiny``

Each file is written only if it passes onnx.checker; an existing file is left alone. Prints one line per model: name,
size, and its operators with their counts. Needs torch, transformers, onnxscript (``pip install -e .[export]``).
"""

from __future__ import annotations

import inspect
import logging
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx

if TYPE_CHECKING:
    from benchmarks.models.zoo import Source

OPSET = 17
NEWER_OPSET = 20
"""Opset of torch's newer exporter by default."""


def export_torch(name: str) -> onnx.ModelProto:
    """Export one of the torch models, by the exporter that its entry selects."""
    import torch

    from benchmarks.models.zoo import build_source

    source = build_source(name)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return newer_export(source) if source.newer else _traced(source)


def _traced(source: Source) -> onnx.ModelProto:
    """Export by the TorchScript exporter: most users have its graphs."""
    import io

    import torch

    buffer = io.BytesIO()
    torch.onnx.export(
        source.module,
        tuple(source.inputs.values()),
        buffer,
        input_names=list(source.inputs),
        output_names=list(source.outputs),
        dynamic_axes={k: dict(v) for k, v in source.axes.items()},
        opset_version=OPSET,
        dynamo=False,
    )
    return onnx.load_model_from_string(buffer.getvalue())


def newer_export(source: Source) -> onnx.ModelProto:
    """Export by the exporter behind ``dynamo=True``; it takes the axes of inputs only, nested like ``forward``'s
    arguments.
    """
    import torch

    axes = [dict(source.axes[name]) for name in source.inputs]
    parameters = inspect.signature(source.module.forward).parameters.values()
    plain = sum(p.kind is not p.VAR_POSITIONAL for p in parameters)
    program = torch.onnx.export(
        source.module,
        tuple(source.inputs.values()),
        input_names=list(source.inputs),
        output_names=list(source.outputs),
        dynamic_shapes=(*axes[:plain], tuple(axes[plain:])),
        opset_version=NEWER_OPSET,
        dynamo=True,
        verbose=False,
    )
    assert program is not None
    return program.model_proto


def build(name: str) -> onnx.ModelProto:
    """Build the model by name and check it."""
    from benchmarks.models.light import LIGHT_MODELS, redraw

    model = redraw(name) if name in LIGHT_MODELS else export_torch(name)
    forget_machine(model)
    model.graph.name = name
    onnx.checker.check_model(model, full_check=True)
    return model


def forget_machine(model: onnx.ModelProto) -> None:
    """Clear names of scopes and files on the exporting machine: they do not belong in a stored model."""
    graph = model.graph
    parts: list[Any] = [model, graph, *graph.node, *graph.initializer, *graph.input, *graph.output, *graph.value_info]
    for part in parts:
        part.ClearField("doc_string")
        part.ClearField("metadata_props")


def names_of(words: list[str]) -> list[str]:
    """Expand ``all``, ``tiny`` and ``vision``."""
    from benchmarks.models.light import LIGHT_MODELS
    from benchmarks.models.zoo import NOT_IN_ALL, TORCH_MODELS, VISION

    every = [*TORCH_MODELS, *LIGHT_MODELS]
    groups = {
        "all": [n for n in every if not n.endswith("_tiny") and n not in NOT_IN_ALL],
        "tiny": [n for n in every if n.endswith("_tiny") and n not in VISION],
        "vision": list(VISION),
    }
    names = [n for w in words for n in groups.get(w, [w])]
    unknown = [n for n in names if n not in every]
    if unknown:
        raise SystemExit(f"unknown models: {', '.join(unknown)}; known: all, tiny, vision, {', '.join(every)}")
    return names


def main(arguments: list[str]) -> None:
    """See the module's docstring."""
    if len(arguments) < 2:
        raise SystemExit(__doc__)
    logging.disable(logging.WARNING)
    out = Path(arguments[0])
    out.mkdir(parents=True, exist_ok=True)
    for name in names_of(arguments[1:]):
        path = out / f"{name}.onnx"
        if path.exists():
            print(f"{name}: exists", flush=True)
            continue
        start = time.perf_counter()
        model = build(name)
        partial = path.with_suffix(".part")
        onnx.save_model(model, str(partial))
        partial.rename(path)
        seconds = time.perf_counter() - start
        operators = Counter(n.op_type for n in model.graph.node)
        histogram = " ".join(f"{op}:{count}" for op, count in sorted(operators.items()))
        size, nodes = path.stat().st_size / 1e6, len(model.graph.node)
        print(f"{name}: {size:.2f} MB, {seconds:.1f} s, {nodes} nodes: {histogram}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
