"""Waves: independent launches share a fork-join; the validator detects dependent ones."""

from __future__ import annotations

import os
import re
import threading
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polydyn.compiler import Options, plan_graph
from polydyn.errors import PolydynError
from polydyn.graph.expand import import_model
from polydyn.graph.ir import SymbolSource
from polydyn.program.assemble import build_artifact, build_program
from polydyn.program.memory import Slot, arena_estimate, live_ranges, plan_slots
from polydyn.program.parallel_launches import (
    MEMORY_FACTOR,
    intermediate_lives,
    join_waves,
    touched_by_wave,
    verify_waves,
    wave_ranges,
)
from polydyn.program.plan import HostPlan, IndexCheck, Launch
from polydyn.program.verify_memory import verify_slots
from polydyn.runtime.artifact import Artifact
from polydyn.runtime.opening import open_program
from polydyn.schedules.index import Index
from polydyn.testing.random_graphs import random_feeds, random_graph, union
from tests.support.marks import slow
from tests.support.programs import ADD, WEIGHTS, B, L, buffers, example, expected, feeds, kernel, launch
from tests.support.tiny import model, node

F = "float32"
RNG = np.random.default_rng(5)


def declared(x: Launch, kind: str = "nest") -> Launch:
    """Return the launch with its last buffer as its output."""
    return replace(x, writes=x.buffers[-1:], kind=kind)


def diamond(*order: int, waves: tuple[int, ...] = (), kinds: str = "aaaa") -> HostPlan:
    """Plan ``o = (x + y) + (x + w)``, ``p = x + x``: launches 0 and 1 feed 2; 3 is independent."""
    names = ("x y s", "x w t", "s t o", "x x p")
    rows = [declared(launch(ADD, n, (), L, 10**6), k) for n, k in zip(names, kinds, strict=True)]
    return HostPlan(
        "diamond", ("x", "y", "w"), ("o", "p"),
        buffers(
            *((n, F, (L,), "input") for n in "xyw"), *((n, F, (L,), "intermediate") for n in "st"),
            *((n, F, (L,), "output") for n in "op"),
        ),
        {}, (SymbolSource("L", "x", 0),), (), (ADD,), tuple(rows[k] for k in order or range(4)), waves=waves,
    )  # fmt: skip


def test_independent_launches_of_one_kind_meet() -> None:
    plan = join_waves(diamond())
    assert [[x.buffers[-1] for x in plan.launches[r.start : r.stop]] for r in wave_ranges(plan)] == [
        ["s", "t", "p"],
        ["o"],
    ]
    assert join_waves(plan) == plan, "deterministic, and stable"
    assert max(join_waves(diamond(kinds="abaa")).waves) == 2, "kinds do not mix"


def test_a_launch_of_unknown_writes_is_a_barrier() -> None:
    plan = join_waves(replace(diamond(), launches=tuple(replace(x, writes=None) for x in diamond().launches)))
    assert plan.launches == tuple(replace(x, writes=None) for x in diamond().launches) and set(plan.waves) == {1}


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (diamond(waves=(2, 2)), None),
        (diamond(0, 2, 1, 3), "wave 1 reads a buffer that wave 2 writes"),
        (diamond(0, 1, 2, 3, waves=(1, 2, 1)), "wave 1 reads a buffer that wave 1 writes"),
        (diamond(waves=(3, 1)), "wave 0 reads a buffer that wave 0 writes"),
        (diamond(waves=(2, 1)), "waves of (2, 1) launches, the plan has 4"),
        (diamond(waves=(4, 0)), "waves of (4, 0) launches"),
        (replace(example(), waves=(2, 1, 1)), "the writes of launch 'add:x y t0' are unknown"),
    ],
)
def test_the_validator_sees_broken_waves(plan: HostPlan, message: str | None) -> None:
    if message is None:
        verify_waves(plan)
        return
    with pytest.raises(PolydynError, match=re.escape(message)):
        verify_waves(plan)
    with pytest.raises(PolydynError, match=re.escape(message)):
        build_program(plan)


