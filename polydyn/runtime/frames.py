"""What one call at a time of a program with parts has for itself: tensors, memory between parts, what steps keep.

What parts give, and the steps that C runs, lies in rooms when only other stages read it. A room serves tensors that are
never there at the same time, grows to the largest, and stays for the calls to come. Standard library and numpy only.
"""

from __future__ import annotations

import ctypes
import struct
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from polydyn.errors import PolydynError
from polydyn.runtime.native import DTYPE_CODES, Context, address_of, new_output
from polydyn.runtime.program import Program, numpy_dtype
from polydyn.runtime.sequence import (
    COUNTED,
    STOP_MEMORY,
    STOP_SIGNALS,
    Chain,
    Held,
    Loop,
    Model,
    Room,
    Stage,
    Tables,
    in_c,
    made_dtypes,
)  # fmt: skip

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Layout:
    """What all frames of a program have in common.

    ``order``: the stages as the manifest has them, ``bodies`` the models that each runs, ``outputs`` what each gives,
    all with names. ``gone``: after each the tensors that nobody reads any more. ``rooms``: the number of the room of
    each tensor that has one. ``results``: tensors that are outputs; ``given``: those
    that C writes to memory of the caller's. ``dtypes``: of all that are known before a call.
    """

    manifest: Mapping[str, Any]
    order: Sequence[Mapping[str, Any]]
    parts: Sequence[Program]
    bodies: Sequence[Mapping[str, Program]]
    outputs: Sequence[Sequence[str]]
    gone: Sequence[Sequence[str]]
    rooms: Mapping[str, int]
    inputs: Sequence[str]
    results: Sequence[str]
    given: Sequence[str]
    constants: Mapping[str, Array]
    symbols: Mapping[str, int]
    dtypes: Mapping[str, str]

    @staticmethod
    def of(
        manifest: Mapping[str, Any], parts: Sequence[Program], constants: Mapping[str, Array], inner: bool
    ) -> Layout:
        """The layout of a program; ``inner``: of one that is a body, whose results lie in rooms too."""
        order = manifest["order"]
        bodies = [{r: parts[k] for r, k in s.get("bodies", {}).items()} for s in order]
        results = list(dict.fromkeys(o.get("of", o["name"]) for o in manifest["outputs"]))
        outputs = [_outputs(k, s, b, parts) for k, (s, b) in enumerate(zip(order, bodies, strict=True))]
        gone = _last_uses(order, outputs, results)
        rooms = _rooms(order, bodies, outputs, gone, set() if inner else set(results))
        dtypes = _dtypes(manifest, parts, bodies, outputs) | {n: str(a.dtype) for n, a in constants.items()}
        dtypes |= _taken(order, parts, bodies)
        symbols = {s["symbol"]: k for k, s in enumerate(manifest["symbols"])}
        made = [n for s, b, made in zip(order, bodies, outputs, strict=True) if in_c(s, b) for n in made]
        given = [n for n in results if n in made and n not in rooms]
        inputs = [x["name"] for x in manifest["inputs"]]
        return Layout(
            manifest, order, parts, bodies, outputs, gone, rooms, inputs, results, given, constants, symbols, dtypes,
        )  # fmt: skip


def _outputs(
    k: int, stage: Mapping[str, Any], bodies: Mapping[str, Program], parts: Sequence[Program]
) -> list[str]:  # fmt: skip
    """The tensors of a stage; what C makes has a name even when nobody reads it."""
    if "part" in stage:
        return list(parts[stage["part"]].outputs)
    if not in_c(stage, bodies):
        return list(stage["outputs"])
    found = stage["outputs"] or [""] * len(made_dtypes(stage, bodies))
    return [n or f"output {o} of stage {k}" for o, n in enumerate(found)]


def _last_uses(
    order: Sequence[Mapping[str, Any]], outputs: Sequence[Sequence[str]], results: Iterable[str]
) -> list[tuple[str, ...]]:
    """After each stage the tensors that nobody reads any more."""
    last = {n: k for k, stage in enumerate(order) for n in (*stage["inputs"], *outputs[k])}
    kept = {"", *results}
    return [tuple(n for n, at in last.items() if at == k and n not in kept) for k in range(len(order))]


def _rooms(
    order: Sequence[Mapping[str, Any]], bodies: Sequence[Mapping[str, Program]], outputs: Sequence[Sequence[str]],
    gone: Sequence[Sequence[str]], results: set[str],
) -> dict[str, int]:  # fmt: skip
    """The room of every tensor that C makes and that is no result, or one whose size is not known before."""
    found: dict[str, int] = {}
    free: list[int] = []
    for stage, models, made, over in zip(order, bodies, outputs, gone, strict=True):
        for name in made if in_c(stage, models) else ():
            if name not in results or stage.get("step") in COUNTED:
                found[name] = free.pop() if free else len(set(found.values()))
        free += [found[name] for name in over if name in found]
    return found


