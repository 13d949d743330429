"""Rows of the tables of kernels as choices of a search: offered, recorded, compiled, proven and right at all sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

import polydyn
from polydyn.backends import Options
from polydyn.backends.cpu import cpu_target
from polydyn.checked import CheckedProgram
from polydyn.compiler import plan_program
from polydyn.errors import Declined, ScheduleError
from polydyn.graph.expand import import_model
from polydyn.lowering.alternatives import Rows
from polydyn.measure import tune
from polydyn.measure.calibrate import machine
from polydyn.measure.cpu import other_groups, placed_builder, products
from polydyn.measure.cpu_bench import CpuBench, SizedBench
from polydyn.measure.cpu_timing import TIMER
from polydyn.measure.workers import Workers
from polydyn.program.plan import HostPlan
from polydyn.schedules.decision import ArgMin, Decision, Entry, Leaf, Split
from polydyn.schedules.index import Index
from polydyn.search.backbone import Problem, Tile
from polydyn.search.explorers.explore import aligned_order, with_rows
from polydyn.search.hardware import Hardware, cpu
from polydyn.search.outcomes import MIN_GAIN, Search, search_record
from polydyn.search.records import Records
from polydyn.search.spaces.loop_model import loop_model
from polydyn.search.strategies import STRATEGIES
from polydyn.search.strategies import tune as tune_task
from polydyn.search.tasks.cpu import DEFAULT, CpuTask
from polydyn.search.tasks.sized import SizedTask
from polydyn.testing import models
from polydyn.testing.inputs import feeds
from polydyn.testing.simulated import Simulated

DOT, SPLIT, WINDOW, TURNED, PLANES = (
    "vectors along the reduction", "split reduction", "window", "transposed product", "window of planes in lanes",
)  # fmt: skip
TARGET = "cpu:avx2"


def computed() -> onnx.ModelProto:
    """Build a product of two inputs, no size known."""
    node = helper.make_node("MatMul", ["a", "b"], ["y"])
    return models.model("computed", [node], {"a": ["M", "K"], "b": ["K", "N"]})


def constant_rows() -> onnx.ModelProto:
    """Build y[96, N] = w[96, 64] @ x[64, N], whose columns are input rows."""
    w = np.random.default_rng(0).standard_normal((96, 64)).astype(np.float32)
    return models.model("rows", [helper.make_node("MatMul", ["w", "x"], ["y"])], {"x": [64, "N"]}, {"w": w})


def sums() -> onnx.ModelProto:
    node = helper.make_node("ReduceSum", ["x", "axes"], ["y"], keepdims=0)
    return models.model("sums", [node], {"x": ["R", "C"]}, {"axes": np.array([1], np.int64)})


def convolution(operator: str, channels: int, outputs: int, group: int = 1) -> onnx.ModelProto:
    return models.convolution(operator, channels, outputs, (3, 3), (1, 1), (), (1, 1), group)


IMAGES = [{"N": 1, "H": 1, "W": 1}, {"N": 2, "H": 5, "W": 7}, {"N": 1, "H": 3, "W": 33}]
CASES: dict[str, tuple[onnx.ModelProto, set[str], Sequence[Mapping[str, int]]]] = {
    "computed": (
        computed(),
        {DOT, SPLIT},
        [{"M": m, "K": k, "N": n} for m, k, n in ((1, 0, 3), (3, 1, 9), (9, 40, 5), (2, 300, 4))],
    ),
    "constant": (models.gemm(24, 640), {SPLIT}, [{"M": m} for m in (0, 1, 7, 13)]),
    "channels": (convolution("Conv", 4, 8), {WINDOW}, IMAGES),
    "many channels": (convolution("Conv", 24, 24), {WINDOW}, IMAGES[1:2]),
    "rows": (constant_rows(), {TURNED}, [{"N": n} for n in (0, 1, 5, 40)]),
    "sums": (sums(), {SPLIT}, [{"R": r, "C": c} for r, c in ((0, 3), (1, 0), (3, 1), (2, 700))]),
    "depthwise": (convolution("Conv", 9, 9, 9), {PLANES, "rows"}, IMAGES),
    "pool": (convolution("MaxPool", 9, 9), {"rows"}, IMAGES),
}


def task_of(model: onnx.ModelProto) -> CpuTask | SizedTask:
    """Return the last task of a model."""
    builder, processor = placed_builder(import_model(model), TARGET, Options(), cpu(1, lanes=8))
    every = {**other_groups(builder, TARGET), **products(builder, processor, TARGET)}
    return [x.task for x in every.values() if not isinstance(x, Declined)][-1]


def chosen(model: onnx.ModelProto, path: Path, tiles: Sequence[Tile], decision: Decision | None = None) -> HostPlan:
    """Return the plan of a model whose records chose some tiles."""
    task = task_of(model)
    with Records.open(path) as records:
        search = Search("polydyn", tuple(tiles), 9, cpu(1, lanes=8), decision or Leaf(0), rows=task.rows.names)
        records.put([search_record(search, task)])
    return plan_program(model, target=TARGET, records=path)


@pytest.mark.parametrize("name", CASES)
def test_every_row_that_a_search_may_choose_is_compiled_and_right(name: str, tmp_path: Path) -> None:
    model, rows, shapes = CASES[name]
    task, reference = task_of(model), ReferenceEvaluator(model)
    assert rows <= {t.row for t in task.row_tiles}
    first = {t.row: t for t in reversed(task.row_tiles)}
    for number, (row, tile) in enumerate(first.items()):
        plan = chosen(model, tmp_path / f"{number}.db", [tile])
        launch = plan.launches[-2 if row == SPLIT else -1]
        assert len(launch.candidates) == 1 and row in "\n".join(launch.reasons)
        program = CheckedProgram(plan)
        for shape in shapes:
            given = feeds(model, shape)
            expected = reference.run(None, given)[0]
            np.testing.assert_allclose(
                program.run(given)["y"], expected, rtol=1e-4, atol=1e-4, err_msg=str((row, shape))
            )


def test_a_decision_between_numbers_of_slices_is_one_split_kernel(tmp_path: Path) -> None:
    """The launch that adds the slices serves one kernel, so its number of slices follows from the sizes."""
    model, _, _ = CASES["computed"]
    task = task_of(model)
    rows = next(x.name for x in task.backbone.loops)
    four, two = [t for t in task.row_tiles if t.row == SPLIT][:2]
    tiles = [four, Tile.of_row(DOT), two]
    cost = Index.of(rows)
    decision = Split(Index.of(rows), 2, Leaf(0), Split(Index.of(rows), 4, Leaf(1), Leaf(2)))
    plan = chosen(model, tmp_path / "a.db", tiles, decision)
    assert len(plan.launches[0].candidates) == 2 and len(plan.launches) == 2
    compared = ArgMin((Entry(0, cost), Entry(1, cost + 1), Entry(2, cost)))
    other = chosen(model, tmp_path / "b.db", tiles, compared)
    assert [e.kernel for e in other.launches[0].decision.entries] == [0, 1]  # type: ignore[union-attr]
    for made in (plan, other):
        program = CheckedProgram(made)
        for m in (1, 2, 3, 4, 5, 9):
            given = feeds(model, {"M": m, "K": 90, "N": 5})
            np.testing.assert_allclose(program.run(given)["y"], given["a"] @ given["b"], rtol=1e-4, atol=1e-4)


def test_a_row_that_no_longer_applies_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match="no kernel of the row 'vectors along the reduction'") as e:
        chosen(models.gemm(24, 640), tmp_path / "a.db", [Tile.of_row(DOT)])
    assert "24 columns are more than 4" in str(e.value) and "tune the group again" in str(e.value)
    with pytest.raises(ScheduleError, match="does not support slices=3"):
        chosen(models.gemm(24, 640), tmp_path / "b.db", [Tile.of_row(SPLIT, (), (("slices", 3),))])
    with pytest.raises(ScheduleError, match="the table of kernels has no such row"):
        chosen(models.gemm(24, 640), tmp_path / "c.db", [Tile.of_row("abacus")])


def test_records_without_rows_keep_the_limits_of_the_table(tmp_path: Path) -> None:
    """Older records compared register tiles only."""
    model, path = CASES["computed"][0], tmp_path / "a.db"
    task = task_of(model)
    with Records.open(path) as records:
        records.put([search_record(Search("polydyn", (DEFAULT,), 1, cpu(1, lanes=8), Leaf(0)), task)])
    for plan in (plan_program(model, target=TARGET, records=r) for r in (path, None)):
        assert {c.kernel.partition("_")[0] for c in plan.launches[0].candidates} == {"dot", "contract"}


def test_results_do_not_depend_on_the_number_of_threads(tmp_path: Path) -> None:
    """Rows add in different orders, so a program uses the rows of one search."""
    model, path = models.gemm(24, 640), tmp_path / "a.db"
    task = task_of(model)
    with Records.open(path) as records:
        for threads, tile in ((1, DEFAULT), (2, task.row_tiles[0])):
            search = Search("polydyn", (tile,), 9, cpu(threads, lanes=8), Leaf(0), rows=task.rows.names)
            records.put([search_record(search, task)])
    (launch,) = plan_program(model, target=TARGET, records=path).launches
    assert len(launch.candidates) == 1
    assert "searches for 2 threads are not used" in "\n".join(launch.reasons)


class Preferring(Simulated):
    """A simulated machine on which one row is ten times as fast as the best tile."""

    def __init__(self, task: CpuTask, hardware: Hardware, row: str) -> None:
        super().__init__(task.backbone, hardware)
        self.row, self.tried = row, set[str]()

    def per_operation(self, tiles: Sequence[Tile]) -> list[float]:
        return [self._cost(t, lambda t: super(Preferring, self).per_operation([t])[0]) for t in tiles]

    def seconds(self, tiles: Sequence[Tile], shape: Mapping[str, int], turns: int = 1) -> list[float]:
        return [self._cost(t, lambda t: super(Preferring, self).seconds([t], shape, turns)[0]) for t in tiles]

    def kernel(self, tile: Tile) -> Any:
        return replace(super().kernel(self.tile(tile)), tile=tile)

    def tile(self, tile: Tile) -> Tile:
        return loop_model(self.backbone, self.hardware).tiles[0] if tile.row else tile

    def _cost(self, tile: Tile, cost: Any) -> float:
        self.tried.add(tile.row)
        return float(cost(self.tile(tile)) * (0.01 if tile.row == self.row else 100 if tile.row else 1))


@pytest.mark.parametrize("row", [DOT, SPLIT, ""])
def test_a_search_compares_the_rows_and_keeps_the_fastest(row: str) -> None:
    task = task_of(computed())
    assert isinstance(task, CpuTask)
    hardware = cpu(1, lanes=8)
    instances = tuple((("M", m), ("N", 8), ("K", 256)) for m in (1, 16, 64))
    names = [x.name for x in task.backbone.loops]
    shapes = tuple(tuple(zip(names, (v for _, v in s), strict=True)) for s in instances)
    problem = Problem(task.key, task.backbone, shapes, (1.0,) * len(shapes), rows=task.row_tiles)
    bench = Preferring(task, hardware, row)
    tuned = tune_task(STRATEGIES["polydyn"], problem, hardware, bench, trials=32)
    assert bench.tried == {"", DOT, SPLIT}, "every row is among the first trials"
    assert {k.tile.row for k in tuned.kernels} == {row}
    alone = tune_task(STRATEGIES["vortex"], problem, hardware, Simulated(task.backbone, hardware), trials=8)
    assert {k.tile.row for k in alone.kernels} == {""}, "strategies of papers have their own spaces"


def test_the_order_of_a_space_with_rows_begins_with_one_of_each() -> None:
    task, hardware = task_of(computed()), cpu(1, lanes=8)
    space = loop_model(task.backbone, hardware)
    tiles = aligned_order(space, task.backbone, hardware)
    order = with_rows(tiles, task.row_tiles)
    assert [t.row for t in order[:4]] == ["", DOT, SPLIT, ""] and sorted(order) == sorted((*tiles, *task.row_tiles))
    whole = space.with_rows(task.row_tiles)
    assert whole.points.shape == (len(tiles) + len(task.row_tiles), space.points.shape[1] + 2)  # the row, the slices
    assert len({tuple(x) for x in whole.points.tolist()}) == len(whole)


def test_without_a_search_a_size_has_the_row_that_the_table_gives() -> None:
    task = task_of(computed())
    loops = [x.name for x in task.backbone.loops]

    def row(m: int, n: int, k: int) -> str:
        return task.default(dict(zip(loops, (m, n, k), strict=True))).row

    assert (row(9, 4, 40), row(9, 9, 40), row(1, 5, 80000)) == (DOT, "", "")
    long = task_of(models.gemm(24, 8192))
    (m,) = (x.name for x in long.backbone.loops if x.extent is None)
    assert [long.default({m: n}).row for n in (4, 4000)] == [SPLIT, ""]
    assert Rows().names == () and Rows("rows").default({}) == "rows"


@pytest.mark.parametrize("name", ["constant", "sums"])
def test_the_bench_times_both_launches_of_a_split_reduction(name: str) -> None:
    task, hardware = task_of(CASES[name][0]), machine(cpu_target(TARGET), TARGET, 1)
    loops = {x.name: x.extent or 64 for x in task.backbone.loops}
    tile = next(t for t in task.row_tiles if t.row == SPLIT)
    with Workers(TIMER) as workers:
        bench = CpuBench(task, hardware, workers) if isinstance(task, CpuTask) else SizedBench(task, hardware, workers)
        spent = bench.seconds([tile, DEFAULT], loops)  # type: ignore[attr-defined]
        built = bench.kernels[tile.compile, False]  # type: ignore[attr-defined]
    assert min(spent) > 0 and max(spent) < 1 and len(built.after) == 1
    assert bench.measured == 2  # type: ignore[attr-defined]


def test_tuning_a_model_records_rows_that_explain_names(tmp_path: Path) -> None:
    model, path = models.gemm(24, 640), tmp_path / "r.db"
    (group,) = tune(model, path, threads=1, trials=10, seen=[({"M": 1}, 1), ({"M": 8}, 1)])
    assert group.tuples >= 1
    program = polydyn.compile(model, records=path, threads=1)
    with Records.open(path, readonly=True) as records:
        tried = {r.tile.row for r in records.rows(kind="throughput")}
    assert tried == {"", SPLIT}
    kept = group.gain is not None and group.gain >= MIN_GAIN
    rows = "it chose among the rows split reduction, register tiles"
    assert (rows in program.explain(M=1).details()) == kept
    given = feeds(model, {"M": 5})
    np.testing.assert_allclose(
        program.run(given)["y"], ReferenceEvaluator(model).run(None, given)[0], rtol=1e-4, atol=1e-4
    )