IN_PLACE = kernel("in_place", 2, 0, """const float *a = buf[0]; float *o = buf[1];
for (int64_t i = begin; i < end; i++) o[i] = a[i + end];""")  # fmt: skip
"""Reads the second half of a tensor, writes the first one."""


def two_halves(*order: int, waves: tuple[int, ...] = ()) -> HostPlan:
    """Plan 0 that writes y, 1 that reads a part of y and writes another part of it, 2 that reads y."""
    rows = [launch(ADD, "x x y", (), L, 9), launch(IN_PLACE, "y y", (), L, 9), launch(ADD, "y y z", (), L, 9)]
    said = [replace(x, writes=x.buffers[-1:], reads=x.buffers[:1]) for x in rows]
    return HostPlan(
        "halves", ("x",), ("y", "z"),
        buffers(("x", F, (L,), "input"), ("y", F, (L,), "output"), ("z", F, (L,), "output")),
        {}, (SymbolSource("L", "x", 0),), (), (ADD, IN_PLACE), tuple(said[k] for k in order or range(3)), waves=waves,
    )  # fmt: skip


def test_a_launch_that_writes_a_buffer_too_follows_those_whose_elements_it_reads() -> None:
    joined = join_waves(two_halves())
    assert [x.label for x in joined.launches] == [x.label for x in two_halves().launches] and joined.waves == (1, 1, 1)
    for plan in (two_halves(waves=(2, 1)), two_halves(1, 0, 2), two_halves(waves=(1, 2)), two_halves(0, 2, 1)):
        with pytest.raises(PolydynError, match="all writers run before all readers"):
            verify_waves(plan)


def test_the_validator_reads_the_texts_of_kernels_and_believes_no_launch() -> None:
    """A launch with incomplete declarations: ``writes`` without a buffer, ``reads`` of nothing."""
    plan = two_halves(waves=(2, 1))
    with pytest.raises(PolydynError, match="wave 0 reads a buffer that wave 0 writes"):
        verify_waves(replace(plan, launches=tuple(replace(x, reads=()) for x in plan.launches)))
    with pytest.raises(PolydynError, match="has undeclared writes"):
        verify_waves(replace(plan, launches=tuple(replace(x, writes=()) for x in plan.launches)))


def test_tenants_of_a_slot_are_never_alive_in_one_wave() -> None:
    rows = [launch(ADD, f"{a} x {b}", (), L, 9) for a, b in ("xa", "ab", "bc", "co")]
    made = ((n, F, (L if n != "c" else L * 2,), "intermediate") for n in "abc")
    plan = HostPlan(
        "chain", ("x",), ("o",), buffers(("x", F, (L,), "input"), *made, ("o", F, (L,), "output")),
        {}, (SymbolSource("L", "x", 0),), (), (ADD,), tuple(map(declared, rows)),
    )  # fmt: skip
    verify_slots(plan, plan_slots(intermediate_lives(plan)))
    one, two = L * 4, L * 8
    verify_slots(plan, (Slot(("a", "c"), (one, two)), Slot(("b",), (one,))))
    for slots, message in {
        (Slot(("a", "b"), (one,)), Slot(("c",), (two,))): "shares memory with 'a'",
        (Slot(("a", "c"), (one,)), Slot(("b",), (one,))): "places it wrongly",
        (Slot(("a",), (one,)), Slot(("a", "c"), (one, two))): "places it wrongly",
        (Slot(("a", "c"), (one, two)),): "has no slot for it",
    }.items():
        with pytest.raises(PolydynError, match=message):
            verify_slots(plan, slots)
    with pytest.raises(PolydynError, match="shares memory with 'a'"):
        verify_slots(replace(plan, waves=(1, 2, 1)), (Slot(("a", "c"), (one, two)), Slot(("b",), (one,))))


def test_waves_count_as_one_time_in_the_memory_plan() -> None:
    """In order, s could have given its memory to t's successor; in parallel nothing of a wave is shared."""
    plan = join_waves(diamond())
    assert touched_by_wave(plan)[0] == ["x", "y", "s", "x", "w", "t", "x", "p"]
    program = build_program(plan, threads=2)
    f = {n: np.random.default_rng(k).standard_normal(1000).astype(F) for k, n in enumerate("xyw")}
    got = program.run(f)
    np.testing.assert_array_equal(got["o"], (f["x"] + f["y"]) + (f["x"] + f["w"]))
    np.testing.assert_array_equal(got["p"], f["x"] + f["x"])


