"""Arguments of the command line: sizes, ranges, arrays from files, generated inputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import click
import numpy as np
import numpy.typing as npt

from polydyn.errors import InputError, ShapeError
from polydyn.runtime.explain import resolve_dims
from polydyn.runtime.plain_expressions import evaluate
from polydyn.runtime.program import Program, numpy_dtype
from polydyn.shapes.sizes import Sizes

Array = npt.NDArray[Any]


def sizes(text: str) -> dict[str, int]:
    """Parse ``B=1,L=8`` into a mapping. UsageError: wrong format."""
    try:
        pairs = [item.partition("=")[::2] for item in text.split(",")]
        return {name.strip(): int(size) for name, size in pairs}
    except ValueError:
        raise click.UsageError(f"{text!r} is not of the form B=1,L=8") from None


def dim_sizes(text: str) -> tuple[str, Sizes]:
    """Parse a dim's name and sizes: ``B=1:64``, or any form of ``Sizes.parse``. UsageError: wrong format."""
    name, equals, sizes = text.partition("=")
    try:
        if not equals:
            raise ShapeError("no sizes", remedy="write B=1:64, L=8:512:8 or L=1:512@128:0.6,384:0.4")
        return name.strip(), Sizes.parse(sizes)
    except ShapeError as e:
        raise click.UsageError(f"{text!r}: {e}") from None


def named_axes(text: str) -> tuple[str, tuple[str | None, ...]]:
    """Parse an input and names for its axes: ``input_ids=B,L``; ``_`` leaves an axis unnamed. UsageError: wrong
    format."""
    name, equals, axes = text.rpartition("=")
    if not equals or not name or not all(a.strip() for a in axes.split(",")):
        raise click.UsageError(f"{text!r} is not of the form input_ids=B,L")
    return name.strip(), tuple(None if a.strip() == "_" else a.strip() for a in axes.split(","))


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
            raise InputError(f"cannot read {path}: {e}", tensor=name, remedy="give a file written by numpy.save") from e
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
            feeds[i["name"]] = _array([evaluate(d, sizes) for d in i["dims"]], i["dtype"], rng)
    return feeds


def _array(dims: list[int], dtype: str, rng: np.random.Generator) -> Array:
    if dtype == "bfloat16":
        return (rng.standard_normal(dims).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if dtype.startswith("float"):
        return rng.standard_normal(dims).astype(numpy_dtype(dtype))
    bits = rng.random(dims) < 0.75
    bits[..., :1] = True
    return bits.astype(numpy_dtype(dtype))
