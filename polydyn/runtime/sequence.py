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
        ("inner", c_void_p),
        *((n, c_int32) for n in ("entered", "formal_count", "captured_count", "size_count", "result_count")),
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
        ("origin", c_char_p), ("name", c_char_p),
        *((n, c_int32) for n in ("kind", "input_count", "output_count", "dim_count", "setting")),
    )  # fmt: skip


class Size(ctypes.Structure):
    """``pd_size``."""

    _fields_ = (
        *((n, c_int32) for n in ("tensor", "axis", "value")),
        ("dim", c_void_p), ("name", c_char_p), ("text", c_char_p),
    )  # fmt: skip


class Chain(ctypes.Structure):
    """``pd_sequence``."""

    _fields_ = (
        *((n, c_void_p) for n in ("tensors", "rooms", "values", "sources", "checks", "stages", "times")),
        *((n, c_int32) for n in ("source_count", "check_count", "count", "at", "begun", "lacks")),
        ("text", ctypes.c_char * 1024),
    )


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

    def sizes(self, manifest: Mapping[str, Any]) -> tuple[int, int, int, int]:
        """Where symbols come from, and what is checked of the inputs: addresses, numbers. A first part that has all
        inputs checks them itself.
        """
        sources = [
            Size(self.tensors[s["input"]], s["axis"], self.symbols[s["symbol"]])
            for s in manifest["symbols"] if s["input"]
        ]  # fmt: skip
        first, names = manifest["order"][0], [i["name"] for i in manifest["inputs"]]
        checks = [
            Size(self.tensors[i["name"]], axis, 0, self.expression(dim), i["name"].encode(), text.encode())
            for i in manifest["inputs"] if "part" not in first or first["inputs"] != names
            for axis, (text, dim) in enumerate(zip(i["shape"], i["dims"], strict=True))
        ]  # fmt: skip
        self._keep += [*sources, *checks]
        return self.array(Size, sources), self.array(Size, checks), len(sources), len(checks)

    def dims(self, dims: Sequence[Expression]) -> int:
        """The address of an array of expressions."""
        return self.array(c_void_p, [self.expression(d) for d in dims])

    def expression(self, x: Expression) -> int:
        """The address of an expression."""
        if _depth(x) > DEPTH:
            raise CodegenError("a size that data decide is an expression of too many levels")
        return self.array(c_int64, self._words(x))

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

    def body(self, model: Model, settings: Mapping[str, Any], direct: Sequence[bool]) -> Body:
        """A body of a step; ``direct``: the results that the program writes to their place."""
        inputs = model.inputs
        captured, sizes = ([x for n, k in settings[key] for x in (inputs[n], k)] for key in ("captured", "sizes"))
        results = [model.result(n) for n in settings["results"]]
        lists = ([inputs[n] for n in settings["formals"]], captured, sizes, results, direct)
        unit = self.unit(model.program, model.program._take()) if model.chain is None else Unit()
        return Body(
            unit, model.chain, 0, len(lists[0]), len(captured) // 2, len(sizes) // 2, len(results),
            *(self.array(c_int32, x) for x in lists),
        )  # fmt: skip

    def branches(self, models: Sequence[Model], settings: Sequence[Mapping[str, Any]]) -> Any:
        """A pointer to two bodies."""
        made = []
        for m, s in zip(models, settings, strict=True):
            results = s["results"]
            made.append(self.body(m, s, [n in m.written and n not in results[:k] for k, n in enumerate(results)]))
        both = (Body * len(made))(*made)
        self._keep.append(both)
        return ctypes.cast(both, POINTER(Body))

    def loop(self, model: Model, settings: Mapping[str, Any]) -> Loop:
        """A body that is repeated."""
        first, count = int(settings["loop"]), settings["carried"]
        formals, program = settings["formals"][2 * first :], model.program
        condition, rows = settings["results"][:first], settings["results"][first + count :]
        carried = settings["results"][first : first + count]
        written: set[str] = set()

        def has_place(name: str) -> bool:
            """Whether the program writes it there; it writes every output once."""
            first_use = name in model.written and name not in written
            written.add(name)
            return first_use

        ends = [has_place(n) for n in condition]
        own = [n not in rows and has_place(n) for n in carried]  # a row that is carried lies among the rows
        lie = [has_place(n) for n in rows]
        strided = {o["name"] for o in program.manifest["outputs"] if o["strided"]}
        made = [
            Carried(
                in_place=int(d and program.appendable.get(n) == f and n not in strided),
                row=rows.index(n) if n in rows and n in model.written else -1, stays=int(n == f),
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
        slices, body = settings["slices"], self.body(model, settings, [*ends, *own, *lie])
        return Loop(
            body, (Carried * (count + 1))(*made), (Rows * (len(rows) + 1))(*places), self.room(Held, len(slices)),
            self.array(c_int32, [int(x) for s in slices for x in s]), self.room(c_int64, len(slices)),
            count, len(rows), len(slices), first, plain=int(plain),
        )  # fmt: skip


def _depth(x: Expression) -> int:
    """How many values lie on the stack at once."""
    return max(_depth(y) + (k > 0) for k, y in enumerate(x[1:])) if isinstance(x, list) else 1


class Model:
    """A model that a step runs. ``inputs``: the number of each. ``written``: outputs that it writes where it is told.

    ``chain``: the address of the sequence of a model of several parts, else None.
    """

    def __init__(self, program: Program, chain: int | None = None, tensors: Mapping[str, int] | None = None) -> None:
        """``tensors``: the numbers of those of several parts."""
        self.program, self.chain = program, chain
        self.inputs, self._outputs = (
            numbers(program, n) if tensors is None else tensors for n in ("inputs", "outputs")
        )
        self.written = self._outputs.keys() if tensors is None else set()

    def result(self, name: str) -> int:
        """A result as ``pd_body`` has it."""
        return self._outputs[name] if name in self._outputs else -1 - self.inputs[name]


def numbers(program: Program, which: str) -> Mapping[str, int]:
    """The places of ``inputs`` or ``outputs`` by name."""
    return {x["name"]: k for k, x in enumerate(program.manifest[which])}


def in_c(stage: Mapping[str, Any], bodies: Mapping[str, Program]) -> bool:
    """Whether C runs a stage."""
    return "part" in stage or (stage["step"] in KINDS and all(b.whole_in_c for b in bodies.values()))


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
