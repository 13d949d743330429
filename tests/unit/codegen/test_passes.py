"""Passes over the loop IR: before -> after as text, and a rejection next to each success."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest

from polydyn.codegen.cpu.shares import (
    MIN_TASK_VECTORS,
    TASKS_PER_THREAD,
    even_shares,
    row_blocks,
    split_into_tasks,
    tasks_per_thread,
)
from polydyn.codegen.ir import (
    Between,
    Body,
    Call,
    Compare,
    Def,
    FlatLoad,
    For,
    If,
    Inst,
    Let,
    Mark,
    Pointer,
    Reg,
    Set,
    Store,
    Switch,
    walk,
)
from polydyn.codegen.passes.announce import prefetch_for_write, without_announcements
from polydyn.codegen.passes.bind import bind, fold
from polydyn.codegen.passes.epilogues import finished, instances
from polydyn.codegen.passes.hoist import hoist_rows, split_guards
from polydyn.codegen.passes.jam import jam
from polydyn.codegen.passes.pointers import row_pointers
from polydyn.codegen.passes.prefetch import prefetch_ahead, prefetch_next, share_panel
from polydyn.codegen.passes.registers import registers, share_loads, unroll
from polydyn.codegen.passes.tiles import balance, clip, mark_parallel, task_count, tasks, unswitch, variants
from polydyn.codegen.passes.vectorise import vectorise_loop, vectorise_tile
from polydyn.codegen.show import show
from polydyn.schedules.errors import CodegenError, Declined
from polydyn.schedules.expr import Value, const, op
from polydyn.schedules.index import ZERO, Index, maximum, minimum

ix = Index.of
Golden = Callable[[str, str], None]


def at(buffer: str, address: Index | int | str, dtype: str = "float32") -> FlatLoad:
    return FlatLoad(dtype, buffer, ix(address))


def loop(var: str, hi: Index | int | str, *body: object, lo: int = 0) -> For:
    return For(var, ix(lo), ix(hi), body)  # type: ignore[arg-type]


def copy(address: Index | str, value: Value) -> Store:
    return Store("y", ix(address), value)


ROW = loop("i", "n", copy(ix("i"), op("exp", at("x", ix("i") * "s"))))
SUM = loop("i", "n", Set("v", at("x", "i"), 1, "sum"))


def test_fold_removes_what_is_decided() -> None:
    guarded = If((Compare(">=", ix("n"), ix("n") - 1), Compare("<", ix("i"), ix("n"))), (copy("i", at("x", 0)),))
    assert show(fold((guarded,))) == "if i < n\n  y[i] = x[0]\n"
    assert fold((If((Compare("<", ix(3), ix(2)),), (ROW,)),)) == ()
    assert fold((loop("i", "n", ROW, lo=5),))[0] == loop("i", "n", ROW, lo=5)
    assert show(bind((loop("i", "T", copy("i", at("x", "i"))),), {"T": 1})) == "y[0] = x[0]\n"
    assert bind((loop("i", "T", copy("i", at("x", "i"))),), {"T": 0}) == ()


def test_a_map_becomes_vectors_and_a_masked_tail(golden: Golden) -> None:
    golden("vectorise_map.txt", show(vectorise_loop(ROW, 8)))


def test_a_sum_becomes_chains_a_rest_and_a_masked_tail(golden: Golden) -> None:
    golden("vectorise_sum.txt", show(vectorise_loop(SUM, 8)))


def test_a_tail_is_predicated_unless_lanes_beyond_it_add_zero() -> None:
    def tail(value: Value, reduction: str) -> bool:
        return "else v_i0" in show(vectorise_loop(loop("i", "n", Set("v", value, 1, reduction)), 8))

    assert not tail(at("x", "i"), "sum") and not tail(op("mul", at("x", "i"), at("y", "i")), "sum")
    assert tail(at("x", "i"), "max") and tail(op("exp", at("x", "i")), "sum")
    assert tail(op("mul", at("x", "i"), at("y", 0)), "sum"), "a lane beyond the end times infinity is not zero"


def row_of_two_passes() -> For:
    """Build the maximum of every row, then a scaled copy of the row through a separate buffer."""
    x = ix("i") * "n" + ix("j")
    first = loop("j", "n", Set("m", at("x", x), 1, "max"), Store("kept", ix("j"), at("x", x)))
    second = loop("j", "n", copy(x, op("mul", at("kept", "j"), Reg("float32", "m"))))
    return loop("i", "R", Def("m", const(0.0, "float32")), Mark("stage", (first,)), Mark("stage", (second,)))


def test_two_rows_run_side_by_side_and_the_odd_one_alone(golden: Golden) -> None:
    together = jam(row_of_two_passes(), 2, {"kept"})
    assert not isinstance(together, Declined)
    golden("jam.txt", show(together))


def test_rows_whose_loops_differ_do_not_run_together() -> None:
    declined = jam(loop("i", "n", loop("j", "i", copy("j", at("x", "j")))), 2, ())
    assert isinstance(declined, Declined) and "the length of an inner loop depends" in str(declined)


def test_stores_are_announced_by_the_pass_before_once_for_each_vector(golden: Golden) -> None:
    (row,) = prefetch_for_write((row_of_two_passes(),), "stage", {"y"})
    golden("announce.txt", show((row,)))
    inner = row.body[1].body[0]
    calls = [n for n in walk(vectorise_loop(inner, 8)) if isinstance(n, Call)]
    assert len(calls) == 6 and not any(isinstance(n, Call) for n in walk(without_announcements(inner).body))
    assert prefetch_for_write((row,), "stage", {"kept"}) == (row,)


def test_whole_vectors_have_no_tail() -> None:
    assert "if" not in show(vectorise_loop(loop("i", ix("n") * 8, copy("i", at("x", "i"))), 8))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ((loop("i", "n", copy("i", at("x", ix("i") * "i")))), "not affine in the lane"),
        ((loop("i", "n", copy("j", at("x", "i")))), "write one element"),
        ((loop("i", "n", Set("v", at("x", "i")))), "not one reduction"),
        ((loop("i", "n", copy("i", at("x", "i", "uint32")))), "no vectors of uint32"),
        ((loop("i", "n", Set("v", at("x", "i", "uint8"), 1, "sum"))), "accumulates uint8"),
        ((loop("i", "n", loop("k", "i", copy("i", at("x", "k"))))), "a bound depends on the lane"),
        ((loop("i", "n", copy("i", op("where", at("m", "i", "bool"), at("x", "i"), at("x", 0))))), "guarded load"),
        ((loop("i", "n", Mark("row", ()))), "Mark inside the vector loop"),
    ],
)
def test_what_has_no_vector_form_is_refused(body: For, reason: str) -> None:
    refused = vectorise_loop(body, 8)
    assert isinstance(refused, Declined) and reason in str(refused)


def test_a_bug_in_a_pass_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the pass itself ends the compilation; it never becomes a scalar loop with a note."""

    def broken(*_: object) -> None:
        raise CodegenError("planted")

    monkeypatch.setattr("polydyn.codegen.passes.vectorise._iteration", broken)
    with pytest.raises(CodegenError, match="planted"):
        vectorise_loop(ROW, 8)
    monkeypatch.undo()
    with pytest.raises(CodegenError, match="must start at 0"):
        vectorise_loop(replace(ROW, lo=Index.of(1)), 8)
    with pytest.raises(CodegenError, match="cannot vectorise the tile: no vectors of uint32"):
        vectorise_tile((loop("j", 16, copy("j", at("x", "j", "uint32"))),), "j", 8)


