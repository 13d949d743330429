"""What is emitted is proven: every kernel of the stored models; for each kind of mistake a control that is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stored import path_of

from polydyn.codegen.cpu_attention import AttentionKernel
from polydyn.codegen.kernel import AVX2, AVX512
from polydyn.fusion.pipeline import fusion_plan, rewrite_graph
from polydyn.graph.expand import import_model
from polydyn.lowering.attention import lower_attention
from polydyn.lowering.kernels import KernelBuilder
from polydyn.schedules.addresses import check_addresses
from polydyn.schedules.dependence import Dependences, analyse
from polydyn.schedules.errors import LegalityError, ScheduleError
from polydyn.schedules.expr import const, op
from polydyn.schedules.index import Index, IndexLike, maximum, minimum
from polydyn.schedules.isl_util import at_least, equals, frame
from polydyn.schedules.model import Group
from polydyn.schedules.polyhedra import context
from polydyn.schedules.proof import prove_contract, prove_nest
from polydyn.schedules.proof_attention import prove_attention
from polydyn.schedules.schedule import schedule_attention, schedule_contract, schedule_nest
from polydyn.schedules.tile_flow import ContractTiles, check_fill_box, check_panel_box
from polydyn.schedules.tiling import Roles, TiledGroup, attention_tree, contract_tree, nest_tree
from polydyn.schedules.tree import Band, Mark, Sequence, Tree
from polydyn.schedules.verify import check_bounds, check_legal, check_parallel
from tests.polyhedral_groups import array, group, layer_norm, ld, matmul, softmax, statement

V = Index.of
K = V("K")


def product() -> Group:
    """The matmul of the shared groups in the names that kernels use."""
    g, names = matmul(), {"S2": ("INIT", "init"), "S3": ("ACC", "backbone"), "S4": ("DONE0", "epilogue")}
    return replace(g, statements=tuple(replace(s, name=names[s.name][0], role=names[s.name][1]) for s in g.statements))


G = product()
D = analyse(G, positive=False)
ROLES = Roles((), "i", "j", "k", (), (("INIT", "first"), ("DONE0", "last")))


def tiles(block: IndexLike = 8, blocks: Index | None = None, short: int = 0) -> ContractTiles:
    rows, columns, width, step = 4, 8, 4, V(block)
    share = V("c_hi") - "c_lo"
    panels = minimum((V("N") - V("c_lo") * columns).ceildiv(width) - short, share * 2 - short)
    number = maximum(1, K.ceildiv(8)) if blocks is None else blocks
    return ContractTiles(rows, columns, width, step, number, True, panels, V("S") * columns * step, step * width)


def prove(t: ContractTiles | None = None, roles: Roles = ROLES, tiled: TiledGroup | None = None) -> None:
    prove_contract(G, roles, tiled or contract_tree(G, roles, True), t or tiles(), D)


def positive(g: Group) -> Dependences:
    return analyse(g, positive=False).under(context(g))


# -- what is right is accepted ---------------------------------------------------------------------------------------


def test_the_sunk_statements_come_from_the_solved_matrix() -> None:
    roles, choice = schedule_contract(G, replace(ROLES, sunk=()), positive(G))
    assert roles == ROLES and choice.solved.exprs("DONE0") == (V("i"), V("j"), K - 1)
    prove()
    prove(tiles(block="K", blocks=V(1)))
    with pytest.raises(ScheduleError, match="are not the loops"):
        schedule_contract(G, replace(ROLES, row="j", col="i", block="i"), positive(G))


@pytest.mark.parametrize("make", [softmax, layer_norm])
def test_band_and_phases_come_from_the_solved_matrix(make: type[Group]) -> None:
    g = make()  # type: ignore[call-arg]
    s = schedule_nest(g, positive(g))
    assert s.band == ("r",) and sorted(s.phases.values()) == [0, 0, 1, 1, 2] and not s.notes
    for tiled in (False, True):
        prove_nest(g, nest_tree(g, s.band, s.phases, tiled), s.band, s.phases, analyse(g, positive=False))


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
    prove_nest(g, nest_tree(g, (), s.phases, False), (), s.phases, analyse(g, positive=False))


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


# -- what is wrong is refused, with a witness ------------------------------------------------------------------------


def refused(what: str, example: str = "for example") -> pytest.RaisesExc[LegalityError]:
    return pytest.raises(LegalityError, match=rf"{what}(.|\n)*{example}")


def test_every_kind_of_failure_carries_its_witness() -> None:
    """Statements, array, what is violated under the context, one sample point with its sizes."""
    x, g = softmax(), positive(softmax())
    tiled = contract_tree(G, ROLES, True)
    flat = {q.name: [k, *q.iterators, *([0] * (2 - len(q.iters)))] for k, q in enumerate(x.statements)}
    early = {**flat, "Y": [2, "r", "l"]}
    backwards = {n: [-V("l") if v == "l" and n == "M1" else v for v in r] for n, r in flat.items()}
    hole = replace(x, statements=x.statements[1:])
    big = replace(x, arrays={**x.arrays, "y": array("y", "output", "R", V("L") - 1)})
    order = ("INIT", "ACC", "LOAD", "SAVE", "DONE0")
    tasks = replace(tiled, coincident=(*tiled.coincident, "b_k"))
    kinds = {
        ("D1 -> Y", "d"): lambda: check_legal(x, g, early),
        ("M1 -> M1", "m"): lambda: check_legal(x, g, backwards),
        ("D1 -> D1", "d"): lambda: check_parallel(x, g, flat, [2]),
        ("M1", "m"): lambda: analyse(hole),
        ("Y", "y"): lambda: check_bounds(big, g),
        ("ACC -> ACC", "acc"): lambda: prove(tiled=replace(tiled, tree=reordered(tiled.tree, order))),
        ("ACC", "panel"): lambda: prove(tiles(short=1)),
        ("ACC", None): lambda: prove(tiles(blocks=maximum(1, K // 8))),
        ("ACC -> ACC", "D"): lambda: prove(tiled=tasks),
    }
    for (node, tensor), fails in kinds.items():
        with pytest.raises(LegalityError) as caught:
            fails()
        text = str(caught.value)
        assert (caught.value.node, caught.value.tensor) == (node, tensor), text
        assert "violated: [" in text and "for example " in text, text
        assert any(f"'{p}': " in text.split("for example ")[1] for p in ("R", "L", "M", "N", "K", "k0", "n0")), text


def test_epilogue_at_the_first_step() -> None:
    with refused("backwards: ACC -> DONE0"):
        prove(roles=replace(ROLES, sunk=(("INIT", "first"), ("DONE0", "first"))))


def reordered(tree: Tree, order: tuple[str, ...]) -> Tree:
    """The tree with the statements of the sequence that holds DONE0 in another order."""
    if isinstance(tree, Sequence):
        single = {next(iter(part)): (part, below) for part, below in tree.children if len(part) == 1}
        if "DONE0" in single:
            return Sequence(tuple(single[n] for n in order))
        return Sequence(tuple((part, reordered(below, order)) for part, below in tree.children))
    return replace(tree, child=reordered(tree.child, order)) if isinstance(tree, (Band, Mark)) else tree


def test_epilogue_before_the_reduction_loop() -> None:
    tiled = contract_tree(G, ROLES, True)
    with refused("backwards: ACC -> DONE0"):
        prove(tiled=replace(tiled, tree=reordered(tiled.tree, ("INIT", "LOAD", "DONE0", "ACC", "SAVE"))))


def test_sums_saved_before_they_are_complete() -> None:
    tiled = contract_tree(G, ROLES, True)
    order = ("INIT", "LOAD", "SAVE", "ACC", "DONE0")
    with refused("SAVE runs before ACC of the same block"):
        prove(tiled=replace(tiled, tree=reordered(tiled.tree, order)))
    order = ("INIT", "ACC", "LOAD", "SAVE", "DONE0")
    with refused("ACC reads acc of another element, which ACC wrote"):
        prove(tiled=replace(tiled, tree=reordered(tiled.tree, order)))


def test_load_of_a_block_that_was_not_saved() -> None:
    tiled = contract_tree(G, ROLES, True)
    skipping = tuple(
        replace(s, conditions=(*s.conditions, at_least(V("B_k") - 3, "b_k"))) if s.name == "SAVE" else s
        for s in tiled.statements
    )
    with refused("LOAD reads mem"):
        prove(tiled=replace(tiled, statements=skipping))


def test_panels_packed_too_late() -> None:
    tiled = contract_tree(G, ROLES, True)

    def late(tree: Tree) -> Tree:
        if isinstance(tree, Sequence):
            return Sequence(tree.children[::-1])
        return replace(tree, child=late(tree.child)) if isinstance(tree, (Band, Mark)) else tree

    with refused("ACC reads panel"):
        prove(tiled=replace(tiled, tree=late(tiled.tree)))


def test_panel_one_short() -> None:
    check_panel_box(tiles())
    with refused("a live column is read from a panel that is not packed"):
        check_panel_box(tiles(short=1))
    with refused("ACC reads panel where nothing was written"):
        prove(tiles(short=1))
    with pytest.raises(LegalityError, match="do not hold"):
        check_panel_box(replace(tiles(), panel_size=V("S") * 8 * 8 - 1))


def filling(short: int = 0, block: IndexLike = 8, blocks: Index | None = None) -> ContractTiles:
    """Tiles of a kernel that also copies its rows; ``short``: rows too few."""
    t = tiles(block, blocks)
    pitch = t.block + 4
    rows = {"filled": V("r_hi") - "r_lo" - short, "fill_size": V("S") * 4 * pitch, "pitch": pitch, "steps": t.block}
    return replace(t, fill=True, **rows)


def test_copied_rows() -> None:
    tiled = contract_tree(G, ROLES, True, fill=True)
    prove(filling(), tiled=tiled)
    prove(filling(block="K", blocks=V(1)), tiled=tiled)
    with refused("ACC reads rows where nothing was written"):
        prove(filling(short=1), tiled=tiled)
    with pytest.raises(LegalityError, match="do not hold"):
        check_fill_box(replace(filling(), fill_size=V("S") * 4 * 12 - 1))
    with pytest.raises(LegalityError, match="do not hold"):
        check_fill_box(replace(filling(), pitch=V(7), fill_size=V("S") * 28))

    def late(tree: Tree) -> Tree:
        if isinstance(tree, Sequence) and any("FILL" in part for part, _ in tree.children):
            return Sequence(tree.children[::-1])
        return replace(tree, child=late(tree.child)) if isinstance(tree, (Band, Mark)) else tree

    with refused("ACC reads rows"):
        prove(filling(), tiled=replace(tiled, tree=late(tiled.tree)))
    once = tuple(
        replace(s, conditions=(*s.conditions, equals("b_k", 0))) if s.name == "FILL" else s for s in tiled.statements
    )
    with refused("ACC reads rows of another element, which FILL wrote"):
        prove(filling(), tiled=replace(tiled, statements=once))


def test_reduction_blocks_as_tasks() -> None:
    tiled = contract_tree(G, ROLES, True)
    with refused("parallel row 2 carries a dependence"):
        prove(tiled=replace(tiled, coincident=(*tiled.coincident, "b_k")))


def test_a_reduction_iterator_in_the_shared_band() -> None:
    g = group(
        "scan", "M", [array("x", "input", "M", "M"), array("y", "input", "M")],
        [statement("S", {"i": "M", "j": "M"}, "y", "i", ld("x", "i", "j"), "sum")],
    )  # fmt: skip
    d = analyse(g, positive=False)
    prove_nest(g, nest_tree(g, ("i",), {"S": 0}, True), ("i",), {"S": 0}, d)
    with refused("parallel row 1 carries a dependence: S -> S"):
        prove_nest(g, nest_tree(g, ("i", "j"), {"S": 0}, True), ("i", "j"), {"S": 0}, d)


def test_too_few_reduction_blocks() -> None:
    with refused("instances are not covered by the tiles: ACC"):
        prove(tiles(blocks=maximum(1, K // 8)))


def test_a_phase_too_early() -> None:
    g = softmax()
    d, phases = analyse(g, positive=False), {"M0": 0, "M1": 0, "D0": 1, "D1": 1, "Y": 1}
    for tiled in (False, True):
        with refused(r"backwards: D1 -> Y|vector loop l carries a dependence: D1 -> Y"):
            prove_nest(g, nest_tree(g, ("r",), phases, tiled), ("r",), phases, d)


def test_vector_loop_that_carries_a_dependence() -> None:
    before = op("where", const(True, "bool"), ld("y", "i", V("j") - 1), ld("x", "i", "j"))
    g = group(
        "scan", "M", [array("x", "input", "M", "M"), array("y", "output", "M", "M")],
        [statement("I", {"i": "M", "j": "M"}, "y", "i j", ld("x", "i", "j")),
         statement("S", {"i": "M", "j": "M"}, "y", "i j", before)],
    )  # fmt: skip
    d, phases = analyse(g, positive=False), {"I": 0, "S": 1}
    with refused("vector loop j carries a dependence: S -> S"):
        prove_nest(g, nest_tree(g, ("i",), phases, False), ("i",), phases, d)


@pytest.fixture(scope="module")
def attention() -> tuple[Group, AttentionKernel]:
    """The attention of a small BERT, scheduled."""
    plan = fusion_plan(rewrite_graph(import_model(path_of("bert_tiny"), None)))
    form = lower_attention(plan, next(g for g in plan.groups if g.kind == "attention"))
    assert form is not None
    group = form.lowered.group
    return group, AttentionKernel("a", group, schedule_attention(form.parts), AVX512, frozenset())


def test_attention_parts_in_another_order(attention: tuple[Group, AttentionKernel]) -> None:
    group, kernel = attention
    tiled = kernel.tree()

    def swapped(tree: Tree) -> Tree:
        if isinstance(tree, Mark) and tree.name == "block" and isinstance(tree.child, Sequence):
            scores, rows, values = tree.child.children
            return replace(tree, child=Sequence((scores, values, rows)))
        if isinstance(tree, Sequence):
            return Sequence(tuple((part, swapped(below)) for part, below in tree.children))
        return replace(tree, child=swapped(tree.child)) if isinstance(tree, (Band, Mark)) else tree

    prove_attention(group, kernel.parts, tiled, kernel.tiles())
    with refused("backwards: ROW_R6 -> ACC2"):
        prove_attention(group, kernel.parts, replace(tiled, tree=swapped(tiled.tree)), kernel.tiles())


def test_attention_rows_of_the_next_block_too_early(attention: tuple[Group, AttentionKernel]) -> None:
    """Scores of all blocks, then all rows, then all values: right for whole arrays, wrong for rows of one block."""
    group, kernel = attention
    tiled = kernel.tree()

    def distributed(tree: Tree) -> Tree:
        if isinstance(tree, Band) and tree.members == ("c_i",):
            assert isinstance(tree.child, Mark) and isinstance(tree.child.child, Sequence)
            parts = tree.child.child.children
            return Sequence(tuple((part, Band(("c_i",), below)) for part, below in parts))
        if isinstance(tree, Sequence):
            return Sequence(tuple((part, distributed(below)) for part, below in tree.children))
        return replace(tree, child=distributed(tree.child)) if isinstance(tree, (Band, Mark)) else tree

    with refused("reads scores of another element"):
        prove_attention(group, kernel.parts, replace(tiled, tree=distributed(tiled.tree)), kernel.tiles())


def test_attention_phase_too_early(attention: tuple[Group, AttentionKernel]) -> None:
    group, kernel = attention
    parts = replace(kernel.parts, phases=dict.fromkeys(kernel.parts.phases, 0))
    with refused("backwards|vector loop"):
        prove_attention(group, parts, attention_tree(parts, kernel.scores.plan.promote), kernel.tiles())


def test_outputs_whose_elements_share_addresses() -> None:
    good = array("E", "output", "M", 3, "N")
    assert check_addresses(group("g", "M N", [good], []), {"M": V("B"), "N": V("H") // 2}) == ()
    wide = replace(good, strides=(V("N") * 3 + V("T") * 3, V("N") + "T", V(1)))
    assert check_addresses(group("g", "M N T", [wide], []), {}) == ()
    with refused("elements of E share addresses: dim 0"):
        check_addresses(group("g", "M N", [replace(good, strides=(V("N") * 2, V("N"), V(1)))], []), {})


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