def _dtypes(
    manifest: Mapping[str, Any], parts: Sequence[Program], bodies: Sequence[Mapping[str, Program]],
    outputs: Sequence[Sequence[str]],
) -> dict[str, str]:  # fmt: skip
    """The types of inputs, and of what C makes."""
    found = {i["name"]: i["dtype"] for i in manifest["inputs"]}
    for stage, models, made in zip(manifest["order"], bodies, outputs, strict=True):
        if "part" in stage:
            found |= {o["name"]: o["dtype"] for o in parts[stage["part"]].manifest["outputs"]}
        elif in_c(stage, models):
            found |= zip(made, made_dtypes(stage, models), strict=True)
    return found


def _taken(
    order: Sequence[Mapping[str, Any]], parts: Sequence[Program], bodies: Sequence[Mapping[str, Program]]
) -> dict[str, str]:
    """The types that parts and bodies take tensors as."""
    found: dict[str, str] = {}
    for stage, models in zip(order, bodies, strict=True):
        for role, model in models.items():
            types = {i["name"]: i["dtype"] for i in model.manifest["inputs"]}
            captured = stage["settings"].get(role, stage["settings"])["captured"]
            found |= {stage["inputs"][k]: types[n] for n, k in captured if n in types}
    for stage in order:
        if "part" in stage:
            found |= {i["name"]: i["dtype"] for i in parts[stage["part"]].manifest["inputs"]}
    return found


