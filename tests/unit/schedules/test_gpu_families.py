"""Schedules of CUDA kernels other than the product of warps and threads: text, result, rejections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from polydyn.schedules.errors import LegalityError, ScheduleError
from polydyn.schedules.expr import Load, Value, transform
from polydyn.schedules.index import Index
from polydyn.schedules.proof.overlap import first_conflict
from polydyn.schedules.proof.prove import prove
from polydyn.schedules.tree.few_rows import GemvTile, gemv_schedule
from polydyn.schedules.tree.gpu import GpuTile, gpu_parts
from polydyn.schedules.tree.names import b, c, e, f, lanes, w
from polydyn.schedules.tree.nodes import Band, Mark, Sequence, Tree
from polydyn.schedules.tree.online import OnlineTile, online_attention
from polydyn.schedules.tree.online_warpgroups import WarpgroupOnlineTile, online_warpgroups
from polydyn.schedules.tree.rewrites import PART
from polydyn.schedules.tree.scheduled import Scheduled, flat
from polydyn.schedules.tree.strategies import ACC
from polydyn.schedules.tree.warpgroups import WarpgroupTile, warpgroup_parts, warpgroup_product
from tests.support.marks import slow
from tests.support.schedule_text import text
from tests.support.scheduled_groups import (
    online_parts,
    product,
    roles,
    run_online,
    run_product,
    run_shares,
    shared_online_parts,
    single,
)

V = Index.of
ONE = single()
ROLES = roles(ONE)
LANES = (GemvTile(8, (4, 2), (4, 8), (1, 8)), GemvTile(2, (1, 8), (4, 8), (4, 1), 8))
"""Tiles of GEMV kernels: vectors along the reduction, and along the columns, for a cluster of blocks."""
GROUPS = (WarpgroupTile(2, 1, 4, 1, 16, (4, 16)), WarpgroupTile(1, 2, 4, 2, 8, (4, 16), 64))
"""Tiles of warpgroup kernels: columns in one box, rows of two warpgroups; columns in panels, rows of one warpgroup in
two instructions, results stored as boxes.
"""
PARTS = WarpgroupTile(2, 1, 4, 2, 8, (4, 16), parts=8)
"""A split-K cluster tile: two slabs of a panel, so each block has a slab and half of its rows."""
COUNTER_TILE = GpuTile((2, 2), (2, 4), (16, 8), (2, 16), (1, 2), staged=True)
"""A split-K tile with an arrival counter: 64 rows and columns, 32 steps."""
ONLINE = (OnlineTile(4, 64, 64, 64, 16), OnlineTile(4, 32, 64, 64, 8), OnlineTile(4, 32, 64, 128, 4),
          OnlineTile(4, 64, 64, 64, 16, 2))  # fmt: skip
"""Tiles of attention: instructions of tensor cores for 16 bits and tf32, and CUDA cores; 32 rows of a warp."""

HOPPER = (WarpgroupOnlineTile(2, 128, (1, 4), (1, 8)), WarpgroupOnlineTile(2, 128, (2, 4), (2, 8)))
"""Tiles of warpgroup attention: heads of one panel and of two."""


def few_rows(sizes: GemvTile = LANES[0]) -> Scheduled:
    return gemv_schedule(ONE, ROLES, sizes)


def warpgroups(sizes: WarpgroupTile = GROUPS[1]) -> Scheduled:
    return warpgroup_product(ONE, ROLES, sizes)


def parts(sizes: WarpgroupTile = PARTS) -> Scheduled:
    return warpgroup_parts(ONE, ROLES, sizes)


def counted(sizes: GpuTile = COUNTER_TILE) -> Scheduled:
    return gpu_parts(ONE, ROLES, sizes, 4)


def online(sizes: OnlineTile = ONLINE[0], depth: int = 60, width: int = 62) -> Scheduled:
    return online_attention(*online_parts(depth, width), sizes)


def online_shares(sizes: OnlineTile = ONLINE[0], depth: int = 60, width: int = 62) -> Scheduled:
    return online_attention(*shared_online_parts(depth, width), sizes, shares=True)


def hopper(sizes: WarpgroupOnlineTile = HOPPER[0], depth: int = 60, width: int = 62) -> Scheduled:
    return online_warpgroups(*online_parts(depth, width), sizes)


@pytest.mark.parametrize("make", [few_rows, warpgroups, online, online_shares, hopper], ids=lambda f: f.__name__)
def test_the_composition(make: Callable[[], Scheduled], golden: Callable[[str, str], None]) -> None:
    golden(f"families/{make.__name__}.txt", text(make()))


@pytest.mark.parametrize("sizes", LANES, ids=str)
def test_few_rows_are_proven(sizes: GemvTile) -> None:
    prove(few_rows(sizes))


@pytest.mark.parametrize("sizes", GROUPS, ids=str)
def test_warpgroups_are_proven(sizes: WarpgroupTile) -> None:
    prove(warpgroups(sizes))


@pytest.mark.parametrize(
    "sizes", [GemvTile(2, (1, 2), (2, 2), (1, 3)), GemvTile(3, (2, 1), (2, 2), (2, 1), 2)], ids=str
)
def test_few_rows_compute_at_ragged_sizes(sizes: GemvTile) -> None:
    t = few_rows(sizes)
    for m, n, k in ((1, 1, 1), (5, 9, 13), (3, 2, 12), (4, 5, 0), (0, 3, 2)):
        assert run_product(t, {}, m, n, k), (m, n, k)


PANELS, BOXES = WarpgroupTile(2, 1, 1, 2, 4, (2, 2)), WarpgroupTile(1, 2, 1, 1, 8, (2, 3), 32)
SMALL, RAGGED = [(1, 1, 1), (5, 3, 0)], [(1, 1, 1), (33, 37, 5), (16, 32, 4), (5, 3, 0)]


@pytest.mark.parametrize(
    ("sizes", "shapes"), [(PANELS, SMALL), slow(PANELS, RAGGED), slow(BOXES, RAGGED)],
    ids=["groups, small", "groups", "boxes"],
)  # fmt: skip
def test_warpgroups_compute_at_ragged_sizes(sizes: WarpgroupTile, shapes: list[tuple[int, int, int]]) -> None:
    t = warpgroups(sizes)
    for m, n, k in shapes:
        assert run_product(t, {}, m, n, k, B=1), (m, n, k)


def test_parts_of_a_cluster_are_proven_and_compute_at_ragged_sizes() -> None:
    prove(parts())
    t = parts(WarpgroupTile(1, 1, 1, 1, 4, (2, 1), parts=2))
    for m, n, k in ((3, 33, 5), (2, 3, 0)):
        assert run_product(t, {}, m, n, k, B=1), (m, n, k)


def test_parts_of_counted_blocks_are_proven_and_compute_at_ragged_sizes() -> None:
    prove(counted())
    t = counted(GpuTile((1, 2), (1, 4), (16, 8), (1, 2), staged=True))
    for m, n, k in ((3, 33, 9), (2, 3, 0)):
        assert run_product(t, {}, m, n, k, B=1), (m, n, k)


@pytest.mark.parametrize("sizes", ONLINE, ids=str)
def test_online_softmax_is_proven(sizes: OnlineTile) -> None:
    prove(online(sizes))


@pytest.mark.parametrize("sizes", [ONLINE[0], slow(ONLINE[1]), slow(ONLINE[2])], ids=str)
def test_shares_of_online_softmax_are_proven(sizes: OnlineTile) -> None:
    prove(online_shares(sizes))


@pytest.mark.parametrize("sizes", HOPPER, ids=str)
def test_online_softmax_of_warpgroups_is_proven(sizes: WarpgroupOnlineTile) -> None:
    prove(hopper(sizes))


@pytest.mark.parametrize(
    ("step", "fragments", "rows", "keys"),
    [
        *((4, 2, *n) for n in ((1, 1), (2, 0))),
        slow(4, 2, 17, 19),
        *(slow(*sizes, *n) for sizes in ((4, 1), (16, 1), (16, 2)) for n in ((1, 1), (17, 19), (2, 0))),
    ],
)
def test_online_softmax_computes_at_ragged_sizes(step: int, fragments: int, rows: int, keys: int) -> None:
    depth, width = 2 * step - 1, 29
    t = online(OnlineTile(1, 16, 2 * step, 32, step, fragments), depth, width)
    assert run_online(t, depth, width, rows, keys)


@pytest.mark.parametrize(("rows", "keys"), [(1, 1), slow(17, 9), (2, 0)])
def test_shares_of_online_softmax_leave_what_a_second_launch_needs(rows: int, keys: int) -> None:
    t = online_shares(OnlineTile(1, 16, 4, 32, 4), 3, 29)
    assert run_shares(t, 3, 29, rows, keys)


@pytest.mark.parametrize(("rows", "keys"), [(2, 0), (1, 3), slow(3, 19)])
def test_online_softmax_of_warpgroups_computes_at_ragged_sizes(rows: int, keys: int) -> None:
    t = hopper(WarpgroupOnlineTile(1, 16, (2, 1), (1, 4), 2), 3, 29)
    assert run_online(t, 3, 29, rows, keys)


def test_what_a_product_may_be_late_for() -> None:
    """All except statements that scale its sums and pack its operand; no statements if weights stay with the scores."""
    t = hopper()
    nodes = [{"INIT", "ACC1"}, {"LOGIT"}, {"PEAK", "WEIGHT", "TOTAL"}, {"RESCALE"}, {"FRAG_W"}]
    assert first_conflict(t, "ACC2", nodes) == 3 and first_conflict(t, "ACC2", nodes[:3]) == 3
    assert first_conflict(t, "ACC2", [*nodes[:3], *nodes[4:]]) == 3
    together = tuple(replace(x, storage="acc1") if x.name == "a_frag2" else x for x in t.buffers)
    with pytest.raises(LegalityError, match="ACC2 of a tile is not over"):
        first_conflict(replace(t, buffers=together), "ACC2", nodes)


# -- rejections -------------------------------------------------------------------------------------------------------


def swapped(t: Scheduled, m: str, n: str) -> Scheduled:
    """Exchange the parts of the sequence that hold statements m and n."""

    def go(node: Tree) -> Tree:
        if isinstance(node, Sequence):
            kids = [(k, go(x)) for k, x in node.children]
            at = {name: i for i, (names, _) in enumerate(kids) for name in names}
            if m in at and n in at and at[m] != at[n]:
                kids[at[m]], kids[at[n]] = kids[at[n]], kids[at[m]]
            return Sequence(tuple(kids))
        return replace(node, child=go(node.child)) if isinstance(node, (Band, Mark)) else node

    return replace(t, tree=go(flat(t.tree)))


def one_register(t: Scheduled, buffer: str = "acc") -> Scheduled:
    """Let all lanes of a column sum into one register."""
    lane = set(t.map.axes[PART])
    return replace(t, buffers=tuple(replace(x, fixed=x.fixed | lane) if x.name == buffer else x for x in t.buffers))


def one_fragment(t: Scheduled, storage: str) -> Scheduled:
    """Store all fragments of a warp's rows in the registers of one."""
    rows = t.map.digit("i", f("i"))
    put = tuple(replace(x, fixed=x.fixed | {rows}) if x.place == storage else x for x in t.buffers)
    return replace(t, buffers=put)


