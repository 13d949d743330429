"""Schedules that a user writes: from a model's group to a tree, a proof or a witness, C, a result and a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from polydyn import explore
from polydyn.codegen.cpu.scheduled import ScheduledKernel
from polydyn.codegen.cpu.target import AVX2
from polydyn.errors import InputError, LegalityError, ScheduleError, UnsupportedError
from polydyn.explore import Scheduled, accumulate, assign, clip, interchange, promote, prove, pull_out, tile
from polydyn.schedules.group.polyhedra import read_accesses
from polydyn.schedules.tree import Band, Sequence, Tree
from polydyn.schedules.tree.names import a, b, it, p
from tests.support.tiny import model, node

W = np.random.default_rng(0).standard_normal((40, 56)).astype(np.float32)
SIZES = [0, 1, 7, 33]


def product() -> explore.Group:
    """Build ``y[M, 56] = gelu(x[M, 40] @ w + b)``."""
    nodes = [node("MatMul", "x w", "p"), node("Add", "p b", "s"), node("Gelu", "s", "y")]
    made = model(nodes, {"x": ("float32", ["M", 40])}, ["y"], {"w": W, "b": W[0]})
    (group,) = explore.groups(made)
    return group


def softmax() -> explore.Group:
    (group,) = explore.groups(model([node("Softmax", "x", "y")], {"x": ("float32", ["R", "C"])}, ["y"]))
    return group


def tiled(t: Scheduled) -> Scheduled:
    """Tile by blocks of 8 x 24, the reduction in blocks of P_k around them; sums in a buffer per block."""
    t = tile(t, "i", (b, "B_i"), (p, 8))
    t = tile(t, "j", (b, "B_j"), (p, 24))
    t = tile(t, "k", (b, "B_k"), (p, "P_k"))
    t = interchange(t, b("i"), b("j"), b("k"), p("k"), p("i"), p("j"))
    t = accumulate(pull_out(t, b("k"), p("k")), b("j"))
    for axis in ("i", "j"):
        t = clip(t, axis, *t.map.views)
    return assign(clip(t, "k", "ACC"), "task", b("i"), b("j"))


def packed(t: Scheduled) -> Scheduled:
    """Tile in this way, and copy the columns of a block for each block of the reduction."""
    t = tiled(t)
    weights = next(x.array for x in read_accesses(t.group.backbone)[1:] if "i1" in str(x.index))
    t = promote(t, weights, "j", "PACK", "panel", b("k"), ["ACC"], {a("k"): (p("k"),), a("j"): (p("j"),)})
    return clip(clip(t, "k", "PACK"), "j", "PACK")


@pytest.mark.parametrize("schedule", [tiled, packed])
@pytest.mark.parametrize("target", ["cpu", "cpu:avx2"])
def test_a_composition_is_proven_compiled_and_right_at_ragged_sizes(schedule: object, target: str) -> None:
    group = product()
    assert callable(schedule)
    kernel = group.compile(schedule(group.start()), sizes={"P_k": 16}, target=target)
    assert ("panel" in kernel.text) == (schedule is packed)
    (rows,) = group.polyhedral.params
    assert all(kernel.check(**{rows: m}) < 1e-5 for m in SIZES)
    assert kernel.seconds(repeat=3, **{rows: 16}) > 0


def test_rows_run_as_the_matrix_has_them() -> None:
    group = softmax()
    t = group.start()
    for n in [n for n, x in group.polyhedral.arrays.items() if x.role == "local"]:
        t = explore.keep(t, n, n, it("i0"))
    kernel = group.compile(assign(t, "task", it("i0")))
    for rows, columns in ((0, 3), (1, 1), (5, 33), (3, 0)):
        sizes = dict(zip(group.polyhedral.params, (rows, columns), strict=True))
        assert kernel.check(**sizes) < 1e-5


def test_the_familys_own_kernel_is_there_to_compare_with() -> None:
    group = product()
    kernel = group.compiled("cpu:avx2")
    assert kernel.check(**{kernel.group.params[0]: 33}) < 1e-5 and "PD_" in kernel.text


def test_the_matrix_and_the_trees_are_texts() -> None:
    group = product()
    assert "?INIT" in group.matrix() and "backbone ACC" in str(group)
    before, after = explore.tree(group.start()), explore.tree(tiled(group.start()))
    assert "band i, j, k" in before and "band b_i, b_j" in after


def swapped(tree: Tree) -> Tree:
    """Return the tree with the first two parts of its first sequence exchanged."""
    if isinstance(tree, Band):
        return Band(tree.members, swapped(tree.child))
    assert isinstance(tree, Sequence)
    first, second, *rest = tree.children
    return Sequence((second, first, *rest))


def test_an_illegal_order_has_a_witness() -> None:
    group = product()
    t = tiled(group.start())
    wrong = replace(t, tree=swapped(t.tree))
    with pytest.raises(LegalityError, match=r"INIT.*ACC") as e:
        group.compile(wrong, sizes={"P_k": 16})
    assert "for example" in str(e.value)


def test_sums_that_the_next_column_overwrites_are_found() -> None:
    """Blocks of the reduction are outside of the columns, and a column's storage holds one sum only."""
    t = tile(product().start(), "k", (b, "B_k"), (p, 16))
    t = pull_out(interchange(t, it("i"), b("k"), it("j"), p("k")), p("k"))
    t = clip(accumulate(t, it("j")), "k", "ACC")
    with pytest.raises(LegalityError, match="acc"):
        prove(t)


