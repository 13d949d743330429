"""Rates of decoders beside other tools: every case runs in two of them, a third that cannot run is named."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import language, limits, record
from benchmarks.language import QUICK, WHOLE, Interval, Lines, Matrix, judged, main
from benchmarks.language_models import SMOKE, WEIGHTS, Size, folder_of, onnx_bytes
from benchmarks.rows import Effort
from tests.support.stored import compiled, path_of

SIZE = Size(layers=2, hidden=64, vocabulary=120, head=16)
MATRIX = Matrix(("float32",), (1,), prompts=(3,), behind=(0, 5), batches=(2,))
BANDWIDTH = 1e10


def test_every_case_is_measured_and_what_cannot_run_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(tmp_path, SIZE)
    shutil.copy(path_of("llama_tiny"), folder / "float32.onnx")
    compiled("llama_tiny", 1).save(folder / "float32.polydyn")
    monkeypatch.setattr(limits, "read_bandwidth", lambda threads: BANDWIDTH)
    monkeypatch.setattr(language, "TIMES", 1)
    monkeypatch.setattr(language, "OTHERS", ("missing", "polydyn"))
    lines = Lines(tmp_path / "language.jsonl")
    rows = language.run(MATRIX, SIZE, tmp_path, Effort(3, 0.1), [], lines)
    assert [r["case"] for r in rows] == ["prompt of 3", "behind 0", "behind 5", "2 texts behind 128"]
    for r in rows:
        assert set(r["tools"]) == {"onnxruntime", "polydyn"} and not r["refused"], r["refused"]
        assert r["best"] == "onnxruntime" and r["ratio"][1] <= r["ratio"][0] <= r["ratio"][2]
        for tool in r["tools"].values():
            mean, low, high = tool["rate"]
            assert 0 < low <= mean <= high and len(tool["turns"]) == r["rounds"]
    read = onnx_bytes(folder / "float32.onnx") + 128 * 2 * SIZE.cache_bytes
    last = rows[-1]["tools"]["polydyn"]
    assert last["share"] == pytest.approx(read * last["rate"][0] / 2 / BANDWIDTH)
    assert "share" not in rows[0]["tools"]["polydyn"], "a prompt is not bound by what it reads"
    said = [json.loads(line) for line in lines.path.read_text().splitlines()]
    assert [s["kind"] for s in said] == ["run", "opening", *["rate"] * 4, "memory"]
    assert said[0]["machine"] and said[0]["size"]["vocab_size"] == 120
    opened = said[1]["tools"]
    assert opened["onnxruntime"]["error"] == 0 and opened["polydyn"]["error"] < 1e-4
    assert all(t["peak"] >= t["anonymous"] > 0 and 0 < t["open"][0] < t["first"][0] for t in opened.values())
    assert "ValueError: no tool 'missing'" in said[1]["refused"]["missing"]
    assert "NOT MEASURED: missing" in capsys.readouterr().out


def test_intervals_are_those_of_students_distribution() -> None:
    whole = Interval.of([1.0, math.e, math.e**2])
    half = 4.30 / math.sqrt(3)
    assert whole.plain() == pytest.approx([math.e, math.exp(1 - half), math.exp(1 + half)])
    assert Interval.of([2.0] * 5).plain() == pytest.approx([2, 2, 2])
    assert Interval.of([3.0]).high == math.inf


def test_the_fastest_other_tool_is_the_rival() -> None:
    def tool(*turns: float) -> dict[str, list[float]]:
        return {"rate": Interval.of([1 / t for t in turns]).plain(), "turns": list(turns)}

    tools = {"slow": tool(3, 3.1, 2.9), "fast": tool(2, 2.1, 1.9), "polydyn": tool(1, 1.05, 0.95)}
    found = judged(tools, noise=0.05)
    assert found["best"] == "fast" and found["ratio"] == pytest.approx([2, 2, 2]) and found["verdict"] == "faster"
    assert judged(tools, noise=1.5)["verdict"] == "same", "inside the spread of an A/A run"
    swapped = tools | {"polydyn": tool(1, 4, 2)}
    assert judged(swapped, noise=0.0)["verdict"] == "same", "1 is inside the interval"
    assert judged({"polydyn": tool(1, 1)}, 0.0) == {}


def test_the_whole_matrix_and_the_quick_sample() -> None:
    assert WHOLE.weights == WEIGHTS and WHOLE.threads == (1, 2)
    assert [n for n, _ in WHOLE.shapes()] == [
        *(f"prompt of {n}" for n in (16, 128, 512, 2048)), *(f"behind {n}" for n in (0, 128, 1024, 4096)),
        "4 texts behind 128", "8 texts behind 128",
    ]  # fmt: skip
    assert set(dict(QUICK.shapes())) == {"prompt of 128", "behind 0", "behind 1024", "4 texts behind 128"}
    assert Size().config()["num_key_value_heads"] == 4 and Size().cache_bytes == 2 * 4 * 8 * 4 * 64


def test_options_choose_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = []
    monkeypatch.setattr(language, "run", lambda matrix, size, *rest, **options: seen.append((matrix, size)) or [])
    monkeypatch.setattr(record, "SCRATCH", tmp_path)
    main(["--only", "polydyn"])
    main(["--quick", "--threads", "2", "--batches"])
    main(["--smoke", "--weights", *WEIGHTS])
    assert seen[0] == (WHOLE, Size())
    assert seen[1] == (replace(QUICK, threads=[2], batches=[]), Size())
    assert seen[2] == (replace(QUICK, weights=list(WEIGHTS)), SMOKE)
