"""Distances to float64 and comparisons of bits: right for what is exact, and they notice what is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

from benchmarks import bits, numerics
from benchmarks.exact import in_float64
from benchmarks.single.case import cases
from polydyn.testing.accuracy import ULP, distance
from tests.support.stored import path_of


def test_rounding_is_half_an_ulp_and_more_is_more() -> None:
    exact = np.random.default_rng(0).standard_normal(1000)
    found = distance({"y": exact.astype(np.float32)}, {"y": exact})
    assert found and found.ulp[0] == 1000 and found.largest < 1e-7
    off = exact.astype(np.float32)
    off[7] = np.nextafter(np.nextafter(off[7], np.float32(9)), np.float32(9))
    off[8] = 2 * off[8]
    found = distance({"y": off}, {"y": exact})
    assert found and found.ulp[0] == 998 and found.ulp[-1] == 1 and sum(found.ulp) == 1000
    assert found.largest == pytest.approx(abs(off[8] - exact[8]) / np.abs(exact).max())
    assert len(found.ulp) == len(ULP)


def test_what_cannot_be_compared_has_no_distance() -> None:
    assert distance({"y": np.zeros(2, np.float32)}, {"y": np.zeros(3)}) is None
    assert distance({"y": np.zeros(2, np.int64)}, {"y": np.zeros(2)}) is None
    found = distance({"y": np.float32([1, np.inf])}, {"y": np.array([1, np.inf])})
    assert found and sum(found.ulp) == 1 and found.mean == 0
    assert distance({"y": np.float32([np.nan, 1])}, {"y": np.array([1.0, 1.0])}) is None, "a NaN that is not exact"


def parsed(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]>\n{text}')


def test_integers_in_exact_arithmetic_stay_integers() -> None:
    model = parsed("""g (int64[N] x) => (int64[N] y) {
        f = Cast <to = 1> (x)
        l = Log (f)
        d = Constant <value = float {2.772588722}> ()
        q = Div (l, d)
        e = Constant <value = float {8}> ()
        m = Mul (q, e)
        y = Cast <to = 7> (m)
    }""")
    (got,) = in_float64(model, {"x": np.array([2, 4, 16])})
    np.testing.assert_array_equal(got, [2, 4, 8])
    assert model.graph.node[-1].input[0] == "m", "the given model is unchanged"


def test_gather_elements_of_one_row() -> None:
    model = parsed("g (float[1, N] x, int64[1, M] i) => (float[1, M] y) { y = GatherElements <axis = 1> (x, i) }")
    x, places = np.float32([[1, 2, 3]]), np.array([[2, 0, 0, 1, -1, 2, 1]])
    (got,) = in_float64(model, {"x": x, "i": places})
    np.testing.assert_array_equal(got, [[3, 1, 1, 2, 3, 3, 2]])
    assert got.dtype == np.float64


def test_rows_of_models_and_families(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(numerics.record, "SCRATCH", tmp_path)
    monkeypatch.setattr(
        "sys.argv", ["numerics", path_of("resnet_tiny"), "--shapes", "1", "--families", "--only", "Sin f32"]
    )
    monkeypatch.setattr(numerics, "LIMIT", 0.0)
    assert numerics.main() == 1, "the ratio exceeds the limit"
    out = capsys.readouterr().out
    assert "1 models: ratios" in out and "worst: Sin f32" in out
    (model, family) = json.loads((tmp_path / "numerics.json").read_text())["rows"]
    assert model["polydyn"]["largest"] < 1e-5 and model["shapes"] == [{"N": 1, "H": 31, "W": 47}]
    assert family["case"] == "family Sin, Cos" and sum(family["polydyn"]["ulp"]) > 0


def test_every_family_has_cases() -> None:
    from benchmarks.single.__main__ import selected

    named = {numerics.family_of(c) for c in selected([], ["f32"])}
    assert set(numerics.FAMILIES) <= named


def test_bits_that_differ_are_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    zero: list[Any] = [{"y": np.float32([0.0])}]
    assert bits.equal(zero, [{"y": np.float32([0.0])}])
    for other in (np.float32([-0.0]), np.float64([0.0]), np.float32([[0.0]])):
        assert not bits.equal(zero, [{"y": other}])
    assert not bits.equal(zero, [{"z": np.float32([0.0])}])

    def made(path: Path, threads: int, target: str, numbers: Any, cache: bool = False) -> Any:
        return [{"y": np.float32([1.0 + (threads == 3) + (target == "cpu:avx2")])}], True

    monkeypatch.setattr(bits, "elsewhere", made)
    row = bits.compared(Path("m.onnx"), [1, 2, 3], ["cpu:avx512", "cpu:avx2"], [0])
    assert row["calls"] and row["processes"] and row["threads"] == {2: True, 3: False}
    assert row["targets"]["cpu:avx2"] == {"equal": 0, "shapes": 1, "difference": 0.5}
    monkeypatch.setattr("sys.argv", ["bits", "m.onnx", "--shapes", "0"])
    assert bits.main() == 1 and "DIFFERS" in capsys.readouterr().out


def test_calls_processes_and_threads_have_equal_bits() -> None:
    path, numbers = Path(path_of("resnet_tiny")).resolve(), [1, 3]
    first, again = bits.calls(path, 1, "cpu", numbers, cache=True)
    assert again and len(first) == 2
    assert bits.equal(first, bits.calls(path, 3, "cpu", numbers, cache=True)[0])
    elsewhere, again = bits.elsewhere(path, 2, "cpu", numbers, cache=True)
    assert again and bits.equal(first, elsewhere)


def test_a_failed_process_is_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="missing, cpu, 1 threads: "):
        bits.elsewhere(tmp_path / "missing.onnx", 1, "cpu", [0])


def test_a_family_names_its_worst_case(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = (next(iter(cases(n, "T R", lambda n, x: n.Tanh(x), ((4,),)))) for n in ("Tanh", "Sigmoid"))
    monkeypatch.setattr(numerics, "selected", lambda *_: [a, b])
    made = {"Tanh f32": (2e-7, 1e-7), "Sigmoid f32": (1e-7, 1e-7)}
    monkeypatch.setattr(numerics, "of_case", lambda c: [numerics.Distance(m, m, (1,) + (0,) * 6) for m in made[c.name]])
    ((name, row),) = numerics.families([])
    assert (name, row["worst"], row["calls"]) == ("Tanh, Sigmoid", "Tanh f32", 2)
    assert row["worst_ratio"] == pytest.approx(2.0) and row["ratio"] == pytest.approx(1.5)


@pytest.mark.parametrize("node", ["BatchNormalization (x, v, v, v, v)", "Softmax (x)"])
def test_old_opsets_mean_what_they_meant(node: str) -> None:
    model = parsed(f"g (float[N, 2, H] x, float[2] v) => (float[N, 2, H] y) {{ y = {node} }}")
    model.opset_import[0].version = 8
    if "v" not in node:
        del model.graph.input[1:]
    given = {"x": np.random.default_rng(0).standard_normal((3, 2, 4), np.float32), "v": np.float32([2, 0.5])}
    given = {v.name: given[v.name] for v in model.graph.input}
    found = distance({"y": numerics.runtime(model).run(None, given)[0]}, {"y": in_float64(model, given)[0]})
    assert found and found.largest < 1e-6, "a batch norm does not train, softmax is over all axes but the first"


def test_local_response_of_few_channels() -> None:
    model = parsed("g (float[N, 3, 2, 2] x) => (float[N, 3, 2, 2] y) { y = LRN <size = 3, alpha = 0.5> (x) }")
    given = {"x": np.random.default_rng(0).standard_normal((5, 3, 2, 2), np.float32)}
    found = distance({"y": numerics.runtime(model).run(None, given)[0]}, {"y": in_float64(model, given)[0]})
    assert found and found.largest < 1e-6


@pytest.mark.parametrize(
    ("attributes", "x", "w"),
    [
        ("pads = [1, 2, 0, 1], strides = [2, 1], dilations = [1, 2]", (2, 3, 9, 8), (4, 3, 3, 2)),
        ("group = 2", (1, 4, 5, 6), (6, 2, 2, 2)),
        ('auto_pad = "SAME_UPPER", strides = [2]', (1, 2, 8), (3, 2, 3)),
        ('auto_pad = "SAME_LOWER", strides = [2]', (1, 2, 8), (3, 2, 3)),
        ('auto_pad = "VALID"', (1, 1, 4, 5, 4), (2, 1, 2, 3, 2)),
    ],
)
def test_convolutions_are_as_in_onnx_runtime(attributes: str, x: tuple[int, ...], w: tuple[int, ...]) -> None:
    numbers = np.random.default_rng(0)
    given = {"x": numbers.standard_normal(x, np.float32), "w": numbers.standard_normal(w, np.float32)}
    given["b"] = numbers.standard_normal(w[0], np.float32)
    dims = {n: ", ".join(map(str, a.shape)) for n, a in given.items()}
    inputs = ", ".join(f"float[{d}] {n}" for n, d in dims.items())
    model = parsed(f"g ({inputs}) => (float[{', '.join('abcde'[: len(x)])}] y) {{ y = Conv <{attributes}> (x, w, b) }}")
    (exact,) = in_float64(model, given)
    (got,) = numerics.runtime(model).run(None, given)
    found = distance({"y": got}, {"y": exact})
    assert found and exact.dtype == np.float64 and found.largest < 1e-6
