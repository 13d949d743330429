"""The attentions that CUDA kernels support."""

from __future__ import annotations

from polydyn.codegen.cuda.group import ProductGroup, product_refusal
from polydyn.codegen.printers.cuda_values import HALF
from polydyn.schedules.errors import Declined, ScheduleError
from polydyn.schedules.laws.online_softmax import softmax
from polydyn.schedules.tiling import AttentionParts
from polydyn.schedules.tree.strategies import operand

DEPTHS, LARGE_DEPTHS = (32, 64, 128), (192, 256)
"""Head sizes of tiles; other heads are padded with zeros. ``LARGE_DEPTHS``: only for 16-bit types, with fewer keys
per tile, so that sums fit the registers and rings the shared memory."""


def attention_refusal(parts: AttentionParts) -> Declined | None:
    """Return the reason why an attention should run as separate kernels, or None."""
    r = parts.score_roles
    for part, roles in ((parts.scores, parts.score_roles), (parts.values, parts.value_roles)):
        if refusal := product_refusal(part, roles):
            return refusal
    scores = ProductGroup("scores", parts.scores, parts.score_roles)
    values = ProductGroup("values", parts.values, parts.value_roles)
    floats = scores.sums == values.sums == "float32"
    if values.dtype != scores.dtype or parts.score_roles.inner or not floats:
        return Declined(f"an attention of {scores.dtype} and {values.dtype}")
    most = (LARGE_DEPTHS if scores.dtype in HALF else DEPTHS)[-1]
    for extent in (scores.K, values.N):
        if extent.constant is None or extent.constant > most:
            return Declined(f"an attention of {scores.dtype} with heads of {extent}, more than {most}")
    try:
        for part, axis in ((parts.scores, r.row), (parts.scores, r.col), (parts.values, parts.value_roles.col)):
            operand(part, axis)
        softmax(parts.rows, parts.row_prefix, parts.score_roles.col)
    except ScheduleError as e:
        return Declined(str(e).partition("\n")[0])
    return None
