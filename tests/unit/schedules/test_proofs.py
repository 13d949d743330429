"""Emitted kernels are proven: every kernel of the stored models; each kind of mistake has a control that is rejected.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polydyn.backends import target_of
from polydyn.codegen.cpu.attention import AttentionKernel
from polydyn.codegen.cpu.target import AVX2, AVX512
from polydyn.fusion.facts import size_facts
from polydyn.fusion.pipeline import fusion_plan, rewrite_graph
from polydyn.graph.expand import import_model
from polydyn.graph.ir import Guard
from polydyn.lowering.attention import AttentionGroup, lower_attention
from polydyn.lowering.place_cpu import KernelBuilder
from polydyn.schedules.errors import LegalityError, ScheduleError
from polydyn.schedules.expr import const, op
from polydyn.schedules.group.addresses import check_addresses
from polydyn.schedules.group.dependence import analyse
from polydyn.schedules.index import Index, IndexLike, maximum, minimum
from polydyn.schedules.isl_util import at_least, equals, frame
from polydyn.schedules.model import Group
from polydyn.schedules.proof.boxes import ContractTiles, check_fill_box, check_panel_box
from polydyn.schedules.proof.obligations import vectors_in_rows, vectors_inside
from polydyn.schedules.proof.order import check_parallel
from polydyn.schedules.proof.prove import prove
from polydyn.schedules.proof.proven import Proven
from polydyn.schedules.solution.schedule import schedule_attention, schedule_nest
from polydyn.schedules.tiling import unfold
from polydyn.schedules.tree import Band, Mark, Sequence, Tree
from polydyn.schedules.tree.attention import cpu_attention
from polydyn.schedules.tree.loops import distribute
from polydyn.schedules.tree.names import b, c, it, p
from polydyn.schedules.tree.scheduled import Scheduled
from polydyn.schedules.tree.strategies import CpuTile, nest
from tests.support.polyhedral_groups import array, group, layer_norm, ld, softmax, statement
from tests.support.schedule_checks import check_legal
from tests.support.scheduled_groups import positive
from tests.support.stored import path_of
from tests.support.tiny import model, node

V = Index.of


def prove_nest(g: Group, band: tuple[str, ...], phases: dict[str, int], tiled: bool) -> None:
    Proven(nest(g, band, phases, tiled), vectors_inside(g, band, phases))


# -- correct schedules are accepted ----------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [softmax, layer_norm])
def test_band_and_phases_come_from_the_solved_matrix(make: type[Group]) -> None:
    g = make()  # type: ignore[call-arg]
    s = schedule_nest(g, positive(g))
    assert s.band == ("r",) and sorted(s.phases.values()) == [0, 0, 1, 1, 2] and not s.notes
    for tiled in (False, True):
        prove_nest(g, s.band, s.phases, tiled)


def test_what_no_pattern_fuses_runs_one_nest_after_another_and_says_so() -> None:
    ij: dict[str, IndexLike] = {"i": "M", "j": "M"}
    g = group(
        "two", "M", [array("x", "input", "M", "M"), array("t", "local", "M", "M"), array("y", "output", "M", "M")],
        [statement("A", ij, "t", "i j", op("exp", ld("x", "i", "j"))),
         statement("B", ij, "y", "i j", op("add", ld("t", "i", "j"), ld("t", "j", "i")))],
    )  # fmt: skip
    s = schedule_nest(g, positive(g))
    assert s.band == () and s.phases == {"A": 0, "B": 1}
    assert s.notes[0].startswith("one loop nest per statement, in the original order (stitch: no loop is common")
    prove_nest(g, (), s.phases, False)


@pytest.mark.parametrize("name", ["bert_tiny", "gpt2_tiny", "t5_tiny", "vit_tiny"])
def test_every_kernel_of_a_model_is_proven_once(name: str) -> None:
    plan = fusion_plan(rewrite_graph(import_model(path_of(name), None)))
    builder = KernelBuilder(plan, AVX512 if name == "bert_tiny" else AVX2)
    placed = [k for g in plan.groups for k in builder.place(g)]
    assert list(builder.placed) == list(dict.fromkeys(p.key for p in placed)) == list(builder.forms)
    assert len(builder.placed) >= 8
    assert any(p.kernels[0].name.startswith("attention") for p in builder.placed.values())
    assert not builder.unproven
    assert not [n for p in placed for k in p.kernels for n in k.notes if "original order" in n]


# -- rejections, with a witness ----------------------------------------------------------------------------------------


def refused(kind: str, example: str = "for example") -> pytest.RaisesExc[LegalityError]:
    return pytest.raises(LegalityError, match=rf"{kind}(.|\n)*{example}")


def test_every_kind_of_failure_carries_its_witness() -> None:
    """Statements, array, the violation under the context, one sample point with its sizes."""
    x, g = softmax(), positive(softmax())
    flat = {q.name: [k, *q.iterators, *([0] * (2 - len(q.iters)))] for k, q in enumerate(x.statements)}
    early = {**flat, "Y": [2, "r", "l"]}
    backwards = {n: [-V("l") if v == "l" and n == "M1" else v for v in r] for n, r in flat.items()}
    hole = replace(x, statements=x.statements[1:])
    kinds = {
        ("D1 -> Y", "d"): lambda: check_legal(x, g, early),
        ("M1 -> M1", "m"): lambda: check_legal(x, g, backwards),
        ("D1 -> D1", "d"): lambda: check_parallel(x, g, flat, [2]),
        ("M1", "m"): lambda: analyse(hole),
    }
    for (statement_name, tensor), fails in kinds.items():
        with pytest.raises(LegalityError) as caught:
            fails()
        text = str(caught.value)
        assert (caught.value.node, caught.value.tensor) == (statement_name, tensor), text
        assert "violated: [" in text and "for example " in text, text
        assert any(f"'{p}': " in text.split("for example ")[1] for p in ("R", "L", "M", "N", "K", "k0", "n0")), text


def tiles(short: int = 0) -> ContractTiles:
    """Return 4 x 8 register tiles of 4 lanes, 8 steps of a block; ``short``: missing vectors or rows."""
    rows, columns, width, steps = 4, 8, 4, V(8)
    share, pitch = V("c_hi") - "c_lo", steps + 4
    panels = minimum((V("N") - V("c_lo") * columns).ceildiv(width) - short, share * 2 - short)
    number = maximum(1, V("K").ceildiv(8))
    return ContractTiles(rows, columns, width, steps, number, True, panels, V("S") * columns * steps, steps * width,
                         True, V("r_hi") - "r_lo" - short, V("S") * rows * pitch, pitch, steps)  # fmt: skip


def test_panels_and_rows_that_are_too_small() -> None:
    check_panel_box(tiles())
    check_fill_box(tiles())
    with refused("a live column is read from a panel that is not packed"):
        check_panel_box(tiles(short=1))
    with pytest.raises(LegalityError, match="do not hold"):
        check_panel_box(replace(tiles(), panel_size=V("S") * 8 * 8 - 1))
    with pytest.raises(LegalityError, match="do not hold"):
        check_fill_box(replace(tiles(), fill_size=V("S") * 4 * 12 - 1))
    with pytest.raises(LegalityError, match="do not hold"):
        check_fill_box(replace(tiles(), pitch=V(7), fill_size=V("S") * 28))


def test_a_reduction_iterator_in_the_shared_band() -> None:
    g = group(
        "scan", "M", [array("x", "input", "M", "M"), array("y", "input", "M")],
        [statement("S", {"i": "M", "j": "M"}, "y", "i", ld("x", "i", "j"), "sum")],
    )  # fmt: skip
    prove_nest(g, ("i",), {"S": 0}, True)
    with pytest.raises(ScheduleError, match="runs a reduction"):
        prove_nest(g, ("i", "j"), {"S": 0}, True)
    t = nest(g, ("i",), {"S": 0}, True)
    with refused("two instances of task .* meet one element: S -> S"):
        prove(replace(t, parallel=(("task", (b("t"), it("j"))),)))


def test_a_phase_too_early() -> None:
    g = softmax()
    phases = {"M0": 0, "M1": 0, "D0": 1, "D1": 1, "Y": 1}
    for tiled in (False, True):
        with refused(r"backwards: D1 -> Y|vector loop l carries a dependence: D1 -> Y"):
            prove_nest(g, ("r",), phases, tiled)


def test_vector_loop_that_carries_a_dependence() -> None:
    before = op("where", const(True, "bool"), ld("y", "i", V("j") - 1), ld("x", "i", "j"))
    g = group(
        "scan", "M", [array("x", "input", "M", "M"), array("y", "output", "M", "M")],
        [statement("I", {"i": "M", "j": "M"}, "y", "i j", ld("x", "i", "j")),
         statement("S", {"i": "M", "j": "M"}, "y", "i j", before)],
    )  # fmt: skip
    with refused("vector loop j carries a dependence: S -> S"):
        prove_nest(g, ("i",), {"I": 0, "S": 1}, False)


@pytest.fixture(scope="module")
def attention() -> AttentionKernel:
    """Schedule the attention of a small BERT."""
    plan = fusion_plan(rewrite_graph(import_model(path_of("bert_tiny"), None)))
    form = lower_attention(plan, next(g for g in plan.groups if g.kind == "attention"))
    assert isinstance(form, AttentionGroup)
    group = form.lowered.group
    return AttentionKernel("a", group, schedule_attention(form.parts), AVX512, frozenset())


def marked(t: Scheduled, f: Callable[[Tree], Tree]) -> Scheduled:
    """Change the children of the sequence of an attention's three parts."""

    def go(tree: Tree) -> Tree:
        if isinstance(tree, Mark) and tree.name == "block":
            return replace(tree, child=f(tree.child))
        if isinstance(tree, Sequence):
            return Sequence(tuple((part, go(below)) for part, below in tree.children))
        return replace(tree, child=go(tree.child)) if isinstance(tree, (Band, Mark)) else tree

    return replace(t, tree=go(t.tree))


