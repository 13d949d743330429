"""Tuning for CUDA targets: tiles and their rules, searches without a device and on the CPU libcuda, compilations."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

import polydyn
from polydyn.cli import main
from polydyn.codegen.cuda.emit import LONG_SUFFIX
from polydyn.codegen.cuda.limits import broken_rule
from polydyn.codegen.cuda.tile import CudaTile
from polydyn.codegen.cuda.versions import IMMA_TILES, MORE_TILES, TF32_TILES, TILES, TileFactors
from polydyn.codegen.kernel import UNIT
from polydyn.compiler import Options, plan_program
from polydyn.errors import BuildError, ScheduleError, UnsupportedError
from polydyn.gpu import hardware
from polydyn.gpu.compiler import compiler_version
from polydyn.graph.expand import import_model
from polydyn.lowering.contract import ContractGroup, lower_contract
from polydyn.measure import tune
from polydyn.measure.cuda import CudaTuningBackend, compiler_refusal, find_device
from polydyn.measure.cuda_bench import DeviceBench, ModelBench, TileKernels
from polydyn.measure.tuning_backend import SearchSettings
from polydyn.program.assemble import build_program
from polydyn.program.estimates import estimated
from polydyn.program.plan import HostPlan
from polydyn.schedules.decision import ArgMin, Leaf, Split, cheapest
from polydyn.schedules.index import Index
from polydyn.search.backbone import Problem, Tile
from polydyn.search.explorers.explore import in_order
from polydyn.search.outcomes import Search, search_record
from polydyn.search.records import Records
from polydyn.search.spaces.loop_model import loop_model
from polydyn.search.spaces.ukernel import ukernel_space
from polydyn.search.strategies import strategy
from polydyn.search.tasks.cuda import CudaTask, cuda_task_of, hardware_of
from polydyn.testing import models
from polydyn.testing.choice import choose, estimates
from tests.support.cuda_groups import plan_of
from tests.support.tiny import model, node

TRIALS = 4
A100 = hardware.load("a100")
W = np.random.default_rng(3).standard_normal((48, 40)).astype(np.float32)


@pytest.fixture(autouse=True, scope="module")
def device() -> Iterator[None]:
    """Run programs on the CPU libcuda."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLYDYN_LIBCUDA", "emulated")
        yield


@pytest.fixture
def nothing_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYDYN_LIBCUDA", "libno-such-cuda.so.1")


def linear(dtype: str = "float32") -> onnx.ModelProto:
    """Build ``y[M, 40] = relu(x[M, 48] @ w)``."""
    nodes = [node("MatMul", "x w", "t"), node("Relu", "t", "y")]
    return model(nodes, {"x": (dtype, ["M", 48])}, ["y"], {"w": W.astype(dtype)})


def task_of(target: str, dtype: str = "float32", m: onnx.ModelProto | None = None) -> CudaTask:
    return CudaTuningBackend(target).tasks(import_model(m or linear(dtype)), Options())[0].task


