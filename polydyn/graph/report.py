"""Counting what shape propagation could not say."""

from __future__ import annotations

from polydyn.graph.ir import Graph


def invented_symbols(graph: Graph) -> dict[str, tuple[str, ...]]:
    """Tensor name -> the symbols of its shape that are not sizes of the model's inputs.

    Empty for every graph that ``import_model`` accepts; the number to compare with ``onnx.shape_inference`` and ONNX
    Runtime's ``symbolic_shape_infer``, which invent symbols such as ``unk__3``.
    """
    known = {s.symbol for s in graph.sources}
    found = {t.name: sorted({s for d in t.shape for s in d.symbols()} - known) for t in graph.tensors.values()}
    return {t: tuple(s) for t, s in found.items() if s}
