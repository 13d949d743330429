"""Check models and plans on calls of concrete sizes.

    python -m polydyn.testing.plan MODEL.onnx B=2 L=5 [--loops] [--threads 2] [--target cpu]

Sizes that are not given are chosen such that the model's guards hold. Exits with 1 if there is a fault.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from polydyn.backends import Options, target_of
from polydyn.graph.dtypes import numpy_dtype
from polydyn.graph.dynamic import Symbols
from polydyn.graph.expand import import_parts
from polydyn.graph.importer import ModelLike
from polydyn.runtime.symbols import THREADS
from polydyn.schedules.expr import Array
from polydyn.schedules.names import given_back
from polydyn.shapes.sizes import Dims
from polydyn.testing.plan.arithmetic import guard_holds, size_of
from polydyn.testing.plan.call import Call
from polydyn.testing.plan.faults import Fault
from polydyn.testing.plan.framed import Framed, Programs, programs_of
from polydyn.testing.plan.frames import check_frame
from polydyn.testing.plan.planned import Planned
from polydyn.testing.plan.tensors import OutOfRange

DEFAULT = 3
"""Default size of a dim."""
SPLIT_K_SIZES = (7000, 30_000, 140_000)
"""Dim sizes at which a reduction may be split (split-K)."""
MAX_ELEMENTS = 1 << 20
"""Maximum number of elements of a buffer in a call with a ``SPLIT_K_SIZES`` dim."""


@dataclass(frozen=True)
class Faulty:
    """A fault and its call: name of the plan, sizes, and whether caches were updated in place."""

    plan: str
    sizes: Mapping[str, int]
    in_place: bool
    fault: Fault

    def __str__(self) -> str:
        sizes = " ".join(f"{k}={v}" for k, v in self.sizes.items())
        at = f" at {sizes}" if sizes else ""
        return given_back(f"{self.plan}{at}{', caches in place' * self.in_place}: {self.fault}")


def check_model(
    model: ModelLike, sizes: Mapping[str, int] | Sequence[Mapping[str, int]] = (), *, target: str = "cpu",
    dims: Dims | None = None, symbols: Symbols | None = None, options: Options | None = None, threads: int = 2,
    loops: bool = False, seed: int = 0,
) -> list[Faulty]:  # fmt: skip
    """Return the faults of all plans of a model, for each mapping of dim names to sizes.

    Missing sizes are chosen so that guards hold. Calls whose sizes violate a guard are skipped. ``loops``: also compare
    the loops of every kernel with its statements (slow). Raises PolydynError if the compiler rejects the model.
    """
    programs = programs_of(import_parts(model, dims, symbols), target_of(target, options))
    calls = [sizes] if isinstance(sizes, Mapping) else list(sizes) or [{}]
    return check_programs(programs, dims_of(model), calls, threads=threads, loops=loops, seed=seed)


def check_programs(
    programs: Programs, names: Mapping[tuple[str, int], str], calls: Sequence[Mapping[str, int]], *,
    threads: int = 2, loops: bool = False, seed: int = 0,
) -> list[Faulty]:  # fmt: skip
    """Return the faults of plans that exist already, like ``check_model``. ``names``: the user's names of dims."""
    found = faults_of(programs.frames)
    for planned in programs.plans:
        for given in calls:
            bound = bound_sizes(planned, names, given)
            found += check_planned(planned, bound, threads=threads, loops=loops, seed=seed) or []
    return found


def faults_of(frames: Sequence[Framed]) -> list[Faulty]:
    """Return the tensors that the run time between parts would lose, as faults."""
    return [Faulty(x.name, {}, False, f) for x in frames for f in check_frame(x)]


def check_planned(
    planned: Planned, sizes: Mapping[str, int], *, default: int = DEFAULT, threads: int = 2, loops: bool = False,
    seed: int = 0,
) -> list[Faulty] | None:  # fmt: skip
    """Return the faults of one plan at some sizes. A plan with caches also runs with in-place caches.

    Returns None if its guards or the reference evaluator reject these sizes.
    """
    env = sizes_of(planned, sizes, default, threads)
    if env is None:
        return None
    found: list[Faulty] = []
    shown = {s.symbol: env[s.symbol] for s in planned.plan.sources}
    for in_place in (False, True) if planned.appends else (False,):
        for limit in (2, 1):  # integers may be subscripts of an axis of one element
            try:
                faults = _faults(planned, env, limit, in_place, loops, seed)
                if _rounding_may_decide(planned, faults) and not all(
                    _faults(planned, env, limit, in_place, False, seed + k) for k in (1, 2)
                ):
                    faults = []
                found += [Faulty(planned.source.name, shown, in_place, f) for f in faults]
                break
            except OutOfRange:
                continue
        else:
            return None
    return found


def _faults(
    planned: Planned, env: Mapping[str, int], limit: int, in_place: bool, loops: bool, seed: int
) -> list[Fault]:
    """Return the faults of one call with random inputs."""
    feeds = feeds_of(planned, env, seed, limit)
    return list(Call(planned, env, feeds, in_place=in_place, loops=loops, seed=seed).run())


