"""The sizes of kernels that are no products: what a search may choose beside the ones they have by rule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Choices:
    """Values by the name of a size, first the one that the kernel has by rule.

    ``built``: bound when the kernel is built; ``launched``: arguments of a launch.
    """

    built: Mapping[str, tuple[int, ...]]
    launched: Mapping[str, tuple[int, ...]]


def beside(rule: int, others: Iterable[int]) -> tuple[int, ...]:
    """A size by rule, and others."""
    return tuple(dict.fromkeys((rule, *others)))
