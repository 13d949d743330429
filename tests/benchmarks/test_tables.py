"""Benchmarks of decoding and of versions on the smallest inputs: what they count is right."""

from __future__ import annotations

import pytest

from benchmarks.decode import decode
from benchmarks.gpu import choice
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
