"""Exploring compilations in a notebook: plans as graphs, sizes as expressions, schedules to change by hand.

``kernel_graph``, ``to_sympy`` and ``condition`` need the extra ``polydyn[explore]`` (networkx and sympy).
"""

from polydyn.explore.plans import condition, kernel_graph, symbol, to_sympy
from polydyn.explore.schedules import Compiled, Group, draw, groups, tree
from polydyn.schedules.prove import prove

__all__ = [
    "Compiled", "Group", "condition", "draw", "groups", "kernel_graph", "prove", "symbol", "to_sympy", "tree",
]  # fmt: skip
