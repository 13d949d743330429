"""The run time between parts: no fault in programs with branches and loops; every planted mistake is detected."""

from __future__ import annotations

from collections import Counter
from functools import cache
from random import Random

import onnx
import onnx.parser
import pytest

from polydyn.backends import target_of
from polydyn.graph.expand import import_parts
from polydyn.program import frame
from polydyn.testing.plan.frame_mistakes import ON_FRAMES
from polydyn.testing.plan.framed import Framed, programs_of
from polydyn.testing.plan.frames import check_frame
from polydyn.testing.random_onnx import random_case

EACH = 4
"""Maximum number of mistakes of each kind, if a frame has sites for them."""
LOOPS = onnx.parser.parse_model("""
<ir_version: 10, opset_import: ["" : 21]>
g (int64 m, float[N, 4] x, float[4, 4] w, bool c) =>
  (float[N, 4] y, float[L, 4] grown, float[K, N, 4] rows, float[N, 4] z) {
    t = Tanh (x)
    yes = Constant <value = bool {1}> ()
    a, b, grown, rows = Loop (m, yes, t, x, t) <
        body = body (int64 i, bool go, float[N, 4] v, float[N, 4] u, float[P, 4] s) =>
                    (bool on, float[N, 4] u, float[N, 4] next, float[Q, 4] more, float[N, 4] row) {
            limit = Constant <value = float {60}> ()
            sum = ReduceSum <keepdims = 0> (v)
            on = Less (sum, limit)
            row = MatMul (v, w)
            next = Add (v, x)
            more = Concat <axis = 0> (s, v)
        }>
    d = Sub (a, b)
    y = Softmax (d)
    p = If (c) <then_branch = then () => (float[N, 4] p1) { p1 = Exp (y) },
                else_branch = else () => (float[N, 4] p2) { p2 = Identity (t) }>
    z = Mul (p, t)
}
""")


def frames_of(model: onnx.ModelProto) -> list[Framed]:
    return programs_of(import_parts(model), target_of("cpu", None)).frames


@cache
def framed() -> Framed:
    (made,) = frames_of(LOOPS)
    return made


def test_programs_of_several_parts_lose_no_tensor() -> None:
    assert check_frame(framed()) == []
    for seed in (10, 32):
        assert [f for x in frames_of(random_case(seed, "control").model) for f in check_frame(x)] == []


def test_bodies_of_several_parts_have_frames_of_their_own() -> None:
    model = onnx.parser.parse_model("""
    <ir_version: 10, opset_import: ["" : 21]>
    g (int64 m, float[N] x) => (float[N] y, float[K, N] rows) {
        yes = Constant <value = bool {1}> ()
        y, rows = Loop (m, yes, x) <
            body = body (int64 i, bool go, float[N] v) => (bool on, float[N] next, float[N] row) {
                on = Identity (go)
                n = NonZero (v)
                k = Cast <to = 1> (n)
                s = ReduceSum <keepdims = 0> (k)
                next = Add (v, s)
                row = Identity (v)
            }>
    }""")
    frames = frames_of(model)
    assert len(frames) == 2
    assert [f for x in frames for f in check_frame(x)] == []


def test_mistakes_between_parts_are_seen() -> None:
    """Mistakes of every kind are planted, and none of them is missed."""
    r, kinds, missed = Random(0), Counter[str](), list[str]()
    for made in (framed(), *frames_of(random_case(10, "control").model)):
        for mistake in ON_FRAMES:
            for _ in range(EACH):
                planted = mistake(made, r)
                if planted is not None:
                    kinds[mistake.__name__] += 1
                    missed += [] if check_frame(planted[1]) else [f"{mistake.__name__}: {planted[0]}"]
    assert not missed
    assert kinds.keys() == {m.__name__ for m in ON_FRAMES}


def test_rooms_that_are_free_too_early_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan of frame.py if it considered every tensor unused."""
    monkeypatch.setattr(frame, "_last_uses", lambda order, made, results: made)
    faults = [f for x in frames_of(LOOPS) for f in check_frame(x)]
    assert faults
    assert {f.kind for f in faults} == {"frame"}
