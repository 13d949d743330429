"""Run random layers (``random_layers``) as programs of a device, against ONNX Runtime.

usage: python -m polydyn.testing.fuzz_layers [SEEDS] [--first N] [--family NAME ...] [--dtype NAME ...]
                                             [--target cuda:emulated] [--sm 90] [--forced 1]

Each layer is compiled once in a type, and run at its shapes: all of them one after another, repeated (cached graphs),
then as bound calls, on the emulation with warps in reverse order; results of one shape must have the same bits. Then
this is repeated with versions preferred in a random order, so that each runs whenever it is allowed. For the emulation,
kernels are built as for a device of the capability ``--sm``. A failure is printed with its seed. Exits with 1 if
anything failed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import onnxruntime as ort

from polydyn.backends import cuda
from polydyn.capability import capability
from polydyn.compiler import plan_program
from polydyn.errors import InputError, PolydynError, ShapeError, UnsupportedError
from polydyn.gpu.targets import ARCHITECTURES, named, newest
from polydyn.graph.dtypes import numpy_dtype
from polydyn.program.assemble import build_artifact
from polydyn.runtime.opening import open_program
from polydyn.runtime.program import Program
from polydyn.schedules.expr import Array
from polydyn.testing.campaign import Campaign, Finding, Kinds, Result, parser_of, seeds_of
from polydyn.testing.cells import preferring
from polydyn.testing.halves import HALVES, in_type, rounded, widened
from polydyn.testing.inputs import feeds as inputs_of
from polydyn.testing.layer_writer import Layer
from polydyn.testing.random_layers import FAMILIES, random_layer

BOUND = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 6e-2}
"""Tolerated error of a layer, over the scale of its output, against ONNX Runtime in float32."""
REVERSE = "PDEMU_REVERSE"
Arrays = Mapping[str, Array]
Expected = tuple[Arrays, Arrays]
"""Inputs and outputs."""


def references(layer: Layer) -> list[Expected]:
    """Return inputs and ONNX Runtime's outputs for every shape; no outputs if it rejects the shape."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    if layer.exact:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(layer.model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    found: list[Expected] = []
    for k, shape in enumerate(layer.shapes):
        given = {n: _round_to_all_types(a) for n, a in inputs_of(layer.model, shape, seed=k).items()}
        try:
            found.append((given, dict(zip(names, session.run(names, given), strict=True))))
        except Exception:  # ONNX Runtime's own classes
            found.append((given, {}))
    return found


def _round_to_all_types(a: Array) -> Array:
    """Round floats to values that every type holds."""
    return rounded(a, "bfloat16").astype(np.float32) if a.dtype == np.float32 else a


def difference(got: Array, want: Array, bound: float) -> str:
    """Return the error of an output, or an empty string; a bound of 0 requires equal numbers."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{got.dtype}{got.shape}, expected {want.dtype}{want.shape}"
    if want.dtype != np.float32 or not bound:
        return "" if np.array_equal(got, want) else f"differs at {np.argwhere(got != want)[:3].tolist()}"
    finite = np.isfinite(want)
    scale = np.abs(want[finite]).max(initial=0.0)
    off = np.abs(np.where(finite, got, 0).astype(np.float64) - np.where(finite, want, 0))
    if not np.isfinite(off).all() or not np.array_equal(got[~finite], want[~finite], equal_nan=True):
        places = np.argwhere(~np.isfinite(off) | (~finite & ~((got == want) | (np.isnan(got) & np.isnan(want)))))
        return f"not finite where expected, or the reverse, at {places[:3].tolist()} of {want.shape}"
    if off.size and off.max() > bound * max(scale, 1e-3):
        places = np.argwhere(off > bound * scale)
        return f"off by {off.max():.3g} of {scale:.3g}, at {len(places)}: {places[:3].tolist()} of {want.shape}"
    return ""


@contextmanager
def _reversed() -> Iterator[None]:
    os.environ[REVERSE] = "1"
    try:
        yield
    finally:
        del os.environ[REVERSE]


class Runs:
    """The calls of one program of a layer in a type."""

    def __init__(self, program: Program, dtype: str, bound: float) -> None:
        self.program, self.dtype, self.bound = program, dtype, bound
        self.bits: dict[int, dict[str, bytes]] = {}

    def feeds(self, inputs: Arrays) -> dict[str, Array]:
        """Return the inputs in the program's type; bfloat16 inputs are bits."""
        if self.dtype == "float32":
            return dict(inputs)
        cast = {n: rounded(a, self.dtype) for n, a in inputs.items()}
        return {n: a.view(np.uint16) if a.dtype == numpy_dtype("bfloat16") else a for n, a in cast.items()}

    def wide(self, a: Any, want: Array) -> Array:
        """Return an output as float32 if the layer's output is float32."""
        found = np.asarray(a)
        return widened(found, self.dtype) if want.dtype == np.float32 and self.dtype != "float32" else found

    def check(self, k: int, inputs: Arrays, want: Arrays, bound_call: bool = False) -> str:
        """Return the error of a call at shape number k, or an empty string."""
        if bound_call:
            with _reversed():
                got = self.program.bind(self.feeds(inputs))()
        else:
            got = self.program.run(self.feeds(inputs))
        bits = {n: np.asarray(a).tobytes() for n, a in got.items()}
        if k in self.bits:
            return "" if bits == self.bits[k] else "other bits than in the first call"
        self.bits[k] = bits
        for n, w in want.items():
            if message := difference(self.wide(got[n], w), w, self.bound):
                return f"{n} {message}"
        return ""