def _rounding_may_decide(planned: Planned, faults: Sequence[Fault]) -> bool:
    """Return whether only numbers are wrong, in a plan that rounds to 8 bits.

    A number between two bytes may fall to either of them, and products of bytes carry that on. A fault of the plan
    does not depend on numbers: it is there with other inputs too.
    """
    rounds = any(t.dtype in ("int8", "uint8") for g in planned.later for t in g.tensors.values())
    return bool(faults) and rounds and all(f.kind in ("value", "output") for f in faults)


def feeds_of(planned: Planned, sizes: Mapping[str, int], seed: int, limit: int = 2) -> dict[str, Array]:
    """Return random inputs. Integers are below ``limit`` because they may be subscripts."""
    numbers, out = np.random.default_rng(seed), dict[str, Array]()
    for name in planned.plan.inputs:
        t = planned.later[0].tensors[name]
        shape, kind = [size_of(d, sizes) for d in t.shape], numpy_dtype(t.dtype)
        if kind.kind in "biu":
            out[name] = numbers.integers(0, 200 if kind.name == "uint8" else limit, shape).astype(kind)
        else:
            out[name] = numbers.standard_normal(shape).astype(np.float32).astype(kind)
    return out


def sizes_of(planned: Planned, requested: Mapping[str, int], default: int, threads: int) -> dict[str, int] | None:
    """Return values of all symbols such that guards hold, or None. Symbols in ``requested`` keep their value."""
    plan = planned.plan
    env = {s.symbol: requested.get(s.symbol, default) for s in plan.sources} | {THREADS: threads}
    for g in plan.guards * 4:
        pairs = {"==": ((g.left, g.right), (g.right, g.left)), "<=": ((g.right, g.left),)}.get(g.relation, ())
        for this, other in () if guard_holds(g, env) else pairs:
            if this.is_symbol and str(this) not in requested and str(this) not in other.symbols():
                env[str(this)] = max(0, size_of(other, env))
                break
    fits = all(guard_holds(g, env) for g in plan.guards)
    return env if fits and all(size_of(d, env) >= 0 for b in plan.buffers.values() for d in b.shape) else None


def sizes_in_shares(planned: Planned, threads: int = 2) -> dict[str, int] | None:
    """Return sizes at which a reduction is split: one long dim, short others. Returns None if none are found."""
    added = [x for x in planned.plan.launches if x.kind == "shares"]
    for symbol in [s.symbol for s in planned.plan.sources] if added else ():
        for long in SPLIT_K_SIZES:
            env = sizes_of(planned, {symbol: long}, 2, threads)
            if env is None or not any(size_of(x.elements, env) > 0 for x in added):
                continue
            if max(math.prod(size_of(d, env) for d in b.shape) for b in planned.plan.buffers.values()) <= MAX_ELEMENTS:
                return {s.symbol: env[s.symbol] for s in planned.plan.sources}
    return None


def dims_of(model: ModelLike) -> dict[tuple[str, int], str]:
    """Return the dim names of the model: (input, axis) -> name."""
    if isinstance(model, bytes):
        model = onnx.load_from_string(model)
    elif not isinstance(model, onnx.ModelProto):
        model = onnx.load(str(model), load_external_data=False)
    shapes = [(v.name, v.type.tensor_type.shape.dim) for v in model.graph.input]
    return {(name, k): d.dim_param for name, dims in shapes for k, d in enumerate(dims) if d.dim_param}


def bound_sizes(planned: Planned, names: Mapping[tuple[str, int], str], sizes: Mapping[str, int]) -> dict[str, int]:
    """Return ``sizes`` with keys also for the plan's symbols of the user's dim ``names`` (from ``dims_of``)."""
    own = {s.symbol: names.get((s.input, s.axis), "") for s in planned.plan.sources}
    return dict(sizes) | {symbol: sizes[name] for symbol, name in own.items() if name in sizes}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m polydyn.testing.plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("sizes", nargs="*", help="NAME=SIZE")
    parser.add_argument("--loops", action="store_true", help="run the loops of every kernel too")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--target", default="cpu")
    args = parser.parse_args(argv)
    given = {name: int(size) for name, _, size in (a.partition("=") for a in args.sizes)}
    programs = programs_of(import_parts(args.model), target_of(args.target, None))
    lost = faults_of(programs.frames)
    print(*(f"{f}\n" for f in lost), sep="", end="")
    wrong = len(lost)
    for planned in programs.plans:
        bound = bound_sizes(planned, dims_of(args.model), given)
        found = check_planned(planned, bound, threads=args.threads, loops=args.loops)
        what = "its guards refuse these sizes" if found is None else f"{len(found)} faults"
        print(f"{planned.source.name}, {len(planned.plan.launches)} launches: {what}")
        print(*(f"  {f}\n" for f in found or ()), sep="", end="")
        wrong += len(found or [])
    return int(wrong > 0)
