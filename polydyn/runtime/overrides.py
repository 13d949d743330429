"""Initializers that are inputs too: a call may give them a value, else they have the model's.

The program has them as constants. A second version inside the artifact has them as inputs, and runs the calls that
change one (``manifest["overridden"]``). Standard library and numpy only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from polydyn.errors import InputError
from polydyn.runtime.artifact import Artifact
from polydyn.runtime.bound import BoundCall
from polydyn.runtime.composite import attached, part_at
from polydyn.runtime.program import Array, LaunchTime, Program, numpy_dtype
from polydyn.runtime.spans import Span

OVERRIDDEN, DEFAULTS = "overridden/", "defaults/"
"""What names of the second version, and of the model's values, begin with in ``sources`` and ``images``."""


def with_overrides(artifact: Artifact, second: Artifact | None, inputs: Sequence[Mapping[str, Any]],
                   defaults: Mapping[str, Array]) -> Artifact:  # fmt: skip
    """An artifact with a second version that has initializers as inputs.

    ``inputs``: dicts with ``name``, ``dtype``, ``shape`` and ``fixed``: why the value cannot be changed, else "".
    """
    images = {f"{DEFAULTS}{k}": defaults[x["name"]].tobytes() for k, x in enumerate(inputs)}
    rows = [{**x, "default": list(defaults[x["name"]].shape)} for x in inputs]
    manifest = dict(artifact.manifest) | {"overridden": {"inputs": rows, "program": None}}
    whole = Artifact(manifest, artifact.sources, artifact.library, artifact.weights, dict(artifact.images) | images)
    if second is None:
        return whole
    joined, program = attached(whole, OVERRIDDEN, second)
    manifest["overridden"] = {"inputs": rows, "program": program}
    return Artifact(manifest, joined.sources, joined.library, joined.weights, joined.images)


def overridden_of(artifact: Artifact) -> Artifact | None:
    """The second version of an artifact of ``with_overrides``."""
    program = artifact.manifest["overridden"]["program"]
    return part_at(artifact, OVERRIDDEN, program) if program else None


class WithOverrides(Program):
    """What a program with initializers that are inputs does differently; a class in front of the one that computes."""

    second: Program | None = None
    """The version with those inputs; None if no value can be changed."""

    def _chosen(self, feeds: Mapping[str, Any]) -> tuple[Program | None, dict[str, Any]]:
        """The version for a call (None: this one) and its inputs. InputError: a value that cannot be changed."""
        rows = {x["name"]: (k, x) for k, x in enumerate(self.manifest["overridden"]["inputs"])}
        given = {n: feeds[n] for n in rows if n in feeds}
        rest = {n: a for n, a in feeds.items() if n not in rows}
        values = {n: self._default(k, x) for n, (k, x) in rows.items()} if given else {}
        if not (changed := [n for n, a in given.items() if not _equal(a, values[n])]):
            return None, rest
        for name in changed:
            why = rows[name][1]["fixed"]
            if why or self.second is None:
                raise InputError(
                    f"initializer '{name}' must keep the model's value: {why}", tensor=name,
                    remedy="leave it out, or make it an input without an initializer",
                )  # fmt: skip
        free = {n: values[n] for n, (_, x) in rows.items() if not x["fixed"]}
        return self.second, rest | free | {n: given[n] for n in changed}

    def _default(self, k: int, x: Mapping[str, Any]) -> Array:
        """The model's value."""
        data = self._artifact.images[f"{DEFAULTS}{k}"]
        value: Array = np.frombuffer(data, numpy_dtype(x["dtype"])).reshape(x["default"])
        return value

    def run(self, feeds: Mapping[str, Any], out: Mapping[str, Array] | None = None) -> dict[str, Array]:
        """As ``Program.run``; ``feeds`` may have initializers too. InputError also: one cannot be changed."""
        other, chosen = self._chosen(feeds)
        return super().run(chosen, out) if other is None else other.run(chosen, out)

    def bind(self, feeds: Mapping[str, Any], out: Mapping[str, Array] | None = None) -> BoundCall:
        """As ``Program.bind``; ``feeds`` as for ``run``."""
        other, chosen = self._chosen(feeds)
        return super().bind(chosen, out) if other is None else other.bind(chosen, out)

    def profile(self, feeds: Mapping[str, Any], repeats: int = 5) -> list[LaunchTime]:
        """As ``Program.profile``; ``feeds`` as for ``run``."""
        other, chosen = self._chosen(feeds)
        return super().profile(chosen, repeats) if other is None else other.profile(chosen, repeats)

    def trace(self, feeds: Mapping[str, Any], repeats: int = 5) -> list[Span]:
        """As ``Program.trace``; ``feeds`` as for ``run``."""
        other, chosen = self._chosen(feeds)
        return super().trace(chosen, repeats) if other is None else other.trace(chosen, repeats)

    def arguments(self, kind: str) -> list[dict[str, Any]]:
        """As ``Program.arguments``, with those initializers as ``optional``."""
        return list(self.manifest["overridden"]["inputs"]) if kind == "optional" else super().arguments(kind)


def _equal(value: Any, default: Array) -> bool:
    """Whether a value is the model's, bit by bit."""
    array = np.asarray(value)
    same = array.dtype.itemsize == default.dtype.itemsize and array.dtype.kind == default.dtype.kind
    return same and array.shape == default.shape and array.tobytes() == default.tobytes()


_KINDS: dict[type[Program], type[Program]] = {}


def overriding(kind: type[Program]) -> type[Program]:
    """The class of a program with such initializers that computes as the class ``kind`` does."""
    if kind not in _KINDS:
        _KINDS[kind] = cast(type[Program], type(f"{kind.__name__}WithOverrides", (WithOverrides, kind), {}))
    return _KINDS[kind]

