"""The pipeline as data: every pass has a switch, and reasons for its joins and its rejections."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

from polydyn.cli import main
from polydyn.compiler import Options, compile
from polydyn.errors import InputError
from polydyn.fusion.pipeline import NAMES, PASSES, fusion_plan, rewrite_graph
from polydyn.graph.expand import import_model
from polydyn.graph.reference import evaluate
from polydyn.jobs import read_jobs
from polydyn.testing.inputs import shapes
from polydyn.testing.plans import ADD_ORDER, gemms, layers, row_without, table
from tests.support.marks import slow
from tests.support.stored import path_of, planned
from tests.support.tiny import model, node

RNG = np.random.default_rng(0)
WEIGHTS = {n: RNG.standard_normal((8, 8)).astype(np.float32) * 0.5 for n in ("wq", "wk", "wv")}
CONSTANTS = WEIGHTS | {
    "g": RNG.standard_normal(8).astype(np.float32), "b": RNG.standard_normal(8).astype(np.float32),
    "flat": np.array([-1, 8]), "axes": np.array([-1]), "half": np.float32(0.5), "n": np.array([8]),
    "p": np.array([1.0, 2.0], np.float32), "q": np.array([3.0, 4.0], np.float32),
}  # fmt: skip


def block() -> onnx.ModelProto:
    """Build a model with work for every pass: merged products of flat rows, an attention, a norm, a concatenation."""
    nodes = [
        node("Add", "p q", "pq"), node("ReduceSum", "pq", "s", keepdims=0), node("Reshape", "x flat", "f"),
        *(node("MatMul", f"f {w}", f"{w}f") for w in WEIGHTS), node("Shape", "x", "sx", start=0, end=2),
        node("Concat", "sx n", "shape", axis=0), *(node("Reshape", f"{w}f shape", f"{w}o") for w in WEIGHTS),
        node("Transpose", "wko", "kt", perm=[0, 2, 1]), node("MatMul", "wqo kt", "qk"), node("Mul", "qk half", "qs"),
        node("Softmax", "qs", "soft"), node("MatMul", "soft wvo", "at"), node("Add", "at x", "z"),
        node("LayerNormalization", "z g b", "o"), node("Mul", "o s", "os"), node("Tanh", "os", "t"),
        node("Concat", "t x", "y", axis=-1),
    ]  # fmt: skip
    return model(nodes, {"x": ("float32", ["B", "L", 8])}, ["y"], CONSTANTS)


@pytest.mark.parametrize(
    "off",
    [
        slow(set(NAMES)),
        slow({"views", "windows", "elementwise"}),
        {"split", "transpose", "attention", "epilogue", "fold"},
    ],
    ids=["all off", "views off", "some off"],
)
def test_results_do_not_depend_on_the_passes(off: set[str]) -> None:
    m = block()
    graph = import_model(m)
    program = compile(m, threads=1, options=Options(frozenset(off)))
    assert {f"pass {n} is off" for n in off} <= set(program.manifest["notes"])
    for b, n in ((1, 1), (2, 7), (3, 17), (0, 4)):
        x = {"x": RNG.standard_normal((b, n, 8)).astype(np.float32)}
        np.testing.assert_allclose(program.run(x)["y"], evaluate(graph, x)["y"], rtol=0, atol=2e-5)


def test_every_pass_counts() -> None:
    """Without any one pass there are more kernels, or more bytes are moved."""
    graph, shape = import_model(block()), {"B": 2, "L": 16}
    rows = table(graph, shape)
    assert [r.after for r in rows] == ["nothing", *ADD_ORDER]
    assert (rows[0].kernels, rows[-1].kernels) == (29, 4) and rows[-1].gemms == 3
    best = (rows[-1].kernels, rows[-1].bytes)
    worse = set()
    for off in ({"merge", "batch"}, *({n} for n in NAMES)):  # products that are not merged are batched
        row = row_without(graph, off, shape)
        worse |= off if (row.kernels, row.bytes) > best else set()
    assert worse >= {"fold", "merge", "views", "stitch", "attention"}, "the others have tests of their own"


def test_an_unknown_pass_is_refused_by_name() -> None:
    assert Options(["stitch"]) == Options({"stitch"}) and hash(Options(["stitch"]))
    with pytest.raises(InputError, match=r"unknown pass: stich\n.*the passes are tidy, requantize, integers"):
        Options(frozenset({"stich"}))


def test_each_pass_says_what_it_does() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert all(p.summary and sum(x is not None for x in (p.graph, p.groups, p.join)) <= 1 for p in PASSES)


@pytest.mark.slow
def test_the_command_line_has_the_switch(tmp_path: Path) -> None:
    onnx.save_model(block(), str(tmp_path / "m.onnx"))
    arguments = ["explain", str(tmp_path / "m.onnx"), "--shape", "B=1,L=8", "--why", "--without", "attention"]
    done = CliRunner().invoke(main, [*arguments, "--without", "stitch"])
    assert done.exit_code == 0 and "pass stitch is off" in done.output and "pass attention is off" in done.output
    assert "apart from" in done.output and "no pass that is on joins such a pair" in done.output
    assert CliRunner().invoke(main, [*arguments, "--without", "stich"]).exit_code == 2


def test_a_job_without_a_pass_is_another_job(tmp_path: Path) -> None:
    onnx.save_model(block(), str(tmp_path / "m.onnx"))
    jobs = [{"model": "m.onnx", "output": "a"}, {"model": "m.onnx", "output": "b", "without": ["stitch"]}]
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    all_on, one_off = read_jobs(tmp_path / "jobs.json")
    assert all_on.arguments != one_off.arguments
    (tmp_path / "jobs.json").write_text(json.dumps([jobs[1] | {"without": ["stich"]}]))
    with pytest.raises(InputError, match="unknown pass: stich"):
        read_jobs(tmp_path / "jobs.json")


def test_every_launch_says_what_joined_it_and_what_did_not() -> None:
    lines = [r for x in planned("bert_tiny").launches for r in x.reasons]
    text = "\n".join(lines)
    assert "element-wise on the contraction's output (epilogue)" in text and "(stitch)" in text
    assert "it reduces; only element-wise readers are epilogues of a contraction" in text
    assert "fusion stops at another backbone's group; its operands come from memory" in text
    assert not any("\n" in line for line in lines)


@pytest.mark.parametrize("name", [f"{n}_tiny" for n in ("bert", "gpt2_past", "llama", "resnet", "t5")])
def test_no_pass_moves_more_bytes_or_launches_more_kernels(name: str) -> None:
    rows = table(import_model(path_of(name)), shapes(name)[-1])
    for a, b in pairwise(rows):
        assert b.kernels <= a.kernels and b.bytes <= a.bytes, f"{a} -> {b}"
    assert rows[-1].kernels < rows[0].kernels / 2 and rows[-1].bytes < rows[0].bytes


def test_a_layer_of_bert_is_seven_kernels() -> None:
    graph = import_model(path_of("bert_tiny"))
    found = layers(fusion_plan(rewrite_graph(graph)))
    assert found is not None and found[0] <= 7 and found[1] <= 6
    off = (("attention", "merge", "batch"), ("attention",))
    apart = [gemms(fusion_plan(rewrite_graph(graph, x), x)) for x in off]
    assert apart == [2 * 8, 2 * 6], "query, key and value are one product; 24 such layers and a pooler are 145"