def test_a_tile_becomes_vectors_with_live_lanes() -> None:
    tile = (loop("j", 16, copy("j", at("x", "j"))),)
    assert show(vectorise_tile(tile, "j", 8)) == "vector j in [0, 2)\n  y[8*j]<8> = x[8*j]<8>\n"
    masked = show(vectorise_tile(tile, "j", 8, ix("N")))
    assert masked.count("if lane < (N - 8*j)") == 2 or masked.count("if lane < (-8*j + N)") == 2
    with pytest.raises(CodegenError, match="whole number of vectors"):
        vectorise_tile((loop("j", 12, copy("j", at("x", "j"))),), "j", 8)


def test_unrolled_tiles_live_in_registers() -> None:
    body: Body = (loop("p", 2, Store("acc", ix("p"), at("x", "p"), "sum")),)
    flat = unroll(body, ("p",))
    assert show(flat) == "acc[0] += x[0]\nacc[1] += x[1]\n"
    text = show(registers(flat, "acc", "float32"))
    assert text == "def acc_0 = undefined\ndef acc_1 = undefined\nacc_0 += x[0]\nacc_1 += x[1]\n"
    with pytest.raises(CodegenError, match="not constant"):
        registers(body, "acc", "float32")
    with pytest.raises(CodegenError, match="no constant extent"):
        unroll((loop("p", "n", copy("p", at("x", "p"))),), ("p",))
    with pytest.raises(CodegenError, match="different numbers of lanes"):
        registers((Store("acc", ZERO, const(0, "float32")), Store("acc", ZERO, const(0, "float32"), None, 8)), "acc",
                  "float32")  # fmt: skip


