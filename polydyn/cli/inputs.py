"""Inputs of a call from the command line: arrays from files, generated ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from polydyn.errors import InputError
from polydyn.runtime.explain import resolve_dims
from polydyn.runtime.plain_expressions import evaluate
from polydyn.runtime.program import Program, numpy_dtype

Array = npt.NDArray[Any]


def named_files(items: Iterable[str]) -> dict[str, Array]:
    """Load arrays from ``name=file.npy``. InputError: wrong format, or numpy cannot read the file."""
    out: dict[str, Array] = {}
    for item in items:
        name, equals, path = item.partition("=")
        if not equals:
            raise InputError(f"--input {item} does not name a file", remedy="write --input name=file.npy")
        try:
            out[name] = np.load(path, allow_pickle=False)
        except (OSError, ValueError, EOFError) as e:
            why, remedy = getattr(e, "strerror", None) or e, "give a file written by numpy.save"
            raise InputError(f"cannot read {path}: {why}", tensor=name, remedy=remedy) from e
    return out


def file_names(names: Iterable[str]) -> dict[str, str]:
    """Return a distinct file name for each tensor: its own name, with unsafe characters replaced."""
    files: dict[str, str] = {}
    for k, name in enumerate(names):
        safe = "".join(c if c.isalnum() or c in "._-" else "_" for c in name) or f"output_{k}"
        while f"{safe}.npy" in files.values():
            safe += f"_{k}"
        files[name] = f"{safe}.npy"
    return files


def sizes_of(program: Program, shape: Mapping[str, int], arrays: Mapping[str, Array]) -> dict[str, int]:
    """Return every symbol's value from ``--shape`` and the arrays read from files."""
    sizes = dict(shape)
    for s in program.manifest["symbols"]:
        a = arrays.get(s["input"])
        if a is not None and s["axis"] < a.ndim:
            sizes.setdefault(s["symbol"], a.shape[s["axis"]])
    return resolve_dims(program.manifest, sizes)


def feeds_for(program: Program, shape: Mapping[str, int], arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return the given arrays, and seeded random ones for the other inputs.

    Floats are standard normal; integers and booleans are 0 or 1. The first one of each row is 1, so that a mask is
    valid, and an index is valid for any table with two rows.
    """
    inputs = program.manifest["inputs"]
    if all(i["name"] in arrays for i in inputs):
        return dict(arrays)
    sizes = sizes_of(program, shape, arrays)
    rng = np.random.default_rng(0)
    feeds = dict(arrays)
    for i in inputs:
        if i["name"] not in feeds:
            dims = [evaluate(d, sizes) for d in i["dims"]]
            try:
                feeds[i["name"]] = _array(dims, i["dtype"], rng)
            except (MemoryError, ValueError) as e:  # ValueError: numpy cannot create an array of this shape
                raise InputError(
                    f"no memory for input '{i['name']}' of shape {dims}", tensor=i["name"], remedy="give smaller sizes"
                ) from e
    return feeds


def _array(dims: list[int], dtype: str, rng: np.random.Generator) -> Array:
    if dtype == "bfloat16":
        return (rng.standard_normal(dims).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if dtype.startswith("float"):
        return rng.standard_normal(dims).astype(numpy_dtype(dtype))
    bits = rng.random(dims) < 0.75
    bits[..., :1] = True
    return bits.astype(numpy_dtype(dtype))
