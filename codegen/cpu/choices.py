"""Search choices for the sizes of kernels that are not products, in addition to their default sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Choices:
    """Values by the name of a size; the default comes first.

    ``built``: sizes that are bound when the kernel is built; ``launched``: arguments of a launch.
    """

    built: Mapping[str, tuple[int, ...]]
    launched: Mapping[str, tuple[int, ...]]


def with_default(default: int, others: Iterable[int]) -> tuple[int, ...]:
    """Return the default of a size, followed by the other values."""
    return tuple(dict.fromkeys((default, *others)))
