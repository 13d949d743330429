"""Encode a program of several parts as 64-bit words, in the order in which ``runtime/c/parts.c`` and ``frame.c`` read.

A list follows its length. A text is a list of words, padded with zeros. An expression is a list in postfix order.
``sequence.h`` explains each field.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from polydyn.errors import CodegenError
from polydyn.program.frame import KINDS, is_in_c, label, loop_forms, written_by
from polydyn.runtime.native import DTYPE_CODES as DTYPES
from polydyn.runtime.plain_expressions import Expression

OPERATORS = {"+": 3, "*": 4, "//": 5, "min": 6, "max": 7}
"""The values of ``PD_PLUS`` and the following constants."""
END, NUMBER, SYMBOL = 0, 1, 2
DEPTH = 32
"""``PD_EXPRESSION_DEPTH``."""
RELATIONS = {"==": "=", "<=": "<", "%==": "%"}
"""Codes of the relations in ``pd_late_guard``."""

Manifest = Mapping[str, Any]


class EncodedProgram:
    """A program as a list of words. ``manifest``: with the entries of ``frame.add_frame``.

    ``models``: the manifests of its parts and bodies. ``places``: for each model, offset and bytes of its weights and
    of its library. ``constants``: their entries by name.
    """

    def __init__(
        self, manifest: Manifest, models: Sequence[Manifest], places: Sequence[Sequence[int]], constants: Manifest
    ) -> None:
        self.manifest, self.models = manifest, models
        self.tensors = {t["name"]: k for k, t in enumerate(manifest["tensors"])}
        self.symbols = {s["symbol"]: k for k, s in enumerate(manifest["symbols"])}
        self.all: list[int] = []
        self._program(places)
        self._tensors(constants)
        self._checks()
        uses = sum(1 if "part" in s else len(s["bodies"]) for s in manifest["order"])
        self._append(uses, len(manifest["order"]))
        for stage in manifest["order"]:
            self._stage(stage)

    # -- encoding of values --------------------------------------------------------------------------------------------

    def _append(self, *numbers: int) -> None:
        self.all += map(int, numbers)

    def _list(self, numbers: Iterable[int]) -> None:
        every = list(numbers)
        self._append(len(every), *every)

    def _text(self, text: str) -> None:
        data = text.encode() + b"\0"
        data += b"\0" * (-len(data) % 8)
        self._list(int.from_bytes(data[k : k + 8], "little", signed=True) for k in range(0, len(data), 8))

    def _expression(self, x: Expression) -> None:
        if _depth(x) > DEPTH:
            raise CodegenError("an expression for a data-dependent size has too many levels")
        self._list([*self._postfix(x), END])

    def _postfix(self, x: Expression) -> list[int]:
        if isinstance(x, int):
            return [NUMBER, x]
        if isinstance(x, str):
            return [SYMBOL, self.symbols[x]]
        operator, first, *rest = x
        return [*self._postfix(first), *(w for y in rest for w in (*self._postfix(y), OPERATORS[operator]))]

    # -- the program ---------------------------------------------------------------------------------------------------

    def _program(self, places: Sequence[Sequence[int]]) -> None:
        m = self.manifest
        self._text(next((label(s) for s in m["order"] if not is_in_c(s)), ""))
        self._append(len(places), m["own_parts"])
        for place in places:
            self._append(*place)
        launches = [len(self.models[s["part"]]["launches"]) if "part" in s else 1 for s in m["order"]]
        self._append(sum(launches), sum(bool(s["input"]) for s in m["symbols"]))
        self._append(len(m["inputs"]))
        self._ios(m["inputs"])
        read = {n for s in m["order"] if "step" in s for n in s["inputs"]}
        self._list(i["name"] in read for i in m["inputs"])
        self._append(len(m["outputs"]))
        self._ios(m["outputs"])
        for o in m["outputs"]:
            self._append(self.tensors[o["of"]])
            for dim in o["dims"]:
                self._expression(dim)

    def _ios(self, ios: Sequence[Manifest]) -> None:
        for io in ios:
            self._text(io["name"])
            self._text(f"[{', '.join(io['shape'])}]")
            self._append(DTYPES.index(io["dtype"]), len(io["shape"]))

    # -- the sequence --------------------------------------------------------------------------------------------------

    def _tensors(self, constants: Manifest) -> None:
        m = self.manifest
        self._append(len(m["tensors"]))
        for t in m["tensors"]:
            constant = constants.get(t["name"])
            self._append(DTYPES.index(t["dtype"] or DTYPES[0]), t["room"], t["result"], t["device"])
            self._append(-1 if constant is None else constant["offset"])
            if constant is not None:
                self._list(constant["shape"])
        self._append(1 + max((t["room"] for t in m["tensors"]), default=-1), len(m["symbols"]))

    def _checks(self) -> None:
        """Encode the sources of symbols, the checks of inputs, and the guards that no part checks. If the first part
        takes all inputs, it checks them itself.
        """
        m = self.manifest
        sources = [s for s in m["symbols"] if s["input"]]
        self._append(len(sources))
        for s in sources:
            self._append(self.tensors[s["input"]], s["axis"], self.symbols[s["symbol"]])
        first, names = m["order"][0], [i["name"] for i in m["inputs"]]
        seen = "part" in first and first["inputs"] == names
        checks = [] if seen else [(i, a) for i in m["inputs"] for a in range(len(i["shape"]))]
        self._append(len(checks))
        for i, axis in checks:
            self._append(self.tensors[i["name"]], axis)
            self._expression(i["dims"][axis])
            self._text(i["name"])
            self._text(i["shape"][axis])
        self._append(len(m["late_guards"]))
        for g in m["late_guards"]:
            self._append(ord(RELATIONS[g["relation"]]))
            self._expression(g["left"])
            self._expression(g["right"])
            self._text(g["rule"])
            self._text(g["message"])

    def _stage(self, stage: Manifest) -> None:
        in_c, part = is_in_c(stage), "part" in stage
        settings = stage.get("settings", {})
        setting = int(bool(settings.get("center", settings.get("allowzero"))))
        if in_c and stage.get("step") == "unique":
            axis = settings["axis"]
            setting = settings["sorted"] + 2 * (0 if axis is None else 1 + axis)
        self._append(KINDS.index("part" if part else stage["step"] if in_c else "python"), setting)
        self._text("" if part else f"host: {label(stage)}")
        self._text(stage.get("origin", ""))
        self._text(settings.get("tensor", settings.get("why", "")))
        self._list(self.tensors[n] if n else -1 for n in stage["inputs"])
        self._list(self.tensors[n] for n in stage["made"] if in_c)
        self._list(self.symbols[s] for s in stage.get("symbols", ()))
        model = self.models[stage["part"]] if part else None
        dims = stage["dims"] if model is None else _sizes(stage, model)
        self._append(len(dims))
        for dim in dims:
            self._expression(dim)
        if part:
            self._append(stage["part"])
        elif in_c and stage["step"] == "iterate":
            self._loop(stage["bodies"]["body"], settings)
        elif in_c and stage["step"] == "branch":
            for role in ("then_branch", "else_branch"):
                results = settings[role]["results"]
                written = written_by(self.models[stage["bodies"][role]])
                direct = [n in written and n not in results[:k] for k, n in enumerate(results)]
                self._body(stage["bodies"][role], settings[role], direct)

    # -- bodies --------------------------------------------------------------------------------------------------------

    def _body(self, model: int, settings: Manifest, direct: Sequence[bool]) -> None:
        m = self.models[model]
        several = "tensors" in m
        inputs, outputs = ([x["name"] for x in m["tensors" if several else which]] for which in ("inputs", "outputs"))
        self._append(model)
        self._list(inputs.index(n) for n in settings["formals"])
        for key in ("captured", "sizes"):
            self._list(x for n, k in settings[key] for x in (inputs.index(n), k))
        self._list(outputs.index(n) if n in outputs else -1 - inputs.index(n) for n in settings["results"])
        self._list(direct)

    def _loop(self, model: int, settings: Manifest) -> None:
        f = loop_forms(self.models[model], settings)
        self._body(model, settings, f.direct)
        self._append(int(settings["loop"]), f.plain, f.on_device)
        self._list(f.counts)
        self._list(x for form in f.carried for x in form)
        self._append(len(settings["scans"]))
        for (axis, back, tail), dtype in zip(settings["scans"], settings["row_dtypes"], strict=True):
            self._append(DTYPES.index(dtype), axis, back)
            self._append(len(tail))
            for dim in tail:
                self._expression(dim)
        self._list(x for s in settings["slices"] for x in s)


def _sizes(stage: Manifest, model: Manifest) -> list[Expression]:
    """Return the sizes of a part. Its inputs after the tensors only provide sizes."""
    return [stage["sizes"][i["name"]] for i in model["inputs"][len(stage["inputs"]) :]]


def _depth(x: Expression) -> int:
    """Return the maximum number of values on the evaluation stack."""
    return max(_depth(y) + (k > 0) for k, y in enumerate(x[1:])) if isinstance(x, list) else 1
