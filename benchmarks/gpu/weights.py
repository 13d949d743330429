"""Weights from a seed, equal wherever they are drawn; numpy alone.

A matrix repeats a square of random numbers, so a pack with models of full size stays small: each tensor costs the bytes
of one square. To a kernel they are as random as others: no two neighbours of a tile or of a row of it are related.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

SQUARE = 128
FLOAT8_SCALE = 2.0**-6
"""Of activations and weights that are quantized to 8-bit floats: numbers up to 7."""


def weight(name: str, shape: Sequence[int], scale: float = 1.0, dtype: str = "float16") -> np.ndarray[Any, Any]:
    """A tensor's numbers, normal with this deviation; they follow from its name and shape."""
    rng = np.random.default_rng(zlib.crc32(f"{name} {list(shape)}".encode()))
    if len(shape) < 2:
        return (rng.standard_normal(tuple(shape)) * scale).astype(dtype)
    rows, columns = int(np.prod(shape[:-1])), shape[-1]
    square = (rng.standard_normal((min(rows, SQUARE), min(columns, SQUARE))) * scale).astype(dtype)
    repeats = -(-rows // square.shape[0]), -(-columns // square.shape[1])
    return np.ascontiguousarray(np.tile(square, repeats)[:rows, :columns]).reshape(shape)


def scaled(name: str, k: int, n: int, dtype: str = "float16") -> np.ndarray[Any, Any]:
    """A dense layer's [k, n], whose results are as large as what it is given."""
    return weight(name, (k, n), k**-0.5, dtype)


def dense(k: int, n: int) -> Mapping[str, np.ndarray[Any, Any]]:
    """``w`` and ``c`` (bias) of a layer."""
    return {"w": scaled("w", k, n), "c": weight("c", (n,), 0.1)}


def convolution(channels: int, filters: int, window: int) -> np.ndarray[Any, Any]:
    """Filters [filters, channels, window, window]."""
    return weight("filters", (filters, channels, window, window), (channels * window**2) ** -0.5)


def whole(k: int, n: int) -> np.ndarray[Any, Any]:
    """Bytes [k, n] of the whole range."""
    rng = np.random.default_rng(k * 100003 + n)
    square = rng.integers(-128, 128, (SQUARE, SQUARE), np.int8)
    return np.ascontiguousarray(np.tile(square, (-(-k // SQUARE), -(-n // SQUARE)))[:k, :n])
