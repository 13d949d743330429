"""Tuning real kernels: measured on this machine, stored in records, compiled from records alone, killed and resumed."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

import polydyn
from polydyn.backends.cpu import cpu_target
from polydyn.build.compiler import Building
from polydyn.build.features import machine_features
from polydyn.checked import CheckedProgram
from polydyn.cli import main
from polydyn.codegen.kernel import Kernel
from polydyn.compiler import Options, plan_program
from polydyn.errors import ArtifactError, BuildError, Declined, InputError, ScheduleError
from polydyn.measure import tasks_of, tune
from polydyn.measure.cpu_bench import Built, CpuBench, Form
from polydyn.measure.cpu_timing import TIMER
from polydyn.measure.sketch import Sketch
from polydyn.measure.workers import Answer, Workers
from polydyn.program.assemble import build_program
from polydyn.program.plan import HostPlan
from polydyn.schedules.decision import Leaf
from polydyn.schedules.index import Index
from polydyn.search.backbone import Tile
from polydyn.search.hardware import cpu
from polydyn.search.records import Records
from polydyn.search.spaces.loop_model import loop_model
from polydyn.search.tasks.cpu import placed_task
from polydyn.testing import models
from tests.support.marks import slow
from tests.support.paths import ROOT

TRIALS = 6


def linear(n: int = 40, k: int = 33, name: str = "linear") -> onnx.ModelProto:
    """Build ``y[M, n] = relu(x[M, k] @ w + b)``."""
    r = np.random.default_rng(3)
    w, b = r.standard_normal((k, n)).astype(np.float32), r.standard_normal(n).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["p"]),
        helper.make_node("Add", ["p", "b"], ["s"]),
        helper.make_node("Relu", ["s"], ["y"]),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["M", k])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["M", n])
    graph = helper.make_graph(nodes, name, [x], [y], [numpy_helper.from_array(w, "w"), numpy_helper.from_array(b, "b")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def batched() -> onnx.ModelProto:
    """Build ``y[B, M, N] = a[B, M, K] @ b[B, K, N]``, no size known."""
    sizes = {"a": "BMK", "b": "BKN", "y": "BMN"}
    a, b, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, list(s)) for n, s in sizes.items())
    graph = helper.make_graph([helper.make_node("MatMul", ["a", "b"], ["y"])], "batched", [a, b], [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def expected(x: np.ndarray) -> np.ndarray:
    r = np.random.default_rng(3)
    w, b = r.standard_normal((33, 40)).astype(np.float32), r.standard_normal(40).astype(np.float32)
    return np.maximum(x @ w + b, 0)


def inputs(m: int) -> np.ndarray:
    return np.random.default_rng(m).standard_normal((m, 33)).astype(np.float32)


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("records") / "tuned.db"
    (group,) = tune(linear(), path, threads=1, trials=TRIALS)
    assert group.measured > 0 and 1 <= group.binaries <= 8 and group.tuples <= 24
    return path


def test_a_second_search_measures_nothing(records: Path) -> None:
    (group,) = tune(linear(), records, threads=1, trials=TRIALS)
    assert group.measured == 0


def test_compiling_with_records_is_right_and_says_why(records: Path) -> None:
    program = polydyn.compile(linear(), records=records, threads=1)
    for m in (0, 1, 2, 7, 17, 64, 129):
        np.testing.assert_allclose(program.run({"x": inputs(m)})["y"], expected(inputs(m)), rtol=1e-4, atol=1e-5)
    text = program.explain(M=17).details()
    assert f"tuned by polydyn for {cpu_name(records)}: {TRIALS} tiles explored" in text and "kernel 0: " in text


def cpu_name(records: Path) -> str:
    with Records.open(records, readonly=True) as opened:
        return next(iter(opened.rows())).hardware.name


def test_equal_records_give_equal_bytes(records: Path, tmp_path: Path) -> None:
    copy = tmp_path / "merged.db"
    with Records.open(copy) as other:
        other.merge(records)
    before = records.read_bytes()
    for name, path in (("a", records), ("b", copy)):
        polydyn.compile(linear(), records=path, threads=1).save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert records.read_bytes() == before, "compiling changed the record file"


def test_what_was_not_tuned_is_compiled_and_named(records: Path) -> None:
    program = polydyn.compile(linear(n=24), records=records, threads=1)
    assert "is not tuned: tuned.db has no search by polydyn" in "\n".join(program.explain(M=3).notes)
    program = polydyn.compile(linear(), records=records, threads=1, options=Options(strategy="vortex"))
    assert "no search by vortex" in "\n".join(program.explain(M=3).notes)


def test_products_decoded_in_registers_are_not_tuned_and_named(records: Path) -> None:
    made = models.linear_of_nibbles(16, 64, accuracy=4)
    notes = polydyn.compile(made, records=records, threads=1).explain(M=3).notes
    in_bytes = bool({"avx512_vnni", "avx_vnni"} & set(machine_features()))
    assert in_bytes == any("is not tuned: its 4-bit weights are decoded in registers" in n for n in notes)
    assert in_bytes == (tasks_of(made) == [])


def test_missing_files_and_strategies_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="does not exist"):
        polydyn.compile(linear(), records=tmp_path / "none.db")
    with pytest.raises(InputError, match="unknown strategy 'fast'"):
        tune(linear(), tmp_path / "r.db", options=Options(strategy="fast"))


def test_a_compilation_needs_outcomes_only(records: Path, tmp_path: Path) -> None:
    with Records.open(records, readonly=True) as source, Records.open(tmp_path / "tuned.db") as short:
        short.put(r for r in source.rows() if r.kind == "search")
    for name, path in (("a", records), ("b", tmp_path / "tuned.db")):
        polydyn.compile(linear(), records=path, threads=1).save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_search_that_names_kernels_it_lacks_is_refused(records: Path, tmp_path: Path) -> None:
    with Records.open(records, readonly=True) as source, Records.open(tmp_path / "torn.db") as torn:
        found = [r for r in source.rows() if r.kind == "search"]
        torn.put(replace(r, note=json.dumps(json.loads(r.note) | {"tiles": []})) for r in found)
    with pytest.raises(ScheduleError, match="of 0"):
        polydyn.compile(linear(), records=tmp_path / "torn.db", threads=1)


@pytest.mark.parametrize("name", ["tscompiler", slow("vortex"), "dietcode", slow("ftuner"), slow("bladedisc")])
def test_every_strategy_compiles_to_right_kernels(name: str, tmp_path: Path) -> None:
    options = Options(strategy=name)
    seen = [({"M": m}, 1) for m in (1, 5, 40)]
    tune(linear(), tmp_path / "r.db", threads=1, trials=4, options=options, seen=seen)
    program = polydyn.compile(linear(), records=tmp_path / "r.db", threads=1, options=options)
    assert f"tuned by {name}" in program.explain(M=5).details()
    for m in (1, 5, 40, 61):
        np.testing.assert_allclose(program.run({"x": inputs(m)})["y"], expected(inputs(m)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "model",
    [slow(models.convolution("Conv", 3, 16, (3, 3), (2, 2), (), (1, 1))), models.dynamic_linear(32, 24)],
    ids=["convolution", "bytes"],
)
def test_convolutions_and_products_of_bytes_are_tuned(model: onnx.ModelProto, tmp_path: Path) -> None:
    (group,) = (g for g in tune(model, tmp_path / "r.db", threads=1, trials=2) if not g.declined)
    assert group.tuples
    tuned, plain = (polydyn.compile(model, records=r) for r in (tmp_path / "r.db", None))
    assert "tuned by polydyn" in tuned.explain(**dict.fromkeys(tuned.symbols, 9)).details()
    for sizes in ((1, 1, 1), (2, 31, 29), (5, 8, 40), (0, 4, 4)):
        x = np.random.default_rng(1).standard_normal((sizes[0], 3, *sizes[1:]), np.float32)
        x = x if len(tuned.symbols) > 1 else x[:, 0, 0, :1].repeat(24, 1)
        np.testing.assert_allclose(tuned.run({"x": x})["y"], plain.run({"x": x})["y"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("gain", "default"), [(0.97, True), (1.3, False)])
def test_what_does_not_gain_keeps_the_default(
    gain: float, default: bool, records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.db"
    with Records.open(records, readonly=True) as source, Records.open(path) as other:
        other.put(r for r in source.rows() if r.kind not in ("search", "gain"))
    monkeypatch.setattr("polydyn.measure.cpu.gain_over", lambda *_: gain)
    (group,) = tune(linear(), path, threads=1, trials=TRIALS)
    assert group.gain == gain
    program = polydyn.compile(linear(), records=path, threads=1)
    assert ("kernel 0: the default" in program.explain(M=9).details()) == default
    np.testing.assert_allclose(program.run({"x": inputs(9)})["y"], expected(inputs(9)), rtol=1e-4, atol=1e-5)


def test_searches_for_several_numbers_of_threads_are_in_one_program(records: Path, tmp_path: Path) -> None:
    with Records.open(records, readonly=True) as source, Records.open(tmp_path / "r.db") as both:
        (found,) = (r for r in source.rows() if r.kind == "search")
        tiles = sorted({r.tile for r in source.rows() if r.kind == "throughput" and not r.shape})
        note = json.loads(found.note) | {"decision": {"kernel": 0}}
        for units, tile in ((1, tiles[0]), (4, tiles[-1])):
            text = json.dumps(note | {"tiles": [[tile.compile, tile.launch]]})
            both.put([replace(found, hardware=replace(found.hardware, units=units), note=text)])
    polydyn.compile(linear(), records=tmp_path / "r.db", threads=1).save(tmp_path / "a.polydyn", with_threads=False)
    polydyn.compile(linear(), records=tmp_path / "r.db", threads=4).save(tmp_path / "b.polydyn", with_threads=False)
    assert (tmp_path / "a.polydyn").read_bytes() == (tmp_path / "b.polydyn").read_bytes()
    taken = []
    for threads in (1, 2, 3, 8):
        program = polydyn.load(tmp_path / "a.polydyn", threads=threads)
        np.testing.assert_allclose(program.run({"x": inputs(61)})["y"], expected(inputs(61)), rtol=1e-4, atol=1e-5)
        (launch,) = program.explain(M=61).launches
        taken.append((launch.kernel, *launch.choices.items()))
        assert f"nth = {threads} " in "\n".join(launch.selection)
    assert taken[0] == taken[1] != taken[2] and taken[2][0] == taken[3][0]


def forced(plan: HostPlan, kernel: int) -> HostPlan:
    """Return the plan with one kernel in place of the decision."""
    (launch,) = plan.launches
    return replace(plan, launches=(replace(launch, decision=Leaf(kernel)),))


def test_every_kept_kernel_passes_every_check(tmp_path: Path) -> None:
    options = Options(strategy="vortex")
    tune(linear(), tmp_path / "r.db", threads=1, trials=8, options=options)
    plan = plan_program(linear(), records=tmp_path / "r.db", options=options)
    (launch,) = plan.launches
    assert len(launch.candidates) > 1
    for k in range(len(launch.candidates)):
        program, checked = build_program(forced(plan, k), threads=2), CheckedProgram(forced(plan, k))
        for m in (1, 8, 45):
            x = inputs(m)
            y = program.run({"x": x})["y"]
            np.testing.assert_allclose(y, expected(x), rtol=1e-4, atol=1e-5)
            # with 8 lanes gcc contracts a multiplication and an addition in one build and not in the other
            close = 0.0 if cpu_target("cpu").width == 16 else 1e-6
            np.testing.assert_allclose(checked.run({"x": x})["y"], y, close, close)


def test_a_convolution_is_placed_by_its_image() -> None:
    (placed,) = tasks_of(models.convolution("Conv", 4, 16, (3, 3), (2, 2), (), (1, 1)))
    task = placed.task
    params = task.params({"i0": 2, task.form.roles.row: 35})
    extents = {n: e.evaluate(params) for n, e in task.extents.items()}
    assert extents["i0"] == 2
    assert extents[task.form.roles.row] == 35


def test_a_size_that_no_loop_tells_is_refused_by_name() -> None:
    (placed,) = tasks_of(models.convolution("Conv", 4, 16, (3, 3), (2, 2), (), (1, 1)))
    params = dict(placed.task.place)
    known = {n: e for n, e in params.items() if n != "n0"} | {"n0": Index.of("N") + "K"}
    assert not isinstance(placed_task(replace(placed.task, place={}), known), Declined)
    lost = known | {max(known): Index.of("stride")}
    refused = placed_task(replace(placed.task, place={}), lost)
    assert isinstance(refused, Declined)
    assert "no loop extent determines stride" in refused.reason


def test_a_tuple_that_does_not_build_is_a_record_and_no_crash() -> None:
    (placed,) = tasks_of(linear())
    roles = placed.task.form.roles
    part = ((f"b.{roles.block}", 192), (f"w.{roles.row}", 0), (f"w.{roles.col}", 16), (f"w.{roles.block}", 1))
    wrong = Tile(part, ((f"b.{roles.row}", 8), (f"b.{roles.col}", 16)))
    with Workers(TIMER) as workers:
        bench = CpuBench(placed.task, cpu(1, lanes=cpu_target("cpu").width), workers)
        (cost,) = bench.per_operation([wrong])
    assert cost == float("inf") and wrong.compile in bench.failures


class Uncompiled(CpuBench):
    """A bench whose kernels are only generated; ``answer`` returns the result of a launch."""

    def __init__(self, answer: Callable[[Mapping[str, Any]], Answer]) -> None:
        (placed,) = tasks_of(linear())

        class Stub(Workers):
            def __init__(self) -> None:
                """Start nothing."""

            def map(self, arguments: Sequence[Mapping[str, Any]]) -> list[Answer]:
                return list(map(answer, arguments))

        super().__init__(placed.task, cpu(1, lanes=cpu_target("cpu").width), Stub())

    def _compile(self, kernels: Mapping[Form, Kernel], building: Building | None = None) -> None:
        self.kernels |= {form: Built("", 0, k) for form, k in kernels.items()}


def test_a_launch_that_fails_is_none_of_another_size() -> None:
    bench = Uncompiled(lambda a: Answer(failure="no memory") if a["symbols"][0] > 99 else Answer(1e-3))
    row, tile = bench.task.form.roles.row, loop_model(bench.task.backbone, bench.hardware).tiles[0]
    assert [bench.seconds([tile], {row: m}) for m in (tile[f"w.{row}"] * 100, 1)] == [[math.inf], [1e-3]]
    assert bench.failures == {tile.compile: "no memory"}
    assert math.isfinite(bench.kernel(tile).step)


def test_a_tuple_that_fails_with_few_rows_is_refused() -> None:
    """The time for small row counts would be a share of an unknown time."""
    for rows in (1, 3):
        bench = Uncompiled(lambda a, m=rows: Answer(failure="killed") if a["symbols"][0] == m else Answer(1e-3))
        row = bench.task.form.roles.row
        tile = next(t for t in loop_model(bench.task.backbone, bench.hardware).tiles if t[f"w.{row}"] > 3)
        with pytest.raises(BuildError, match="does not run: killed"):
            bench.kernel(tile)


def test_a_sketch_refuses_sizes_whose_micro_kernels_it_lacks() -> None:
    (placed,) = tasks_of(batched())
    task, rows, columns = placed.task, 6, 2 * cpu_target("cpu").width
    r, hardware = task.form.roles, cpu(1, lanes=cpu_target("cpu").width)
    space = loop_model(task.backbone, hardware)
    tile = next(t for t in space.tiles if (t.get(f"w.{r.row}"), t[f"w.{r.col}"]) == (rows, columns))
    whole, sketch = task.builder(tile, "whole"), task.builder(tile, "sketch", Sketch)
    assert isinstance(sketch, Sketch)
    assert len(sketch.build().text) < 0.6 * len(whole.build().text), "a third with 16 lanes, half with 8"
    sizes = {x.name: 5 for x in task.backbone.loops}
    for m, n in product(range(1, 40), (1, columns // 2, columns - 1, columns, columns + 1, 3 * columns // 2)):
        tiles = -(-m // rows)  # rows are shared out evenly, columns tile by tile
        live = {(i + 1) * m // tiles - i * m // tiles for i in range(tiles)}
        there = live <= {1, 3, rows} and {min(n, columns), n % columns or columns} <= {columns // 2, columns}
        assert sketch.covers(task.params(sizes | {r.row: m, r.col: n})) == there, (m, n)
    with Workers(TIMER) as workers:
        bench = CpuBench(task, hardware, workers)
        bench.per_operation([tile])
        assert [sketched for _, sketched in bench.kernels] == [True]
        bench.seconds([tile], sizes | {r.row: 5, r.col: 7})
        assert [sketched for _, sketched in bench.kernels] == [True, False]


def test_what_is_known_of_sizes_makes_instances() -> None:
    (placed,) = tasks_of(linear())
    assert placed.expected(None) == placed.expected({"B": (1, 8)}) == []
    dims = {"M": polydyn.Sizes(0, 64, 4, likely=(32,))}
    shapes, weights = placed.instances(placed.expected(dims))
    rows = [dict(s)[placed.task.form.roles.row] for s in shapes]
    assert rows[0] == 4 and rows[-1] == 64 and max(zip(weights, rows, strict=True))[1] == 32
    # a shape without work is left out
    assert placed.instances([({"M": 0}, 5), ({"M": 3}, 2)])[1] == (2 * 3 * 33 * 40 * 2,)
    assert placed.instances([({"M": 0}, 5)]) == placed.instances([({"M": 3}, 0)]) == ((), ())
    with pytest.raises(InputError, match=r"\{'L': 3\} lacks a size of M"):
        placed.instances([({"L": 3}, 1)])


TUNING_SCRIPT = """
import sys
from tests.program.test_tuner import TRIALS, linear
from polydyn.measure import tune
print("started", flush=True)
tune(linear(), sys.argv[1], threads=1, trials=TRIALS)
"""


@pytest.mark.parametrize("count", [slow(3), slow(50)])
def test_killed_at_any_moment_it_goes_on_and_loses_nothing(count: int, tmp_path: Path) -> None:
    path, kept, r = tmp_path / "r.db", 0, random.Random(0)
    for _ in range(count):
        process = subprocess.Popen(
            [sys.executable, "-c", TUNING_SCRIPT, str(path)], stdout=subprocess.PIPE, start_new_session=True,
            cwd=ROOT, env=dict(os.environ),
        )  # fmt: skip
        assert process.stdout is not None and process.stdout.readline()
        time.sleep(r.uniform(0.0, 1.5))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        if path.exists():
            with Records.open(path) as opened:
                found = len(opened.rows())  # every row is checked against its hash
            assert found >= kept, "a record was lost"
            kept = found
    (group,) = tune(linear(), path, threads=1, trials=TRIALS)
    (again,) = tune(linear(), path, threads=1, trials=TRIALS)
    assert again.measured == 0 and group.tuples == again.tuples


def test_the_command_tunes_from_a_log_and_compiles(tmp_path: Path) -> None:
    onnx.save(linear(), tmp_path / "m.onnx")
    (tmp_path / "seen.json").write_text(json.dumps([{"dims": {"M": 7}, "count": 3}, {"dims": {"M": 90}, "count": 1}]))
    (tmp_path / "bad.json").write_text("[1]")
    call, model, records = CliRunner().invoke, str(tmp_path / "m.onnx"), str(tmp_path / "r.db")
    few = ["--trials", "4", "--threads", "1", "--from-log", str(tmp_path / "seen.json")]
    made = call(main, ["tune", model, "--records", records, "--strategy", "bladedisc", *few])
    assert made.exit_code == 0 and "tiles kept" in made.output, made.output
    asked = ["compile", model, "-o", str(tmp_path / "m.polydyn"), "--records", records, "--threads", "1"]
    assert f"--records {records} --strategy bladedisc" in made.output.replace("\n", "")
    done = call(main, [*asked, "--strategy", "bladedisc"])
    assert done.exit_code == 0, done.output
    wrong = call(main, [*asked, "--strategy", "nobody"])
    assert wrong.exit_code == 2 and "'nobody'" in wrong.output and "bladedisc" in wrong.output
    assert polydyn.load(tmp_path / "m.polydyn").explain(M=7).launches[0].selection
    bad = call(main, ["tune", model, "--records", records, "--from-log", str(tmp_path / "bad.json")])
    assert bad.exit_code == 1 and "not a log of shapes" in bad.output
