"""The seal of a program's weights: C programs check by it that a library and an artifact belong together.

The last ``SEAL`` bytes of the weights are ``TEXT``, a digest of all bytes before the seal, and zeros. The library holds
``TEXT`` and the digest too (``runtime/c/seal.c``). The digest is written into the built library, not into its sources,
so that a model with new weights compiles no translation unit again. Standard library and numpy only.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from polydyn.build.features import available_cores
from polydyn.runtime.mapped import PART, joined_hash

SEAL = 64
"""Bytes of a seal, ``PD_SEAL`` of internal.h."""
TEXT = b"polydyn weights\0"
DIGEST = 16
"""Bytes of the digest."""

Bytes = npt.NDArray[np.uint8]


def hash_of_parts(data: Bytes) -> str:
    """Return the SHA-256 of the SHA-256 of every PART bytes, in order. Threads hash parts in parallel: one thread
    hashes 1.8 GB/s, far less than the memory bandwidth."""

    def part(start: int) -> bytes:
        return hashlib.sha256(data[start : start + PART].data).digest()

    if data.size <= PART:
        return joined_hash(map(part, range(0, data.size, PART)))
    from concurrent.futures import ThreadPoolExecutor  # small programs open without it

    with ThreadPoolExecutor(available_cores()) as threads:  # hashlib releases the interpreter lock
        return joined_hash(threads.map(part, range(0, data.size, PART)))


def seal_weights(weights: Bytes) -> None:
    """Write the seal into the last ``SEAL`` bytes of the weights."""
    digest = bytes.fromhex(hash_of_parts(weights[:-SEAL]))[:DIGEST]
    weights[-SEAL:] = np.frombuffer((TEXT + digest).ljust(SEAL, b"\0"), np.uint8)


def digest_of(weights: Bytes) -> bytes:
    """Return the digest in the seal of weights."""
    return weights[-SEAL + len(TEXT) :][:DIGEST].tobytes()


def seal_library(library: bytes, digest: bytes) -> bytes:
    """Return the library of a program with the digest of its weights."""
    before, found, after = library.partition(TEXT + bytes(DIGEST))
    assert found, "every library contains runtime/c/seal.c"
    return before + TEXT + digest + after
