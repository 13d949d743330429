"""Arguments of the command line as text: sizes, ranges, names of axes."""

from __future__ import annotations

import click

from polydyn.errors import ShapeError
from polydyn.shapes.sizes import Sizes


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
