"""explain agrees with the runtime: same sizes, same threads, from the manifest alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import polydyn
from polydyn.errors import ArtifactError, InputError
from polydyn.runtime.expressions import to_json
from polydyn.runtime.plain_expressions import evaluate, fold, symbols_of, unfold
from polydyn.runtime.program import Program
from polydyn.schedules.index import Index, fetch, maximum, minimum
from polydyn.testing.inputs import feeds
from tests.support.paths import ROOT
from tests.support.stored import load, path_of

N, M = Index.of("n"), Index.of("m")


@pytest.fixture(scope="module")
def bert() -> Program:
    return polydyn.compile(path_of("bert_tiny"), threads=2, dims={"L": (0, 128)})


@pytest.mark.parametrize("shape", [(1, 1), (0, 5), (2, 31), (5, 128)])
def test_explain_agrees_with_what_the_runtime_plans(bert: Program, shape: tuple[int, int]) -> None:
    sizes = {"B": shape[0], "L": shape[1]}
    ran = bert.profile(feeds(load("bert_tiny"), sizes), repeats=1)
    said = bert.explain(**sizes).launches
    assert [(x.label, x.kernel, x.tasks, x.threads, x.flops, x.bytes) for x in ran] == [
        (x.label, x.kernel, x.tasks, x.threads, x.flops, x.bytes) for x in said
    ]
    assert all(x.bytes > 0 for x in said if x.tasks > 0)


def test_an_explanation_reads_as_a_table_with_reasons(bert: Program) -> None:
    explained = bert.explain(B=2, L=9)
    table = str(explained)
    assert table.startswith("bert_tiny at B=2, L=9, 2 threads: ") and "FLOP/byte" in table
    assert all(x.kernel in table for x in explained.launches) and len(explained.kernels) == bert.kernel_count
    assert "epilogue" in explained.details() and "epilogue" not in table
    contraction = next(x for x in explained.launches if x.kernel.startswith("contract"))
    assert contraction.choices and contraction.sizes and contraction.reasons
    assert contraction.seconds(contraction.flops, 1e30) == 1 and contraction.seconds(1e30, contraction.bytes) == 1


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ({"B": 1}, r"no size is given for L \(axis 1 of 'input_ids'\)"),
        ({"B": 1, "L": 8, "Q": 3}, "the program has no dim Q"),
        ({"B": 1, "L": -1}, "-1 is not a size"),
        ({"B": 1, "L": 129}, "compiled for 0 <= L <= 128"),
        ({"B": 1, "L": 8, "attention_mask_1": 9}, "both called L"),
    ],
)
def test_explain_refuses_what_a_call_would(bert: Program, dims: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        bert.explain(**dims)


def test_a_loaded_artifact_explains_with_numpy_alone(bert: Program, tmp_path: Path) -> None:
    bert.save(tmp_path / "b.polydyn")
    code = (
        "import sys, polydyn\n"
        f"p = polydyn.load({str(tmp_path / 'b.polydyn')!r}, threads=2)\n"
        "print(p.explain(B=3, L=7).details())\n"
        "assert not {'islpy', 'onnx', 'rich', 'click'} & set(sys.modules)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=dict(os.environ, PATH=""),
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert run.stdout.strip() == bert.explain(B=3, L=7).details().strip()


expressions = st.recursive(
    st.one_of(st.integers(-5, 5).map(Index.of), st.sampled_from([N, M])),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda t: t[0] + t[1]),
        st.tuples(inner, inner).map(lambda t: t[0] * t[1]),
        st.tuples(inner, st.sampled_from([N, M, Index.of(3)])).map(lambda t: t[0] // t[1]),
        st.tuples(inner, inner).map(lambda t: minimum(*t)),
        st.tuples(inner, inner).map(lambda t: maximum(*t)),
    ),
    max_leaves=8,
)


@given(expressions, st.integers(0, 9), st.integers(0, 9))
def test_json_expressions_mean_the_same(x: Index, n: int, m: int) -> None:
    data = json.loads(json.dumps(to_json(x)))
    assert symbols_of(data) == x.symbols()
    assert evaluate(data, {"n": n, "m": m}) == x.evaluate({"n": n, "m": m})


def test_expressions_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="contents of a tensor"):
        to_json(fetch("t", (N,)) + 1)
    with pytest.raises(ArtifactError, match="not an operator"):
        evaluate(["exec", 1], {})
    with pytest.raises(KeyError):
        evaluate(["+", "n", 1], {})


def test_flops_count_multiplications_and_additions() -> None:
    from tests.support.tiny import model, node

    w = np.ones((3, 5), np.float32)
    program = polydyn.compile(model([node("MatMul", "x w", "y")], {"x": ("float32", ["N", 3])}, ["y"], {"w": w}))
    (x,) = program.explain(N=7).launches
    assert x.flops == 2 * 7 * 3 * 5
    assert x.bytes >= 4 * (7 * 3 + 3 * 5 + 7 * 5), "the packed weight may be padded"


def test_equal_expressions_are_one_list_in_memory_and_in_files() -> None:
    deep = N
    for _ in range(12):  # as a tree 2^12 nodes
        deep = maximum(deep + M, minimum(deep, 7 * M) + 1)
    data = {"a": to_json(deep), "b": [to_json(deep + 1), "x"], "c": ["min", "max"], "d": {"e": []}}
    table, folded = fold(data)
    assert len(table) < 100 and len(json.dumps([table, folded])) < 5000
    again = unfold(*json.loads(json.dumps([table, folded])))
    assert fold(again) == (table, folded) and again["c"] == ["min", "max"]
    env = {"n": 3, "m": 5}
    value = 3
    for _ in range(12):
        value = max(value + 5, min(value, 35) + 1)
    assert evaluate(again["a"], env) == value and evaluate(again["b"][0], env) == value + 1
    assert symbols_of(again["a"]) == {"n", "m"}


def test_an_expression_names_earlier_ones_only() -> None:
    with pytest.raises(ValueError, match="expression 1 of 1"):
        unfold([["+", "n", 1], ["+", {"list": 1}, 1]], {})
