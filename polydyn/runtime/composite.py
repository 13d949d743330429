"""Programs of several parts as artifacts: the parts' artifacts inside one, their libraries among its weights.

Standard library and numpy only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from polydyn.runtime.artifact import ALIGN, Artifact, Bytes, aligned_bytes

LIBRARY = "lib.so"


def split(artifact: Artifact) -> list[Artifact]:
    """The parts of an artifact of ``join_parts``, and the bodies of its steps."""
    return [part_at(artifact, f"{k}/", m) for k, m in enumerate(artifact.manifest["parts"])]


def part_at(artifact: Artifact, prefix: str, manifest: Mapping[str, Any]) -> Artifact:
    """A part of an artifact: its manifest, and what its names begin with."""
    at = manifest["weights"]
    sources = {n[len(prefix) :]: t for n, t in artifact.sources.items() if n.startswith(prefix)}
    images = {n[len(prefix) :]: i for n, i in artifact.images.items() if n.startswith(prefix)}
    library = images.pop(LIBRARY, b"")
    if "library" in manifest:
        library = _cut(artifact, manifest["library"]).tobytes()
    return Artifact(manifest, sources, library, _cut(artifact, at), images, artifact.file)


def _cut(artifact: Artifact, at: Mapping[str, int]) -> Bytes:
    return artifact.weights[at["offset"] : at["offset"] + at["bytes"]]


GENERAL = "general/"
"""What names in ``sources`` and ``images`` begin with that belong to the general version."""


def with_general(artifact: Artifact, general: Artifact, pairs: Sequence[tuple[Any, Any]]) -> Artifact:
    """An artifact with a second version, for calls in which not all of ``pairs`` of sizes are equal but one is 1."""
    whole, manifest = attached(artifact, GENERAL, general)
    note = "calls in which one of two sizes that are taken to be equal is 1 run in a second version"
    more = {
        "general": {"pairs": [list(p) for p in pairs], "program": manifest},
        "notes": [*artifact.manifest["notes"], note],
    }
    return Artifact(dict(artifact.manifest) | more, whole.sources, whole.library, whole.weights, whole.images)


def attached(artifact: Artifact, prefix: str, other: Artifact) -> tuple[Artifact, dict[str, Any]]:
    """An artifact with the data of another one inside, under names with a prefix; the other's manifest."""
    first, second = artifact.weights, other.weights
    at, weights = 0, first
    if not np.array_equal(first, second):
        at = -(-first.size // ALIGN) * ALIGN
        weights = aligned_bytes(at + second.size)
        weights[: first.size], weights[at:] = first, second
    sources = dict(artifact.sources) | {prefix + n: t for n, t in other.sources.items()}
    images = dict(artifact.images) | {prefix + n: i for n, i in other.images.items()}
    images |= {prefix + LIBRARY: other.library} if other.library else {}
    manifest = dict(other.manifest) | {"weights": {"offset": at, "bytes": int(second.size)}}
    return Artifact(artifact.manifest, sources, artifact.library, weights, images), manifest


def general_of(artifact: Artifact) -> Artifact:
    """The second version of an artifact of ``with_general``."""
    return part_at(artifact, GENERAL, artifact.manifest["general"]["program"])
