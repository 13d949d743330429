"""Cells of the campaign run real programs, and models that a campaign found wrong stay right (tests/data/fuzz)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

import polydyn
from polydyn.cli import main
from polydyn.testing import fuzz_models, model_check
from polydyn.testing.cell_programs import Programs, ways
from polydyn.testing.cells import ARM, Cell, missing
from polydyn.testing.model_check import Check, Depth, Finding
from tests.support.paths import DATA

KEPT = sorted((DATA / "fuzz").glob("*.onnx"))


def model() -> onnx.ModelProto:
    """Build ``y = relu(x @ w), z = softmax(y)``."""
    info, w = helper.make_tensor_value_info, np.linspace(-1, 1, 192, dtype=np.float32).reshape(8, 24)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["s"]),
        helper.make_node("Relu", ["s"], ["y"]),
        helper.make_node("Softmax", ["y"], ["z"]),
    ]
    inputs = [info("x", TensorProto.FLOAT, ["B", 8])]
    outputs = [info(n, TensorProto.FLOAT, ["B", 24]) for n in "yz"]
    graph = helper.make_graph(nodes, "g", inputs, outputs, [numpy_helper.from_array(w, "w")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


CALLS = [({"B": n}, {"x": np.linspace(-2, 3, 8 * n, dtype=np.float32).reshape(n, 8)}) for n in (2, 17, 0)]


def outcome(cell: str, seed: int = 0) -> model_check.Outcome:
    return Check(model(), CALLS, Depth.PROGRAM, False, Cell.parse(cell), seed).run()


@pytest.mark.parametrize(
    ("cell", "note", "family"),
    [
        ("target=cpu:avx2,tiles=random,opened=saved", "groups with tiles from records", "contract"),
        ("tiles=search,precision=bf16,threads=3", "groups with tiles from records", "contract"),
        ("tiles=written,passes=half", "schedules that were written", "written"),
        ("opened=cached,passes=none,threads=1", "programs from the cache", "nest"),
    ],
)
def test_programs_of_cells_are_right(cell: str, note: str, family: str) -> None:
    out = outcome(cell)
    assert out.finding is None and out.counts["calls compared"] == 3 and out.counts[note], (out.finding, out.counts)
    families = {row[3] for row in out.reached if row[0] == "kernel"}
    assert family in families and ("node", "Softmax", "13", "float32") in out.reached
    assert any(row[0] == "pass" for row in out.reached) or "passes=none" in cell


@pytest.mark.slow
@pytest.mark.skipif(("target", ARM) in missing(), reason=f"{ARM}: {missing().get(('target', ARM))}")
def test_programs_for_arm64_run_in_an_emulator() -> None:
    assert outcome(f"target={ARM},opened=saved,compiler=zig").counts["calls compared"] == 3


@pytest.mark.parametrize("cell", ["", "threads=3,opened=saved"])
def test_other_results_with_more_threads_are_a_failure(cell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = model_check.programs_of

    def other(*arguments: Any) -> Programs:
        programs = real(*arguments)

        def many(feeds: Mapping[str, Any]) -> Mapping[str, Any]:
            return {n: np.asarray(a) * np.float32(1.0000001) for n, a in programs.one(feeds).items()}

        return Programs(programs.one, [many], programs.manifest, programs.notes)

    monkeypatch.setattr(model_check, "programs_of", other)
    finding = outcome(cell).finding
    assert finding is not None and (finding.kind, finding.stage) == ("wrong", "threads")


def test_a_model_is_written_and_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell.parse("passes=none,opened=saved")
    script = fuzz_models.write(tmp_path / "seed7", model(), CALLS[0], Finding("wrong", "program", "y"), cell, 7)
    assert "polydyn fuzz --again seed7.onnx" in Path(script).read_text()
    compile(Path(script).read_text(), script, "exec")
    arguments = ["fuzz", "--again", str(tmp_path / "seed7.onnx")]
    right = CliRunner().invoke(main, arguments)
    assert right.exit_code == 0 and "seed7.onnx: right" in right.output
    seen: Counter[str] = Counter()

    def wrong(check: Check) -> None:
        seen[str(check.cell)] += check.seed
        check.record_finding("wrong", "program", "planted")

    monkeypatch.setattr(Check, "_program", wrong)
    again = CliRunner().invoke(main, arguments)
    assert again.exit_code == 3 and "wrong, program: planted" in again.output and seen == {str(cell): 7}


@pytest.mark.parametrize("path", KEPT, ids=lambda p: p.stem)
def test_a_kept_model_is_right(path: Path) -> None:
    """Copied from what ``polydyn fuzz --out`` wrote; its metadata has the cell in which it failed."""
    found = fuzz_models.again(path).finding
    assert found is None, found


@pytest.mark.parametrize("path", KEPT, ids=lambda p: p.stem)
def test_kept_models_have_inputs(path: Path) -> None:
    with np.load(path.with_suffix(".npz")) as arrays:
        assert {i.name for i in onnx.load(path).graph.input} <= set(arrays)


def test_ways_to_call_a_program_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    program = polydyn.compile(model(), threads=1)
    want, calls = program.run(CALLS[1][1]), ways(program)
    for call in calls:
        got = call(CALLS[1][1])
        assert all(np.asarray(got[n]).tobytes() == want[n].tobytes() for n in want)
    monkeypatch.setattr(program, "bind", lambda feeds: lambda: {n: a * 2 for n, a in want.items()})
    assert calls[2](CALLS[1][1])["y"].tolist() != want["y"].tolist()
