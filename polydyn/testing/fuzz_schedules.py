"""Write random schedules for groups of small models, and compare what the program computes with the default's.

usage: python -m polydyn.testing.fuzz_schedules [SEEDS] [--first N]

A step that is refused is left out. With what is left the model is planned, its kernels are executed by the interpreter
of the loop IR after every pass (``POLYDYN_VERIFY=2``), compiled, and run at ragged sizes. Exits with 1 if a kernel is
wrong, or if an error is not a refusal by name.
"""

from __future__ import annotations

import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from polydyn.compiler import plan_program
from polydyn.errors import InputError, LegalityError, PolydynError, ScheduleError
from polydyn.explore import Schedule, groups
from polydyn.testing.campaign import Campaign, Finding, Kinds, Result, fresh_cache, parser_of, seeds_of

SIZES = (0, 1, 2, 3, 5, 7, 16, 19)
TILES = (1, 2, 3, 4, 6, 8, 16)


def _model(nodes: list[Any], inputs: dict[str, list[Any]], **constants: Any) -> onnx.ModelProto:
    given = [helper.make_tensor_value_info(n, TensorProto.FLOAT, dims) for n, dims in inputs.items()]
    graph = helper.make_graph(
        nodes, "g", given, [helper.make_empty_tensor_value_info("y")],
        [numpy_helper.from_array(v.astype(np.float32), n) for n, v in constants.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def _constant(*shape: int) -> Any:
    return np.random.default_rng(len(shape)).standard_normal(shape)


def models() -> dict[str, Callable[[], onnx.ModelProto]]:
    """Return the models whose groups get schedules."""
    node = helper.make_node
    wide = {"x": ["M", 24]}
    return {
        "product": lambda: _model([node("MatMul", ["x", "w"], ["s"]), node("Gelu", ["s"], ["y"])], wide,
                                  w=_constant(24, 40)),
        "batches": lambda: _model([node("MatMul", ["x", "z"], ["s"]), node("Sigmoid", ["s"], ["y"])],
                                  {"x": ["B", "M", "K"], "z": ["B", "K", "N"]}),
        "softmax": lambda: _model([node("Softmax", ["x"], ["y"])], {"x": ["A", "C"]}),
        "norm": lambda: _model([node("LayerNormalization", ["x", "w"], ["y"])], wide, w=_constant(24)),
        "transpose": lambda: _model([node("Transpose", ["x"], ["s"], perm=[2, 0, 1]), node("Exp", ["s"], ["y"])],
                                    {"x": ["A", 6, "C"]}),
        "sum": lambda: _model([node("Mul", ["x", "x"], ["s"]), node("ReduceSum", ["s"], ["y"], keepdims=0)],
                              {"x": ["A", "C"]}),
        "window": lambda: _model([node("Conv", ["x", "w"], ["s"], pads=[1, 1, 1, 1]), node("Relu", ["s"], ["y"])],
                                 {"x": ["N", 4, "H", "W"]}, w=_constant(8, 4, 3, 3)),
        "narrow": lambda: _model([node("MatMul", ["x", "w"], ["s"]), node("Relu", ["s"], ["y"])], wide,
                                 w=_constant(24, 5)),
        "chain": lambda: _model([node("MatMul", ["x", "w"], ["s"]), node("Add", ["s", "x"], ["t"]),
                                 node("MatMul", ["t", "v"], ["y"])], wide, w=_constant(24, 24), v=_constant(24, 9)),
    }  # fmt: skip


def random_schedule(group: Any, rng: random.Random, steps: int) -> Schedule:
    """Return a schedule after up to ``steps`` random steps; those that are refused are left out."""
    s: Schedule = group.schedule()
    for n in range(steps):
        try:
            s = _step(s, rng, first=n == 0)
        except (ScheduleError, LegalityError):
            continue
    return s


def _step(s: Schedule, rng: random.Random, first: bool) -> Schedule:
    axes, loops = list(s.axes), list(s.draft.names.values())
    kinds = ("tile", "tile", "even", "accumulate", "reorder", "cache", "unroll", "vectorize", "store", "parallel")
    kind = rng.choice([*["pack"] * first, *kinds])
    if kind == "pack":
        return s.pack(rng.choice([4, 8, 16]))
    if kind == "tile":
        some = rng.sample(axes, rng.randint(1, min(3, len(axes))))
        return s.tile(**{x: _tile(rng) for x in some})
    if kind == "even":
        return s.even(rng.choice(axes))
    if kind == "reorder":
        return s.reorder(*rng.sample(loops, min(len(loops), rng.randint(2, 4))))
    if kind == "unroll":
        some = rng.sample(loops, rng.randint(1, min(3, len(loops))))
        return s.unroll(*some, factor=rng.choice([None, None, 2, 4]))
    if kind == "parallel":
        return s.parallel(*loops[: rng.randint(1, 2)])
    if kind == "cache":
        return s.cache(rng.choice(list(s.tensors)), at=rng.choice(loops))
    if kind == "store":
        local = [n for n, a in s.draft.group.arrays.items() if a.role == "local"]
        return s.store(rng.choice(local or ["l0"]), at=rng.choice(loops))
    return getattr(s, kind)(rng.choice(loops)) if kind == "vectorize" else s.accumulate(at=rng.choice(loops))


def _tile(rng: random.Random) -> int | tuple[int, int]:
    size = rng.choice(TILES)
    return size if rng.random() < 0.7 else (size * rng.choice([1, 2, 3]), size)


@contextmanager
def _verified() -> Iterator[None]:
    before = os.environ.get("POLYDYN_VERIFY")
    os.environ["POLYDYN_VERIFY"] = "2"
    try:
        yield
    finally:
        os.environ.pop("POLYDYN_VERIFY")
        if before is not None:
            os.environ["POLYDYN_VERIFY"] = before


def check(seed: int) -> tuple[str, str]:
    """Return what happened to the schedule of a seed, and a message: ``right``, ``refused``, ``wrong`` or ``error``."""
    rng = random.Random(seed)
    name = rng.choice(list(models()))
    model = models()[name]()
    group = rng.choice(groups(model))
    said = f"{seed} {name}"
    try:
        s = random_schedule(group, rng, rng.randint(2, 9))
        said = f"{said}\n{s}"
        try:
            with _verified():
                plan_program(model, schedules=[s.written])
        except InputError as e:
            return "refused", f"{said}\n{e}"
        for _ in range(3):
            s.check(seed, **{x: rng.choice(SIZES) for x in s.dims})
    except (ScheduleError, LegalityError) as e:
        return "refused", f"{said}\n{e}"
    except PolydynError as e:
        return "wrong", f"{said}\n{type(e).__name__}: {e}"
    except Exception as e:  # anything else is a bug too
        return "error", f"{said}\n{type(e).__name__}: {e}"
    return "right", said


def run_seed(seed: int, seen_kinds: Kinds = frozenset()) -> Result:
    """Check the schedule of a seed."""
    kind, message = check(seed)
    finding = Finding(kind, "schedule", message) if kind in ("wrong", "error") else None
    return Result(seed, f"seed{seed}", Counter({kind: 1}), finding)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    args = parser_of(__doc__).parse_args(argv)
    with fresh_cache():
        return Campaign(run_seed, seeds_of(args), args.jobs, unit="schedules").run()


if __name__ == "__main__":
    sys.exit(main())