def test_an_order_that_needs_much_more_memory_is_not_taken() -> None:
    """Many chains one after the other need two slots; in parallel they would need two each."""
    chains, names = [], ["x"]
    for c in range(8):
        chains += [declared(launch(ADD, f"x x a{c}", (), L, 9)), declared(launch(ADD, f"a{c} x b{c}", (), L, 9))]
        chains.append(declared(launch(ADD, f"b{c} x o{c}", (), L, 9)))
        names += [f"a{c}", f"b{c}"]
    outputs = tuple(f"o{c}" for c in range(8))
    plan = HostPlan(
        "chains", ("x",), outputs,
        buffers(("x", F, (L,), "input"), *((n, F, (L,), "intermediate") for n in names[1:]),
                *((o, F, (L,), "output") for o in outputs)),
        {}, (SymbolSource("L", "x", 0),), (), (ADD,), tuple(chains),
    )  # fmt: skip
    assert join_waves(plan).waves == (1, 1) + (2, 1) * 7 + (1,), "only what stands side by side already"


def test_index_checks_stay_before_the_first_reader() -> None:
    plan = diamond()
    plan = replace(plan, buffers=plan.buffers | buffers(("y", "int64", (L,), "input")))
    plan = replace(plan, launches=(*plan.launches[:2], *plan.launches[3:], plan.launches[2]))
    checked = replace(plan, index_checks=(IndexCheck("y", L, Index.of(0), 0, "an index"),))
    moved = join_waves(checked)
    assert "y" in moved.launches[moved.index_checks[0].launch].buffers


COUNT = kernel("count", 2, 0, "int64_t *o = buf[1];\nfor (int64_t i = begin; i < end; i++) o[i]++;")