def searched(path: Path) -> Path:
    """Return a record file of a search without a device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLYDYN_LIBCUDA", "libno-such-cuda.so.1")
        (group,) = tune(linear(), path, target="cuda:emulated", trials=TRIALS)
    assert group.source == "model" and group.measured == 0 and 1 <= group.binaries <= 8
    return path


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return searched(tmp_path_factory.mktemp("records") / "tuned.db")


# -- tiles -------------------------------------------------------------------------------------------------------------


def test_default_tiles_break_no_rule() -> None:
    for dtype, tiles in TILES.items():
        assert [broken_rule(t, (dtype, dtype)) for t in tiles] == [None] * len(tiles)
    assert [broken_rule(t, ("float32", "float32")) for t in TF32_TILES] == [None, None]
    assert [broken_rule(t, ("float16", "float16")) for t in MORE_TILES] == [None] * 3
    assert [broken_rule(t, ("int8", "uint8")) for t in IMMA_TILES] == [None, None]


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"instruction": "fma"}, "fma does not multiply float16"), ({"instruction": "lanes"}, "does not multiply"),
        ({"bm": 96}, "powers of two"), ({"wn": 16}, "multiples of 16 x 32"), ({"bk": 8}, "a multiple of 16"),
        ({"wm": 48}, "units divide the block"), ({"stages": 1}, "at least two stages"), ({"wm": 0}, "powers of two"),
        ({"bm": 512, "bn": 512, "wm": 16, "wn": 32}, "at most 1024 threads"), ({"blocks": 8}, "registers of a thread"),
        ({"wm": 128, "wn": 128}, "registers of a thread"),
    ],
)  # fmt: skip
def test_a_tile_that_breaks_a_rule_is_refused_by_name(change: dict[str, Any], rule: str) -> None:
    wrong = broken_rule(replace(CudaTile("mma", 128, 128, 32, 64, 32, 4, 2), **change), ("float16", "float16"))
    assert wrong is not None and rule in wrong


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_tuples_are_tiles_and_spaces_keep_their_rules(dtype: str) -> None:
    task = task_of("cuda:sm_80", dtype)
    for tile in task.kernel.defaults:
        assert replace(task.tile(task.tuple_of(tile)), blocks=tile.blocks) == tile
    space = loop_model(task.backbone, hardware_of(A100)).within(task.refusal)
    assert len(space) > 20 and task.defaults[-1] in space.position
    for t in space.tiles[::7]:
        tile = task.tile(t)
        assert broken_rule(tile, task.kernel.product.dtypes) is None
        assert A100.resident_blocks(tile.threads, 0, task.shared(tile)) >= tile.blocks
    built = next(k for x in task.kernel.forms(tile) for k in x.build())
    assert int(built.scratch) == task.shared(tile)
    with pytest.raises(ScheduleError, match="two stages"):
        task.tile(replace(t, compile=(*t.compile[:-1], ("stages", 1))))
    with pytest.raises(ScheduleError, match="powers of two"):
        space.within(lambda tile: "powers of two")


def test_every_type_has_its_instruction() -> None:
    kinds = {"float32": "fma", "float16": "mma", "bfloat16": "mma", "int8": "imma", "tf32": "tf32"}
    found = []
    for name in kinds:
        dtype = {"tf32": "float32"}.get(name, name)
        plan = plan_of([node("MatMulInteger" if name == "int8" else "MatMul", "x w", "y")],
                       {"x": ("M", 48), "w": (48, "N")}, ["y"], dtype=dtype)  # fmt: skip
        form = lower_contract(plan, plan.groups[0], 0)
        assert isinstance(form, ContractGroup)
        task = cuda_task_of("key", form, "cuda:sm_80", tf32=name == "tf32")
        assert task.key.dtype == task.backbone.dtype == name
        assert not any(map(task.refusal, task.defaults))
        found.append(task.tile(task.defaults[-1]).instruction)
    assert found == list(kinds.values())


def test_several_reductions_are_one_loop() -> None:
    x, y = ("float16", ["M", 4, 16]), ("float16", ["N", 4, 16])
    products = model([node("Einsum", "x y", "z", equation="mab,nab->mn")], {"x": x, "y": y}, ["z"])
    task = task_of("cuda:sm_80", m=products)
    assert [x.extent for x in task.backbone.loops] == [None, None, 64]
    assert str(task.extents[task.loops[2]]) == "64"


def test_the_description_is_the_data_files() -> None:
    found = hardware_of(A100)
    assert (found.units, found.local_bytes, found.unit_threads) == (108, A100.smem_per_sm, 2048)
    assert found.peak("float16") == pytest.approx(311.9e12) and found.peak("tf32") == pytest.approx(155.9e12)
    assert [i.name for i in found.usable("bfloat16")] == ["mma"] and found.usable("int8")[0].kind == "tensor"
    slice_of_it = hardware.existing("cuda:sm_80", A100.name, 54)
    assert slice_of_it.peak_tflops["f32"] == pytest.approx(A100.peak_tflops["f32"] / 2)
    assert hardware.existing("cuda:sm_80", A100.name, 108) == A100
    assert hardware.existing("cuda:sm_80", "NVIDIA A30", 56).smem_per_sm == A100.smem_per_sm


# -- without a device --------------------------------------------------------------------------------------------------


def test_a_search_without_a_device_says_so_and_resumes(records: Path, tmp_path: Path, nothing_there: None) -> None:
    assert find_device("cuda:emulated")[1] is False
    with Records.open(tmp_path / "copy.db") as copy:
        copy.merge(records)
        before = copy.digest()
        assert {r.source for r in copy.rows()} == {"model"}
        assert {r.hardware.name for r in copy.rows()} == {"NVIDIA H200"}
    with Records.open(searched(tmp_path / "copy.db")) as copy:
        assert copy.digest() == before


def test_what_has_no_tiles_is_refused_by_name(tmp_path: Path, nothing_there: None) -> None:
    """FTuner's uKernels are tiles of threads: CUDA cores have them, tensor cores do not."""
    block = (("b.i0", 64), ("b.i1", 64), ("b.j0", 16))
    threads = Tile((*block, ("t.i0", 4), ("t.i1", 4), ("t.j0", 1)))
    tile = task_of("cuda:sm_80").tile(threads)
    assert (tile.instruction, tile.threads, tile.stages) == ("fma", 256, 4)
    half = task_of("cuda:sm_80", "float16")
    assert half.refusal(threads) == "mma has no tiles of threads"
    with pytest.raises(ScheduleError, match="mma has no tiles of threads rejected"):
        ukernel_space(half.backbone, hardware_of(A100), [half.backbone.sizes({"i0": 64})], generator=half.refusal)
    row = model([node("MatMul", "x w", "y")], {"x": ("float32", ["B", 1, 48])}, ["y"], {"w": W[:, :1]})
    assert CudaTuningBackend("cuda:sm_80").tasks(import_model(row), Options()) == []
    for call in (tune, lambda m, r, target: plan_program(m, target=target, records=r)):
        with pytest.raises(UnsupportedError, match="several architectures"):
            call(linear(), written(tmp_path / "r.db", task_of("cuda:sm_80")), target="cuda")


