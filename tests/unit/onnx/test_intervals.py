"""Intervals of integers: they hold for all data, and subscripts inside their axis are not checked."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest

from polydyn.graph.expand import import_model
from polydyn.graph.intervals import Intervals
from polydyn.graph.ir import Compute, Graph
from polydyn.schedules.expr import OPS, Op, Value, cast, const, indices, load
from polydyn.schedules.index import Atom, Index
from tests.support.tiny import model, node

RNG = np.random.default_rng(0)
DTYPES = ("int64", "int32", "uint8", "int8")


class Expressions:
    """Random integer expressions over three tensors: one known, one of small numbers, one of any numbers."""

    def __init__(self, dtype: str) -> None:
        self.dtype, info = dtype, np.iinfo(dtype)
        self.data = {
            "known": RNG.integers(-7, 100, 40).astype(dtype), "small": RNG.integers(0, 3, 40).astype(dtype),
            "any": RNG.integers(info.min, info.max, 40, endpoint=True).astype(dtype),
        }  # fmt: skip

    def draw(self, depth: int) -> tuple[Value, np.ndarray]:
        """Return an expression and its values."""
        if not depth or RNG.random() < 0.2:
            if RNG.random() < 0.3:
                number = int(RNG.integers(0, 50))
                return const(number, self.dtype), np.full(40, number, self.dtype)
            name = str(RNG.choice(list(self.data)))
            return load(name, (Index.of("d0"),), self.dtype), self.data[name]
        name = str(RNG.choice(["where", "min", "max", "add", "sub", "neg", "mod", "bitand", "mul", "cast"]))
        a, x = self.draw(depth - 1)
        b, y = self.draw(depth - 1)
        if name == "where":
            return Op(self.dtype, name, (Op("bool", "lt", (a, b)), a, b)), np.where(x < y, x, y)
        if name == "cast":
            return cast(cast(a, "uint8"), self.dtype), x.astype(np.uint8).astype(self.dtype)
        if name == "neg":
            return Op(self.dtype, name, (a,)), -x
        if name == "mod":
            b, y = const(7, self.dtype), np.full(40, 7, self.dtype)
        with np.errstate(over="ignore"):
            return Op(self.dtype, name, (a, b)), OPS[name].numpy(x, y).astype(self.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_value_is_in_its_interval(dtype: str) -> None:
    found = 0
    for _ in range(300):
        expressions = Expressions(dtype)
        value, values = expressions.draw(4)
        intervals = Intervals()
        for name in ("known", "small"):
            intervals.learn_constant(name, expressions.data[name])
        intervals.learn(Compute("y", value))
        interval = intervals.of("y")
        found += interval is not None
        if interval is not None:
            assert interval[0] <= values.min() and values.max() <= interval[1], f"{value}: {interval}"
    assert found > 50


def test_reductions_and_floats_have_none() -> None:
    intervals = Intervals()
    intervals.learn_constant("t", np.arange(5))
    intervals.learn(Compute("s", load("t", (Index.of("r0"),), "int64"), (Index.of(5),), "add"))
    intervals.learn(Compute("f", cast(load("x", (Index.of("d0"),), "float32"), "int64")))
    assert intervals.of("s") is None and intervals.of("f") is None


def chain(table: list[int], then: Callable[[str, str], list[onnx.NodeProto]] | None = None) -> onnx.ModelProto:
    """Return a model that reads x at numbers of a table, which it reads at the remainders of its input by 4."""
    nodes = [node("Mod", "i four", "at"), node("Gather", "table at", "place")]
    nodes += then("place", "chosen") if then else [node("Identity", "place", "chosen")]
    return model(
        [*nodes, node("Gather", "x chosen", "y")], {"i": ("int64", ["N"]), "x": ("float32", [6, "C"])}, ["y"],
        {"four": np.array(4), "table": np.array(table), "two": np.array(2)},
    )  # fmt: skip


def wrapped(graph: Graph) -> bool:
    """Check whether the subscripts of the result may count from the end: the sign of the number is looked at."""
    (y,) = (n for n in graph.nodes if n.output == "y")
    assert isinstance(y, Compute)
    return any(isinstance(a, Atom) and a.kind in ("floordiv", "max") for i in indices(y.body) for a in i.atoms())


def test_subscripts_of_known_tables_are_not_checked() -> None:
    graph = import_model(chain([5, 0, 3, 2]))
    assert not graph.bounds
    assert not wrapped(graph), "nothing is negative"


def test_subscripts_that_may_leave_their_axis_are_checked() -> None:
    assert import_model(chain([5, 0, 6, 2])).bounds
    assert import_model(chain([5, 0, 3, -7])).bounds
    assert import_model(chain([1, 0, 3, 2], lambda a, b: [node("Mul", f"{a} two", b)])).bounds
    from_the_end = import_model(chain([5, 0, -6, 2]))
    assert not from_the_end.bounds
    assert wrapped(from_the_end)


def test_records_have_an_interval_for_each_column() -> None:
    """A table of pairs: places of x, and numbers that are none."""
    table, numbers = np.array([5, 90, 0, -90, 3, 90, 2, 90]), {"two": np.array(2), "one": np.array(1)}
    pair = [node("Mod", "i four", "at"), node("Mul", "at two", "first")]

    def records(*more: onnx.NodeProto) -> onnx.ModelProto:
        return model(
            [*pair, *more, node("Gather", "x place", "y")], {"i": ("int64", ["N"]), "x": ("float32", [6, "C"])}, ["y"],
            {"four": np.array(4), "table": table, **numbers},
        )  # fmt: skip

    assert not import_model(records(node("Gather", "table first", "place"))).bounds
    assert import_model(records(node("Add", "first one", "second"), node("Gather", "table second", "place"))).bounds


def test_a_symbolic_axis_is_checked_unless_its_size_is_bounded() -> None:
    m = chain([5, 0, 3, 2])
    m.graph.input[1].type.tensor_type.shape.dim[0].dim_param = "R"
    assert import_model(m).bounds