class Frame:
    """The memory of one call, which stays for later ones.

    ``kept``: what the steps that Python runs keep, by number of the stage. ``arrays``: during a call, the tensors whose
    memory is numpy's. ``contexts``: of the parts, by number of the stage.
    """

    def __init__(self, layout: Layout, library: ctypes.CDLL) -> None:
        self.layout, self._library = layout, library
        every = dict.fromkeys([*layout.inputs, *layout.constants, *(n for made in layout.outputs for n in made if n)])
        self._numbers = {n: k for k, n in enumerate(every)}
        self._names = list(every)
        self._tensors = (Held * (len(every) + 1))()
        for name, k in self._numbers.items():
            dtype = layout.dtypes.get(name)
            self._tensors[k].dtype = 0 if dtype is None else DTYPE_CODES.index(dtype)
            self._tensors[k].room = layout.rooms.get(name, -1)
        self._rooms = (Room * (len(set(layout.rooms.values())) + 1))()
        self._scratch = (Room * (len(layout.order) + 1))()
        self.values = (ctypes.c_int64 * (len(layout.symbols) + 1))()
        self._tables = Tables(self._numbers, layout.symbols)
        self._loops: list[Loop] = []
        self._inner: list[Frame] = []
        self.contexts: dict[int, Context] = {}
        self._stages = (Stage * (len(layout.order) + 1))(*map(self._stage, range(len(layout.order))))
        first = (ctypes.addressof(x) for x in (self._tensors, self._rooms, self.values))
        sources, checks, *counts = self._tables.sizes(layout.manifest)
        stages = ctypes.addressof(self._stages)
        self._chain = Chain(*first, sources, checks, stages, None, *counts, len(layout.order))
        self._pointer = ctypes.pointer(self._chain)
        self._shapes: list[tuple[int, ...]] = []
        self._last: dict[str, tuple[int, ...]] = {}
        self._given = layout.given
        self.kept: list[dict[str, Any]] = [{} for _ in layout.order]
        self.arrays: dict[str, Array] = {}
        for name, array in layout.constants.items():
            self._take(name, array)
        free = weakref.finalize(self, _free, library, self._rooms, self._scratch, self._loops)
        free.atexit = False

    def _stage(self, k: int) -> Stage:
        stage, bodies, outputs = self.layout.order[k], self.layout.bodies[k], self.layout.outputs[k]
        tables = self._tables
        if "part" in stage:
            program = self.layout.parts[stage["part"]]
            self.contexts[k] = program._take()
            return tables.part(stage, outputs, program, self.contexts[k])
        if not in_c(stage, bodies):
            return tables.stage("python", {**stage, "symbols": ()}, ())
        settings = stage["settings"]
        more: dict[str, Any] = {}
        if stage["step"] == "iterate":
            self._loops.append(tables.loop(self._model(bodies["body"]), settings))
            more = {"loop": tables.pointer(self._loops[-1])}
        elif stage["step"] == "branch":
            roles = ("then_branch", "else_branch")
            more = {"bodies": tables.branches([self._model(bodies[r]) for r in roles], [settings[r] for r in roles])}
        else:
            name = settings.get("tensor", settings.get("why", ""))
            setting = settings.get("center", settings.get("allowzero"))
            scratch = ctypes.pointer(self._scratch[k])
            more = {"scratch": scratch, "name": name.encode(), "setting": int(bool(setting))}
        return tables.stage(stage["step"], stage, outputs, origin=stage["origin"].encode(), **more)

    def _model(self, program: Program) -> Model:
        if program.one_part:
            return Model(program)
        frame = program._inner_frame()  # type: ignore[attr-defined]
        self._inner.append(frame)
        return Model(program, ctypes.addressof(frame._chain), frame._numbers)

    # -- a call ------------------------------------------------------------------------------------------------------

    def begin(self, arrays: Mapping[str, Array], times: int | None) -> None:
        """Takes the inputs; when they have the shapes of the call before, results get memory of theirs then.

        ``times``: the address where those of launches and steps go, None: nobody asks.
        """
        for name, array in arrays.items():
            self._take(name, array)
        shapes = [a.shape for a in arrays.values()]
        if shapes != self._shapes:
            self._shapes = shapes
            self._last.clear()
        for name in self._given:
            if name in self._last:
                self._give(name, self._last[name])
            else:
                self._tensors[self._numbers[name]].given = -1
        chain = self._chain
        chain.at, chain.begun, chain.times = 0, -1, times

    def run(self) -> int:
        """Runs on until all stages have run, one fails, or one needs Python (``stage``); says which."""
        while True:
            code: int = self._library.pd_sequence_run(self._pointer)
            if code == STOP_MEMORY:
                t = self._tensors[self._chain.lacks]
                self._give(self._names[self._chain.lacks], tuple(t.shape[: t.rank]))
            elif code != STOP_SIGNALS:
                return code

    @property
    def stage(self) -> int:
        """The number of the stage that comes next, or that has failed."""
        return int(self._chain.at)

    @property
    def entered(self) -> bool:
        """Whether a stage has begun: the inputs fit."""
        return int(self._chain.begun) >= 0

    @property
    def message(self) -> str:
        """What a stage that has failed says."""
        return bytes(self._chain.text).decode(errors="replace")

    def array(self, name: str) -> Array:
        """A tensor as it lies there."""
        if name in self.arrays:
            return self.arrays[name]
        if name in self.layout.constants:
            return self.layout.constants[name]
        t = self._tensors[self._numbers[name]]
        shape, dtype = tuple(t.shape[: t.rank]), numpy_dtype(self.layout.dtypes[name])
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        memory: Any = (ctypes.c_char * size).from_address(t.data) if size else None
        array: Array = np.ndarray(shape, dtype, memory)
        return array

    def go_on(self, arrays: Mapping[str, Array]) -> None:
        """Behind a step in Python, which gives these."""
        for name, array in arrays.items():
            self._take(name, array)
        self._chain.at += 1
        for over in self.layout.gone[: self._chain.at]:
            for name in over:
                self.arrays.pop(name, None)

    def results(self) -> dict[str, Array]:
        """The outputs' tensors."""
        made = {}
        for name in self.layout.results:
            array = self.array(name)
            if name in self.layout.rooms:
                array = array.copy()
            elif name in self._given:
                t = self._tensors[self._numbers[name]]
                shape = self._last[name] = tuple(t.shape[: t.rank])
                array = array if array.shape == shape else array.reshape(shape)
            made[name] = array
        return made

    @property
    def bytes(self) -> int:
        """Of all rooms."""
        rooms = [*self._rooms, *self._scratch]
        for loop in self._loops:
            rooms += [r for c in loop.carried[: loop.carried_count] for r in c.rooms]
            rooms += [r.room for r in loop.rows[: loop.row_count]]
        return int(sum(r.bytes for r in rooms)) + sum(f.bytes for f in self._inner)

    def _take(self, name: str, array: Array) -> None:
        """Lets a tensor be an array."""
        self.arrays[name] = array
        at, rank = self._numbers[name] * SIZE, array.ndim
        struct.pack_into(f"P{rank}q", self._tensors, at, address_of(array), *array.shape)
        struct.pack_into(f"{rank}q", self._tensors, at + STRIDES, *array.strides)
        struct.pack_into("i", self._tensors, at + RANK, rank)
        if name not in self.layout.dtypes:
            self._tensors[self._numbers[name]].dtype = DTYPE_CODES.index(array.dtype.name)

    def _give(self, name: str, shape: tuple[int, ...]) -> None:
        """New memory for a result."""
        try:
            array = self.arrays[name] = new_output(shape, numpy_dtype(self.layout.dtypes[name]))
        except (MemoryError, ValueError) as e:  # ValueError: numpy has no such array, not even an empty one
            raise PolydynError(f"there is no memory for a tensor whose size data decide: {e}") from e
        at = self._numbers[name] * SIZE
        struct.pack_into("P", self._tensors, at, address_of(array))
        struct.pack_into("q", self._tensors, at + GIVEN, array.nbytes)


SIZE, STRIDES, GIVEN, RANK = ctypes.sizeof(Held), Held.strides.offset, Held.given.offset, Held.rank.offset


def _free(library: ctypes.CDLL, rooms: Any, scratch: Any, loops: Sequence[Loop]) -> None:
    for memory in (rooms, scratch):
        library.pd_free_rooms(memory, ctypes.c_int64(len(memory)))
    for loop in loops:
        library.pd_free_loop(ctypes.byref(loop))
