"""The fusion pipeline as data: passes in order, each with a name, a switch and its source in the papers.

TSCompiler 4.2 and BladeDISC 4.1: passes over the symbolic graph, then passes over groups, each of which merges groups
into larger ones. A new pass is one line in ``PASSES``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial

from polydyn.clock import section
from polydyn.debug import Level, show, verifying
from polydyn.errors import PolydynError, UnknownNameError, planning
from polydyn.fusion.argsort import mark_argsorts
from polydyn.fusion.attention import fuse_attention
from polydyn.fusion.bands import fold_band_constants
from polydyn.fusion.dequantize import dequantize_in_readers
from polydyn.fusion.groups import widen_groups
from polydyn.fusion.halves import store_in_halves
from polydyn.fusion.inline import absorb_permutations, inline_views
from polydyn.fusion.k_major_weights import make_weights_k_major
from polydyn.fusion.layout import channels_last
from polydyn.fusion.masks import compute_masks
from polydyn.fusion.partition import Rule, join_groups
from polydyn.fusion.pieces import choose_pieces
from polydyn.fusion.plan import FusionPlan
from polydyn.fusion.prologue import join_prologues
from polydyn.fusion.recompute import recompute_producers
from polydyn.fusion.rowsums import sum_rows
from polydyn.fusion.rules import elementwise, epilogue, join_columns, stitch
from polydyn.fusion.scan import mark_scans
from polydyn.fusion.scatter import mark_scatters
from polydyn.fusion.separate import separate, write_in_place
from polydyn.fusion.show import show_plan
from polydyn.fusion.siblings import join_siblings
from polydyn.fusion.sink import sink_epilogues
from polydyn.fusion.split import split_merged_axes
from polydyn.fusion.stems import merge_rows_of_windows
from polydyn.fusion.verify import verify_plan
from polydyn.fusion.widen import widen_constants
from polydyn.fusion.winograd import SIDE, winograd
from polydyn.fusion.zero_points import hoist_zero_points
from polydyn.graph.fold import fold
from polydyn.graph.ir import Graph
from polydyn.graph.passes.batch import batch_contractions
from polydyn.graph.passes.empty import without_empty
from polydyn.graph.passes.integers import float8_products, integer_products
from polydyn.graph.passes.merge import merge_contractions
from polydyn.graph.passes.nibbles import products_of_nibbles
from polydyn.graph.passes.scales import products_without_scales
from polydyn.graph.passes.steps import without_requantizing
from polydyn.graph.passes.tidy import tidy
from polydyn.graph.show import show_graph
from polydyn.graph.verify import verify_graph
from polydyn.logs import note, progress
from polydyn.schedules.lanes import DEVICE_DTYPES, VECTOR_DTYPES


@dataclass(frozen=True)
class Pass:
    """One step: a rewriting of the graph, a rewriting of the groups, or a rule by which groups join.

    With none of the three it is the switch of a step in a later stage. ``summary``: one line for people, with the
    paper's section. ``cuda``, ``cpu``: the pass runs only for this kind of target; ``bf16``: only if products may round
    their operands; ``unit``: only if a matrix unit then multiplies them.
    """

    name: str
    summary: str
    graph: Callable[[Graph], Graph] | None = None
    groups: Callable[[FusionPlan], FusionPlan] | None = None
    join: Rule | None = None
    cuda: bool = False
    cpu: bool = False
    bf16: bool = False
    unit: bool = False


REWRITES: tuple[Pass, ...] = (
    Pass("tidy", "equal nodes are computed once, operations that change nothing are removed", graph=tidy),
    Pass("requantize", "dequantizing and requantizing with equal parameters is removed", graph=without_requantizing),
    Pass("integers", "products of dequantized operands become integer products", graph=integer_products),
    Pass("nibbles", "4-bit weights stay packed in products", graph=products_of_nibbles),
    Pass("float8", "products of dequantized 8-bit floats are scaled once", graph=float8_products, cuda=True),
    Pass("scales", "scales of stored operands are hoisted out of products", graph=products_without_scales),
    Pass("fold", "nodes that read only constants are evaluated at compile time", graph=fold),
    Pass("merge", "contractions that share an operand become one (BladeDISC 4.3)", graph=merge_contractions),
    Pass("batch", "independent contractions of equal shapes become a batched one", graph=batch_contractions),
)
"""Passes over the graph that keep its views."""

FUSION: tuple[Pass, ...] = (
    Pass("transpose", "a producer writes the permuted order that its reader uses", graph=absorb_permutations),
    Pass("pieces", "maps select pieces of a tensor instead of a concatenation (rotations)", graph=choose_pieces),
    Pass("views", "views and scalars are inlined into readers (BladeDISC 4.2 input-inline)", graph=inline_views),
    Pass("dequantize", "bytes are dequantized where maps read them", graph=dequantize_in_readers),
    Pass("split", "merged axes are split if readers use the parts (dim collapse)", graph=split_merged_axes),
    Pass("stems", "a window's row and few channels become one axis", graph=merge_rows_of_windows, cpu=True, unit=True),
    Pass("layout", "convolutions and the nodes after them are stored channels last", graph=channels_last),
    Pass("groups", "narrow groups of channels fill a tile of the matrix unit", graph=widen_groups, cpu=True, unit=True),
    Pass("winograd", "3x3 convolutions need 4 or 2.25 multiplications instead of 9", graph=winograd),
    Pass("rowsums", "weights with any zero point become int8, plus a sum per row", graph=sum_rows),
    Pass("offsets", "row zero points are hoisted out of integer products", graph=hoist_zero_points),
    Pass("widen", "constants of integer products are widened at compile time", graph=widen_constants),
    Pass("steps", "8-bit constants become K-major", graph=make_weights_k_major, cuda=True),
    Pass("bands", "band-matrix constants become comparisons", graph=fold_band_constants, cuda=True),
    Pass("halves", "tensors between kernels are bfloat16 where their readers round", graph=store_in_halves, bf16=True),
    Pass("order", "positions of the first elements in order are found by sorting", groups=mark_argsorts, cpu=True),
    Pass("scatter", "terms that affect one element update it, in order", groups=mark_scatters, cpu=True),
    Pass("scan", "running sums continue from the previous element", groups=mark_scans, cpu=True),
    Pass("windows", "parts of a concatenation are written in place", groups=write_in_place),
    Pass("epilogue", "element-wise readers join contractions (TSCompiler 4.2)", join=epilogue),
    Pass("elementwise", "element-wise groups join (BladeDISC 4.1)", join=elementwise),
    Pass("stitch", "groups around reductions of rows join (BladeDISC 4.2)", join=stitch),
    Pass("siblings", "reductions of the same rows join (input fusion)", groups=join_siblings),
    Pass("prologue", "maps that one product or window reads join it (TSCompiler 5.3)", groups=join_prologues),
    Pass("recompute", "readers recompute cheap producers (BladeDISC 4.2 input-inline)", groups=recompute_producers),
    Pass("sink", "an epilogue that only adds traffic moves to its reader (BladeDISC 4.1)", groups=sink_epilogues),
    Pass("attention", "scores, softmax and values become one kernel", groups=fuse_attention),
    Pass("masks", "attentions compute masks made of subscripts and vectors", groups=compute_masks, cuda=True),
    Pass("columns", "groups around reductions of other axes join (BladeDISC 4.2)", groups=join_columns),
    Pass("stores", "floats of 16 bits are rounded where a kernel stores them, not between its nodes", cuda=True),
    Pass("library", "groups of known structure have the schedules of schedules/library", cpu=True),
    Pass("horizontal", "independent launches run in one fork-join (program/parallel_launches.py)"),
)
"""Passes that form the kernels: first over the graph, then over groups."""

PASSES = (*REWRITES, *FUSION)
NAMES = tuple(p.name for p in PASSES)


def check_names(names: Collection[str]) -> frozenset[str]:
    """Check the names of passes to leave out. Raises InputError for an unknown pass."""
    names = {names} if isinstance(names, str) else names
    unknown = sorted(set(names) - set(NAMES))
    if unknown:
        raise UnknownNameError(f"unknown pass: {', '.join(unknown)}", remedy=f"the passes are {', '.join(NAMES)}")
    return frozenset(names)


def rewrite_graph(graph: Graph, without: Collection[str] = (), cuda: bool = False) -> Graph:
    """Return the graph after ``REWRITES`` without the passes named. Its notes list the passes that are off.

    Nodes that are empty at all sizes are removed first, so no pass needs to check for them. ``cuda``: for CUDA kernels.
    """
    off = check_names(without)
    graph = _rewritten(without_empty(graph), REWRITES, off | {p.name for p in REWRITES if p.cuda and not cuda})
    return replace(graph, notes=(*graph.notes, *(f"pass {n} is off" for n in NAMES if n in off)))


def fusion_plan(
    graph: Graph, without: Collection[str] = (), cuda: bool = False, side: int = SIDE, rounded: bool = False,
    unit: bool = False,
) -> FusionPlan:
    """Return the fusion plan of a rewritten graph: ``FUSION`` without the passes named.

    ``cuda``: for CUDA kernels; ``side``: pixels of Winograd's tiles; ``rounded``: products may round to bfloat16;
    ``unit``: the processor has a matrix unit.
    """
    off = _off(without, cuda, rounded, unit)
    plan = _fused(graph, off, cuda, side, verifying())
    try:
        verify_plan(plan)
    except PolydynError:
        _fused(graph, off, cuda, side, verify=True)  # names the pass
        raise
    return plan


def _fused(graph: Graph, off: frozenset[str], cuda: bool, side: int, verify: bool) -> FusionPlan:
    """Return the plan after all passes that are not ``off``. ``verify``: check it after each pass."""
    graph = prepared_graph(graph, off, cuda, side, rounded=True, unit=True)
    plan = separate(graph, DEVICE_DTYPES if cuda else VECTOR_DTYPES)
    for number, p in enumerate(FUSION):
        progress("fusing", number, len(FUSION))
        if p.groups is join_prologues:
            p = replace(p, groups=partial(join_prologues, cuda=cuda))
        if p.name not in off and (p.groups or p.join):
            with planning(f"pass {p.name}"), section(f"pass {p.name}"):
                plan = p.groups(plan) if p.groups else join_groups(plan, p.join) if p.join else plan
                if verify:
                    verify_plan(plan)
            note("fusion", "pass %s: %d groups", p.name, len(plan.groups))
            _show(p, lambda plan=plan: show_plan(plan))  # type: ignore[misc]
    return plan


def prepared_graph(
    graph: Graph, without: Collection[str] = (), cuda: bool = False, side: int = SIDE, rounded: bool = False,
    unit: bool = False,
) -> Graph:  # fmt: skip
    """Return the rewritten graph after the graph passes of ``FUSION``, ready for grouping."""
    settled = {"winograd": partial(winograd, side=side), "views": partial(inline_views, cuda=cuda)}
    passes = tuple(replace(p, graph=settled.get(p.name, p.graph)) for p in FUSION)
    return _rewritten(graph, passes, _off(without, cuda, rounded, unit))


def _off(without: Collection[str], cuda: bool, rounded: bool, unit: bool) -> frozenset[str]:
    """Return the names of the passes of ``FUSION`` that are off."""
    unused = {
        p.name for p in FUSION
        if (p.cpu if cuda else p.cuda) or (p.bf16 and not rounded) or (p.unit and not (rounded and unit))
    }  # fmt: skip
    return check_names(without) | unused


def _show(p: Pass, text: Callable[[], str]) -> None:
    show(Level.LOOPS, "passes", p.name, text, summary=p.summary)


def _rewritten(graph: Graph, passes: tuple[Pass, ...], off: frozenset[str]) -> Graph:
    for number, p in enumerate(passes):
        progress("rewriting", number, len(passes))
        if p.graph and p.name not in off:
            with planning(f"pass {p.name}"), section(f"pass {p.name}"):
                graph = p.graph(graph)
                note("fusion", "pass %s: %d nodes", p.name, len(graph.nodes))
                _show(p, lambda graph=graph: show_graph(graph))  # type: ignore[misc]
                verify_graph(graph)
    return graph