def test_attention_parts_in_another_order(attention: AttentionKernel) -> None:
    def swapped(tree: Tree) -> Tree:
        assert isinstance(tree, Sequence)
        scores, rows, values = tree.children
        return Sequence((scores, values, rows))

    Proven(attention.schedule, vectors_in_rows(attention.parts))
    with refused("backwards: R6 -> B_ACC|B_ACC reads weights where nothing was written"):
        prove(marked(attention.schedule, swapped))


def test_attention_rows_of_the_next_block_too_early(attention: AttentionKernel) -> None:
    """Scores of all register tiles, then all rows, then all values: right for whole arrays, wrong for rows of one."""
    t = attention.schedule
    with refused("reads scores of another epoch"):
        prove(distribute(replace(t, tree=_unmarked(t.tree)), c("i"), "A_ACC"))


def _unmarked(tree: Tree) -> Tree:
    if isinstance(tree, Mark):
        return replace(tree, child=_unmarked(tree.child)) if tree.name == "row" else _unmarked(tree.child)
    if isinstance(tree, Sequence):
        return Sequence(tuple((part, _unmarked(below)) for part, below in tree.children))
    return replace(tree, child=_unmarked(tree.child)) if isinstance(tree, Band) else tree


def test_attention_with_one_sum_for_all_rows(attention: AttentionKernel) -> None:
    t = attention.schedule
    one = t.buffer("acc1")
    row = t.map.digit("i", p("i"))
    with refused("acc1"):
        prove(replace(t, buffers=tuple(replace(x, fixed=x.fixed | {row}) if x is one else x for x in t.buffers)))


