"""Vectors of sizes that operators read and write at constant subscripts, as exporters do for ``shape[i] = n``."""

from __future__ import annotations

import numpy as np

from polydyn.graph.operators.registry import InferContext, OnnxNode
from polydyn.schedules.expr import Array


def _read(op: str, vector: Array, at: Array) -> Array | None:
    """Return elements of a vector at subscripts, which are tuples of one number for GatherND and ScatterND."""
    places = at[..., 0] if op.endswith("ND") and at.shape[-1] == 1 else at
    if vector.ndim != 1 or (places is at and op.endswith("ND")):
        return None
    try:
        found: Array = vector[places.reshape(-1)].reshape(places.shape)
    except IndexError:  # every call reports it
        return None
    return found


def read_sizes(node: OnnxNode, ctx: InferContext) -> Array | None:
    """Return the sizes that a GatherElements or GatherND reads; None for data, or unknown subscripts."""
    value, at = ctx.known_elements(node.inputs[0]), ctx.constant(node.inputs[1])
    if value is None or at is None or node.attribute("batch_dims", 0):
        return None
    return _read(node.op, value, at)


def written_sizes(node: OnnxNode, ctx: InferContext) -> Array | None:
    """Return the sizes after a ScatterND or ScatterElements without a reduction. Updates may be data.

    Returns None if all sizes are data, or if a subscript is unknown or occurs twice.
    """
    value, at = ctx.known_elements(node.inputs[0]), ctx.constant(node.inputs[1])
    if value is None or at is None or node.attribute("reduction", "none") != "none":
        return None
    places = _read(node.op, np.arange(value.size).reshape(value.shape), at)
    if places is None or np.unique(places).size != places.size:
        return None
    out: Array = value.copy()
    new = ctx.known_elements(node.inputs[2])
    out[places] = None if new is None else new
    return out