@pytest.mark.parametrize("threads", [1, 2, 3, 7, 40])
def test_every_task_of_a_wave_runs_exactly_once(threads: int) -> None:
    sizes = [L, Index.of(1), L * 2, L // 2, Index.of(0), Index.of(5)]
    work = [10**9, 1, 10**5, 40000, 10, 10**6]
    outputs = tuple(f"o{k}" for k in range(6))
    made = ((o, "int64", (s,), "output") for o, s in zip(outputs, sizes, strict=True))
    rows = buffers(("x", F, (L,), "input"), *made)
    launches = [declared(launch(COUNT, f"x {o}", (), s, w)) for o, s, w in zip(outputs, sizes, work, strict=True)]
    plan = HostPlan(
        "count", ("x",), outputs, rows, {}, (SymbolSource("L", "x", 0),), (), (COUNT,), tuple(launches), waves=(6,)
    )
    program = build_program(plan, threads=threads)
    for length in (0, 1, 2, 6, 7, 33, 1000):
        out = {o: np.zeros(s.evaluate({"L": length}), np.int64) for o, s in zip(outputs, sizes, strict=True)}
        for _ in range(3):
            program.run({"x": np.zeros(length, F)}, out=out)
        assert all((a == 3).all() for a in out.values()), (length, out)


WHO = kernel(
    "who",
    2,
    0,
    """int64_t *o = buf[1];
for (int64_t i = begin; i < end; i++) o[i] = pthread_self();
usleep(20000);""",
)
WHO = replace(WHO, text=f"unsigned long pthread_self(void);\nint usleep(unsigned);\n{WHO.text}")


def test_small_launches_of_a_wave_run_on_different_threads() -> None:
    """Each is too small for two threads, together they are not."""
    outputs = ("o0", "o1")
    rows = buffers(("x", F, (L,), "input"), *((o, "int64", (L,), "output") for o in outputs))
    long = Index.of(10**9)  # worth waking a worker for
    launches = tuple(replace(declared(launch(WHO, f"x {o}", (), L, 30000)), flops=long) for o in outputs)
    plan = HostPlan("who", ("x",), outputs, rows, {}, (SymbolSource("L", "x", 0),), (), (WHO,), launches)

    def threads_of(p: HostPlan) -> set[int]:
        got = build_program(p, threads=2).run({"x": np.zeros(4, F)})
        return {int(t) for o in outputs for t in got[o]}

    assert len(threads_of(plan)) == 1
    assert len(threads_of(join_waves(plan))) == 2


@pytest.fixture(scope="module")
def branches() -> HostPlan:
    """Plan three towers of two products each, their launches one by one."""
    nodes, weights = [], {}
    for k in "abc":
        nodes += [node("MatMul", f"x{k} v{k}", f"s{k}"), node("Softmax", f"s{k}", f"t{k}", axis=-1)]
        nodes += [node("MatMul", f"t{k} w{k}", f"y{k}")]
        weights |= {f"{w}{k}": RNG.standard_normal((48, 48)).astype(np.float32) for w in "vw"}
    made = model(nodes, {f"x{k}": ("float32", ["N", 48]) for k in "abc"}, ["ya", "yb", "yc"], weights)
    return plan_graph(import_model(made), options=Options(frozenset({"horizontal"})))


def of_towers(n: int) -> dict[str, np.ndarray]:
    return {f"x{k}": RNG.standard_normal((n, 48)).astype(np.float32) for k in "abc"}


@pytest.fixture(scope="module")
def joined(branches: HostPlan) -> Artifact:
    """Compile the towers with waves."""
    return build_artifact(join_waves(branches))[0]


def test_explain_and_profile_show_waves_and_launches(branches: HostPlan, joined: Artifact) -> None:
    assert plan_waves(branches) == len(branches.launches)
    program = open_program(joined, threads=2)
    explained = program.explain(N=40)
    assert max(map(len, explained.waves)) >= 3 and f"in {len(explained.waves)} wave" in str(explained)
    assert len(explained.waves) < len(branches.launches)
    assert sum(map(len, explained.waves)) == sum(x.tasks > 0 for x in explained.launches)
    times = program.profile(of_towers(40), repeats=1)
    assert len(times) == len(explained.launches) and all(t.nanoseconds > 0 for t in times if t.tasks > 0)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_trace_has_every_task_once_and_one_wave_after_the_other(joined: Artifact, threads: int) -> None:
    program = open_program(joined, threads=threads)
    explained = program.explain(N=40)
    spans = program.trace(of_towers(40), repeats=1)
    for k, x in enumerate(explained.launches):
        pieces = sorted((s.first, s.first + s.tasks) for s in spans if s.launch == k)
        ends = [0, *(end for _, end in pieces)]
        assert [begin for begin, _ in pieces] == ends[:-1] and ends[-1] == x.tasks, x.label
        assert all(s.label == x.label and s.kernel == x.kernel for s in spans if s.launch == k)
    assert {s.thread for s in spans} <= set(range(threads)) and spans == sorted(spans, key=lambda s: s.begin)
    for before, after in pairwise(sorted(spans, key=lambda s: (s.thread, s.begin))):
        assert before.thread != after.thread or before.end <= after.begin, "a thread does one thing at a time"
    wave = [x.wave for x in explained.launches]
    for before, after in pairwise(sorted({w for w in wave if w is not None})):
        last = max((s.end for s in spans if wave[s.launch] == before), default=0)
        assert all(s.begin >= last for s in spans if wave[s.launch] == after)


def plan_waves(plan: HostPlan) -> int:
    return len(wave_ranges(plan))


def test_waves_change_no_bit_of_a_model(branches: HostPlan, joined: Artifact) -> None:
    programs = [build_program(branches, threads=1), *(open_program(joined, threads=t) for t in (1, 2, 5))]
    for n in (1, 40):
        f = of_towers(n)
        first, *others = (p.run(f) for p in programs)
        for got in others:
            assert all(got[o].tobytes() == first[o].tobytes() for o in first)


@pytest.mark.parametrize("seeds", [slow(range(5)), slow(range(40, 45))])
def test_random_graphs_in_waves(seeds: range) -> None:
    """Independent graphs, so that many launches can be joined; small launches are shared out too."""
    graphs = [random_graph(s, f"s{s}_") for s in seeds]
    plan = plan_graph(union(graphs), options=Options(frozenset({"horizontal"})))
    joined = join_waves(plan)
    verify_waves(joined)
    assert len(joined.waves) < len(plan.launches)
    many = replace(joined, launches=tuple(replace(x, work=Index.of(10**9)) for x in joined.launches))
    programs = [build_program(plan, threads=1), build_program(many, threads=2), build_program(joined, threads=2)]
    for k in range(2):
        f = {n: a for g in graphs for n, a in random_feeds(g, k).items()}
        one, *others = (p.run(f) for p in programs)
        assert all(one[o].tobytes() == got[o].tobytes() for got in others for o in one)


TAKES = {
    n: kernel(
        f"takes{n}", n + 1, 0, f"{''.join(f'const float *a{k} = buf[{k}];' for k in range(n))} float *o = buf[{n}];"
    )
    for n in range(1, 4)
}
"""Kernels that read 1, 2, ... buffers and write the last one."""


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_random_plans_keep_dependences_and_memory(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 25))
    rows = []
    for k in range(count):
        read = data.draw(st.lists(st.integers(0, k), max_size=3, unique=True)) if k else []
        names = ["x" if j == 0 else f"t{j - 1}" for j in read] or ["x"]
        known = data.draw(st.booleans()) or data.draw(st.booleans())
        x = launch(TAKES[len(names)], " ".join([*names, f"t{k}"]), (), L, 100)
        rows.append(declared(x, data.draw(st.sampled_from("ab"))) if known else x)
    made = ((f"t{k}", F, (B,), "intermediate") for k in range(count))
    plan = HostPlan(
        "random", ("x",), (), buffers(("x", F, (L,), "input"), *made), {}, (), (), tuple(TAKES.values()), tuple(rows),
    )  # fmt: skip
    joined = join_waves(plan)
    verify_waves(joined)
    assert sorted(x.buffers[-1] for x in joined.launches) == sorted(x.buffers[-1] for x in rows)
    when = {plan.launches.index(joined.launches[k]): w for w, r in enumerate(wave_ranges(joined)) for k in r}
    maker = {x.buffers[-1]: k for k, x in enumerate(rows)}
    for k, x in enumerate(rows):
        assert all(when[maker[b]] < when[k] for b in x.buffers[:-1] if b in maker)
    assert _arena(joined) <= MEMORY_FACTOR * _arena(plan)


