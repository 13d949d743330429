"""CUDA kernels of schedules that a user writes, on the strict emulation against the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from polydyn import explore
from polydyn.errors import LegalityError, ScheduleError
from polydyn.explore import Scheduled, accumulate, assign, clip, interchange, keep, promote, pull_out, tile
from polydyn.schedules.tree.names import b, c, p, s, w
from tests.support.tiny import model, node

W = np.random.default_rng(0).standard_normal((40, 56)).astype(np.float32)
SIZES = (0, 1, 7, 33)


def product() -> explore.Group:
    """Build ``y[M, 56] = gelu(x[M, 40] @ w + b)``."""
    nodes = [node("MatMul", "x w", "p"), node("Add", "p b", "s"), node("Gelu", "s", "y")]
    (group,) = explore.groups(model(nodes, {"x": ("float32", ["M", 40])}, ["y"], {"w": W, "b": W[0]}))
    return group


def softmax() -> explore.Group:
    (group,) = explore.groups(model([node("Softmax", "x", "y")], {"x": ("float32", ["R", "C"])}, ["y"]))
    return group


def threads(t: Scheduled) -> Scheduled:
    """Map 8 x 8 threads to a block, and 2 x 3 elements with all of their sums to a thread."""
    t = tile(t, "i", (b, "B_i"), (w, 8), (p, 2))
    t = tile(t, "j", (b, "B_j"), (w, 8), (p, 3))
    t = tile(t, "k", (b, "B_k"), (p, 8))
    t = interchange(t, b("i"), b("j"), b("k"), w("i"), w("j"), p("k"), p("i"), p("j"))
    t = accumulate(pull_out(t, b("k"), p("k")), b("j"))
    for axis in ("i", "j"):
        t = clip(t, axis, *t.map.views)
    t = clip(t, "k", "ACC")
    return assign(assign(t, "task", b("i"), b("j")), "unit", w("i"), w("j"))


def operand(t: Scheduled, along: str) -> str:
    """Return the array that the product reads along an axis."""
    on = {x for (n, x), axis in t.map.iterators.items() if n == "ACC" and axis == along}
    return next(x.array for x in t.group.backbone.reads if on & {y for i in x.index for y in i.symbols()} and
                x.array != t.group.backbone.array)  # fmt: skip


def shared(t: Scheduled) -> Scheduled:
    """Map threads in this way, with both operands in shared memory, a block of the reduction at a time."""
    t = threads(t)
    rows, columns = operand(t, "i"), operand(t, "j")
    t = promote(t, columns, "j", "COPY_B", "tile_b", b("k"), ["ACC"], {s("k"): (p("k"),), s("j"): (w("j"), p("j"))})
    t = promote(t, rows, "i", "COPY_A", "tile_a", b("k"), ["ACC"], {s("i"): (w("i"), p("i")), c("k"): (p("k"),)})
    for n, axis in (("COPY_A", "i"), ("COPY_B", "j")):
        t = clip(clip(t, axis, n), "k", n)
    return t


@pytest.mark.parametrize("schedule", [threads, shared])
def test_a_composition_of_blocks_and_threads_is_right_at_ragged_sizes(
    schedule: Callable[[Scheduled], Scheduled],
) -> None:
    group = product()
    kernel = group.cuda(schedule(group.start()))
    assert kernel.kernel.device.threads == 64 and ("pd_syncthreads" in kernel.text) == (schedule is shared)
    (rows,) = group.polyhedral.params
    for order in (kernel, replace(kernel, reverse=True)):
        assert all(order.check(**{rows: m}) < 1e-5 for m in SIZES)


def rows(t: Scheduled) -> Scheduled:
    """Map a row to a thread."""
    t = replace(t, parallel=())
    (row,) = [x for x in t.map.axes if all(x in s.iterators for s in t.group.statements)]
    t = tile(t, row, (b, "B"), (w, 32))
    for n in [n for n, x in t.group.arrays.items() if x.role == "local"]:
        t = keep(t, n, n, w(row), (w(row),))
    t = clip(t, row, *t.map.views)
    return assign(assign(t, "task", b(row)), "unit", w(row))


def test_rows_of_threads() -> None:
    nodes = [node("ReduceMean", "x axes", "m", keepdims=0), node("Exp", "m", "y")]
    (group,) = explore.groups(model(nodes, {"x": ("float32", ["R", "C"])}, ["y"], {"axes": np.array([1])}))
    kernel = group.cuda(rows(group.start()))
    for order in (kernel, replace(kernel, reverse=True)):
        for sizes in ((0, 3), (1, 1), (5, 33), (37, 7)):
            assert order.check(**dict(zip(group.polyhedral.params, sizes, strict=True))) < 1e-5


def test_what_cannot_be_said_is_refused_by_name() -> None:
    group = product()
    t = threads(group.start())
    with pytest.raises(ScheduleError, match="no loops of tasks and then of units"):
        group.cuda(replace(t, parallel=t.parallel[:1]))
    with pytest.raises(ScheduleError, match="8 threads of a block"):
        group.cuda(replace(t, parallel=(t.parallel[0], ("unit", (w("i"),)))))
    with pytest.raises(ScheduleError, match="padding in ACC"):
        group.cuda(explore.pad(shared(group.start()), "ACC"))
    rows_of = softmax()
    with pytest.raises(ScheduleError, match=r"l\d has n\d elements"):
        rows_of.cuda(rows(rows_of.start()))


def test_threads_that_meet_one_sum_are_found() -> None:
    group = product()
    t = threads(group.start())
    with pytest.raises(LegalityError, match="two instances of unit"):
        group.cuda(replace(t, parallel=(t.parallel[0], ("unit", (w("i"), p("k"))))))