def test_attention_phase_too_early(attention: AttentionKernel) -> None:
    parts = replace(attention.parts, phases=dict.fromkeys(attention.parts.phases, 0))
    whole = unfold(attention.group, parts.score_roles.batch, "local")
    with refused("backwards|vector loop|where nothing|epoch"):
        tile = CpuTile(vectors="Q_d", lanes=1)
        Proven(cpu_attention(whole, parts, (CpuTile(), tile), True), vectors_in_rows(parts))


def test_outputs_whose_elements_share_addresses() -> None:
    good = array("E", "output", "M", 3, "N")
    assert check_addresses(group("g", "M N", [good], []), {"M": V("B"), "N": V("H") // 2}) == ()
    wide = replace(good, strides=(V("N") * 3 + V("T") * 3, V("N") + "T", V(1)))
    assert check_addresses(group("g", "M N T", [wide], []), {}) == ()
    with refused("elements of E share addresses: dim 0"):
        check_addresses(group("g", "M N", [replace(good, strides=(V("N") * 2, V("N"), V(1)))], []), {})


def test_addresses_are_proven_with_multiples() -> None:
    """``H // 2 * 2`` elements are stored in rows of ``H``: rows share addresses unless H is even."""
    rows = replace(array("E", "output", "M", 2, "N"), strides=(V("H"), V("N"), V(1)))
    half = {"M": V("B"), "N": (V("H") + 1) // 2}
    with refused("elements of E share addresses: dim 0"):
        check_addresses(group("g", "M N H", [rows], []), half)
    guard = Guard(V("H"), "%==", V(2), "")
    facts = size_facts((guard,))
    assert check_addresses(group("g", "M N H", [rows], []), half, (), facts) == ()
    with refused("elements of E share addresses: dim 0"):
        check_addresses(group("g", "M N H", [replace(rows, strides=(V("N"), V("N"), V(1)))], []), half, (), facts)


@pytest.mark.parametrize("name", ["cpu:avx2", "cuda:sm_80"])
def test_every_target_checks_the_addresses_of_its_outputs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of(name)
    graph = import_model(model([node("Relu", "x", "y")], {"x": ("float32", ["M", "N"])}, ["y"]))
    builder = target.builder(target.fuse(target.rewrite(graph)))
    (fused,) = builder.plan.groups
    (good,) = builder.place(fused)
    lowered = good.lowered
    arrays = {n: replace(a, strides=(V(0),) * len(a.shape)) for n, a in lowered.group.arrays.items()}
    bad = replace(good, lowered=replace(lowered, group=replace(lowered.group, arrays=arrays)))
    monkeypatch.setattr(builder, "build_group", lambda _: bad)
    with refused("share addresses"):
        builder.place(fused)


# -- lemmas ----------------------------------------------------------------------------------------------------------


@given(st.integers(0, 400), st.integers(1, 70))
def test_balanced_shares_partition(total: int, shares: int) -> None:
    """[t*s // n, t*(s+1) // n) for s < n: consecutive, all of [0, t), each of floor(t/n) or ceil(t/n)."""
    t, n = V(total), V(shares)
    bounds = [int(t * s // n) for s in range(shares + 1)]
    assert bounds[0] == 0 and bounds[-1] == total
    assert {bounds[s + 1] - bounds[s] for s in range(shares)} <= {total // shares, -(-total // shares)}


@given(st.integers(1, 400), st.integers(1, 16))
def test_balanced_row_tiles_fit_the_register_tile(rows: int, tile: int) -> None:
    """ceil(M/P) nearly equal tiles have 1 to P rows: a variant of the micro-kernel exists for each."""
    number = -(-rows // tile)
    sizes = {(c + 1) * rows // number - c * rows // number for c in range(number)}
    assert min(sizes) >= 1 and max(sizes) <= tile


def test_constants_inside_and_outside_a_floor_division_add_up() -> None:
    f = frame("x", ("v",), ("N",))
    for n in (1, 15, 16, 17, 33):
        s = f.where([at_least((V("N") + 15) // 16 - 1, "v"), at_least("v", 0), equals("N", n)])
        assert s.count_val().to_python() == -(-n // 16)