def check(program: Program, layer: Layer, dtype: str, expected: Sequence[Expected], what: str) -> list[Finding]:
    """Run a program at every shape: in sequence, repeated, and bound; a shape that fails is skipped from then on."""
    runs = Runs(program, dtype, 0.0 if layer.exact else BOUND[dtype])
    found: list[Finding] = []
    bad = set[int]()
    for turn in ("first", "again", "bound"):
        for k, (given, want) in enumerate(expected):
            if k in bad:
                continue
            kind, message = _outcome(runs, k, given, want, turn == "bound")
            if message or not want:
                bad.add(k)
            if message:
                found.append(Finding(kind, f"{layer.name} {dtype} {what} {turn} at {dict(layer.shapes[k])}", message))
    return found


def _outcome(runs: Runs, k: int, inputs: Arrays, want: Arrays, bound: bool) -> tuple[str, str]:
    """Return (kind, message) of a call; no message if it is right. A call without a reference may be rejected."""
    try:
        return "wrong", runs.check(k, inputs, want, bound)
    except PolydynError as e:
        kind = _kind(e)
        return kind, "" if kind == "refused" and not want else f"{type(e).__name__}: {e}"
    except Exception as e:
        return "error", f"{type(e).__name__}: {e}"


def _kind(e: Exception) -> str:
    return "refused" if isinstance(e, (InputError, ShapeError, UnsupportedError)) else "error"


def run_layer(layer: Layer, dtype: str, target: str, forced: int) -> list[Finding]:
    """Return the failures of a layer in a type: with estimated choices, then with ``forced`` random orders of versions.
    """
    try:
        expected = references(layer)
        model = in_type(layer.model, dtype) if dtype in HALVES else layer.model
        plan = plan_program(model, target=target)
        found: list[Finding] = []
        for k in range(forced + 1):
            artifact, _ = build_artifact(preferring(plan, k) if k else plan, target)
            program = open_program(artifact, threads=1)
            found += check(program, layer, dtype, expected, f"preferring {k}" if k else "natural")
        return found
    except Exception as e:
        return [Finding(_kind(e), f"{layer.name} {dtype}", f"{type(e).__name__}: {e}")]


def run_seed(
    seed: int, seen_kinds: Kinds = frozenset(), families: Sequence[str] = tuple(FAMILIES),
    dtypes: Sequence[str] = tuple(BOUND), target: str = "cuda:emulated", sm: int = 90, forced: int = 1,
) -> Result:  # fmt: skip
    """Run the layers of a seed, one of each family, on a device of the capability ``sm``."""
    os.environ.setdefault("POLYDYN_LIBCUDA", "emulated")
    os.environ.setdefault("PDEMU_SM", str(sm))
    device = {"cuda:emulated": f"cuda:{named(sm)}"}
    result = Result(seed, f"seed{seed}")
    with mock.patch.object(cuda, "newest", lambda target: newest(device.get(target) or target)):
        for family in families:
            layer = random_layer(family, seed)
            dtype = "float32" if layer.exact else dtypes[seed % len(dtypes)]
            found = run_layer(layer, dtype, target, forced)
            result.counts["layers"] += 1
            result.counts["layers refused"] += any(f.kind == "refused" for f in found)
            faults = [f for f in found if f.kind in ("wrong", "error")]
            if faults and result.finding is None:
                message = "; ".join(f"{f.stage}: {f.message}" for f in faults)
                result.finding = Finding(faults[0].kind, layer.name, message)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = parser_of(__doc__, 20)
    parser.add_argument("--family", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--dtype", nargs="+", choices=BOUND, default=list(BOUND))
    parser.add_argument("--target", default="cuda:emulated")
    parser.add_argument("--sm", type=int, default=90, choices=[*map(capability, ARCHITECTURES)],
                        help="compute capability of the emulated device")  # fmt: skip
    parser.add_argument("--forced", type=int, default=1,
                        help="random orders of versions, in addition to the estimates' order")  # fmt: skip
    args = parser.parse_args(argv)
    run = partial(
        run_seed, families=args.family, dtypes=args.dtype, target=args.target, sm=args.sm, forced=args.forced
    )  # fmt: skip
    return Campaign(run, seeds_of(args), args.jobs, unit="seeds of layers").run()


if __name__ == "__main__":
    sys.exit(main())