def test_loads_are_shared_until_a_store_to_their_buffer() -> None:
    x = at("x", 0)
    run: Body = (copy(ix(0), op("add", x, x)), Store("x", ZERO, x), copy(ix(1), x))
    assert show(share_loads(run)) == "def t0 = x[0]\ny[0] = add(t0, t0)\nx[0] = t0\ndef t1 = x[0]\ny[1] = t1\n"
    assert share_loads((copy(ix(0), x),)) == (copy(ix(0), x),)
    vectors = tuple(Store("y", ix(16 * k), op("add", x, x), None, n) for k, n in enumerate((16, 8)))
    text = show(share_loads(vectors))
    assert text.count("x[0]") == 1 and "broadcast<8>(t0<16>)" in text


def test_shares_partition_and_clip_is_exact() -> None:
    (b,) = balance((loop("c", "C", ROW),), "c", ix("T"), "B", "b")
    assert isinstance(b, For)
    for total in range(7):
        for shares in range(1, 5):
            env = {"T": total, "B": shares}
            parts = [range(b.lo.evaluate({**env, "b": s}), b.hi.evaluate({**env, "b": s})) for s in range(shares)]
            assert [x for p in parts for x in p] == list(range(total))
    (c,) = clip((loop("k", 16, ROW),), ("k",), ix("E"))
    assert isinstance(c, For) and str(c.hi) == "min(16, E)"


def test_vectors_inside_a_range_have_no_guard() -> None:
    """Every vector is in one of three loops, in the middle one exactly if no lane is outside; also with no vectors."""
    i, n = ix("i"), ix("n")
    guard = Between("bool", maximum(3 - 16 * i, 0), minimum(n - 16 * i, 16), 16)
    load = FlatLoad("float32", "x", i * 16, 16, guard=guard)
    vectors = loop("i", "v", Store("y", i * 16, load, lanes=16))
    parts = split_guards(vectors)
    assert [[x.value.guard is None for x in walk((p,)) if isinstance(x, Store)] for p in parts] == [[0], [1], [0]]
    for size, count in product((0, 2, 15, 16, 19, 35, 48, 70), (0, 1, 2, 4)):
        env = {"n": size, "v": count}
        ranges = [range(p.lo.evaluate(env), p.hi.evaluate(env)) for p in parts if isinstance(p, For)]
        assert [x for r in ranges for x in r] == list(range(count))
        assert list(ranges[1]) == [k for k in range(count) if 16 * k >= 3 and 16 * k + 16 <= size]
    apart = replace(load, guard=replace(guard, low=ix("n") - 8 * i))
    assert len(split_guards(replace(vectors, body=(Store("y", i * 16, apart, lanes=16),)))) == 1


