"""Initializers that are also inputs: a call may override their values.

In the program they are constants. A second version in the artifact has them as inputs, and runs the calls that change a
value (``manifest["overridden"]``). Standard library and numpy only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from polydyn.arguments import checked_feeds
from polydyn.errors import InputError
from polydyn.runtime.artifact import Artifact
from polydyn.runtime.bound import BoundCall, as_array
from polydyn.runtime.composite import attached, part_at
from polydyn.runtime.launch_times import LaunchTime
from polydyn.runtime.program import Array, Program, numpy_dtype
from polydyn.runtime.spans import Span
from polydyn.runtime.tables import Table

OVERRIDDEN, DEFAULTS = "overridden/", "defaults/"
"""Prefixes of the names in ``sources`` and ``images``: of the second version, and of the model's values."""


def with_overrides(artifact: Artifact, second: Artifact | None, inputs: Sequence[Mapping[str, Any]],
                   defaults: Mapping[str, Array]) -> Artifact:  # fmt: skip
    """Return an artifact with a second version that has initializers as inputs.

    ``inputs``: dicts with ``name``, ``dtype``, ``shape`` and ``fixed``: why the value cannot be changed, or "".
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
    """Return the second version of an artifact of ``with_overrides``, or None."""
    program = artifact.manifest["overridden"]["program"]
    return part_at(artifact, OVERRIDDEN, program) if program else None


class WithOverrides(Program):
    """Base class in front of a program class, for programs with initializers that are inputs."""

    second: Program | None = None
    """The version with those inputs, or None if no value can be changed."""

    def _chosen(self, feeds: Mapping[str, Any]) -> tuple[Program | None, dict[str, Any]]:
        """Return the version for a call (None: this one) and its inputs. InputError: a value cannot be changed."""
        feeds = checked_feeds(feeds)
        rows = {x["name"]: (k, x) for k, x in enumerate(self.manifest["overridden"]["inputs"])}
        values_in_call = {n: feeds[n] for n in rows if n in feeds}
        rest = {n: a for n, a in feeds.items() if n not in rows}
        values = {n: self._default(k, x) for n, (k, x) in rows.items()} if values_in_call else {}
        if not (changed := [n for n, a in values_in_call.items() if not _equal(as_array(n, a), values[n])]):
            return None, rest
        for name in changed:
            reason = rows[name][1]["fixed"]
            if reason or self.second is None:
                raise InputError(
                    f"initializer '{name}' must keep the model's value: {reason}", tensor=name,
                    remedy="leave it out, or make it an input without an initializer",
                )  # fmt: skip
        free = {n: values[n] for n, (_, x) in rows.items() if not x["fixed"]}
        return self.second, rest | free | {n: values_in_call[n] for n in changed}

    def _default(self, k: int, x: Mapping[str, Any]) -> Array:
        """Return the model's value of an initializer."""
        data = self._artifact.images[f"{DEFAULTS}{k}"]
        value: Array = np.frombuffer(data, numpy_dtype(x["dtype"])).reshape(x["default"])
        return value

    def run(self, feeds: Mapping[str, Any], out: Mapping[str, Array] | None = None) -> dict[str, Array]:
        """Implement ``Program.run``; ``feeds`` may contain initializers. InputError also: one cannot be changed."""
        other, chosen = self._chosen(feeds)
        return super().run(chosen, out) if other is None else other.run(chosen, out)

    def bind(self, feeds: Mapping[str, Any], out: Mapping[str, Array] | None = None) -> BoundCall:
        """Implement ``Program.bind``; ``feeds`` as for ``run``."""
        other, chosen = self._chosen(feeds)
        return super().bind(chosen, out) if other is None else other.bind(chosen, out)

    def profile(
        self, feeds: Mapping[str, Any], repeats: int = 5, out: Mapping[str, Array] | None = None
    ) -> Table[LaunchTime]:  # fmt: skip
        """Implement ``Program.profile``; ``feeds`` as for ``run``."""
        other, chosen = self._chosen(feeds)
        return super().profile(chosen, repeats, out) if other is None else other.profile(chosen, repeats, out)

    def trace(
        self, feeds: Mapping[str, Any], repeats: int = 5, out: Mapping[str, Array] | None = None
    ) -> Table[Span]:  # fmt: skip
        """Implement ``Program.trace``; ``feeds`` as for ``run``."""
        other, chosen = self._chosen(feeds)
        return super().trace(chosen, repeats, out) if other is None else other.trace(chosen, repeats, out)

    def arguments(self, kind: str) -> list[dict[str, Any]]:
        """Implement ``Program.arguments``, with those initializers as ``optional``."""
        return list(self.manifest["overridden"]["inputs"]) if kind == "optional" else super().arguments(kind)


def _equal(array: Array, default: Array) -> bool:
    """Return whether a value equals the model's, bit by bit."""
    same = array.dtype.itemsize == default.dtype.itemsize and array.dtype.kind == default.dtype.kind
    return same and array.shape == default.shape and array.tobytes() == default.tobytes()


_KINDS: dict[type[Program], type[Program]] = {}


def overriding(kind: type[Program]) -> type[Program]:
    """Return a subclass of ``kind`` for programs with such initializers."""
    if kind not in _KINDS:
        _KINDS[kind] = cast(type[Program], type(f"{kind.__name__}WithOverrides", (WithOverrides, kind), {}))
    return _KINDS[kind]
