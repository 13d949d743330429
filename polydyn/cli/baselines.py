"""Other runtimes, each as a function of a call's inputs, for ``polydyn bench``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polydyn.errors import InputError, UnsupportedError
from polydyn.onnx_runtime import ort_session

Call = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Maps input name -> array to output name -> array."""


@dataclass(frozen=True)
class Source:
    """One model for every runtime: its ONNX file (or its bytes), ``module`` for torch (written by
    ``torch.export.save``, or None), the names of its inputs and outputs in order, and threads per call.
    """

    model: str | bytes
    module: Path | None
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    threads: int


def _onnxruntime(s: Source) -> Call:
    session = ort_session(s.model, s.threads)
    return lambda feeds: dict(zip(s.outputs, session.run(list(s.outputs), dict(feeds)), strict=True))


def _openvino(s: Source) -> Call:
    import openvino

    settings = {"INFERENCE_NUM_THREADS": s.threads, "INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.compile_model(s.model, "CPU", settings)

    def run(feeds: Mapping[str, Any]) -> Mapping[str, Any]:
        results = compiled(dict(feeds))
        return {n: results[n] for n in s.outputs}

    return run


def _torch(s: Source, compiled: bool = False) -> Call:
    """InputError: ``module`` is missing, cannot be read, or has other inputs or outputs."""
    if s.module is None:
        raise InputError("torch cannot read ONNX", rule="--against torch, inductor",
                         remedy="also give the model as written by torch.export.save: --module model.pt2")  # fmt: skip
    import torch
    from torch.utils import _pytree as pytree

    try:
        exported = torch.export.load(s.module)
    except Exception as e:  # torch errors have no common base class
        raise InputError(f"cannot read {s.module}: {_line(e)}", rule="--module",
                         remedy="give a file that torch.export.save wrote") from e  # fmt: skip
    torch.set_num_threads(s.threads)
    module, taken = exported.module(), exported.graph_signature.user_inputs
    call = torch.compile(module, dynamic=True) if compiled else module
    names = taken if set(taken) == set(s.inputs) else s.inputs

    def run(feeds: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            tensors = [torch.from_numpy(feeds[n]) for n in names]
            positional, named = pytree.tree_unflatten(tensors, exported.call_spec.in_spec)
            with torch.no_grad():
                results = pytree.tree_leaves(call(*positional, **named))
            return {n: r.numpy() for n, r in zip(s.outputs, results, strict=True)}
        except Exception as e:  # a guard of the export, a wrong number of inputs or outputs, an operator
            raise InputError(f"{s.module} does not run: {_line(e)}", rule="--module", remedy="export the model of the "
                             "ONNX file, with dynamic_shapes for the dims of --shape") from e  # fmt: skip

    return run


def _line(e: Exception) -> str:
    return str(e).strip().partition("\n")[0] or type(e).__name__


BASELINES: Mapping[str, Callable[[Source], Call]] = {
    "onnxruntime": _onnxruntime,
    "openvino": _openvino,
    "torch": _torch,
    "inductor": lambda s: _torch(s, compiled=True),
}
"""``inductor`` is ``torch.compile(dynamic=True)``. The first call at each shape, which may compile, is not timed."""


def baseline_names(text: str) -> list[str]:
    """Parse ``onnxruntime,torch`` into a list. InputError: a name is not in ``BASELINES``."""
    names = [n.strip() for n in text.split(",") if n.strip()]
    unknown = [n for n in names if n not in BASELINES]
    if unknown:
        raise InputError(f"unknown baseline {unknown[0]!r}", rule="--against", remedy=f"use {', '.join(BASELINES)}")
    return names


def open_baseline(name: str, source: Source) -> Call:
    """Open one of ``BASELINES`` for calls. UnsupportedError: it is not installed; InputError: see ``_torch``."""
    try:
        return BASELINES[name](source)
    except ImportError:
        package = "torch" if name == "inductor" else name
        raise UnsupportedError(
            f"{package} is not installed", rule="--against", remedy=f"pip install {package}, or leave {name} out"
        ) from None
