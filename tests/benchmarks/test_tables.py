"""Benchmarks of decoding and of versions on the smallest inputs: their counts are right."""

from __future__ import annotations

import pytest

from benchmarks.decode import decode
from benchmarks.gpu import choice, sass, table
from polydyn.gpu.compiler import KernelUse
from polydyn.gpu.hardware import load
from polydyn.testing.accuracy import TOLERANCE
from tests.support.stored import path_of


def test_decoding_compares_and_counts() -> None:
    result = decode(path_of("gpt2_past_tiny"), steps=3, prompt=2, batch=2, threads=1)
    assert result["error"] <= TOLERANCE
    token = 4 * 4 * 8 * 4  # bytes of keys and values of two layers of 4 heads of 8 floats
    assert result["bytes_copied"] == result["bytes_appended"] == 2 * 5 * token


def test_decoding_takes_the_newer_exporter() -> None:
    result = decode(path_of("llama_tiny"), steps=3, prompt=2, batch=2, threads=1)
    assert result["error"] <= TOLERANCE and result["bytes_copied"] <= 2 * result["bytes_appended"]


def test_versions_beside_the_roofline(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "LAYERS", ((64, 128),))
    monkeypatch.setattr("sys.argv", ["choice", "--arch", "sm_80", "--rows", "1", "300"])
    choice.main()
    lines = capsys.readouterr().out.splitlines()
    assert "A100" in lines[0] and lines[3].split()[1:3] == ["1", "gemv_2_n8"]
    shares = [int(line.split()[6].rstrip("%")) for line in lines[3:]]
    assert len(shares) == 2 and all(0 < s <= 100 for s in shares), "nothing is faster than the roofline"


def test_cases_of_the_review_beside_the_fastest_rival(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sass, "built", lambda *kernel: (sass.Code((), ()), KernelUse(200)))
    rivals = (table.Rival("one", (1e4, 2e4)), table.Rival("other", (1.0, 2.0)))
    case = table.Case("small", table.layer("relu", 64, 128), {"M": 40}, ("before", (7.0, 9.0)), rivals)
    row = table.row(case, load("h200"))
    (kernel,) = row["kernels"]
    assert row["ratio"] == 1.5 / row["us"] < table.MIN_RATIO and "BELOW" in table.line(row)
    assert row["us"] >= row["bound_us"] + 1.5 and kernel["moved"] == 2 * (40 * 64 + 64 * 128 + 128 + 40 * 128)
    assert kernel["registers"] == 200 and kernel["flight"] > 0


def test_instructions_of_a_result() -> None:
    loop = ("LDS.128", "FFMA", "BAR", "STG.E.128", "BRA")
    assert table.of_a_result(sass.Code(("HGMMA", *loop, "EXIT"), ((1, 6), (0, 7)))) == 5 / 8
    assert table.of_a_result(sass.Code(("HMMA", "BRA", *loop[:4], "EXIT", "NOP"), ((0, 2),))) == 4 / 8
    assert table.of_a_result(sass.Code(("HMMA", "BRA", "EXIT"), ((0, 2),))) is None
