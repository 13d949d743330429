"""Compare a kernel of one group with the reference, on random inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from polydyn.errors import InputError, UnknownNameError, UnsupportedError
from polydyn.explore.reference import elements, reference
from polydyn.graph.dtypes import numpy_dtype
from polydyn.runtime.tables import html_table, html_text
from polydyn.schedules import model as polyhedral
from polydyn.schedules.expr import FLOATS, loads

TOLERANCE = {"float32": 2e-5, "float64": 1e-12}
"""Maximum difference from the reference, relative to the largest element."""


class Checked:
    """A kernel of a group that can run. ``packed``: constants in the kernel's layout, by array."""

    group: polyhedral.Group
    packed: Mapping[str, npt.NDArray[Any]] | None

    def __repr__(self) -> str:
        lines, name = self.text.count("\n"), type(self).__name__
        return f"<{name} kernel of {self.group.name}: {lines} lines, sizes {', '.join(self.group.params) or 'none'}>"

    def _repr_html_(self) -> str:
        text = html_text("text", self.text) + html_text("notes", "\n".join(self.notes))
        return html_table(repr(self)[1:-1], (), ()) + text

    @property
    def text(self) -> str:
        """The text of the kernel."""
        raise NotImplementedError

    @property
    def notes(self) -> tuple[str, ...]:
        """The decisions of the code generator."""
        raise NotImplementedError

    def run(self, inputs: Mapping[str, npt.NDArray[Any]], **sizes: int) -> dict[str, npt.NDArray[Any]]:
        """Return the outputs as flat arrays."""
        raise NotImplementedError

    def memory(
        self, buffers: Sequence[str], inputs: Mapping[str, npt.NDArray[Any]], sizes: Mapping[str, int]
    ) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays for a kernel's ``buffers``: zeros for outputs, the others from ``inputs``.

        InputError: an array is missing, too small, or has another dtype.
        """
        out: dict[str, npt.NDArray[Any]] = {}
        for n in buffers:
            a, size = self.group.arrays[n], elements(self.group, n, sizes)
            if a.role == "output":
                out[n] = np.zeros(size, numpy_dtype(a.dtype))
            elif n not in inputs or inputs[n].size < size or inputs[n].dtype != numpy_dtype(a.dtype):
                raise InputError(f"{n} must be {size} elements of {a.dtype}", tensor=n, remedy="use the arrays of draw")
            else:
                out[n] = np.ascontiguousarray(inputs[n])
        return out

    def check(self, seed: int = 0, **sizes: int) -> float:
        """Return the maximum difference from the reference on random inputs, relative to the largest element.

        InputError: the difference is beyond rounding. (A notebook would hide an AssertionError.)
        """
        inputs = draw(self.group, sizes, seed) | dict(self.packed or {})
        got, want = self.run(inputs, **sizes), reference(self.group, sizes, inputs)
        worst = 0.0
        for n, w in want.items():
            difference = np.abs(np.asarray(got[n], np.float64) - np.asarray(w, np.float64))
            worst = max(worst, float(np.max(difference, initial=0) / max(1e-30, float(np.max(np.abs(w), initial=0)))))
            if not worst <= TOLERANCE.get(self.group.arrays[n].dtype, 0):
                raise InputError(f"{n} differs from the reference by {worst:.2e}", tensor=n, rule="the reference")
        return worst


def draw(group: polyhedral.Group, sizes: Mapping[str, int], seed: int = 0) -> dict[str, npt.NDArray[Any]]:
    """Return random flat inputs of a group, by name. UnsupportedError: it reads at data-dependent positions."""
    if any(i.fetches() for s in group.statements for x in loads(s.value) for i in x.index):
        raise UnsupportedError(f"{group.name} reads at data-dependent positions", rule="random inputs")
    check_sizes(group, sizes)
    if seed < 0:
        raise InputError(f"seed={seed}", rule="random inputs", remedy="pass an integer >= 0")
    rng = np.random.default_rng(seed)
    out: dict[str, npt.NDArray[Any]] = {}
    for n, a in group.arrays.items():
        if a.role in ("input", "constant"):
            size, dtype = elements(group, n, sizes), numpy_dtype(a.dtype)
            values = rng.standard_normal(size) if a.dtype in FLOATS else rng.integers(0, 8, size)
            out[n] = values.astype(dtype)
    return out


def check_sizes(group: polyhedral.Group, sizes: Mapping[str, int]) -> None:
    """Check that every parameter of the group has a size. InputError: one is missing. UnknownNameError: there is
    another."""
    if unknown := sorted(set(sizes) - set(group.params)):
        sizes_of_group = ", ".join(group.params) or "none"
        raise UnknownNameError(f"the group has no size {unknown[0]}", dim=unknown[0], remedy=f"it has {sizes_of_group}")
    missing = set(group.params) - set(sizes)
    if missing:
        raise InputError(f"no size is given for {min(missing)}", dim=min(missing), remedy="pass it by name")
