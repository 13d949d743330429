"""The interpreter of the loop IR: nodes, values, leaves, whole kernels, and the mistakes that it must see."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from polydyn.codegen import family
from polydyn.codegen.ir import (
    Alloc,
    Apply,
    Call,
    Compare,
    Def,
    FlatLoad,
    For,
    If,
    Let,
    Pointer,
    Reg,
    Set,
    Store,
    Switch,
    rewrite,
)
from polydyn.codegen.kernel import Block, Kernel
from polydyn.codegen.passes.bind import fold
from polydyn.codegen.pipeline import Step
from polydyn.schedules.expr import Const, FromIndex, Load, const, op
from polydyn.schedules.index import ONE, ZERO, Index
from polydyn.testing.kernel_graphs import graph
from polydyn.testing.loops import sizes as loop_sizes
from polydyn.testing.loops.check import SIZES, cases_of
from polydyn.testing.loops.cpu import CpuRun
from polydyn.testing.loops.cuda import CudaRun
from polydyn.testing.loops.mutants import mutants
from polydyn.testing.loops.rooms import Broken
from polydyn.testing.loops.score import Score
from polydyn.testing.loops.sizes import cases_by_kernel
from polydyn.testing.loops.steps import LoopError, executable, first_wrong, verify_kernels
from polydyn.testing.loops.warps import ldmatrix, mma, swizzled
from polydyn.testing.plan.planned import plans_of

V = Index.of
N_VALUE = FromIndex("float32", V("n"))
X, N = FlatLoad("float32", "x", V("i")), V("n")


@pytest.fixture(scope="module")
def tables():
    return plans_of(graph("tables"), target="cpu:avx2")[0]


def run(body, n=5, size=5, width=4, **more):
    """The array y of ``size`` elements after a body; x is 0, 1, 2, ..."""
    x, y = np.arange(size, dtype=np.float32), np.full(size, -1, np.float32)
    CpuRun({"x": ("float32", x), "y": ("float32", y)}, width).run(body, {"n": n, **more})
    return y.tolist()


def test_loops_conditions_and_switches_run_as_c_runs_them():
    each = (For("i", ZERO, N, (Store("y", V("i"), op("mul", X, const(2, "float32"))),)),)
    assert run(each) == [0, 2, 4, 6, 8]
    assert run((If((Compare("<", N, V(5)),), (), each),)) == [0, 2, 4, 6, 8]
    assert run((If((Compare("<", N, V(5)),), each),)) == [-1] * 5
    one, two = (Store("y", ZERO, Const("float32", x)) for x in (1.0, 2.0))
    assert [run((Switch(N, ((2, (one,)), (4, (two,)))),), n)[0] for n in (1, 2, 3, 4)] == [1, 1, 2, 2]
    with pytest.raises(Broken, match="beyond its cases"):
        run((Switch(N, ((2, (one,)),)),), 3)


def test_vectors_have_masks_and_strides():
    whole = Store("y", ZERO, FlatLoad("float32", "x", ONE, 4), lanes=4)
    assert run((whole,)) == [1, 2, 3, 4, -1]
    masked = Store("y", ONE, FlatLoad("float32", "x", ZERO, 4, mask=V(2)), lanes=4, mask=V(3))
    assert run((masked,)) == [-1, 0, 1, 0, -1]
    apart = Store("y", ZERO, FlatLoad("float32", "x", ZERO, 2, V(3)), lanes=2, stride=V(2))
    assert run((apart,)) == [0, -1, 3, -1, -1]


def test_an_access_out_of_bounds_is_named():
    with pytest.raises(Broken, match=r"x\[5..5\] of 5 elements"):
        run((For("i", ZERO, N + 1, (Store("y", V("i"), X),)),))
    with pytest.raises(Broken, match=r"y\[2..5\]"):
        run((Store("y", V(2), FlatLoad("float32", "x", ZERO, 4), lanes=4),))


def test_an_element_is_stored_once_unless_it_is_read_in_between():
    store = Store("y", ZERO, const(1, "float32"))
    with pytest.raises(Broken, match=r"y\[0..0\] is stored twice"):
        run((store, store))
    assert run((store, replace(store, again=True)))[0] == 1
    assert run((store, Store("y", ZERO, op("add", FlatLoad("float32", "y", ZERO), const(1, "float32")))))[0] == 2


def test_a_register_ends_with_its_block():
    late = (Store("y", V("i"), Reg("float32", "s")), Def("s", const(0, "float32")))
    with pytest.raises(Broken, match="'s' has no value"):
        run((Let("i", ZERO, (Def("s", const(0, "float32")), For("i", ZERO, V(2), late))),))


def test_tasks_that_meet_in_memory_are_a_race(tables):
    case = next(c for c in cases_of(tables, SIZES[0]) if c.kernel.name.startswith("nest"))
    kernel = replace(case.kernel, after=())
    body = (Store("a1", ZERO, const(1, "float32")),)
    arrays = {n: ("float32", np.zeros(8, np.float32)) for n in kernel.buffers}
    two = replace(case, kernel=replace(kernel, tasks=V(2)))
    with pytest.raises(Broken, match="two tasks access"):
        two._execute(two.kernel, (replace(body[0], buffer=kernel.buffers[0]),), arrays, False)


def test_memory_that_nobody_wrote_is_poison_and_registers_keep_sums():
    local = (Store("y", ZERO, FlatLoad("float32", "l", ONE)),)
    assert np.isnan(run((Alloc("l", "float32", V(2), "stack", local),))[0])
    total = (Def("s", const(0, "float32")), For("i", ZERO, N, (Set("s", X, reduce="sum"),)),
             Store("y", ZERO, Reg("float32", "s")))  # fmt: skip
    assert run(total)[0] == 10
    with pytest.raises(Broken, match="'s' has no value"):
        run(total[1:])


def test_transpositions_are_blocks():
    source, to = Pointer("float32", "x", ZERO), Pointer("float32", "y", ZERO)
    numbers = (FromIndex("int64", V(k)) for k in (3, 2, 3))  # stride, rows, columns
    x, y = np.arange(6, dtype=np.float32), np.full(12, -1, np.float32)
    CpuRun({"x": ("float32", x), "y": ("float32", y)}, 4).run((Call("pd_transpose_f32", (to, source, *numbers)),), {})
    assert y.tolist() == [0, 3, 0, 0, 1, 4, 0, 0, 2, 5, 0, 0]


def test_a_leaf_without_meaning_is_an_error():
    with pytest.raises(Broken, match="pd_unknown"):
        run((Call("pd_unknown"),))


# -- warps -------------------------------------------------------------------------------------------------------------


def device(body, threads=64, blocks=1, reverse=False, size=64):
    """The array y after a kernel of ``threads`` threads; x is 0, 1, 2, ..."""
    x, y = np.arange(size, dtype=np.float32), np.full(size, -1, np.float32)
    kernel = Kernel("k", (), V(blocks), block=Block(threads), buffers=("x", "y"))
    CudaRun({"x": ("float32", x), "y": ("float32", y)}, kernel, {}, reverse).run(body, blocks)
    return y


def exchange(*between):
    """Every thread stores to shared memory and reads the element of the thread 32 further on."""
    far = V("tid") + 32 - 64 * ((V("tid") + 32) // 64)
    inner = (Store("s", V("tid"), FlatLoad("float32", "x", V("tid"))), *between,
             Store("y", V("tid"), FlatLoad("float32", "s", far)))  # fmt: skip
    return (Alloc("s", "float32", V(64), "shared", inner),)


def test_a_missing_barrier_is_seen_in_one_of_both_orders():
    right = device(exchange(Call("pd_syncthreads")))
    assert right.tolist() == [*range(32, 64), *range(32)]
    assert any(not np.array_equal(device(exchange(), reverse=r), right) for r in (False, True))


def test_a_barrier_that_some_threads_reach_is_an_error():
    some = If((Compare("<", V("tid"), V(7)),), (Call("pd_syncthreads"),))
    with pytest.raises(Broken, match="some threads of a warp"):
        device((some,))
    with pytest.raises(Broken, match=r"wait forever|others wait"):
        device((If((Compare("==", V("warp"), ZERO),), (Call("pd_syncthreads"),)),))


def test_asynchronous_copies_land_at_their_wait():
    place = Pointer("float32", "s", V("tid"))
    copy = Call("pd_cp_async<4>", (place, Pointer("float32", "x", V("tid")), Const("int32", 4)))
    read = Store("y", V("tid"), FlatLoad("float32", "s", V("tid")))

    def of(*wait):
        return (Alloc("s", "float32", V(64), "shared", (copy, Call("pd_cp_async_commit"), *wait, read)),)

    assert device(of(Call("pd_cp_async_wait<0>"))).tolist() == list(range(64))
    with pytest.raises(Broken, match="nobody waits for"):
        device(of())
    late = (copy, Call("pd_cp_async_commit"), Call("pd_cp_async_wait<1>"), read, Call("pd_cp_async_wait<0>"))
    assert np.isnan(device((Alloc("s", "float32", V(64), "shared", late),))).all()


def test_shuffles_reach_other_lanes():
    value = Apply("float32", "pd_shfl_xor", (FlatLoad("float32", "x", V("tid")), const(16, "int32")))
    got = device((Def("v", value), Store("y", V("tid"), Reg("float32", "v"))), threads=32)
    assert got[:32].tolist() == [*range(16, 32), *range(16)]


def test_blocks_and_loops_of_threads():
    each = For("i", ZERO, V(50), (Store("y", V("i"), FlatLoad("float32", "x", V("i"))),), "block")
    assert device((each,), threads=32).tolist() == [*range(50), *[-1] * 14]
    per_block = If((Compare("<", V("tid"), V(8)),), (Store("y", V("bid") * 8 + "tid", const(1, "float32")),))
    assert device((per_block,), threads=32, blocks=3).tolist() == [1] * 24 + [-1] * 40


def test_the_layouts_of_tensor_cores_multiply_matrices():
    r = np.random.default_rng(0)
    a, b = r.integers(-4, 5, (16, 16)), r.integers(-4, 5, (8, 16))
    lane = np.arange(32)
    halves = [m.astype(np.float16).view(np.uint16) for m in (a, b)]
    quarters = [halves[0][:8, :8], halves[0][8:, :8], halves[0][:8, 8:], halves[0][8:, 8:]]
    left = ldmatrix(np.concatenate(quarters), False)
    right = ldmatrix(np.concatenate([halves[1][:, :8], halves[1][:, 8:]] * 2), False)[:, :2]
    d = mma(np.zeros((32, 4), np.float32), left, right, ("float16", "float16"))
    want = a @ b.T
    for i in range(4):
        assert np.array_equal(d[:, i], want[lane // 4 + i // 2 * 8, lane % 4 * 2 + i % 2])


@pytest.mark.parametrize(("pitch", "chunk", "size"), [(64, 8, 2), (32, 8, 2), (16, 4, 4), (128, 16, 1)])
def test_columns_of_chunks_of_a_tile_lie_in_different_banks(pitch, chunk, size):
    rows = np.arange(8)
    for column in range(0, pitch, chunk):
        at = swizzled(rows, np.full(8, column), pitch, chunk, size) * size
        assert len(set((at // (chunk * size) % (128 // (chunk * size))).tolist())) == min(8, 128 // (chunk * size))
    places = swizzled(*np.mgrid[:16, :pitch], pitch, chunk, size)
    assert sorted(places.reshape(-1).tolist()) == list(range(16 * pitch))


# -- kernels -----------------------------------------------------------------------------------------------------------

TARGETS = ("cpu:avx2", "cpu:avx512", "cuda:sm_80")
SMALL = SIZES[:2]


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compute_what_their_groups_say(target):
    _check("tables", target, SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("target", [*TARGETS, "cpu:amx-emulated"])
@pytest.mark.parametrize(
    "name", ["products", "words", "rounded", "windows", "rows", "attention", "halves", "attention of halves", "bytes"]
)
def test_all_kernels_compute_what_their_groups_say(name, target):
    _check(name, target, SMALL)


def _check(name, target, sizes):
    done = 0
    for planned in plans_of(graph(name), target=target):
        for k, at in enumerate(sizes):
            for case in cases_of(planned, at, seed=k):
                assert case.run(planned.loops) == "", case.name
                done += 1
    assert done


def test_most_mistakes_are_seen(monkeypatch):
    monkeypatch.setattr(loop_sizes, "DRAWS", 4)
    score = Score()
    plans = plans_of(graph("tables"), target="cpu:avx2")
    loops = {n: b for p in plans for n, b in p.loops.items()}
    for cases in cases_by_kernel(plans, 0.3, score.skipped).values():
        score.add(cases, loops, 6, 0)
    assert not {r for r in score.skipped if not r.startswith("drawn: ")} - {"too slow", "too much work"}
    seen, missed = score.counts["seen"], score.counts["not seen"]
    assert seen >= 4 * missed and seen > 30, score.survivors


def test_a_mutant_differs_in_one_place_and_only_where_code_runs():
    body = (Let("a", N, (For("i", ZERO, V("a"), (Store("y", V("i"), X),)),)),)
    store = body[0].body[0].body[0]
    texts = {m.text for m in mutants(body, 100, 0, {id(store)})}
    assert texts == {
        "Store y is missing",
        "Store y stores one further",
        "x is read one further",
        "x is read one before",
    }
    every = mutants(body, 100, 0, {id(store), id(body[0]), id(body[0].body[0])})
    assert len({repr(m.body) for m in every}) == len(every) > len(texts)


def test_the_pass_that_changes_a_result_is_named(monkeypatch):
    def wrong(body):
        return rewrite(body, lambda n: () if isinstance(n, Store) else n) if executable(body) else fold(body)

    monkeypatch.setattr(family, "FOLD", Step("fold", "forgets all stores", wrong))
    (planned,) = plans_of(graph("tables"), target="cpu:avx2")
    with pytest.raises(LoopError, match="after the step fold"):
        verify_kernels(planned, planned.loops)


def test_right_kernels_have_no_wrong_step():
    (planned,) = plans_of(graph("tables"), target="cpu:avx2")
    case = next(cases_of(planned, SIZES[0]))
    assert first_wrong(case, planned.loops, planned.loops.steps[case.kernel.name]) is None
    assert not executable((Store("y", ZERO, Load("float32", "x", (ZERO,))),))
    assert verify_kernels(planned, planned.loops) > 4


def test_a_first_sum_is_not_made_an_assignment():
    """``0 + x`` is ``x``: the change has no effect. That of the second sum has one."""
    body = (Def("s", const(0, "float32")), Set("s", N_VALUE, reduce="sum"), Set("s", N_VALUE, reduce="sum"))
    every = mutants(body, 100, 0, {id(n) for n in body})
    assert [m.text for m in every].count("Set s replaces") == 1
    assert len([m for m in mutants(body[:2], 100, 0, {id(n) for n in body}) if m.text == "Set s replaces"]) == 0


def test_stores_of_different_elements_keep_their_order():
    stores = tuple(Store("y", V(k), const(k, "float32")) for k in (0, 1))
    again = tuple(replace(s, again=True) for s in stores)
    for body, swaps in ((stores, 0), (again, 1)):
        every = mutants(body, 100, 0, {id(n) for n in body})
        assert len([m for m in every if "other order" in m.text]) == swaps
