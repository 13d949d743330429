"""The tables of ``sequence.h``: parts and steps that C runs one behind the other. Standard library and numpy only."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_uint8, c_void_p
from typing import Any

from polydyn.errors import CodegenError
from polydyn.runtime.expressions import Expression
from polydyn.runtime.native import DTYPE_CODES, Context, Tensor
from polydyn.runtime.program import Program

STOP_PYTHON, STOP_MEMORY, STOP_SIGNALS = -1, -2, -3
KINDS = (
    "part", "python", "branch", "iterate", "non_zero", "suppress",
    "sizes", "common", "count", "reshape", "broadcast", "slice", "unsqueeze", "squeeze", "pads",
)  # fmt: skip
"""``PD_PART`` ... in order."""
COUNTED = ("non_zero", "suppress")
"""Steps that count while they work: what they give lies in a room even where it is a result."""
OPERATORS = {"+": 3, "*": 4, "//": 5, "min": 6, "max": 7}
"""``PD_PLUS`` ..."""
NUMBER, SYMBOL = 1, 2
DEPTH = 32
"""``PD_EXPRESSION_DEPTH``."""
AXES = 16
"""``PD_MAX_RANK``."""


class Room(ctypes.Structure):
    """``pd_room``."""

    _fields_ = (("data", c_void_p), ("bytes", c_int64))


class Held(ctypes.Structure):
    """``pd_held``."""

    _fields_ = (
        ("data", c_void_p), ("shape", c_int64 * AXES), ("strides", c_int64 * AXES), ("given", c_int64),
        ("dtype", c_int32), ("rank", c_int32), ("room", c_int32),
    )  # fmt: skip


class Unit(ctypes.Structure):
    """``pd_unit``."""

    _fields_ = (
        *((n, c_void_p) for n in ("context", "shapes", "run", "profile", "error", "tensors", "output_dims", "sizes")),
        *((n, c_void_p) for n in ("from_", "to", "ranks")),
        *((n, c_int32) for n in ("input_count", "output_count", "launch_count")),
    )


class Body(ctypes.Structure):
    """``pd_body``."""

    _fields_ = (
        ("unit", Unit),
        *((n, c_int32) for n in ("formal_count", "captured_count", "size_count", "result_count")),
        *((n, c_void_p) for n in ("formals", "captured", "sizes", "results", "direct")),
    )


class Carried(ctypes.Structure):
    """``pd_carried``."""

    _fields_ = (
        ("now", Held), ("rooms", Room * 2), *((n, c_int32) for n in ("at", "in_place", "row", "stays")),
    )  # fmt: skip


class Rows(ctypes.Structure):
    """``pd_rows``."""

    _fields_ = (
        ("row", Held), ("room", Room), ("start", c_void_p), ("step", c_int64), ("capacity", c_int64),
        ("tail", c_void_p), *((n, c_int32) for n in ("tail_rank", "axis", "backwards", "direct")),
    )  # fmt: skip


class Loop(ctypes.Structure):
    """``pd_loop``."""

    _fields_ = (
        ("body", Body), ("carried", POINTER(Carried)), ("rows", POINTER(Rows)),
        *((n, c_void_p) for n in ("slices", "slice_forms", "slice_steps")),
        *((n, c_int32) for n in ("carried_count", "row_count", "slice_count", "counts")),
        *((n, c_int32) for n in ("phase", "going", "plain", "steady")),
        *((n, c_int64) for n in ("number", "k", "trips")), ("condition", c_uint8),
    )  # fmt: skip


class Stage(ctypes.Structure):
    """``pd_stage``."""

    _fields_ = (
        *((n, c_void_p) for n in ("inputs", "outputs", "symbols", "dims")),
        ("unit", POINTER(Unit)), ("bodies", POINTER(Body)), ("loop", POINTER(Loop)), ("scratch", POINTER(Room)),
        ("name", c_char_p),
        *((n, c_int32) for n in ("kind", "input_count", "output_count", "dim_count", "setting")),
    )  # fmt: skip


class Chain(ctypes.Structure):
    """``pd_sequence``."""

    _fields_ = (
        *((n, c_void_p) for n in ("tensors", "rooms", "values", "stages", "times")),
        *((n, c_int32) for n in ("count", "at", "begun", "lacks")), ("text", ctypes.c_char * 1024),
    )  # fmt: skip


class Tables:
    """Makes tables, and keeps the memory that they point to.

    ``tensors``: the number of each by name. ``symbols``: that of each size.
    """

    def __init__(self, tensors: Mapping[str, int], symbols: Mapping[str, int]) -> None:
        self.tensors, self.symbols = tensors, symbols
        self._keep: list[Any] = []

    def array(self, kind: Any, items: Sequence[Any]) -> int:
        """The address of an array of these."""
        made = (kind * (len(items) + 1))(*items)
        self._keep.append(made)
        return ctypes.addressof(made)

    def room(self, kind: Any, count: int) -> int:
        """The address of memory for so many."""
        return self.array(kind, [kind() for _ in range(count)])

    def pointer(self, x: ctypes.Structure) -> Any:
        """A pointer to a structure."""
        self._keep.append(x)
        return ctypes.pointer(x)

    def dims(self, dims: Sequence[Expression]) -> int:
        """The address of an array of expressions."""
        if any(_depth(d) > DEPTH for d in dims):
            raise CodegenError("a size that data decide is an expression of too many levels")
        return self.array(c_void_p, [self.array(c_int64, self._words(d)) for d in dims])

    def _words(self, x: Expression) -> list[int]:
        """In postfix order; the word behind the last is 0, ``PD_END``."""
        if isinstance(x, int):
            return [NUMBER, x]
        if isinstance(x, str):
            return [SYMBOL, self.symbols[x]]
        operator, first, *rest = x
        return [*self._words(first), *(w for y in rest for w in (*self._words(y), OPERATORS[operator]))]

    def part(self, stage: Mapping[str, Any], outputs: Sequence[str], program: Program, context: Context) -> Stage:
        """A part; the inputs behind its tensors only bring sizes."""
        rest = list(program.inputs)[len(stage["inputs"]) :]
        unit = self.pointer(self.unit(program, context))
        described = {"inputs": stage["inputs"], "dims": [stage["sizes"][n] for n in rest]}
        return self.stage("part", described, outputs, unit=unit)

    def stage(self, kind: str, stage: Mapping[str, Any], outputs: Sequence[str], **more: Any) -> Stage:
        """A stage with what all kinds have."""
        inputs = [self.tensors[n] if n else -1 for n in stage["inputs"]]
        symbols = [self.symbols[s] for s in stage.get("symbols", ())]
        lists = (inputs, [self.tensors[n] for n in outputs], symbols)
        made = Stage(
            *(self.array(c_int32, x) for x in lists), self.dims(stage["dims"]), kind=KINDS.index(kind),
            input_count=len(inputs), output_count=len(outputs), dim_count=len(stage["dims"]), **more,
        )  # fmt: skip
        self._keep.append(made)
        return made

    def unit(self, program: Program, context: Context) -> Unit:
        """A program with a context that nobody else uses."""
        library, manifest = program._native.library, program.manifest
        calls = (library.pd_shapes, library.pd_run, library.pd_profile, library.pd_error)
        ranks = [len(o["shape"]) for o in manifest["outputs"]]
        count = len(manifest["inputs"])
        kinds = (Tensor, c_int64, c_int64, c_void_p, c_void_p)
        counts = (count, sum(ranks), count, count, len(ranks))
        memory = [self.room(kind, n) for kind, n in zip(kinds, counts, strict=True)]
        return Unit(
            context.handle, *(ctypes.cast(f, c_void_p) for f in calls), *memory, self.array(c_int32, ranks),
            count, len(ranks), len(manifest["launches"]),
        )  # fmt: skip

    def body(self, program: Program, settings: Mapping[str, Any], direct: Sequence[bool]) -> Body:
        """A body of a step; ``direct``: the results that the program writes to their place."""
        inputs, outputs = names(program)
        captured, sizes = ([x for n, k in settings[key] for x in (inputs[n], k)] for key in ("captured", "sizes"))
        results = [outputs[n] if n in outputs else -1 - inputs[n] for n in settings["results"]]
        lists = ([inputs[n] for n in settings["formals"]], captured, sizes, results, direct)
        return Body(
            self.unit(program, program._take()), len(lists[0]), len(captured) // 2, len(sizes) // 2, len(results),
            *(self.array(c_int32, x) for x in lists),
        )  # fmt: skip

    def branches(self, programs: Sequence[Program], settings: Sequence[Mapping[str, Any]]) -> Any:
        """A pointer to two bodies."""
        made = []
        for p, s in zip(programs, settings, strict=True):
            _, outputs = names(p)
            results = s["results"]
            made.append(self.body(p, s, [n in outputs and n not in results[:k] for k, n in enumerate(results)]))
        both = (Body * len(made))(*made)
        self._keep.append(both)
        return ctypes.cast(both, POINTER(Body))

    def loop(self, program: Program, settings: Mapping[str, Any]) -> Loop:
        """A body that is repeated."""
        first, count = int(settings["loop"]), settings["carried"]
        formals, (_, outputs) = settings["formals"][2 * first :], names(program)
        condition, rows = settings["results"][:first], settings["results"][first + count :]
        carried = settings["results"][first : first + count]
        written: set[str] = set()

        def has_place(name: str) -> bool:
            """Whether the program writes it there; it writes every output once."""
            first_use = name in outputs and name not in written
            written.add(name)
            return first_use

        ends = [has_place(n) for n in condition]
        own = [n not in rows and has_place(n) for n in carried]  # a row that is carried lies among the rows
        lie = [has_place(n) for n in rows]
        strided = {o["name"] for o in program.manifest["outputs"] if o["strided"]}
        made = [
            Carried(
                in_place=int(d and program.appendable.get(n) == f and n not in strided),
                row=rows.index(n) if n in rows else -1, stays=int(n == f),
            )
            for n, f, d in zip(carried, formals, own, strict=False)
        ]  # fmt: skip
        plain = all(d or c.stays or c.row >= 0 for c, d in zip(made, own, strict=True)) and all(lie)
        plain &= all(d or n == settings["formals"][1] for n, d in zip(condition, ends, strict=True))
        places = [
            Rows(Held(dtype=DTYPE_CODES.index(d), room=-1), tail=self.array(c_int64, tail), tail_rank=len(tail),
                 axis=axis, backwards=int(back))
            for (axis, back, tail), d in zip(settings["scans"], settings["row_dtypes"], strict=True)
        ]  # fmt: skip
        slices, body = settings["slices"], self.body(program, settings, [*ends, *own, *lie])
        return Loop(
            body, (Carried * (count + 1))(*made), (Rows * (len(rows) + 1))(*places), self.room(Held, len(slices)),
            self.array(c_int32, [int(x) for s in slices for x in s]), self.room(c_int64, len(slices)),
            count, len(rows), len(slices), first, plain=int(plain),
        )  # fmt: skip


def _depth(x: Expression) -> int:
    """How many values lie on the stack at once."""
    return max(_depth(y) + (k > 0) for k, y in enumerate(x[1:])) if isinstance(x, list) else 1


def names(program: Program) -> tuple[dict[str, int], dict[str, int]]:
    """The places of a program's inputs, and of its outputs."""
    inputs, outputs = program.manifest["inputs"], program.manifest["outputs"]
    return {i["name"]: k for k, i in enumerate(inputs)}, {o["name"]: k for k, o in enumerate(outputs)}


def in_c(stage: Mapping[str, Any], bodies: Mapping[str, Program]) -> bool:
    """Whether C runs a stage; a body of several parts needs Python."""
    return "part" in stage or (stage["step"] in KINDS and all(b.one_part for b in bodies.values()))


def made_dtypes(stage: Mapping[str, Any], bodies: Mapping[str, Program]) -> list[str]:
    """What a step in C gives."""
    settings = stage["settings"]
    if stage["step"] not in ("branch", "iterate"):
        return ["int64"] * (stage["step"] in COUNTED)
    if stage["step"] == "iterate":
        first, types = 2 * int(settings["loop"]), _dtypes(bodies["body"])
        carried = settings["formals"][first : first + settings["carried"]]
        return [*(types[n] for n in carried), *settings["row_dtypes"]]
    types = _dtypes(bodies["then_branch"])
    return [types[n] for n in settings["then_branch"]["results"]]


def _dtypes(program: Program) -> dict[str, str]:
    return {x["name"]: x["dtype"] for x in (*program.manifest["inputs"], *program.manifest["outputs"])}
