"""Measures kernels with edited texts next to generated ones, to learn the gain of an idea before a generator has it.

A variant is the program of a case with other kernel texts, compiled for the pack; the stage ``variants`` checks and
times it like the original. Edits are patterns (below: those that a review of the texts proposed), or files:
``FOLDER/CASE~NAME/KERNEL.cu``, edited versions of the texts that ``python -m benchmarks.gpu.variants PACK CASE OUT``
writes. An edit that changes nothing, because generators write another text by now, gives no variant.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

from polydyn.runtime.artifact import Artifact, read_artifact
from polydyn.runtime.cuda.images import build_images

Edit: TypeAlias = "Callable[[str, str], str]"
"""(kernel, text) -> another text."""

OF = ("layers", "attention", "stitch")
"""Kinds of cases that have variants."""
SHAPES = 5
PATTERNS: dict[str, tuple[str, tuple[tuple[str, str], ...]]] = {
    "one-block": ("attention_", ((r"(PD_KERNEL\(\w+, \d+), \d+\)", r"\1, 1)"),)),
    "two-blocks": ("attention_", ((r"(PD_KERNEL\(\w+, (?:128|256)), \d+\)", r"\1, 2)"),)),
    "rolled": ("layer_gelu_", ((r"#pragma unroll\n(?=\s*for \(int\w* e_)", "#pragma unroll 1\n"),)),
}  # fmt: skip
"""Maps a name to the cases that it is for, and (pattern, replacement) for their texts."""


def edits(case: str, edited: Path | None = None) -> Iterator[tuple[str, Edit]]:
    """Yield name and edit of the variants of a case; ``edited``: a folder of edited texts."""
    for name, (cases, changes) in PATTERNS.items():
        if re.match(cases, case):
            yield name, partial(_replaced, changes)
    for folder in sorted(edited.glob(f"{case}~*")) if edited else ():
        yield folder.name.partition("~")[2], partial(_read, folder)


def _replaced(changes: tuple[tuple[str, str], ...], _: str, text: str) -> str:
    head, mark, body = text.partition("PD_KERNEL")  # the text before is shared by kernels of a unit
    for pattern, by in changes:
        body = re.sub(pattern, by, mark + body)[len(mark) :]
    return head + mark + body


def _read(folder: Path, kernel: str, text: str) -> str:
    path = folder / f"{kernel}.cu"
    return path.read_text() if path.exists() else text


def edited(artifact: Artifact, edit: Edit) -> Artifact | None:
    """Return the program with edited kernels, or None if the edit changes nothing.

    BuildError: a text does not compile.
    """
    kernels = [(k["name"], k["arch"]) for k in artifact.manifest["kernels"]]
    texts = {f"{k}.cu": edit(k, artifact.sources[f"{k}.cu"]) for k, _ in kernels}
    if all(artifact.sources[n] == t for n, t in texts.items()):
        return None
    sources = dict(artifact.sources) | texts
    archs = tuple(a for a in artifact.manifest["cuda"]["images"] if a != "ptx")
    if not archs:  # an emulated program, or no compiler: only sources exist
        return replace(artifact, sources=sources)
    made = build_images(kernels, sources, archs)
    described = [dict(k) | {"resources": made.resources.get(k["name"], {})} for k in artifact.manifest["kernels"]]
    manifest: Mapping[str, object] = dict(artifact.manifest) | {"kernels": described}
    return replace(artifact, sources=sources, images=made.files, manifest=manifest)


def main() -> None:
    """Write the kernels' texts of a packed case, to be edited."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pack", type=Path, help="a folder")
    parser.add_argument("case", help="the name of its file, without .polydyn")
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    artifact = read_artifact(options.pack / f"{options.case}.polydyn")
    options.out.mkdir(parents=True, exist_ok=True)
    for k in artifact.manifest["kernels"]:
        (options.out / f"{k['name']}.cu").write_text(artifact.sources[f"{k['name']}.cu"])


if __name__ == "__main__":
    main()
