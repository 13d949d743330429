"""Errors of polydyn are also the errors of Python that a user's code may catch."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import numpy as np
import pytest

import polydyn
from polydyn import errors
from polydyn.errors import PolydynError
from polydyn.runtime.program import checked_feeds
from polydyn.shapes.sizes import Sizes


@pytest.mark.parametrize("name", sorted({*errors.__all__} - {"Declined", "PolydynError"}))
def test_an_error_is_printed_and_copied_whole(name: str) -> None:
    """Bases such as KeyError and OSError have an initializer and a text of their own."""
    kind = getattr(errors, name)
    e = kind("it is wrong", node="n", remedy="mend it")
    assert isinstance(e, PolydynError) and str(e) == "it is wrong\n  node: n\n  remedy: mend it"
    other = copy.copy(e)
    assert type(other) is kind and other.remedy == "mend it" and str(e) in str(other)


def test_users_may_catch_what_python_raises(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        polydyn.load(tmp_path / "missing")
    with pytest.raises(FileNotFoundError):
        polydyn.compile(tmp_path / "missing.onnx")
    with pytest.raises(FileNotFoundError):
        polydyn.compile(b"", records=tmp_path / "missing.db")
    with pytest.raises(ValueError, match="not an ONNX protobuf"):
        polydyn.compile(b"\xff")
    with pytest.raises(TypeError, match="options is a dict"):
        polydyn.compile(b"", options={"tf32": True})  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match="unknown target"):
        polydyn.compile(b"", target="cpu:avx9")
    with pytest.raises(ValueError, match=r"9\.\.3 holds no size"):
        Sizes.parse("9:3")


def test_inputs_are_a_mapping() -> None:
    feeds = {"x": np.ones(2)}
    assert checked_feeds(feeds) is feeds
    for wrong in (None, [np.ones(2)]):
        with pytest.raises(TypeError, match=r"not a mapping of arrays by name(.|\n)*polydyn\.InferenceSession"):
            checked_feeds(wrong)  # type: ignore[arg-type]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "polydyn.measure", None)
    with pytest.raises(ModuleNotFoundError), errors.needing_packages("polydyn.tune"):
        import polydyn.measure  # noqa: F401  # polydyn's own modules are not packages
    missing = pytest.raises(errors.MissingPackageError, match=r"polydyn\.tune needs the package onnx")
    with missing as e, errors.needing_packages("polydyn.tune"):
        raise ModuleNotFoundError("No module named 'onnx'", name="onnx")
    assert isinstance(e.value, ImportError) and "pip install polydyn" in str(e.value)
