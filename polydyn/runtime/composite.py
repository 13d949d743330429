"""Programs of several parts as artifacts: one artifact contains the parts' artifacts, with libraries in its weights.

Standard library and numpy only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from polydyn.runtime.artifact import ALIGN, Artifact, Bytes, aligned_bytes

LIBRARY = "lib.so"


def split(artifact: Artifact) -> list[Artifact]:
    """Return the parts of an artifact of ``join_parts``, and the bodies of its steps."""
    return [part_at(artifact, f"{k}/", m) for k, m in enumerate(artifact.manifest["parts"])]


def part_at(artifact: Artifact, prefix: str, manifest: Mapping[str, Any]) -> Artifact:
    """Return a part of an artifact. ``prefix``: of its names; ``manifest``: its manifest."""
    weights = manifest["weights"]
    sources = {n[len(prefix) :]: t for n, t in artifact.sources.items() if n.startswith(prefix)}
    images = {n[len(prefix) :]: i for n, i in artifact.images.items() if n.startswith(prefix)}
    library = images.pop(LIBRARY, b"")
    if "library" in manifest:
        library = _cut(artifact, manifest["library"]).tobytes()
    return Artifact(manifest, sources, library, _cut(artifact, weights), images, artifact.file)


def _cut(artifact: Artifact, block: Mapping[str, int]) -> Bytes:
    return artifact.weights[block["offset"] : block["offset"] + block["bytes"]]


GENERAL = "general/"
"""Prefix of the names in ``sources`` and ``images`` that belong to the general version."""


def with_general(artifact: Artifact, general: Artifact, pairs: Sequence[tuple[Any, Any]]) -> Artifact:
    """Add a version for calls in which not all ``pairs`` are equal, but one size of each unequal pair is 1."""
    whole, manifest = attached(artifact, GENERAL, general)
    note = "calls in which one of two sizes that are assumed equal is 1 run in a second version"
    more = {
        "general": {"pairs": [list(p) for p in pairs], "program": manifest},
        "notes": [*artifact.manifest["notes"], note],
    }
    return Artifact(dict(artifact.manifest) | more, whole.sources, whole.library, whole.weights, whole.images)


def attached(artifact: Artifact, prefix: str, other: Artifact) -> tuple[Artifact, dict[str, Any]]:
    """Add the data of ``other`` to an artifact, under names with a prefix. Return it and the manifest of ``other``."""
    first, second = artifact.weights, other.weights
    offset, weights = 0, first
    if not np.array_equal(first, second):
        offset = -(-first.size // ALIGN) * ALIGN
        weights = aligned_bytes(offset + second.size)
        weights[: first.size], weights[offset:] = first, second
    sources = dict(artifact.sources) | {prefix + n: t for n, t in other.sources.items()}
    images = dict(artifact.images) | {prefix + n: i for n, i in other.images.items()}
    images |= {prefix + LIBRARY: other.library} if other.library else {}
    manifest = dict(other.manifest) | {"weights": {"offset": offset, "bytes": int(second.size)}}
    return Artifact(artifact.manifest, sources, artifact.library, weights, images), manifest


def general_of(artifact: Artifact) -> Artifact:
    """Return the second version of an artifact of ``with_general``."""
    return part_at(artifact, GENERAL, artifact.manifest["general"]["program"])
