"""Programs of several parts as artifacts: the parts' artifacts inside one, their weights one behind the other.

Standard library and numpy only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from polydyn.runtime.artifact import ALIGN, Artifact, Bytes, aligned_bytes

LIBRARY = "lib.so"


def join(
    manifest: Mapping[str, Any], parts: Sequence[Artifact], constants: Mapping[str, npt.NDArray[Any]],
    sources: Mapping[str, str], library: bytes,
) -> Artifact:  # fmt: skip
    """One artifact with ``parts``, and arrays, sources and a library of its own; ``manifest``: what it says besides."""
    blocks: list[Bytes] = [p.weights for p in parts]
    blocks += [np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in constants.values()]
    offsets, end = [], 0
    for b in blocks:
        offsets.append(end)
        end += -(-b.size // ALIGN) * ALIGN
    weights = aligned_bytes(end)
    for b, at in zip(blocks, offsets, strict=True):
        weights[at : at + b.size] = b
    files = dict(sources) | {f"{k}/{n}": t for k, p in enumerate(parts) for n, t in p.sources.items()}
    images = {f"{k}/{n}": i for k, p in enumerate(parts) for n, i in p.images.items()}
    images |= {f"{k}/{LIBRARY}": p.library for k, p in enumerate(parts) if p.library}
    entries = {
        "parts": [
            dict(p.manifest) | {"weights": {"offset": at, "bytes": int(p.weights.size)}}
            for p, at in zip(parts, offsets, strict=False)
        ],
        "constants": {
            n: {"offset": at, "dtype": str(a.dtype), "shape": list(a.shape)}
            for (n, a), at in zip(constants.items(), offsets[len(parts) :], strict=True)
        },
    }
    return Artifact(dict(manifest) | entries, files, library, weights, images)


def split(artifact: Artifact) -> list[Artifact]:
    """The parts of an artifact of ``join``."""
    return [_part(artifact, f"{k}/", m) for k, m in enumerate(artifact.manifest["parts"])]


def _part(artifact: Artifact, prefix: str, manifest: Mapping[str, Any]) -> Artifact:
    at = manifest["weights"]
    sources = {n[len(prefix) :]: t for n, t in artifact.sources.items() if n.startswith(prefix)}
    images = {n[len(prefix) :]: i for n, i in artifact.images.items() if n.startswith(prefix)}
    library = images.pop(LIBRARY, b"")
    return Artifact(manifest, sources, library, artifact.weights[at["offset"] : at["offset"] + at["bytes"]], images)


GENERAL = "general/"
"""What names in ``sources`` and ``images`` begin with that belong to the general version."""


def with_general(artifact: Artifact, general: Artifact, pairs: Sequence[tuple[Any, Any]]) -> Artifact:
    """An artifact with a second version, for calls in which not all of ``pairs`` of sizes are equal but one is 1."""
    first, second = artifact.weights, general.weights
    at = 0 if np.array_equal(first, second) else -(-first.size // ALIGN) * ALIGN
    weights = first
    if at:
        weights = aligned_bytes(at + second.size)
        weights[: first.size], weights[at:] = first, second
    sources = dict(artifact.sources) | {GENERAL + n: t for n, t in general.sources.items()}
    images = dict(artifact.images) | {GENERAL + n: i for n, i in general.images.items()}
    images |= {GENERAL + LIBRARY: general.library} if general.library else {}
    manifest = dict(general.manifest) | {"weights": {"offset": at, "bytes": int(second.size)}}
    note = "calls in which one of two sizes that are taken to be equal is 1 run in a second version"
    more = {
        "general": {"pairs": [list(p) for p in pairs], "program": manifest},
        "notes": [*artifact.manifest["notes"], note],
    }
    return Artifact(dict(artifact.manifest) | more, sources, artifact.library, weights, images)


def general_of(artifact: Artifact) -> Artifact:
    """The second version of an artifact of ``with_general``."""
    return _part(artifact, GENERAL, artifact.manifest["general"]["program"])


def constants_of(artifact: Artifact) -> dict[str, npt.NDArray[Any]]:
    """The arrays of an artifact of ``join``, read-only views of its weights."""
    out = {}
    for name, c in artifact.manifest["constants"].items():
        dtype = np.dtype(c["dtype"])
        data = np.frombuffer(artifact.weights, dtype, int(np.prod(c["shape"], dtype=np.int64)), c["offset"])
        out[name] = data.reshape(c["shape"])
    return out
