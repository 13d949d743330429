"""Tools for notebooks: pictures, plans as graphs, sizes as expressions, schedules to change by hand.

``polydyn.explore.pictures`` draws the objects of the compiler. A notebook that imports this module shows trees and
plans as pictures (``%unload_ext polydyn.explore`` ends that).

``kernel_graph``, ``to_sympy`` and ``condition`` need the extra ``polydyn[explore]`` (networkx and sympy). The schedule
transformations come from ``polydyn.schedules.tree``; docs/schedules.md explains them with an example.
"""

from polydyn.explore import pictures
from polydyn.explore.checks import draw
from polydyn.explore.compiled import Compiled
from polydyn.explore.cuda import CompiledCuda
from polydyn.explore.display import activate_in_notebook, load_ipython_extension, sliders, unload_ipython_extension
from polydyn.explore.handmade import Schedule, save_schedules
from polydyn.explore.plans import condition, kernel_graph, symbol, to_sympy
from polydyn.explore.schedules import Group, groups, tree
from polydyn.schedules.interpret import interpret
from polydyn.schedules.proof.prove import prove
from polydyn.schedules.tree.buffers import accumulate, carry, keep, promote
from polydyn.schedules.tree.limits import assign, clip, mark, pad
from polydyn.schedules.tree.loops import (
    Launch,
    balance,
    begins,
    distribute,
    interchange,
    pull_out,
    refine,
    regroup,
    tile,
)
from polydyn.schedules.tree.names import LANE, Coord, Level
from polydyn.schedules.tree.scheduled import Scheduled

__all__ = [
    "LANE", "Compiled", "CompiledCuda", "Coord", "Group", "Launch", "Level", "Schedule", "Scheduled", "accumulate",
    "assign", "balance", "begins", "carry", "clip", "condition", "distribute", "draw", "groups", "interchange",
    "interpret", "keep", "kernel_graph", "load_ipython_extension", "mark", "pad", "pictures", "promote", "prove",
    "pull_out", "refine", "regroup", "save_schedules", "sliders", "symbol", "tile", "to_sympy", "tree",
    "unload_ipython_extension",
]  # fmt: skip

activate_in_notebook()
