"""Fusion for targets without a kernel for attention."""

from __future__ import annotations

from polydyn.fusion.pipeline import fusion_plan
from polydyn.fusion.plan import FusionPlan
from polydyn.fusion.rules import is_contraction
from polydyn.graph.ir import Graph

__all__ = ["fuse", "is_contraction"]


def fuse(graph: Graph) -> FusionPlan:
    """The fusion plan of a graph whose attentions stay in parts."""
    return fusion_plan(graph, without=("attention",))
