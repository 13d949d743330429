"""What one call at a time of a program with parts has for itself: contexts, memory between parts, what steps keep.

What a part gives and only parts and steps read lies in rooms. A room serves tensors that are never there at the same
time, grows to the largest, and stays for the calls to come. Standard library and numpy only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from polydyn.runtime.native import OUTPUT_BYTES, address_of, new_output
from polydyn.runtime.program import LaunchTime, Program, launch_times, numpy_dtype

Array = npt.NDArray[Any]
Form = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape, strides in bytes."""
Held = tuple[Any, int, Form]
"""A tensor during a call: its array, None where only parts read it; its address; its form."""
ABSENT: Held = (None, 0, ((), ()))
"""For an input that a step does not have."""


def held(array: Array) -> Held:
    """An array with its address and form."""
    return array, address_of(array), (array.shape, array.strides)


class Room:
    """Bytes at ``address``. They are there until ``reserve`` needs more."""

    __slots__ = ("address", "data")

    def __init__(self) -> None:
        self.data = new_output((OUTPUT_BYTES,), np.dtype(np.uint8))
        self.address = address_of(self.data)

    def reserve(self, size: int) -> None:
        """Room for so many bytes; what lies there is lost when there was less."""
        if size > self.data.size:
            self.data = new_output((size,), np.dtype(np.uint8))
            self.address = address_of(self.data)


class Frame:
    """For every stage of a program's order what it needs: of a part its ``PartRun``, of a step a dict of its own."""

    def __init__(
        self, order: Sequence[Mapping[str, Any]], parts: Sequence[Program], gone: Sequence[Iterable[str]],
        outputs: Iterable[str],
    ) -> None:  # fmt: skip
        """``gone``: after each stage the tensors that nobody reads any more. ``outputs``: of the program."""
        self.rooms = rooms(order, parts, gone, set(outputs))
        seen = {x for stage in order if "step" in stage for x in stage["inputs"]}
        self.work: list[Any] = [
            PartRun(stage, parts[stage["part"]], self.rooms, seen) if "part" in stage else {} for stage in order
        ]

    @property
    def bytes(self) -> int:
        """Of all rooms."""
        return sum(r.data.size for r in set(self.rooms.values()))


def rooms(
    order: Sequence[Mapping[str, Any]], parts: Sequence[Program], gone: Iterable[Iterable[str]], outputs: set[str]
) -> dict[str, Room]:
    """The room of every tensor that a part gives and that is no output of the program."""
    found: dict[str, Room] = {}
    free: list[Room] = []
    for stage, over in zip(order, gone, strict=True):
        for name in parts[stage["part"]].outputs if "part" in stage else ():
            if name not in outputs:
                found[name] = free.pop() if free else Room()
        free += [found[name] for name in over if name in found]
    return found


class PartRun:
    """One part with a context: runs on what is there, and leaves what it gives."""

    def __init__(self, stage: Mapping[str, Any], program: Program, places: Mapping[str, Room], seen: set[str]) -> None:
        """``places``: the room of each output that has one. ``seen``: tensors that steps read as arrays."""
        self.program, self._context = program, program._take()
        manifest, sizes = program.manifest, stage["sizes"]
        names = [i["name"] for i in manifest["inputs"]]
        self._tensors = [n for n in names if n not in sizes]
        self._sizes = [sizes[n] for n in names[len(self._tensors) :]]
        self._nowhere = [0] * len(self._sizes)  # nobody reads the elements of what only brings a size
        self._dense: list[tuple[int, ...]] = [()] * sum(bool(o["strided"]) for o in manifest["outputs"])
        self._outputs = [
            (o["name"], numpy_dtype(o["dtype"]), places.get(o["name"]), o["name"] in seen) for o in manifest["outputs"]
        ]
        self._forms: list[Form] = []

    def run(self, there: dict[str, Held], sizes: Mapping[str, int], times: list[LaunchTime] | None) -> None:
        """Adds the outputs to ``there``; ``times``, where somebody asks, gets the launches. InputError: a check failed.
        MemoryError, ValueError: there is no memory for an output.
        """
        context = self._context
        given = [there[n] for n in self._tensors]
        key = [x for g in given for x in g[2]]
        for s in self._sizes:
            key += (sizes[s],), (1,)
        key += self._dense
        if key != context.key:
            self._prepare(key)
        addresses, targets = [g[1] for g in given] + self._nowhere, []
        for (name, dtype, room, seen), form in zip(self._outputs, self._forms, strict=True):
            if room is None:
                made = held(new_output(form[0], dtype))
            else:
                made = np.ndarray(form[0], dtype, room.data) if seen else None, room.address, form
            there[name] = made
            targets.append(made[1])
        if times is None:
            context.run(addresses, targets)
            return
        count = len(self.program.manifest["launches"])
        took = context.profile(addresses, targets, count)
        times += launch_times([context.launch(k) for k in range(count)], [took])

    def _prepare(self, key: list[tuple[int, ...]]) -> None:
        context = self._context
        context.prepare(key)
        shapes = context.output_shapes
        self._forms = [(s, dense_strides(s, o[1].itemsize)) for s, o in zip(shapes, self._outputs, strict=True)]
        for (_, dtype, room, _), shape in zip(self._outputs, shapes, strict=True):
            if room is not None:
                room.reserve(prod(shape) * dtype.itemsize)


def dense_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Of a dense row-major array, in bytes."""
    out = [itemsize] * len(shape)
    for k in range(len(shape) - 1, 0, -1):
        out[k - 1] = out[k] * shape[k]
    return tuple(out)