def test_what_the_compiler_refuses_is_a_record_and_not_kept(
    tmp_path: Path, nothing_there: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[Tile] = []

    def refuse(model: ModelBench, tile: Tile) -> str | None:
        if not refused:
            refused.append(tile)
        return "spills 4 bytes" if tile in refused else None

    monkeypatch.setattr("polydyn.measure.cuda.compiler_refusal", refuse)
    tune(linear("float16"), tmp_path / "r.db", target="cuda:sm_80", trials=TRIALS)
    with Records.open(tmp_path / "r.db") as opened:
        (failed,) = (r for r in opened.rows(kind="failed"))
        (found,) = (r for r in opened.rows(kind="search"))
    assert failed.tile == refused[0] and failed.note == "spills 4 bytes" and failed.source == "model"
    assert [failed.tile.compile, failed.tile.launch] not in json.loads(found.note)["tiles"]


def test_the_compiler_rules_out_what_spills() -> None:
    task = task_of("cuda:sm_80", "float16")
    model = ModelBench(TileKernels(task), A100, hardware_of(A100))
    try:
        compiler_version()
    except BuildError:
        pytest.skip("no CUDA compiler")
    small = task.defaults[-1]
    assert compiler_refusal(model, small) is None
    text = model.first(small)
    tight = replace(text, text=text.text.replace(f", {text.device.threads}, ", f", {text.device.threads}, 4 * "))
    model.kernels._texts[small, 0] = (tight,)
    assert "bytes of registers" in str(compiler_refusal(model, small))


# -- compiling ---------------------------------------------------------------------------------------------------------


@functools.cache
def plain(target: str, dtype: str) -> HostPlan:
    return plan_program(linear(dtype), target=target)


def names(plan: HostPlan) -> list[str]:
    (launch,) = plan.launches
    return [v.name for v in launch.candidates]


def check(program: polydyn.Program, dtype: str, m: int) -> None:
    x = np.random.default_rng(m).standard_normal((m, 48)).astype(dtype)
    want = np.maximum(x.astype(np.float64) @ W.astype(dtype).astype(np.float64), 0)
    tolerance = {"float32": 1e-4, "float16": 2e-2}[dtype]
    np.testing.assert_allclose(program.run({"x": x})["y"], want, rtol=tolerance, atol=tolerance)


def test_compiled_with_records_it_is_right_and_equal(records: Path, tmp_path: Path) -> None:
    program = polydyn.compile(linear(), target="cuda:emulated", records=records)
    for m in (0, 37):
        check(program, "float32", m)
    text = program.explain(M=37).details()
    assert "tuned by polydyn for NVIDIA H200" in text and "ranked by an analytical model without a device" in text
    program.save(tmp_path / "a")
    polydyn.compile(linear(), target="cuda:emulated", records=records).save(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_convolution_keeps_tiles_and_is_right(tmp_path: Path, nothing_there: None) -> None:
    made = models.convolution("Conv", 8, 32, (3, 3), (2, 2), (), (1, 1))
    (group,) = tune(made, tmp_path / "r.db", target="cuda:emulated", trials=TRIALS)
    assert group.tuples and group.source == "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLYDYN_LIBCUDA", "emulated")
        program = polydyn.compile(made, target="cuda:emulated", records=tmp_path / "r.db")
        x = np.random.default_rng(0).standard_normal((2, 8, 9, 6), np.float32)
        want = polydyn.compile(made).run({"x": x})["y"]
        np.testing.assert_allclose(program.run({"x": x})["y"], want, rtol=1e-4, atol=1e-4)
    assert "tuned by polydyn" in program.explain(N=2, H=9, W=6).details()


def test_a_kept_tile_runs_beside_what_keeps_its_group_total(tmp_path: Path) -> None:
    task = task_of("cuda:emulated", "float16")
    sizes = {"b": (32, 64, 32), "w": (16, 64, 16), "v": (16, 32, 16)}
    levels = [(f"{x}.{n}", v) for x, s in sizes.items() for n, v in zip(task.loops, s, strict=True)]
    tile = Tile((*levels, ("stages", 3)))
    found = Search("polydyn", (tile,), 1, hardware_of(task.device), None, (1,), "measured")
    plan = plan_program(linear("float16"), target="cuda:emulated", records=written(tmp_path / "r", task, found))
    own = names(plan)
    assert [n for n in own if " of " in n] == [f"mma_32x64x32_3_16_16_wide of 16x64{x}" for x in ("", LONG_SUFFIX)]
    rest = [n for n in own if " of " not in n and not n.endswith(LONG_SUFFIX)]
    tiles = ("128x128x64_4_wide", "128x64x64_4_wide", "64x64x64_4_wide")
    wide = [f"wgmma_{x}" for x in tiles]
    assert rest == ["gemv_2_n8", "gemv_8_n8", *wide, "mma_64x64x32_4_16_16_wide"]
    last = plan.launches[0].candidates[-1]
    assert not last.conditions and last.scratch.evaluate({}) <= 48 << 10
    assert len({k.name for k in plan.kernels}) == len(plan.kernels) == len(own)
    (launch,) = plan.launches
    tiles = tuple(v for v in launch.candidates if " of " in v.name)
    alone = replace(launch, candidates=tiles, decision=cheapest(len(tiles)))
    program = build_program(replace(plan, launches=(alone,)), target="cuda:emulated")
    for m in (1, 37, 70):
        check(program, "float16", m)


def test_a_measured_decision_leaves_out_tiles_that_are_no_rivals(tmp_path: Path) -> None:
    task = task_of("cuda:sm_80", "float16")
    sizes = {"b": (32, 64, 32), "w": (16, 64, 16), "v": (16, 32, 16)}
    levels = [(f"{x}.{n}", v) for x, s in sizes.items() for n, v in zip(task.loops, s, strict=True)]
    small, large = Tile((*levels, ("stages", 3))), task.defaults[-1]
    decision = Split(Index.of(task.loops[0]), 64, Leaf(0), Leaf(1))
    measured = Search("polydyn", (small, large), 2, hardware_of(A100), decision, (UNIT, UNIT), "measured")
    records = written(tmp_path / "r", task, measured)
    plan = plan_program(linear("float16"), target="cuda:sm_80", records=records)
    (launch,) = estimated(plan, A100).launches
    assert isinstance(launch.decision, Split)
    every = {c.name for c in launch.candidates}
    few, many = (
        {launch.candidates[e.kernel].name for e in side.entries}
        for side in (launch.decision.low, launch.decision.high)
        if isinstance(side, ArgMin)
    )
    tiles = [{n for n in every if f" of {t.wm}x{t.wn}" in n} for t in map(task.tile, (small, large))]
    assert few == every - tiles[1] and many == every - tiles[0] and all(tiles)
    for m in (16, 64, 65, 1000):
        assert choose(launch, {"M": m, "nth": A100.multiprocessors}, A100).name not in tiles[m <= 64]
    program = polydyn.compile(linear("float16"), target="cuda:sm_80", records=records)
    assert "M = 16 <= 64" in program.explain(M=16).details()


def test_a_group_that_no_tile_fits_is_left_out_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It used to end the tuning of the whole model."""
    monkeypatch.setenv("POLYDYN_LIBCUDA", "libno-such-cuda.so.1")
    monkeypatch.setattr(CudaTask, "refusal", lambda self, tile: "planted")
    (group,) = tune(linear(), tmp_path / "r", target="cuda:sm_80", trials=2)
    assert group.tuples == 0 and "planted rejected" in group.declined
    plan = plan_program(linear(), target="cuda:sm_80", records=tmp_path / "r")
    assert any("is not tuned" in n and "planted rejected" in n for n in plan.notes)
    assert plan.launches == plain("cuda:sm_80", "float32").launches


def test_records_of_other_targets_are_not_followed(records: Path) -> None:
    plan = plan_program(linear(), target="cuda:sm_80", records=records)
    assert "no search by polydyn for it on cuda:sm_80, but for cuda:emulated" in "\n".join(plan.notes)
    default = plain("cuda:sm_80", "float32")
    assert (plan.kernels, plan.launches) == (default.kernels, default.launches)
    plan = plan_program(linear(), target="cuda:emulated", records=records, options=Options(strategy="vortex"))
    assert "no search by vortex" in "\n".join(plan.notes)


def written(path: Path, task: CudaTask, *found: Search) -> Path:
    with Records.open(path) as opened:
        opened.put([search_record(s, task) for s in found])
    return path


def test_a_record_that_cannot_be_built_is_refused_by_name(tmp_path: Path) -> None:
    task = task_of("cuda:sm_80", "float16")
    tile = task.defaults[-1]
    odd = Tile(tuple((n, 96 if n == f"b.{task.loops[0]}" else v) for n, v in tile.compile))
    good = Search("polydyn", (odd,), 1, hardware_of(A100), None, (UNIT,), "model")
    for name, wrong, words in (
        ("a", good, "powers of two"), ("b", replace(good, factors=(0,)), "factor above 0"),
        ("c", replace(good, tiles=(), factors=()), "0 tiles"),
    ):  # fmt: skip
        with pytest.raises(ScheduleError, match=words):
            plan_program(linear("float16"), target="cuda:sm_80", records=written(tmp_path / name, task, wrong))
    with pytest.raises(ScheduleError, match="two stages"):
        task.kernel.tuned_versions(TileFactors(((replace(task.tile(tile), stages=1), UNIT),)))


def test_measured_searches_go_before_modelled_ones_and_correct_estimates(tmp_path: Path) -> None:
    task = task_of("cuda:sm_80")
    ranked = Search("polydyn", task.defaults[-1:], 64, hardware_of(A100), None, (UNIT,), "model")
    slow = replace(ranked, explored=3, factors=(2 * UNIT,), source="measured")
    other = replace(slow, explored=90, hardware=replace(slow.hardware, name="NVIDIA A30"))
    plans = []
    for path, found in (("r", (ranked, slow, other)), ("s", (ranked,))):
        file = written(tmp_path / path, task, *found)
        plans.append(plan_program(linear(), target="cuda:sm_80", records=file))
    reasons = [" ".join(p.launches[0].reasons) for p in plans]
    assert "3 tiles explored, measured" in reasons[0] and "2.00 of its estimate" in reasons[0]
    assert "64 tiles explored, ranked by an analytical model without a device" in reasons[1]
    (twice,), (once,) = (estimated(p, A100).launches for p in plans)
    few = next(v.name for v in once.candidates if v.name.startswith("gemv"))
    for m in (1, 64, 1 << 40):
        env = {"M": m, "nth": 108}
        a, b = (estimates(x)[few].evaluate(env) for x in (twice, once))
        assert a == 2 * min(b, 1 << 40) < 1 << 62


# -- on a device: the CPU libcuda, whose times mean nothing ------------------------------------------------------------


@pytest.fixture(scope="module")
def side(device: None) -> Iterator[CudaTuningBackend]:
    """Return a device with one SM, so that waves are short."""
    with CudaTuningBackend("cuda:emulated") as side:
        assert side.device.multiprocessors == 4
        side.device = replace(side.device, multiprocessors=1)
        side.hardware = hardware_of(side.device)
        yield side


def test_a_search_is_measured_where_the_device_is(side: CudaTuningBackend, tmp_path: Path) -> None:
    with Records.open(tmp_path / "r.db") as opened:
        (placed,) = side.tasks(import_model(linear()), Options())
        task = placed.task
        row = replace(strategy("polydyn"), explorer=lambda *_: in_order([]), outside=0.0)
        how = SearchSettings(row, 1, 0, opened, lambda tried, best: None)
        problem = Problem(task.key, task.backbone, *placed.instances([({"M": 5}, 1), ({"M": 70}, 1)]))
        found, binaries, measured = side.search(task, problem, how)
        assert found.source == "measured" and found.hardware.name.startswith("polydyn CPU emulation")
        assert 1 <= binaries <= len(task.defaults) and measured > 3 and min(found.factors) >= 1
        assert {r.source for r in opened.rows()} == {"measured"}
        again, _, none = side.search(task, problem, how)
        assert again == found and none == 0
        opened.put([search_record(found, task)])
    plan = plan_program(linear(), target="cuda:emulated", records=tmp_path / "r.db")
    assert "explored, measured" in "\n".join(plan.launches[0].reasons)


def test_a_tuple_that_does_not_build_or_run_has_failed(
    side: CudaTuningBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = task_of("cuda:emulated")
    assert side.workers is not None
    bench = DeviceBench(ModelBench(TileKernels(task), side.device, side.hardware), side.workers)
    tile, whole = task.defaults[-1], bench._arguments
    monkeypatch.setattr(bench, "_arguments", lambda *a: whole(*a) | {"name": "nobody"})
    assert bench.seconds([tile], task.backbone.sizes({task.loops[0]: 3})) == [math.inf]
    assert "nobody" in bench.failures[tile.compile]

    def spills(kernel: Any) -> Any:
        raise BuildError("spills")

    monkeypatch.setattr(bench.kernels, "image", spills)
    bench._built.clear()
    assert bench.per_operation([tile]) == [math.inf]
    assert bench.failures[tile.compile] == "spills"


def test_the_command_tunes_for_a_device(tmp_path: Path, nothing_there: None) -> None:
    onnx.save(linear(), tmp_path / "m.onnx")
    call, m, records = CliRunner().invoke, str(tmp_path / "m.onnx"), str(tmp_path / "r.db")
    made = call(main, ["tune", m, "--records", records, "--trials", "2", "--target", "cuda:emulated"])
    assert made.exit_code == 0 and "an analytical model ranked the tiles" in made.output, made.output
    assert "--target cuda:emulated" in made.output.replace("\n", "")
    wrong = call(main, ["tune", m, "--records", records, "--target", "cuda"])
    assert wrong.exit_code == 1 and "several architectures" in wrong.output
