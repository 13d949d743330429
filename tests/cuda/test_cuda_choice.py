"""Versions are chosen by estimates of their time: the estimates, the choices, and the host program's choice."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from onnx import helper

import polydyn
from polydyn.build.compiler import build_library
from polydyn.codegen.cuda.emit import LONG_SUFFIX
from polydyn.codegen.cuda.slots import is_fast, of_operation, of_value
from polydyn.codegen.cuda.work import Work
from polydyn.compiler import plan_program
from polydyn.errors import InputError, UnsupportedError
from polydyn.fusion.plan import FusionPlan
from polydyn.gpu import hardware
from polydyn.lowering.place_cuda import serves
from polydyn.program.assemble import build_program
from polydyn.program.estimates import estimated, launch_time, memory_time, resident_blocks, step_time
from polydyn.program.evaluation import Evaluation, evaluation_function
from polydyn.program.plan import HostPlan, Launch
from polydyn.runtime.c import sources
from polydyn.runtime.cuda.program import CudaProgram
from polydyn.schedules.expr import cast, const, load, op
from polydyn.schedules.index import ZERO, Atom, Index
from polydyn.shapes.sizes import Sizes
from polydyn.testing.choice import choose, estimates, may_run
from tests.support.cuda_groups import placed, plan_of
from tests.support.cuda_programs import add, one_launch, version, with_block
from tests.support.programs import B
from tests.support.tiny import model, node

DEVICES = {"sm_90a": hardware.load("h200"), "sm_80": hardware.load("a100")}
H200 = DEVICES["sm_90a"]
SKINNY_VERSIONS = ("gemv", "mma_16x64", "split_mma_16x64", "counted_8_mma_16x64", "wgmma_64x")
V = Index.of


@pytest.fixture(autouse=True, scope="module")
def device() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLYDYN_LIBCUDA", "emulated")
        yield


def product(dtype: str = "float16", **dims: int) -> Any:
    """Build ``y = x w`` of [M, K] and [K, N]; dims passed as arguments are constants."""
    m, k, n = (dims.get(x, x) for x in "MKN")
    return model([node("MatMul", "x w", "y")], {"x": (dtype, [m, k]), "w": (dtype, [k, n])}, ["y"])


@functools.cache
def planned(arch: str, dtype: str = "float16") -> HostPlan:
    """Plan a product of any sizes."""
    return plan_program(product(dtype), target=f"cuda:{arch}")


@functools.cache
def launch(arch: str, dtype: str = "float16") -> Launch:
    """Return the only launch of a product, with estimates."""
    (one,) = estimated(planned(arch, dtype), DEVICES[arch]).launches
    return one


def sizes(arch: str, m: int, k: int, n: int) -> dict[str, int]:
    return {"nth": DEVICES[arch].multiprocessors, "M": m, "K": k, "N": n}


def chosen_version(arch: str, m: int, k: int, n: int, dtype: str = "float16") -> str:
    return choose(launch(arch, dtype), sizes(arch, m, k, n), DEVICES[arch]).name


# -- choices -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", DEVICES)
@pytest.mark.parametrize(("k", "n"), [(768, 768), (768, 3072), (4096, 4096)])
def test_few_rows_take_versions_for_few_rows(arch: str, k: int, n: int) -> None:
    for m in (1, 2):
        assert chosen_version(arch, m, k, n).startswith("gemv_2"), m
    for m in (3, 8, 9, 12, 16):
        assert chosen_version(arch, m, k, n).startswith(SKINNY_VERSIONS), m


def test_it_is_not_the_first_that_fits() -> None:
    """sm_90a used to give tiles of 128 rows and 256 columns to a product of 16 rows."""
    one, at = launch("sm_90a"), sizes("sm_90a", 16, 768, 16384)
    first = next(v for v in one.candidates if may_run(v, at, H200))
    chosen, times = choose(one, at, H200), estimates(one)
    assert first.name.startswith("wgmma_128x256") and chosen.name.startswith("mma_16x64")
    assert times[chosen.name].evaluate(at) < times[first.name].evaluate(at)


@pytest.mark.parametrize(("arch", "large"), [("sm_90a", "wgmma_128x256"), ("sm_80", "mma_128x128")])
def test_many_rows_take_the_largest_tile(arch: str, large: str) -> None:
    whole = DEVICES[arch].multiprocessors * 128
    assert chosen_version(arch, whole, 4096, 4096).startswith(large)
    assert len({chosen_version(arch, m, 1024, 1024).split("_4_")[0] for m in (1, 16, 256, whole)}) >= 3


def test_clusters_where_bytes_from_l2_count() -> None:
    """A short reduction takes ping-pong tiles; one row of clusters does not pay, nor do clusters if bytes are free."""
    shapes = [sizes("sm_90a", *x) for x in ((8192, 4096, 8192), (4096, 768, 3072), (256, 512, 512))]
    names = [choose(launch("sm_90a"), at, H200).name for at in shapes]
    assert names[0].startswith("wgmma_128x256x64_4_cluster") and names[1].startswith("wgmma_128x128x64_5_turns_cluster")
    (free,) = estimated(planned("sm_90a"), replace(H200, costs=replace(H200.costs, l2_bytes=10**6))).launches
    assert not any("cluster" in x for x in (names[2], *(choose(free, at, H200).name for at in shapes)))


@pytest.mark.parametrize("arch", DEVICES)
def test_long_reductions_of_small_results_are_split(arch: str) -> None:
    for m, k, n in ((64, 16384, 64), (16, 16384, 128), (128, 32768, 128)):
        assert chosen_version(arch, m, k, n).startswith("split"), (m, k, n)
    assert arch != "sm_90a" or "_parts_" in chosen_version(arch, 256, 8192, 1024)
    at = sizes(arch, 64, 512, 3072)
    fitting = [v.name for v in launch(arch).candidates if may_run(v, at, DEVICES[arch])]
    assert any(n.startswith("split") for n in fitting) and not chosen_version(arch, 64, 512, 3072).startswith("split")


def test_single_precision_too() -> None:
    assert chosen_version("sm_80", 1, 768, 3072, "float32").startswith("gemv")
    assert chosen_version("sm_80", 13824, 768, 3072, "float32").startswith("fma_128")
    assert chosen_version("sm_80", 32, 3072, 768, "float32").startswith("split_fma_8x64")
    assert chosen_version("sm_80", 256, 768, 768, "float32").startswith("fma_32x32")
    assert chosen_version("sm_80", 64, 16384, 64, "float32").startswith("split")


def test_rows_of_a_block_or_of_a_warp() -> None:
    softmax = model([node("Softmax", "x", "y", axis=-1)], {"x": ("float32", ["M", "N"])}, ["y"])
    (one,) = estimated(plan_program(softmax, target="cuda:sm_90a"), H200).launches

    def name(m: int, n: int) -> str:
        return choose(one, {"nth": 132, "M": m, "N": n}, H200).name

    assert name(100_000, 63) == name(1000, 31) == "warp"
    assert name(8, 4095) == name(128, 769) == "block" and name(4, 100_001) == "block recompute"
    assert name(128, 768) == name(4, 100_000) == "block_wide"


# -- the estimates ---------------------------------------------------------------------------------------------------

HUGE = ((2**31 - 1, 8, 64), (8, 2**31 - 8, 64), (64, 64, 2**31 - 8), (2**21, 2**21, 2**21), (2**31 - 1, 1, 2**13),
        (1, 2**40, 1))  # fmt: skip
UGLY = [(m, k, n) for m in (0, 1, 2, 9, 65, 1024) for k, n in ((0, 1), (1, 1), (7, 65), (64, 0), (1000, 8), (31, 200))]


def checked(x: Index, at: Mapping[str, int]) -> int:
    """Evaluate like C: every term, factor by factor, and every sum must fit 64 bits."""

    def fit(v: int) -> int:
        assert -(2**63) <= v < 2**63, f"{x} overflows"
        return v

    def atom(a: str | Atom) -> int:
        if isinstance(a, str):
            return at[a]
        args = [checked(y, at) for y in a.args]
        if a.kind == "floordiv":
            return args[0] // args[1] if args[1] else 0
        return min(args) if a.kind == "min" else max(args)

    total = 0
    for monomial, coefficient in sorted(x.terms.items(), key=lambda t: (-len(t[0]), str(t[0]))):
        value = 1
        for a in monomial:
            value = fit(value * atom(a))
        total = fit(total + fit(value * coefficient))
    return total


@pytest.mark.parametrize(("arch", "dtype"), [("sm_90a", "float16"), ("sm_80", "float32")])
def test_estimates_of_all_sizes_fit_64_bits(arch: str, dtype: str) -> None:
    versions = {x: name for name, x in estimates(launch(arch, dtype)).items()}
    assert len(versions) >= 5, "versions of one tile may have one"
    for m, k, n in (*HUGE, *UGLY):
        at = sizes(arch, m, k, n)
        for estimate, name in versions.items():
            assert checked(estimate, at) == estimate.evaluate(at) > 0, (name, at)
        choose(launch(arch, dtype), at, DEVICES[arch])  # some version runs


def test_more_work_takes_longer() -> None:
    work = Work(V("K").ceildiv(32), 128, "f16", 2**20, 2**14, 2**14, 100, 1, 3, 2**14)

    def ns(k: int, blocks: int, nth: int = 132) -> int:
        t = launch_time(work, 256, V("G"), V(65536), ZERO, H200)
        return t.evaluate({"K": k, "G": blocks, "nth": nth})

    assert ns(0, 0) < ns(0, 1) < ns(32, 1) < ns(3200, 1) == ns(3200, 132) < ns(3200, 133 * 4) < ns(3200, 133 * 8)
    assert ns(3200, 132 * 8) > ns(3200, 132 * 8, 264), "twice the multiprocessors"
    assert ns(2**50, 2**50) < 2**62 and ns(2**50, 1) < 2**32, "what is larger than all that is told apart"
    assert resident_blocks(256, 128, V(65536), H200) == 2 and resident_blocks(256, 128, V(10**6), H200) == 1
    assert resident_blocks(256, 255, V("s"), H200).evaluate({"s": 1024}) == 1
    full, alone = step_time(work, 256, H200)
    assert full < alone and step_time(replace(work, by_warps=False), 256, H200)[0] < full, "wgmma reaches the peak"


def test_the_end_of_a_block_takes_time() -> None:
    """Arithmetic and bytes of epilogues; ping-pong tiles pay only the part that the next tile's steps do not hide."""
    work = Work(V("K"), 168, "f16", 2**22, traffic=2**15, flight=3, elements=2**14, by_warps=False)

    def ns(k: int, blocks: int = 132, tiles: int = 1, **changed: int) -> int:
        made = replace(work, tiles=V("T") if tiles > 1 else V(1), **changed)  # type: ignore[arg-type]
        at = {"K": k, "G": blocks, "nth": 132, "T": tiles}
        return launch_time(made, 384, V("G"), V(200_000), ZERO, H200).evaluate(at)

    ends = ({}, {"results": 2**17}, {"last": 10 * 2**14 // 32}, {"last": 100 * 2**14 // 32})
    assert ns(12) < ns(12, **ends[1]) < ns(12, **ends[3]) and ns(12, **ends[2]) < ns(12, **ends[3])
    heavy = ends[3]
    assert ns(12, tiles=9, **heavy) < ns(12, blocks=9 * 132, **heavy), "the end of one beside the steps of the next"
    assert ns(200, tiles=9, **heavy) - ns(200, tiles=8, **heavy) == ns(200, tiles=9) - ns(200, tiles=8), "hidden"
    assert ns(1, tiles=9, **heavy) - ns(1, tiles=8, **heavy) > ns(1, tiles=9) - ns(1, tiles=8), "longer than the steps"


def test_slots_of_epilogues() -> None:
    x, y = load("x", (V("i"), V("j")), "float32"), load("y", (V("i"), V("j")), "float32")
    gelu = op("mul", x, op("add", const(1.0, "float32"), op("erf", op("div", x, const(1.4, "float32")))))
    assert of_value(gelu, True) == 3 + of_operation("erf", True) < of_value(gelu, False)
    assert of_value(op("div", x, y), True) == of_operation("div", True) > 1 == of_value(op("max", x, y), True)
    assert of_operation("acosh", True) > 9, "one that nobody counted is not cheap"
    half = op("mul", x, cast(const(0.5, "float16"), "float32"))
    assert of_value(op("add", half, y), True) == 1 == of_value(half, True), (
        "a constant's conversion, and a product's sum"
    )
    assert of_value(op("add", half, op("mul", y, y)), True) == 2
    assert is_fast(["float16", "int64"]) and not is_fast(["float16", "float32"]) and not is_fast(["int8"])
    block = next(c.block for c in planned("sm_80").launches[0].candidates if c.name.startswith("mma_128x128"))
    assert block is not None and block.work is not None
    assert block.work.results == 128 * 128 * 2 and block.work.last > 128 * 128 // 32


def test_what_l2_holds_is_not_read_from_memory() -> None:
    """A workspace that fits is read from L2; operands that do not fit are read again, except reads that blocks share.
    """
    work = Work(V(64), 168, "f16", 2**10, traffic=2**15, flight=3, by_warps=False)

    def ns(moved: int, cached: int, strip: int = 8) -> int:
        x = memory_time(replace(work, strip=strip), V(132 * 40), V(40), V(1), V(moved), V(cached), H200)
        return x.evaluate({"nth": 132})

    small, large = H200.l2_bytes // 2, H200.l2_bytes * 8
    assert 0 < ns(0, small) < ns(small, 0) and ns(0, large) > ns(0, small) * 16
    assert ns(small, 0) == ns(small, 0, strip=0) and ns(large, 0) > ns(large, 0, strip=0)
    assert ns(large, 0, strip=1) > ns(large, 0), "wide strips share more"


def test_shared_memory_is_given_in_units() -> None:
    """Three blocks of a third of it exceed the memory: each has a reserve, and is rounded up to 128 bytes."""
    third = H200.smem_per_sm // 3 - H200.smem_reserved_per_block
    held = [resident_blocks(128, 32, V(n), H200) for n in (third, third + 1)]
    assert held == [3, 2] == [H200.resident_blocks(128, 32, n) for n in (third, third + 1)]


def test_the_compilers_registers_count() -> None:
    plan = planned("sm_90a")
    name = next(v.kernel for v in plan.launches[0].candidates if v.name.startswith("gemv_8"))

    def ns(registers: dict[str, int]) -> int:
        said = {name: {arch: {"registers": r} for arch, r in registers.items()}}
        (one,) = estimated(plan, H200, said).launches
        gemv = next(v for v in one.candidates if v.kernel == name)
        return estimates(one)[gemv.name].evaluate({"nth": 4, "M": 8, "K": 1024, "N": 1024})

    assert ns({"sm_90a": 250}) > ns({"sm_90a": 100}) == ns({"sm_80": 250}), "one block of a multiprocessor, or two"


def test_versions_whose_products_ptxas_serialises_are_not_launched() -> None:
    plan = planned("sm_90a")
    env = {"nth": 132, "M": 4096, "K": 1024, "N": 1024}

    def chosen(*serialised: str) -> tuple[str, tuple[str, ...]]:
        made = estimated(plan, H200, {k: {"sm_90a": {"serialised": 1}} for k in serialised})
        (one,) = made.launches
        return choose(one, env, H200).kernel, made.notes

    best, _ = chosen()
    other, notes = chosen(best)
    assert other != best and f"{best} is not launched: ptxas serialises its products (C75xx)" in notes
    assert chosen(*(c.kernel for c in plan.launches[0].candidates))[0] == best, "there is no other"


def test_devices_of_targets() -> None:
    named = {"sm_80": "A100", "sm_86": "3090", "sm_89": "4090", "sm_90a": "H200", "sm_100": "H200", "emulated": "H200"}
    assert all(name in hardware.device_of(f"cuda:{t}").name for t, name in named.items())
    assert hardware.device_of("cuda") == H200
    with pytest.raises(UnsupportedError, match="cuda:sm_70"):
        hardware.device_of("cuda:sm_70")


def test_what_no_device_can_run_is_refused() -> None:
    large = replace(version("a", V(1)), scratch=V(10**6))
    (one,) = one_launch(large, kernels=(add("a"),)).launches
    with pytest.raises(InputError, match="no kernel runs at this size"):
        choose(one, {"nth": 1, "B": 1}, H200)
    hopper = with_block(version("a", V(1)), arch="sm_90a")
    assert may_run(hopper, {"B": 1}, H200) and not may_run(hopper, {"B": 1}, DEVICES["sm_80"])


# -- versions --------------------------------------------------------------------------------------------------------


def gemm() -> FusionPlan:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    return plan_of(nodes, {"x": ("M", "K"), "w": ("K", "N")}, ["y"], dtype="float16")


def test_ten_tiles_at_most_and_a_total_version() -> None:
    (p,) = placed(gemm(), "sm_90a")
    tiles = {"x".join(k.version.split("x")[:2]) for k in p.kernels if "gemv" not in k.version}
    assert tiles == {"split_mma_64x64", "split_mma_16x64", "split_wgmma_128x128", "wgmma_128x256", "wgmma_128x128",
                     "wgmma_64x128", "wgmma_64x64", "mma_128x128", "mma_64x64", "mma_16x64"}  # fmt: skip
    last = p.kernels[-1]
    assert last.version == "mma_64x64x32_4_2_2" + LONG_SUFFIX and not last.multiples and not last.conditions


def test_versions_that_others_serve_for_are_left_out() -> None:
    few = {n: Sizes(low=1, high=512, multiple=8) for n in "MKN"}
    (one,) = plan_program(product(), target="cuda:sm_80", dims=few).launches
    names = [v.name for v in one.candidates]
    assert not any(n.endswith(LONG_SUFFIX) for n in names) and len(names) == len(set(names))
    assert [n.split("x")[0] for n in names if n.startswith("mma")] == ["mma_128", "mma_64", "mma_16", "mma_64"]
    assert all("_16_16" in n for n in names if "mma" in n) and not one.candidates[-1].conditions
    (p,) = placed(gemm())
    wide, narrow, small = (next(k for k in p.kernels if k.version.startswith(f"mma_{w}"))
                           for w in ("128x128x32_4_16_16", "128x128x32_4_2_2", "64x64x32_4_2_2"))  # fmt: skip
    free = replace(wide, multiples=(), conditions=(), scratch=V(1024))
    assert serves(free, narrow) and not serves(free, small), "another tile may be faster"
    assert not serves(wide, narrow) and not serves(narrow, wide), "may not be launched everywhere, takes longer"


# -- the host program ------------------------------------------------------------------------------------------------


def test_the_host_program_chooses_what_the_model_says() -> None:
    """Loops that are fastest at different sizes, one that is allowed only at some, one that is equal to another."""
    steps = {"flat": V(1000), "slope": B * 20, "stairs": B // 16 * 500 + 40, "even": V(0), "tie": V(1000)}
    works = {n: Work(s, 32, "f32", 1000) for n, s in steps.items()}
    versions = [replace(with_block(version("a", V(k)), work=w), name=n) for k, (n, w) in enumerate(works.items())]
    versions[3] = replace(versions[3], conditions=((B, "%==", V(7)),))
    plan = one_launch(*versions, kernels=(add("a"),))
    program = build_program(plan, target="cuda:emulated")
    (told,) = estimated(plan, H200).launches
    ran = set()
    for b in (1, 2, 3, 7, 9, 16, 33, 40, 63, 64, 65, 130, 300):
        at = {"nth": 4, "B": b}
        chosen = choose(told, at, H200)
        least = estimates(told)[chosen.name].evaluate(at)
        by = program.run({"x": np.zeros((b, 32), np.float32)})["y"]
        assert (by == int(chosen.symbols[0])).all(), b
        (said,) = program.explain(B=b).launches
        assert said.choices["ns"] == least
        lines = [s for s in said.selection if not s.startswith("not ")]
        times = [int(s.split(" ns")[0].rsplit(" ", 1)[1]) for s in lines]
        assert lines[0].startswith(f"taken: {chosen.name}, {least} ns, the least of ") and times == sorted(times)
        ran.add(chosen.name)
    assert ran == {"flat", "slope", "stairs", "even"}
    details = program.explain(B=300).details()
    assert "not even: B %== 7 does not hold: 300, 7" in details and "the first of 2 equal ones" in details
    assert "estimated for NVIDIA H200" in "\n".join(program.explain(B=1).notes)
    assert f"ns={least}" in str(program.explain(B=300))


@pytest.mark.parametrize(("arch", "dtype"), [("sm_90a", "float16"), ("sm_80", "float32")])
def test_the_c_of_the_host_program_says_the_same(arch: str, dtype: str) -> None:
    """The host program's estimates of every version at thousands of sizes; nothing overflows."""
    every = list(dict.fromkeys(estimates(launch(arch, dtype)).values()))
    values = Evaluation(["M", "K", "N"])
    positions = [values.of(e) for e in every]
    copies = " ".join(f"out[{k}] = v[{p}];" for k, p in enumerate(positions))
    text = f"""#include "internal.h"
{evaluation_function("times", values.lines)}
__attribute__((visibility("default"))) int at(const int64_t *sizes, int64_t *out) {{
    int64_t v[{values.count}] = {{sizes[0], sizes[1], sizes[2], sizes[3]}};
    int overflow = times(v);
    {copies}
    return overflow;
}}
"""
    headers = {n: t for n, t in sources().items() if n in ("internal.h", "polydyn.h")}
    loaded = ctypes.CDLL(str(build_library({"times.c": text}, headers).file()))
    out = (ctypes.c_int64 * len(every))()
    steps = (0, 1, 2, 8, 16, 63, 64, 65, 129, 768, 4096)
    for m, k, n in (*HUGE, *itertools.product(steps, steps, steps)):
        at = sizes(arch, m, k, n)
        assert loaded.at((ctypes.c_int64 * 4)(m, k, n, at["nth"]), out) == 0, (m, k, n)
        if (m + k + n) % 7 == 0 or m > 4096:  # Python takes a thousand times as long
            assert list(out) == [e.evaluate(at) for e in every], (m, k, n)


def test_choices_are_remembered() -> None:
    program = polydyn.compile(model([node("Relu", "x", "y")], {"x": ("float32", ["N"])}, ["y"]), target="cuda:emulated")
    assert isinstance(program, CudaProgram)
    program.graphs = 0  # repeated runs need no choice
    for n in (3, 5, 3, 5, 0, 3, 0):
        x = np.arange(-1.0, n - 1, dtype=np.float32)
        assert np.array_equal(program.run({"x": x})["y"], np.maximum(x, 0))
    assert program.counters["choices"] == 3
    for n in range(20, 28):
        program.run({"x": np.zeros(n, np.float32)})
    program.run({"x": np.zeros(3, np.float32)})
    assert program.counters["choices"] == 3 + 8 + 1, "the last eight"


def test_a_product_takes_other_tiles_at_other_sizes() -> None:
    program = polydyn.compile(product(K=64, N=128), target="cuda:emulated")
    assert isinstance(program, CudaProgram)
    r, used = np.random.default_rng(0), []
    w = r.standard_normal((64, 128)).astype(np.float16)
    for m in (1, 12, 300, 12, 0):
        x = r.standard_normal((m, 64)).astype(np.float16)
        got, again = (program.run({"x": x, "w": w})["y"] for _ in range(2))
        assert np.abs(got.astype(np.float64) - x.astype(np.float64) @ w).max(initial=0) < 0.1
        assert np.array_equal(got, again), "equal bits"
        (ran,), (said,) = program.profile({"x": x, "w": w}, 1), program.explain(M=m).launches
        assert m == 0 or ran.kernel == said.kernel
        used.append(said.kernel)
    assert len(set(used[:3])) == 3 and used[1] == used[3] and "mma_16x64" in used[1]