def _arena(plan: HostPlan) -> int:
    sizes = {b.name: B * 4 for b in plan.buffers.values() if b.role == "intermediate"}
    return arena_estimate(plan_slots(live_ranges(sizes, touched_by_wave(plan))))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_waves_with_several_callers_and_in_a_forked_child() -> None:
    program = build_program(join_waves(diamond()), threads=3)
    wrong: list[str] = []

    def call(seed: int) -> None:
        for i in range(20):
            f = {n: np.random.default_rng(seed + k).standard_normal(50 + 37 * i).astype(F) for k, n in enumerate("xyw")}
            got = program.run(f)
            if not np.array_equal(got["o"], (f["x"] + f["y"]) + (f["x"] + f["w"])):
                wrong.append(f"{seed} {i}")

    callers = [threading.Thread(target=call, args=(s,)) for s in range(3)]
    [t.start() for t in callers]
    [t.join() for t in callers]
    child = os.fork()
    if not child:
        call(7)
        os._exit(len(wrong) > 0)
    assert os.waitpid(child, 0)[1] == 0 and not wrong


def test_the_examples_still_agree() -> None:
    plan = example()
    writes = ("t0", "scaled", "t1", "total")
    plan = replace(plan, launches=tuple(replace(x, writes=(w,)) for x, w in zip(plan.launches, writes, strict=True)))
    program = build_program(join_waves(plan), threads=2)
    f = feeds(40, 31)
    for name, value in expected(**f).items():
        np.testing.assert_array_equal(program.run(f)[name], value)
    assert (plan.constants["w"] == WEIGHTS).all()