def unscoped(t: Scheduled, storage: str) -> Scheduled:
    put = tuple(replace(x, scope=()) if x.place == storage else x for x in t.buffers)
    return replace(t, buffers=put)


def early_weights(t: Scheduled) -> Scheduled:
    """Let logits share the registers of the values, which a tile overwrites."""
    return replace(t, buffers=tuple(replace(x, storage="acc2") if x.name == "logits" else x for x in t.buffers))


def without(t: Scheduled, name: str) -> Scheduled:
    return replace(t, flow=tuple(x for x in t.flow if x.statement != name))


def units(t: Scheduled, *loops: object) -> Scheduled:
    return replace(t, parallel=(t.parallel[0], ("unit", loops)))  # type: ignore[arg-type]


WRONG: dict[str, tuple[str, Callable[[], Scheduled]]] = {
    "epilogues before lanes are added": ("SUM -> DONE0|sums", lambda: swapped(few_rows(), "SUM", "DONE0")),
    "added before they are summed": ("ACC -> SUM|reads acc", lambda: swapped(few_rows(), "ACC", "SUM")),
    "one register for all lanes": ("acc", lambda: one_register(few_rows())),
    "one register for all blocks": ("acc", lambda: one_register(few_rows(LANES[1]))),
    "rounds at once": ("two instances of unit", lambda: units(few_rows(), w("j"), lanes("j"), b("k"))),
    "steps beyond the last": ("neither cut there nor padded", lambda: replace(
        few_rows(), padded=frozenset({"INIT"}), clips=tuple(x for x in few_rows().clips if x.statement != ACC))),
    "a lane counts another step": ("is not the number", lambda: replace(
        few_rows(), map=replace(few_rows().map, joined={"k": few_rows().map.joined["k"] + V(PART)}))),
    "added before all parts are staged": ("SUM reads stage", lambda: swapped(parts(), "STAGE", "SUM")),
    "staged where other blocks stage": ("stage", lambda: one_register(parts(), "stage")),
    "added by the warps that stage": ("share a cell of stage|unit", lambda: replace(
        parts(), parallel=(*parts().parallel[:1], ("unit", (c("k"), w("i"))), ("unit", (e("c"), e("w")))))),
    "counted before their sums are left": ("SUM reads stage", lambda: swapped(counted(), "STAGE", "SUM")),
    "left where other blocks leave theirs": ("stage", lambda: one_register(counted(), "stage")),
    "one register for all counted blocks": ("acc", lambda: one_register(counted())),
    "boxes after they are read": ("ACC reads tile_a", lambda: swapped(warpgroups(), "COPY_A", "ACC")),
    "rows before they are staged": ("DONE. reads stage", lambda: swapped(warpgroups(), "STAGE", "DONE0")),
    "boxes before their results": ("SEND0 reads out0", lambda: swapped(warpgroups(), "SEND0", "DONE0")),
    "a box that nobody sends": ("send the digits", lambda: without(warpgroups(), "SEND1")),
    "half of a box": ("send the digits", lambda: warpgroups().put({"SEND0": replace(
        warpgroups().view("SEND0"), hidden=warpgroups().view("SEND0").hidden[1:])})),
    "results of another warp": ("share a cell of out0|another epoch", lambda: unscoped(warpgroups(), "out0")),
    "one panel of two": ("ACC reads tile_b", lambda: warpgroups().put({"COPY_B": replace(
        warpgroups().view("COPY_B"), guard=(("s_j", 0, 1),))})),  # type: ignore[arg-type]
    "staged rows shared by warps": ("share a cell of stage|another epoch", lambda: replace(
        warpgroups(), buffers=tuple(replace(x, scope=()) for x in warpgroups().buffers))),
    "weights before the maximum": ("backwards: PEAK -> ", lambda: swapped(online(), "PEAK", "WEIGHT")),
    "values scaled after they are added to": ("backwards", lambda: swapped(online(), "PEAK", "ACC2")),
    "the maximum kept too early": ("backwards: SCALE -> ", lambda: swapped(online(), "SCALE", "TOP")),
    "logits before their scores": ("backwards: ACC1 -> LOGIT", lambda: swapped(online(), "ACC1", "LOGIT")),
    "keys after they are used": ("FRAG_K reads tile_b1", lambda: swapped(online(), "COPY_K", "ACC1")),
    "queries of another fragment": ("a_frag1", lambda: one_fragment(online(ONLINE[-1]), "a_frag1")),
    "maxima of another fragment": ("top", lambda: one_fragment(online(ONLINE[-1]), "top")),
    "weights of another warp": ("share a cell of a_frag2|another epoch", lambda: unscoped(online(), "a_frag2")),
    "logits that overwrite values": ("have not the same cells", lambda: early_weights(online())),
    "weights packed behind their product": ("ACC2 reads a_frag2", lambda: swapped(hopper(), "FRAG_W", "ACC2")),
    "weights of another warpgroup": ("share a cell of a_frag2", lambda: unscoped(hopper(), "a_frag2")),
    "an output of all tiles": ("two instances of task|backwards", lambda: replace(
        online(), parallel=(("task", (*online().parallel[0][1], b("l"))), online().parallel[1]))),
    "a warpgroup without its warps": ("is of a unit, but runs no digit", lambda: replace(
        warpgroups(), parallel=(*warpgroups().parallel, ("unit", (f("k"),))))),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_refused(name: str) -> None:
    what, make = WRONG[name]
    with pytest.raises(LegalityError, match=what):
        prove(make())


def test_what_does_not_fit_is_declined_by_name() -> None:
    g = product()
    with pytest.raises(ScheduleError, match="sums over more than k"):
        gemv_schedule(g, roles(g), LANES[0])
    with pytest.raises(ScheduleError, match="a tensor map has one reduction"):
        warpgroup_product(g, roles(g), GROUPS[0])
    with pytest.raises(ScheduleError, match="4 slabs of 16 rows do not split into 3 equal parts"):
        parts(replace(PARTS, parts=3))
    largest = replace(ONE, statements=tuple(replace(s, reduce="max") if s.reduce else s for s in ONE.statements))
    with pytest.raises(ScheduleError, match="max cannot be split over lanes"):
        gemv_schedule(largest, ROLES, LANES[0])


def test_an_attention_whose_sums_have_their_axes_in_another_order() -> None:
    """The model transposes the values: heads come after rows."""
    parts, logit = online_parts(7, 29)

    def turned(index: tuple[Index, ...]) -> tuple[Index, ...]:
        return (index[1], index[0], *index[2:])

    def value(v: Value) -> Value:
        return replace(v, index=turned(v.index)) if isinstance(v, Load) and v.buffer == "s2" else v

    moved = tuple(
        replace(s, index=turned(s.index) if s.array == "s2" else s.index, value=transform(s.value, value))
        for s in parts.values.statements
    )
    old = parts.values.arrays["s2"]
    arrays = {**parts.values.arrays, "s2": replace(old, shape=turned(old.shape))}
    t = online_attention(
        replace(parts, values=replace(parts.values, arrays=arrays, statements=moved)),
        logit,
        OnlineTile(1, 16, 8, 32, 4),
    )
    prove(t)
    assert run_online(t, 7, 29, 5, 19)
