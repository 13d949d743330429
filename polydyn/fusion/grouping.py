"""Fusion for targets without a kernel for attention and without promotion of a product's rows."""

from __future__ import annotations

from polydyn.fusion.pipeline import fusion_plan
from polydyn.fusion.plan import FusionPlan
from polydyn.fusion.products import is_contraction
from polydyn.graph.ir import Graph

__all__ = ["fuse", "is_contraction"]


def fuse(graph: Graph) -> FusionPlan:
    """The fusion plan of a graph whose attentions stay in parts, whose paddings are copies, in the model's layout."""
    return fusion_plan(graph, without=("attention", "layout", "prologue"))
