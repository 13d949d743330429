"""Weights from a seed, equal on every machine; numpy alone.

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
"""Scale of activations and weights that are quantized to 8-bit floats: numbers up to 7."""


def weight(name: str, shape: Sequence[int], scale: float = 1.0, dtype: str = "float16") -> np.ndarray[Any, Any]:
    """Return a tensor's numbers, normal with this deviation; they depend only on its name and shape."""
    rng = np.random.default_rng(zlib.crc32(f"{name} {list(shape)}".encode()))
    if len(shape) < 2:
        return (rng.standard_normal(tuple(shape)) * scale).astype(dtype)
    rows, columns = int(np.prod(shape[:-1])), shape[-1]
    square = (rng.standard_normal((min(rows, SQUARE), min(columns, SQUARE))) * scale).astype(dtype)
    repeats = -(-rows // square.shape[0]), -(-columns // square.shape[1])
    return np.ascontiguousarray(np.tile(square, repeats)[:rows, :columns]).reshape(shape)


def scaled(name: str, k: int, n: int, dtype: str = "float16") -> np.ndarray[Any, Any]:
    """Return a dense layer's [k, n] weight that keeps the scale of its input."""
    return weight(name, (k, n), k**-0.5, dtype)


def dense(k: int, n: int) -> Mapping[str, np.ndarray[Any, Any]]:
    """Return ``w`` and ``c`` (bias) of a layer."""
    return {"w": scaled("w", k, n), "c": weight("c", (n,), 0.1)}


def convolution(channels: int, filters: int, window: int) -> np.ndarray[Any, Any]:
    """Return filters [filters, channels, window, window]."""
    return weight("filters", (filters, channels, window, window), (channels * window**2) ** -0.5)


def whole(k: int, n: int) -> np.ndarray[Any, Any]:
    """Return bytes [k, n] of the whole range."""
    rng = np.random.default_rng(k * 100003 + n)
    square = rng.integers(-128, 128, (SQUARE, SQUARE), np.int8)
    return np.ascontiguousarray(np.tile(square, (-(-k // SQUARE), -(-n // SQUARE)))[:k, :n])
