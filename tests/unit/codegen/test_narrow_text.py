"""Narrow vectors as C text: C's own operators take them, functions use whole vectors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from polydyn.codegen.ir import Broadcast, FlatLoad, Reg, Store
from polydyn.codegen.printers.c_values import ValuePrinter
from polydyn.schedules.errors import CodegenError
from polydyn.schedules.expr import op
from polydyn.schedules.index import Index

PRINTER = ValuePrinter({"b": "float32"}, width=16)
ROW = Broadcast("float32", Reg("float32", "t", 16), 8)
COLUMN = FlatLoad("float32", "b", Index.of("k"), 8)


def test_operators_of_c_stay_narrow() -> None:
    assert PRINTER.text(op("mul", ROW, COLUMN), 8) == "(hlow_f32(t) * hload_f32(b, k))"


def test_functions_are_evaluated_in_whole_vectors_and_cut() -> None:
    """A computed operand of a register tile has a narrow last vector."""
    assert PRINTER.text(op("mul", op("tanh", ROW), COLUMN), 8) == "(hlow_f32(pd_tanh_vf32(t)) * hload_f32(b, k))"
    assert PRINTER.text(op("exp", COLUMN), 8) == "hlow_f32(pd_exp_vf32(vwiden_f32(hload_f32(b, k))))"


def test_there_are_no_narrow_conditions() -> None:
    with pytest.raises(CodegenError, match="no narrow vectors of bool"):
        PRINTER.text(op("lt", ROW, COLUMN), 8)


def test_narrow_vectors_are_stored_whole_to_neighbouring_places() -> None:
    """Sums in blocks store narrow sums: the text stored half a vector as a whole one, which gcc rejects."""
    narrow = Store("b", Index.of("k"), Reg("float32", "t", 8), lanes=8)
    assert PRINTER.store(narrow) == "hstore_f32(b, k, t);"
    forms: tuple[dict[str, Any], ...] = ({"stride": Index.of(2)}, {"mask": Index.of("n")})
    for form in forms:
        with pytest.raises(CodegenError, match="stored whole"):
            PRINTER.store(replace(narrow, **form))
