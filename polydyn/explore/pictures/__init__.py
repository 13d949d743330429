"""Pictures of a compilation as SVG, for notebooks and pages, without scripts, network or a plotting package.

Each function takes objects of the compiler and returns a ``Picture``. A notebook shows it, and ``save`` writes it.

    fusion(plan, sizes)                      the kernels of a model, what is fused, reasons against more fusion
    matrix(group, choice), tree(t), change(before, after), loops(t), code(t, target), listing(t, text)
    domain(t, sizes), footprint(t, sizes)    a small instance: order, tiles, dependences, accessed elements
    call(program, feeds), timeline(...), roofline(...)
    searches(records), trials(x), tiles(x), curve(progress), shapes(values), regions(program, label, x, y)
    lines(series)                            numbers over a size
"""

from polydyn.explore.pictures.calls import call, roofline, timeline
from polydyn.explore.pictures.code import code, listing
from polydyn.explore.pictures.domain import domain, footprint
from polydyn.explore.pictures.fusion import fusion
from polydyn.explore.pictures.plots import lines
from polydyn.explore.pictures.searches import Searched, curve, regions, searches, shapes, tiles, trials
from polydyn.explore.pictures.sheet import Picture
from polydyn.explore.pictures.trees import change, loops, matrix, tree

__all__ = [
    "Picture", "Searched", "call", "change", "code", "curve", "domain", "footprint", "fusion", "lines", "listing",
    "loops", "matrix", "regions", "roofline", "searches", "shapes", "tiles", "timeline", "tree", "trials",
]  # fmt: skip