def test_a_tail_that_is_not_cut_is_found() -> None:
    group = product()
    t = tile(group.start(), "i", (b, "B_i"), (p, 8))
    with pytest.raises(LegalityError, match=r"tail|cut"):
        prove(accumulate(pull_out(t, it("k")), p("i")))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: explore.balance(t, "i", "r_lo", "o_lo"), "parts of uneven size along i"),
        (lambda t: replace(t, buffers=()), "has no storage"),
        (lambda t: explore.pad(t, "ACC"), "padding in ACC"),
    ],
)
def test_what_needs_a_kernel_family_is_refused_by_name(change: object, says: str) -> None:
    assert callable(change)
    group = product()
    t = change(tiled(group.start()))
    with pytest.raises(ScheduleError, match=says):
        ScheduledKernel("k", t, AVX2, {"P_k": 16})


def test_sizes_are_asked_for_by_name() -> None:
    group = product()
    t = tiled(group.start())
    with pytest.raises(ScheduleError, match="P_k has no value"):
        group.compile(t)
    kernel = group.compile(t, sizes={"P_k": 16})
    with pytest.raises(InputError, match="no size is given"):
        kernel.check()
    with pytest.raises(InputError, match="must be"):
        kernel.run({}, **{group.polyhedral.params[0]: 3})


def test_a_wrong_kernel_does_not_pass_its_check() -> None:
    group = product()
    kernel = group.compile(tiled(group.start()), sizes={"P_k": 16})
    wrong = replace(kernel, kernel=replace(kernel.kernel, text=kernel.text.replace("0.5f", "0.25f")))
    with pytest.raises(InputError, match="differs from the reference"):
        wrong.check(**{group.polyhedral.params[0]: 5})


def test_sums_along_the_innermost_loop_are_in_vectors() -> None:
    group = product()
    kernel = group.compile(accumulate(pull_out(group.start(), it("k")), it("j")))
    assert not kernel.notes and "acc_k" in kernel.text
    assert kernel.check(**{group.polyhedral.params[0]: 7}) < 1e-5


def test_loops_that_cannot_be_vectors_stay_with_a_note() -> None:
    nodes = [node("MatMul", "x w", "y")]
    (group,) = explore.groups(model(nodes, {"x": ("uint32", ["M", 40])}, ["y"], {"w": np.abs(W).astype(np.uint32)}))
    kernel = group.schedule().compile()
    assert "loop j0 is scalar" in "\n".join(kernel.notes)
    assert kernel.check(**{group.polyhedral.params[0]: 7}) < 1e-12


def test_indices_that_data_decide_are_refused() -> None:
    gather = model([node("Gather", "t i", "y")], {"t": ("float32", ["N", 4]), "i": ("int64", ["L"])}, ["y"])
    (group,) = explore.groups(gather)
    with pytest.raises(UnsupportedError, match="data-dependent"):
        explore.draw(group.polyhedral, dict.fromkeys(group.polyhedral.params, 3))
