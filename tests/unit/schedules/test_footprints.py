"""Footprints: the copy for a range of rows holds the elements that their windows read, and mistakes are rejected."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest

from polydyn.codegen.cpu.product import ContractKernel
from polydyn.codegen.cpu.shares import ROW_BLOCKS
from polydyn.codegen.cpu.target import AVX512
from polydyn.codegen.kernel import WORKERS
from polydyn.fusion.pipeline import fusion_plan, rewrite_graph
from polydyn.graph.expand import import_model
from polydyn.lowering.contract import ContractGroup, lower_contract
from polydyn.lowering.k_packing import INT8X4, INT16X2
from polydyn.schedules.errors import LegalityError
from polydyn.schedules.group.footprint import HIGH, LOW, Footprint, size
from polydyn.schedules.index import Index, product
from polydyn.schedules.proof.footprints import Strip, check_strip
from polydyn.schedules.solution.reuse import Solver
from polydyn.schedules.tree.scheduled import Scheduled
from tests.support.tiny import model, node

V = Index.of


def form(weight: tuple[int, ...], **attributes: Any) -> ContractGroup:
    """Lower a convolution alone for a CPU; its pixels are symbols except with ``pixels``."""
    dims: list[str | int] = ["N", weight[1], *attributes.pop("pixels", "HWD"[: len(weight) - 2])]
    m: onnx.ModelProto = model(
        [node("Conv", "x w", "y", **attributes)], {"x": ("float32", dims)}, ["y"], {"w": np.zeros(weight, np.float32)}
    )
    plan = fusion_plan(rewrite_graph(import_model(m)))
    lowered = lower_contract(plan, plan.groups[0], 16, promotion=True)
    assert isinstance(lowered, ContractGroup)
    return lowered


def words(weight: tuple[int, ...], **attributes: Any) -> ContractGroup:
    """Lower a byte convolution in this way; its products are K-packed."""
    dims: list[str | int] = ["N", weight[1], "H", "W"]
    m = model([node("ConvInteger", "x w", "y", **attributes)], {"x": ("uint8", dims)}, ["y"],
              {"w": np.ones(weight, np.int8)})  # fmt: skip
    plan = fusion_plan(rewrite_graph(import_model(m)))
    lowered = lower_contract(plan, plan.groups[0], 16, promotion=True, kinds=(INT8X4, INT16X2))
    assert isinstance(lowered, ContractGroup) and lowered.k_packed
    return lowered


def strip(f: ContractGroup) -> tuple[Scheduled, Strip]:
    """Return the schedule of a form, and its footprint buffer as the kernel makes it."""
    group = f.lowered.group
    kernel = ContractKernel("k", group, Solver(group).contract(f.roles), AVX512, f.packed, None, f.fill, f.footprint)
    made = kernel.tiles().strip
    assert made is not None
    return kernel.schedule, made


@pytest.fixture(scope="module")
def convolution() -> tuple[Scheduled, Strip]:
    return strip(form((8, 5, 3, 3), pads=[1, 1, 1, 1], strides=[2, 1], dilations=[1, 3]))


@pytest.mark.parametrize(
    ("weight", "attributes", "places"),
    [
        ((8, 5, 3, 3), {"pads": [1, 1, 1, 1]}, 3),
        ((8, 5, 3, 1), {"strides": [2, 2]}, 3),
        ((8, 5, 1, 3), {"pads": [0, 1, 0, 1]}, 2),  # an image row is a batch: windows run along it
        ((8, 5, 5), {"pads": [2, 2], "dilations": [2]}, 2),
        ((8, 5, 3, 3, 2), {"strides": [2, 1, 1]}, 4),
        ((8, 5, 3, 1), {"pixels": (9, 7), "strides": [2, 2]}, 3),  # an image row is a number of columns
    ],
)
def test_windows_have_a_footprint(weight: tuple[int, ...], attributes: dict[str, Any], places: int) -> None:
    f = form(weight, **attributes)
    assert f.footprint is not None and len(f.footprint.places) == places
    check_strip(*strip(f))


def test_what_no_windows_share_has_none() -> None:
    """Steps without overlap, as in patches, copy every element once anyway."""
    assert form((8, 5, 4, 4), strides=[4, 4]).footprint is None
    assert form((8, 5, 1, 1), strides=[2, 2]).footprint is None


def reads(f: Footprint, sizes: dict[str, int], low: int, high: int) -> Iterator[dict[str, int]]:
    """Yield the elements that first pixels ``low`` to ``high`` read, with all other iterators."""
    names = [x for x, _ in (*f.pixels, *f.steps)]
    ranges = [range(low, high + 1), *(range(sizes[size(x)]) for x in names[1:])]
    for point in itertools.product(*ranges):
        env = dict(zip(names, point, strict=True))
        yield {x: at.evaluate(env) for x, at in f.places}


def right(s: Strip) -> bool:
    """Return whether a footprint buffer holds all elements that are read, by counting at a few sizes.

    Its first and last elements must be read. Steps that are left out read none.
    """
    f = s.footprint
    for wide, (low, high) in itertools.product((9, 5), ((0, 0), (1, 2))):
        params = dict.fromkeys({x for _, e in f.pixels for x in e.symbols()}, wide)
        sizes = {size(x): e.evaluate(params) for x, e in (*f.pixels, *f.steps)}
        env = {**sizes, LOW: low, HIGH: high}
        box = {x: (a.evaluate(env), a.evaluate(env) + n.evaluate(env)) for x, (a, n) in s.box.items()}
        found = list(reads(f, sizes, low, high))
        if any((min(r[x] for r in found), max(r[x] for r in found)) != (a, b - 1) for x, (a, b) in box.items()):
            return False
        if any(used(s, params, sizes, run) for run in ((0, 1), (wide - 1, wide))):
            return False
        rows = (high - low) * f.line.evaluate(params) + 1
        held = s.size.evaluate({**params, "S": -(-rows // s.rows)})
        if held < int(product(V(b - a) for a, b in box.values())):
            return False
    return True


def used(s: Strip, params: dict[str, int], sizes: dict[str, int], run: tuple[int, int]) -> bool:
    """Return whether a step that the rows of ``run`` leave out reads an element."""
    f = s.footprint
    env = {x: i.evaluate(params) for x, i in f.span(*map(V, run)).items()} | sizes | params
    names = [x for x, _ in (*f.pixels, *f.steps)]
    for row, *steps in itertools.product(range(run[0], run[1] + 1), *(range(sizes[size(x)]) for x, _ in f.steps)):
        h, w = divmod(row, f.line.evaluate(params))
        at = dict(zip(names, (h, w, *steps), strict=True))
        left_out = (not a.evaluate(env) <= at[x] < b.evaluate(env) for x, (a, b) in s.taps.items())
        places = {x: i.evaluate(at) for x, i in f.places}
        ranges = ((places[x], *(i.evaluate(params | sizes) for i in ends)) for x, ends in f.inside().items())
        if any(left_out) and all(low <= i < high for i, low, high in ranges):
            return True
    return False


def mutants(s: Strip) -> Iterator[Strip]:
    """Yield boxes that begin or end elsewhere, too little memory, another operand."""
    for x, (a, n) in s.box.items():
        for other in ((a + 1, n), (a, n - 1), (a + 1, n - 1), (a, n + 1), (a * 2, n), (a, n * 2)):
            yield replace(s, box={**s.box, x: other})
    for x, (a, b) in s.taps.items():
        for other in ((a + 1, b), (a, b - 1), (a - 1, b + 1)):
            yield replace(s, taps={**s.taps, x: other})
    yield replace(s, size=s.size - 1)
    yield replace(s, size=s.size.subs({"S": 1}))
    f = s.footprint
    for k, (x, at) in enumerate(f.places):
        moved = ((x, at + n) for n in at.symbols())
        yield from (replace(s, footprint=replace(f, places=(*f.places[:k], p, *f.places[k + 1 :]))) for p in moved)
    yield replace(s, footprint=replace(f, steps=f.steps[::-1], pixels=f.pixels[::-1]))
    yield replace(s, footprint=replace(f, steps=tuple((x, e + 1) for x, e in f.steps)))
    yield replace(s, loops=dict.fromkeys(s.loops, "a_f0"))


@pytest.fixture(scope="module")
def slice_convolution() -> tuple[Scheduled, Strip]:
    """Build a convolution over the first five image rows, or fewer."""
    constants = {"w": np.zeros((8, 5, 3, 3), np.float32), "a": np.array([0]), "b": np.array([5]), "k": np.array([2])}
    nodes = [node("Slice", "x a b k", "s"), node("Conv", "s w", "y", pads=[1, 1, 1, 1], strides=[2, 1])]
    m = model(nodes, {"x": ("float32", ["N", 5, "H", "W"])}, ["y"], constants)
    plan = fusion_plan(rewrite_graph(import_model(m)))
    lowered = lower_contract(plan, plan.groups[0], 16, promotion=True)
    assert isinstance(lowered, ContractGroup)
    return strip(lowered)


@pytest.mark.parametrize("name", ["convolution", "slice_convolution"])
def test_what_the_proof_of_a_strip_accepts_is_right(name: str, request: pytest.FixtureRequest) -> None:
    t, s = request.getfixturevalue(name)
    check_strip(t, s)
    assert right(s)
    accepted = []
    for m in mutants(s):
        try:
            check_strip(t, m)
        except LegalityError:
            continue
        accepted.append(m)
    assert all(m.footprint == s.footprint and m.loops == s.loops and right(m) for m in accepted)
    assert len(accepted) < 7, "twice nothing is nothing, and steps too many read zeros"
    assert len(s.taps) == 2


def test_strips_of_several_threads_are_lower_but_no_halo() -> None:
    """A thread that starts late leaves some to another one; few image rows are copied twice."""
    f = form((64, 3, 7, 7), pads=[3, 3, 3, 3])
    group = f.lowered.group
    roles = Solver(group).contract(f.roles)
    kernel = ContractKernel("k", group, roles, AVX512, f.packed, None, f.fill, f.footprint)
    blocks = []
    for threads in (1, 2):
        for side in (30, 224):
            dims = {"N": 1, "H": side, "W": side}
            env = {x: i.evaluate(dims) for x, i in f.lowered.params.items()} | {WORKERS: threads}
            blocks.append(kernel.launch[ROW_BLOCKS].evaluate(env))
    assert blocks == [1, 2, 2, 6]


def test_refusals_name_the_place_and_an_instance(convolution: tuple[Scheduled, Strip]) -> None:
    t, s = convolution
    x = s.footprint.strip
    a, n = s.box[x]
    with pytest.raises(LegalityError, match=rf"place {x} = .* is read outside(.|\n)*for example"):
        check_strip(t, replace(s, box={**s.box, x: (a, n - 1)}))
    with pytest.raises(LegalityError, match="is copied from"):
        check_strip(t, replace(s, box={**s.box, x: (a, n + 1)}))
    with pytest.raises(LegalityError, match="do not hold"):
        check_strip(t, replace(s, size=s.size - 1))


def test_a_copy_that_readers_loop_around_is_refused(convolution: tuple[Scheduled, Strip]) -> None:
    """It would not be complete when the first row reads."""
    t, s = convolution
    with pytest.raises(LegalityError, match=r"runs .* by itself"):
        check_strip(t, replace(s, loops=dict.fromkeys(s.loops, "c_i")))


def test_words_begin_anywhere_in_a_strip_of_their_parts() -> None:
    """Seven taps are two words; the second ends after the window.

    Its part after the footprint's end comes from the next.
    """
    t, s = strip(words((8, 3, 7, 7), strides=[2, 2], pads=[3, 3, 3, 3]))
    f = s.footprint
    assert (f.word, f.dtype, f.beyond) == ("quad", "uint8", 1)
    check_strip(t, s)
    assert right(s)
    wrong = {
        "do not hold": replace(s, size=s.size - 1),
        "is not .* at the places": replace(s, footprint=replace(f, word="")),
        "do not lie side by side": replace(s, footprint=replace(f, places=f.places[::-1])),
        "may hold NaN": replace(s, footprint=replace(f, word="pair_bf16")),
    }
    for why, mutant in wrong.items():
        with pytest.raises(LegalityError, match=why):
            check_strip(t, mutant)


def test_words_of_steps_apart_have_no_strip() -> None:
    assert words((8, 3, 3, 7), dilations=[1, 2]).footprint is None
