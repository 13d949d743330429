"""The file of a program that the provider opens without Python (``c/program.c``).

The first page is text. The library and the weights follow at multiples of 4096 bytes. The weights are mapped.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path

from polydyn.build.cache import replacing
from polydyn.build.compiler import architecture_of
from polydyn.errors import ArtifactError, UnsupportedError
from polydyn.onnx_runtime import FALLBACK
from polydyn.runtime.artifact import ABI, Artifact

PAGE = 4096
SUFFIX = ".ep"


def write_program_file(artifact: Artifact, path: str | os.PathLike[str]) -> int:
    """Write the program of an artifact; return the size in bytes.

    UnsupportedError: the program needs Python or a device. ArtifactError: the file cannot be written.
    """
    check_embeddable(artifact)
    at = PAGE + -(-len(artifact.library) // PAGE) * PAGE
    size = at + int(artifact.weights.size)
    try:
        with replacing(Path(path)) as f:
            f.write(header(artifact, at).ljust(PAGE, b"\0"))
            f.write(artifact.library.ljust(at - PAGE, b"\0"))
            f.write(artifact.weights.data)
            f.truncate(-(-size // PAGE) * PAGE)
    except OSError as e:
        raise ArtifactError(f"cannot write {path}: {e.strerror}", remedy="choose a writable folder") from e
    return size


def header(artifact: Artifact, weights_offset: int) -> bytes:
    """Return the text of the first page."""
    manifest = artifact.manifest
    lines = (
        "polydyn-ep 1", f"abi {ABI}", f"architecture {architecture_of(manifest['target'])}",
        f"library {PAGE} {len(artifact.library)} {zlib.crc32(artifact.library):x}",
        f"weights {weights_offset} {artifact.weights.size}", f"features {','.join(manifest['features']) or '-'}",
        f"parts {int('order' in manifest)}", "",
    )  # fmt: skip
    return "\n".join(lines).encode()


def check_embeddable(artifact: Artifact) -> None:
    """Check that a program runs without Python and on the CPU. UnsupportedError: it does not."""
    manifest = artifact.manifest
    reasons = {
        "a program for a device": "cuda" in manifest,
        "a program with strings": bool(manifest.get("host")),
        "a program with nodes that ONNX Runtime computes": _has_fallback(manifest),
    }
    for reason, applies in reasons.items():
        if applies:
            raise UnsupportedError(
                f"{reason} cannot be part of a session of ONNX Runtime", rule="onnxruntime",
                remedy="run it in Python; a session with the provider leaves such nodes to ONNX Runtime",
            )  # fmt: skip


def _has_fallback(manifest: object) -> bool:
    """Whether a step anywhere in a manifest runs in ONNX Runtime."""
    if isinstance(manifest, dict):
        return manifest.get("kind") == FALLBACK or any(map(_has_fallback, manifest.values()))
    return isinstance(manifest, (list, tuple)) and any(map(_has_fallback, manifest))