def test_only_what_a_loop_repeats_of_a_row_has_a_name() -> None:
    def copied(address: Index) -> Call:
        return Call("copy", (Pointer("float32", "x", address),))

    row, named = ix("m") // 5 * 3 + "m", ix("row_q_0") * 3 + "m"
    body = hoist_rows((copied(row + 7), loop("k", 8, copied(row + "k"))), "row_")
    inside = (copied(named + 7), loop("k", 8, copied(ix("row_0") + "k")))
    assert body == (Let("row_q_0", ix("m") // 5, (Let("row_0", named, inside),)),)


def test_variants_switch_only_between_several() -> None:
    assert variants(ix("r"), {4: (ROW,)}) == (ROW,)
    (s,) = variants(ix("r"), {3: (ROW,), 4: (ROW,)}, "f")
    assert isinstance(s, Switch) and [k for k, _ in s.cases] == [3, 4]
    assert "outline f_3" in show((s,))


def test_a_choice_that_no_iteration_changes_is_made_once() -> None:
    a, b = copy(ix(0), at("x", "k")), copy(ix(1), at("x", "k"))
    outer = If((Compare("<=", ix("c"), ix("N")),), (a,), (b,))
    (chosen,) = unswitch((loop("r", "R", loop("k", "K", outer)),))
    assert isinstance(chosen, If) and chosen.then == (loop("r", "R", loop("k", "K", a)),)
    inner = (loop("k", "K", If((Compare("<=", ix("k"), ix("N")),), (a,), (b,))),)
    assert unswitch(inner) == inner
    both = (loop("k", "K", outer, a),)
    assert unswitch(both) == both


def executed(body: Body, env: dict[str, int]) -> list[tuple[int, ...]]:
    """Return the values of b, i, j at every store, in order."""
    found: list[tuple[int, ...]] = []
    for n in body:
        if isinstance(n, Let):
            found += executed(n.body, {**env, n.var: n.value.evaluate(env)})
        elif isinstance(n, For):
            for x in range(n.lo.evaluate(env), n.hi.evaluate(env)):
                found += executed(n.body, {**env, n.var: x})
        else:
            found.append((env["b"], env["i"], env["j"]))
    return found


@pytest.mark.parametrize("order", [(), ("j", "b", "i")])
def test_a_range_of_tasks_keeps_its_loops(order: tuple[str, ...]) -> None:
    """Every part of the range runs its own tasks, in the given order, each once; nothing is divided per task."""
    inner = loop("i", "N", loop("j", 3, copy(ix(0), at("x", "i"))))
    nest = (Mark("task", (loop("b", "B", inner),)),)
    parallel = mark_parallel(nest, ("b", "i", "j"))
    body, count = tasks(parallel, runs=True, order=order), task_count(parallel)
    assert count == ix("B") * "N" * 3
    sizes = {"b": 2, "i": 4, "j": 3}
    names = order or ("b", "i", "j")
    points = (dict(zip(names, p, strict=True)) for p in product(*(range(sizes[x]) for x in names)))
    want = [(p["b"], p["i"], p["j"]) for p in points]
    for begin in range(25):
        for end in range(begin + 1, 25):
            assert executed(body, {"B": 2, "N": 4, "begin": begin, "end": end}) == want[begin:end]
    innermost = show(body).splitlines()[-2]
    assert f"serial {names[-1]} in" in innermost and "//" not in innermost


def test_the_coincident_band_becomes_a_range_of_tasks() -> None:
    nest = (Mark("task", (loop("b", "B", loop("i", "N", copy(ix("b") * "N" + "i", at("x", "i")))),)),)
    parallel = mark_parallel(nest, ("b", "i"))
    body, count = tasks(parallel), task_count(parallel)
    assert count == ix("B") * "N" and show(body).startswith("serial task in [begin, end)\n  let b = (task // N)\n")
    with pytest.raises(CodegenError, match="does not start at 0"):
        tasks(mark_parallel((Mark("task", (loop("b", "B", ROW, lo=1),)),), ("b",)))
    with pytest.raises(CodegenError, match="0 task marks"):
        tasks((ROW,))


def test_rows_of_the_next_tile_are_prefetched_by_line() -> None:
    product = op("mul", at("x", ix("i") * 40 + "k"), at("w", ix("k") * 16 + ix("c") * 640))
    body = loop("k", 40, Set("v", product, 1, "sum"))

    def calls(following: dict[str, Index], panel: dict[str, Index] | None = None) -> list[tuple[str, str, str]]:
        found = [n for n in walk(prefetch_next((body,), "k", following, panel)) if isinstance(n, Call)]
        return [(n.function, a.buffer, str(a.address)) for n in found for a in n.args if isinstance(a, Pointer)]

    row, panel = {"i": ix("i") + 1}, {"c": ix("c") + 1}
    strips = [("pd_prefetch_f32", "x", str(ix("i") * 40 + 40 + at)) for at in (ix("k_line") * 16, 32)]
    assert calls(row) == strips, "a line in each strip and one before the rest"
    step = ix("k_line") * 16 + "k_far"
    assert calls(row, panel)[1] == ("pd_prefetch_far_f32", "w", str(step * 16 + ix("c") * 640 + 640))
    assert calls({"j": ix("j") + 1}) == [], "no load of the loop depends on j"


def test_a_stream_is_asked_for_once_however_often_it_is_read() -> None:
    words = FlatLoad("int32", "w", ix("j") * 16 + ix("k") * 80, lanes=16)
    steps = loop("u", 8, Set("v", op("mul", at("x", ix("u") + ix("k") * 8), words), 16, "sum"))
    scale = Set("v", FlatLoad("int32", "w", ix("k") * 80 + 64, lanes=16), 16, "sum")
    (outer,) = prefetch_ahead((loop("k", "K", loop("j", 4, steps), scale),), "k", 1600)
    assert show((outer,)).splitlines()[:5] == [
        "serial k in [0, K)",
        "  pd_prefetch_i32(&w[(80*k + 464)] as int32)",
        "  serial j in [0, 4)",
        "    pd_prefetch_i32(&w[(16*j + 80*k + 400)] as int32)",
        "    serial u in [0, 8)",
    ]


def test_row_tiles_share_the_steps_of_a_panel() -> None:
    def steps(tiles: int) -> list[int]:
        found: list[int] = []
        for t in range(tiles):
            (end,) = share_panel((ROW,), ix(t), ix(tiles))
            assert isinstance(end, Let) and isinstance(end.body[0], Let)
            found += range(end.body[0].value.evaluate({}), end.value.evaluate({}))
        return found

    assert steps(1) == steps(17) == [] and all(steps(n) == list(range(16)) for n in (2, 3, 7, 16))


def test_a_register_set_in_narrow_lanes_is_read_as_a_whole_vector() -> None:
    narrow = Store("acc", ZERO, const(0, "float32"), None, 8)
    wide = Store("y", ZERO, FlatLoad("float32", "acc", ZERO, 16), None, 16)
    text = show(registers((narrow, wide), "acc", "float32"))
    assert "def acc_0" in text and "acc" in text.splitlines()[-1]
    with pytest.raises(CodegenError, match="of the 16 lanes"):
        part = replace(wide, value=FlatLoad("float32", "acc", ZERO, 8))
        registers((replace(narrow, lanes=16), part), "acc", "float32")


def test_shares_divide_what_leaves_least_to_the_busiest() -> None:
    def shares(rows: int, columns: int, threads: int, last: int = 48) -> tuple[int, int]:
        got = even_shares(ix(rows), ix(columns), ix(threads), ix(48 * (columns - 1) + last), (8, 48))
        return got["B_i"].evaluate({}), got["B_j"].evaluate({})

    assert shares(1, 16, 2) == (1, 2) and shares(40, 16, 2) == (1, 2), "columns where both divide evenly"
    assert shares(200, 16, 2) == (2, 1), "rows where reading all of them costs more than reading all columns"
    assert shares(20, 3, 2) == (2, 1), "rows where three column tiles would be one and two"
    assert shares(12, 2, 2, last=22) == (2, 1), "rows where the last column tile is half empty"
    assert shares(2, 23, 2) == (1, 2), "few rows: every thread would read all columns"
    assert shares(0, 16, 2) == (1, 2) and shares(1, 1, 4) == (1, 1)


def test_blocks_of_rows_divide_evenly_among_threads() -> None:
    def blocks(rows: int, columns: int, max_rows: int, threads: int, cheap: bool = True) -> tuple[int, int]:
        got = row_blocks(ix(rows), ix(columns), max_rows, ix(threads), cheap)
        return got["B_i"].evaluate({}), got["B_j"].evaluate({})

    assert blocks(100, 4, 16, 2) == (8, 1), "a multiple of the threads"
    assert blocks(1, 4, 16, 2) == (1, 2), "columns where rows are fewer than threads"
    assert blocks(7, 99, 10, 64, cheap=False) == (7, 9) and blocks(25, 99, 10, 64, cheap=False) == (25, 2), "one each"
    assert blocks(3, 400, 1, 2) == (3, 2) and blocks(9, 400, 1, 2) == (9, 2), "columns too where blocks are uneven"
    assert blocks(3, 400, 1, 2, cheap=False) == (3, 1), "not where every part would copy the rows again"
    assert blocks(3, 1, 1, 2) == (3, 1) and blocks(4, 400, 1, 2) == (4, 1) and blocks(99, 400, 1, 2) == (99, 1)
    assert blocks(9, 400, 1, 1) == (9, 1) and blocks(0, 4, 1, 2) == (1, 2)


def test_several_threads_get_pieces_where_dividing_costs_nothing() -> None:
    def split(
        blocks: tuple[int, int], tiles: tuple[int, int], threads: int = 2, others: int = 1, work: int = 10**9,
        packs: bool = False,
    ) -> tuple[int, int]:  # fmt: skip
        given = dict(zip(("B_i", "B_j"), map(ix, blocks), strict=True))
        number = tasks_per_thread(ix(work), ix(threads), 16)
        got = split_into_tasks(given, *map(ix, tiles), ix(threads), ix(others), number, packs)
        return got["B_i"].evaluate({}), got["B_j"].evaluate({})

    assert split((1, 1), (40, 16), threads=1) == (1, 1), "one thread has nobody to wait for"
    assert split((1, 2), (40, 64)) == (1, 2 * TASKS_PER_THREAD) and split((1, 2), (20, 6)) == (1, 6), "columns"
    assert split((2, 1), (400, 64)) == (2, TASKS_PER_THREAD), "columns of both blocks of rows"
    assert split((2, 1), (400, 2)) == (8, 2) and split((2, 1), (40, 2)) == (2, 2), "then rows, if there are many"
    assert split((2, 48), (16, 48), threads=64) == (4, 48), "three tasks each, not one or two"
    assert split((2, 1), (400, 2), packs=True) == (2, 2), "but columns are not packed again"
    assert split((1, 1), (40, 16), others=12) == (1, 2) and split((1, 1), (40, 16), others=16) == (1, 1), "batches"
    assert split((1, 2), (40, 64), work=32 * MIN_TASK_VECTORS) == (1, 2)
    assert split((1, 2), (40, 64), work=96 * MIN_TASK_VECTORS) == (1, 6)
    assert split((1, 1), (0, 0), work=0) == (1, 1) and split((1, 1), (1, 0), others=0) == (1, 1)


def test_statements_behind_a_tile_run_under_one_condition() -> None:
    def inst(name: str) -> Inst:
        return Inst(name, (ix("i"),))

    names = ("DONE0", "DONE1")
    last = (Compare("==", ix("k"), ix("n") - 1), Compare(">", ix("n"), ix(0)))
    body: Body = (inst("ACC"), loop("i", 4, If(last, (inst("DONE0"), loop("j", 2, inst("DONE1"))))))
    assert instances(body, names) == ([inst("DONE0"), inst("DONE1")], last)
    body = (If(last[:1], (inst("ACC"),), (inst("DONE0"),)),)
    assert instances(body, names) == ([inst("DONE0")], (Compare("!=", ix("k"), ix("n") - 1),))
    with pytest.raises(CodegenError, match="one of several conditions does not hold"):
        instances((If(last, (), (inst("DONE0"),)),), names)
    with pytest.raises(CodegenError, match="under 2 different conditions"):
        instances((If(last[:1], (inst("DONE0"),)), inst("DONE1")), names)


def test_what_is_made_of_a_tile_is_a_loop_with_every_operation_once() -> None:
    sums, at_column = at("sums", ix("e_i") * 16 + "e_j"), ix("e_i") * "n" + "e_j"
    x = op("exp", sums)
    stores = (Store("y", at_column, op("mul", x, x)), Store("z", at_column, op("neg", op("mul", x, x))))
    when = (Compare("<", ix("k"), ix(1)),)
    text = show(finished((), ("sums", "float32"), stores, when, ix("m"), ix("n"), (4, 16, 8)))
    assert text.count("exp(") == text.count("mul(") == 2, "in whole vectors and in the last one"
    assert "if k < 1" in text and "serial e_i in [0, m)" in text
    whole = finished((), ("sums", "float32"), stores, (), ix("m"), ix(16), (4, 16, 8))
    assert show(whole).count("exp(") == 1 and "if " not in show(whole)


def rows_of(pitch: int, *rows: int) -> Body:
    """Build rows ``o + r`` of a footprint, in image rows of ``w`` pixels of ``pitch`` elements, at step ``k``."""
    starts = [(ix("o") + r) // "w" * "p" + (ix("o") + r) * pitch + "k" for r in rows]
    return tuple(copy(ix(r), at("x", s)) for r, s in zip(rows, starts, strict=True))


def test_rows_in_one_line_share_a_pointer() -> None:
    """If the condition holds, every row reads its own elements; it fails if an image row ends among them."""
    before = rows_of(2, 0, 1, 3)
    (choice,) = row_pointers(before, "x", ("k",), lines=True)
    assert isinstance(choice, If) and [n.var for n in walk(choice.then) if isinstance(n, Let)] == ["x_0"]
    assert [n.var for n in walk(choice.orelse) if isinstance(n, Let)] == ["x_2", "x_1", "x_0"]
    (shared,) = choice.then
    assert isinstance(shared, Let)
    for o, w in product(range(9), range(1, 6)):
        env = {"o": o, "w": w, "p": 100, "k": 7}
        whole = all(c.holds(env) for c in choice.cond)
        assert whole == (o // w == (o + 3) // w)
        env["x_0"] = shared.value.evaluate(env)
        for a, b in zip(before, shared.body, strict=True):
            assert isinstance(a, Store) and isinstance(b, Store)
            assert isinstance(a.value, FlatLoad) and isinstance(b.value, FlatLoad)
            assert not whole or a.value.address.evaluate(env) == b.value.address.evaluate(env)


def test_rows_that_begin_at_distances_that_are_no_numbers_have_pointers_of_their_own() -> None:
    far = tuple(copy(ix(r), at("x", (ix("o") + r) // "w" * "p" + (ix("o") + r) * "s")) for r in range(2))
    for body, lines in ((far, True), (rows_of(2, 0, 1), False), (rows_of(2, 0), True)):
        assert not any(isinstance(n, If) for n in walk(row_pointers(body, "x", ("k",), lines=lines)))
