"""If on data, Loop and Scan, compared with ONNX Runtime at ugly sizes (docs/adr/0027-parts.md)."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest

import polydyn
from polydyn.errors import InputError, UnsupportedError
from polydyn.runtime.parts_program import PartsProgram
from polydyn.runtime.program import Program
from tests.support.marks import slow

RNG = np.random.default_rng(11)
Feeds = Mapping[str, Any]


def parsed(text: str) -> onnx.ModelProto:
    """Parse a model in ONNX's text format."""
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]>\n{text}')


def check(m: onnx.ModelProto, *calls: Feeds) -> Program:
    """Check that every call equals ONNX Runtime's."""
    program = polydyn.compile(m, threads=2)
    session = onnxruntime.InferenceSession(m.SerializeToString(), providers=["CPUExecutionProvider"])
    kept: list[tuple[Any, Any]] = []
    for feeds in calls:
        before = {n: a.copy() for n, a in feeds.items()}
        got, expected = program.run(feeds), session.run(None, dict(feeds))
        for (name, a), b in zip(got.items(), expected, strict=True):
            shape = tuple(n if b.size == 0 == m else m for n, m in zip(a.shape, b.shape, strict=True))
            # rows without any iteration have size 0 in ONNX Runtime
            assert (a.dtype, a.shape) == (b.dtype, shape), name
            np.testing.assert_allclose(a.reshape(b.shape), b, 1e-4, 1e-5, err_msg=name)
            assert not any(np.may_share_memory(a, x) for x in feeds.values()), f"{name} is memory of the caller"
        assert all(np.array_equal(feeds[n], x) for n, x in before.items()), "inputs are never written"
        kept += [(a, a.copy()) for a in got.values()]
    assert all(np.array_equal(a, b, equal_nan=True) for a, b in kept), "results of earlier calls stay as they are"
    return program


def f32(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float32)


def scalar(value: Any, dtype: str = "int64") -> Any:
    return np.array(value, dtype)


IF = parsed("""
g (float[N, 3] x, float[N, 3] b) => (float[P, Q] y, float[M] z) {
    zero = Constant <value = float {0}> ()
    s = ReduceSum <keepdims = 0> (x)
    c = Greater (s, zero)
    y, z = If (c) <
        then_branch = t () => (float[A, C] u, float[D] v) {
            u = Add (x, b)
            k = Constant <value_ints = [-1]> ()
            v = Reshape (u, k)
        },
        else_branch = e () => (float[A, C] u2, float[D] v2) {
            u2 = Transpose <perm = [1, 0]> (x)
            one = Constant <value_ints = [1]> ()
            none = Constant <value_ints = [0]> ()
            sh = Shape (x)
            first = Slice (sh, none, one)
            v2 = Expand (s, first)
        }>
}
""")


def test_branches_of_different_shapes_with_captured_tensors_and_sizes() -> None:
    program = check(IF, *({"x": sign * np.abs(f32(n, 3)), "b": f32(n, 3)} for n in (1, 2, 7, 31) for sign in (1, -1)))
    assert isinstance(program, PartsProgram) and len(program.steps) == 1


def test_a_branch_may_be_a_tensor_around_it() -> None:
    m = parsed("""
    g (bool c, float[N] x) => (float[N] y) {
        y = If (c) <then_branch = t () => (float[N] u) { u = Identity (x) },
                    else_branch = e () => (float[N] v) { v = Neg (x) }>
    }""")
    check(m, {"c": np.array(True), "x": f32(4)}, {"c": np.array(False), "x": f32(0)})


def test_a_body_reads_its_condition_behind_the_answer_that_it_gives() -> None:
    """The row is computed from a product, so its launch follows the launch of the next condition."""
    m = parsed("""
    g (int64 m, float[N, 4] x, float[4, 4] w) => (float[N, 4] last, float[K, N, 4] rows) {
        yes = Constant <value = bool {1}> ()
        last, rows = Loop (m, yes, x) <
            body = body (int64 i, bool go, float[N, 4] v) => (bool on, float[N, 4] next, float[N, 4] row) {
                limit = Constant <value = float {60}> ()
                s = ReduceSum <keepdims = 0> (v)
                on = Less (s, limit)
                p = MatMul (v, w)
                f = Cast <to = 1> (go)
                row = Mul (p, f)
                one = Constant <value = float {1}> ()
                next = Add (v, one)
            }>
    }""")
    check(m, {"m": scalar(10), "x": np.ones((3, 4), np.float32), "w": np.eye(4, dtype=np.float32)})


def test_a_body_may_hand_on_its_number_its_condition_and_what_it_was_given() -> None:
    """Results are separate arrays: later iterations and calls change none of them. (ONNX Runtime returns others.)"""
    m = parsed("""
    g (int64 m, bool c, float[N] x0) => (float[N] last, int64 number, bool flag, float[N] same) {
        x = Exp (x0)
        before = Constant <value = int64 {-1}> ()
        last, number, flag, same = Loop (m, c, x, before, c, x) <
            body = body (int64 i, bool go, float[N] v, int64 k, bool f, float[N] s) =>
                        (bool on, float[N] w, int64 i, bool go, float[N] s) {
                on = Identity (go)
                add = Cast <to = 1> (k)
                w = Add (v, add)
            }>
    }""")
    program, kept = polydyn.compile(m, threads=1), []
    for trips, going in ((4, True), (0, True), (1, True), (2, False), (3, True)):
        x, count = np.exp(f32(3)), trips * going
        got = program.run({"m": scalar(trips), "c": np.array(going), "x0": np.log(x)})
        want = {"last": x + sum(range(-1, count - 1)), "number": count - 1, "flag": going, "same": x}
        kept.append((got, want))
    for got, want in kept:
        assert all(np.allclose(got[n], want[n], 1e-5) for n in want)

    def alarm(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, alarm)
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    with pytest.raises(TimeoutError):  # an endless loop reacts to signals
        program.run({"m": scalar(10**15), "c": np.array(True), "x0": f32(3)})
    signal.signal(signal.SIGALRM, before)
    assert program.run({"m": scalar(2), "c": np.array(True), "x0": f32(3)})["number"] == 1


def test_a_state_may_be_the_slice_that_was_read() -> None:
    m = parsed("""
    g (float[T, N] x0) => (float[N] last, float[T, N] sums) {
        x = Exp (x0)
        none = Constant <value_ints = [0]> ()
        s0 = ReduceMax <keepdims = 0> (x, none)
        last, sums = Scan <num_scan_inputs = 1, body = body (float[N] s, float[N] t) => (float[N] t, float[N] row) {
            row = Add (s, t)
        }> (s0, x)
    }""")
    program, kept = polydyn.compile(m, threads=1), []
    for t in (4, 1, 4):
        x = f32(t, 3)
        kept.append((program.run({"x0": x}), np.exp(x)))
    for got, x in kept:
        np.testing.assert_allclose(got["last"], x[-1], 1e-5)
        np.testing.assert_allclose(got["sums"], np.concatenate([x.max(0)[None], x[:-1]]) + x, 1e-5)


def test_branches_of_different_rank_are_refused_by_name_only_in_results() -> None:
    m = parsed("""
    g (bool c, float[N] x) => (float[N] y) {
        y = If (c) <then_branch = t () => (float[N] u) { u = Exp (x) },
                    else_branch = e () => (float v) { v = ReduceSum <keepdims = 0> (x) }>
    }""")
    with pytest.raises(UnsupportedError, match="y has rank 1 or rank 0"):
        polydyn.compile(m)


RANKS = """
g (bool c, float[B, S, T] x, float[4, 1] w, float[8, 2] w8) => (float y, float sum, float v) {
    y, v = If (c) <
        then_branch = t () => (float y1, float v1) {
            p = MatMul (x, w)
            last = Constant <value_int = -1> ()
            one = Constant <value_int = 1> ()
            sh = Shape (p)
            size = Gather (sh, last)
            d = Equal (size, one)
            axes = Constant <value_ints = [-1]> ()
            q, k = If (d) <then_branch = tt () => (float[D] a, float a2) {
                               a = Squeeze (p, axes)
                               a2 = ReduceSum <keepdims = 0> (p)
                           },
                           else_branch = te () => (float[D] b, float b2) {
                               b = Identity (p)
                               b2 = ReduceMax <keepdims = 0> (p)
                           }>
            r = Sqrt (k)
            y0 = Mul (q, r)
            y1 = ReduceMax <keepdims = 0> (y0)
            v1 = Neg (k)
        },
        else_branch = e () => (float y2, float v2) {
            p8 = MatMul (x, w8)
            y2 = ReduceMin <keepdims = 0> (p8)
            v2 = Neg (y2)
        }>
    sum = ReduceSum <keepdims = 0> (x)
}"""


def test_readers_of_a_result_of_two_ranks_move_into_the_branches_also_inside_bodies() -> None:
    """``r`` is between the If and a reader that moves, and another node reads ``k`` too. One branch needs T == 4."""
    m = parsed(RANKS)
    short, wide = np.abs(f32(2, 3, 4)), f32(2, 3, 8)
    feeds = {"w": np.abs(f32(4, 1)), "w8": f32(8, 2)}
    check(m, {"c": np.array(True), "x": short, **feeds}, {"c": np.array(False), "x": wide, **feeds})
    for t, x in (
        (4, short),
        (8, wide),
    ):  # then the other branch contradicts the sizes, and only calls of it are rejected
        program = polydyn.compile(m, dims={"T": (t, t)})
        session = onnxruntime.InferenceSession(m.SerializeToString())
        expected = session.run(None, {"c": np.array(t == 4), "x": x, **feeds})
        got = program.run({"c": np.array(t == 4), "x": x, **feeds})
        for a, b in zip(got.values(), expected, strict=True):
            np.testing.assert_allclose(a, b, 1e-4, 1e-5)
        with pytest.raises(InputError, match=r"_branch of .* cannot run: .* can never be equal; this call takes it"):
            program.run({"c": np.array(t != 4), "x": x, **feeds})


def test_a_squeeze_without_axes_is_built_for_every_rank() -> None:
    m = parsed("""
    g (float[B, N, T] x) => (float[M] y) {
        s = Squeeze (x)
        k = Constant <value_ints = [-1]> ()
        y = Reshape (s, k)
    }""")
    check(m, *({"x": f32(*s)} for s in ((2, 3, 1), (1, 3, 4), (1, 1, 1), (2, 3, 4))))


LOOP = parsed("""
g (int64 m, bool c, float[N] x, float[N] b) => (float[N] last, float[K] grown, float[T, N] rows) {
    e = Constant <value = float[0] {}> ()
    last, grown, rows = Loop (m, c, x, e) <
        body = body (int64 i, bool go, float[N] v, float[L] w) => (bool on, float[N] v2, float[L2] w2, float[N] row) {
            v2 = Add (v, b)
            s = ReduceSum <keepdims = 1> (v2)
            w2 = Concat <axis = 0> (w, s)
            f = Cast <to = 1> (i)
            row = Mul (v2, f)
            big = Constant <value = float {1000}> ()
            t = ReduceMax <keepdims = 0> (v2)
            on = Less (t, big)
        }>
}
""")


def test_loops_with_carried_grown_and_scanned_tensors() -> None:
    feeds = [
        {"m": scalar(m), "c": np.array(c), "x": f32(n), "b": np.abs(f32(n)) + step}
        for m, c, n, step in [(5, True, 3, 0), (1, True, 1, 0), (40, True, 7, 90), (3, False, 4, 0)]
    ]
    program = check(LOOP, *feeds)
    assert program.run(feeds[0] | {"m": scalar(0)})["rows"].shape == (0, 3)


def test_a_count_that_sizes_say() -> None:
    m = parsed("""
    g (float[N, H] x) => (float[H] s, float[N, H] r) {
        sh = Shape <start = 0, end = 1> (x)
        axis = Constant <value_ints = [0]> ()
        n = Squeeze (sh, axis)
        t = Constant <value = bool {1}> ()
        z = ReduceSum <keepdims = 0> (x, axis)
        s0 = Sub (z, z)
        s, r = Loop (n, t, s0) <
            body = body (int64 i, bool go, float[H] a) => (bool on, float[H] a2, float[H] q) {
                on = Identity (go)
                row = Gather <axis = 0> (x, i)
                a2 = Add (a, row)
                q = Identity (a2)
            }>
    }""")
    program = check(m, *({"x": f32(n, h)} for n, h in [(1, 3), (31, 7), (5, 1)]))
    assert program.outputs["r"] == "float32[N, H]", "sizes say how many rows there are"


NESTED_LOOPS = parsed("""
g (int64 m, int64 k, float[N] x) => (float[N] y) {
    t = Constant <value = bool {1}> ()
    y = Loop (m, t, x) <
        body = outer (int64 i, bool go, float[N] v) => (bool go, float[N] v3) {
            f = Cast <to = 1> (i)
            v3 = Loop (k, t, v) <
                body = inner (int64 j, bool go2, float[N] w) => (bool go2, float[N] w3) {
                    g = Cast <to = 1> (j)
                    a = Add (f, g)
                    c = Less (g, f)
                    w2 = If (c) <then_branch = p () => (float[N] q) { q = Add (w, a) },
                                 else_branch = e () => (float[N] r) { r = Mul (w, x) }>
                    w3 = Tanh (w2)
                }>
        }>
}
""")


def test_nested_loops_capture_from_every_level() -> None:
    calls = [(3, 2, 4), (1, 5, 1), (4, 1, 9), (0, 3, 2)]
    check(NESTED_LOOPS, *({"m": scalar(a), "k": scalar(b), "x": f32(n)} for a, b, n in calls))


def test_bodies_that_find_sizes() -> None:
    m = parsed("""
    g (int64 m, int64[N] x, bool c) => (int64[P] y, int64[T] rows, int64[Q] z) {
        t = Constant <value = bool {1}> ()
        y, rows = Loop (m, t, x) <
            body = body (int64 i, bool go, int64[K] v) => (bool on, int64[L] w, int64 s) {
                three = Constant <value_ints = [3]> ()
                half = Div (v, three)
                w = Unique (half)
                s = ReduceSum <keepdims = 0> (w)
                zero = Constant <value = int64 {0}> ()
                on = Greater (s, zero)
            }>
        z = If (c) <then_branch = a () => (int64[A] p) { p = Unique (x) },
                    else_branch = b () => (int64[B] q) { q = Identity (x) }>
    }""")
    calls = [(5, 9, True), (70, 4, False), (0, 3, True), (1, 0, True)]
    check(m, *({"m": scalar(n), "x": RNG.integers(0, 99, k), "c": np.array(c)} for n, k, c in calls))


def test_a_condition_that_is_carried_ends_a_bound_loop() -> None:
    m = parsed("""
    g (int64 m, float x) => (float y, bool last, float[T] rows) {
        t = Constant <value = bool {1}> ()
        y, last, rows = Loop (m, t, x, t) <
            body = body (int64 i, bool go, float v, bool ok) => (bool ok, float w, bool next, float row) {
                one = Constant <value = float {1}> ()
                ten = Constant <value = float {10}> ()
                w = Add (v, one)
                next = Less (w, ten)
                row = Neg (w)
            }>
    }""")
    check(m, *({"m": scalar(n), "x": scalar(x, "float32")} for n, x in [(50, 0), (3, 0), (50, 20), (50, 7.5)]))


def test_many_iterations_and_a_row_that_is_carried_lies_once() -> None:
    m = parsed("""
    g (int64 m, float[N] x, float[N] b) => (float[N] last, float[N] kept, float[T, N] rows, float[T] sums) {
        t = Constant <value = bool {1}> ()
        last, kept, rows, sums = Loop (m, t, x, b) <
            body = body (int64 i, bool go, float[N] v, float[N] k)
                        => (bool on, float[N] w, float[N] k, float[N] w, float s) {
                w = Add (v, k)
                s = ReduceSum <keepdims = 0> (w)
                f = Cast <to = 1> (i)
                c = Add (s, f)
                most = Constant <value = float {900}> ()
                on = Less (c, most)
            }>
    }""")
    check(m, *({"m": scalar(n), "x": f32(k), "b": np.full(k, 0.5, np.float32)}
               for n, k in [(10**12, 1), (10**12, 3), (5, 2), (1, 7), (0, 2), (64, 1), (65, 1)]))  # fmt: skip


def test_what_grows_has_room() -> None:
    """Growth along the first axis in place, along another alternating between buffers; also beyond the initial room."""
    m = parsed("""
    g (int64 m, float[N, 8] x) => (float[P, 8] long, float[N, Q] wide, float[T, 8] rows) {
        t = Constant <value = bool {1}> ()
        long, wide, rows = Loop (m, t, x, x) <
            body = body (int64 i, bool go, float[K, 8] v, float[N, L] w)
                        => (bool go, float[K2, 8] v2, float[N, L2] w2, float[8] s) {
                first = Constant <value_ints = [0]> ()
                s = ReduceMean <keepdims = 0> (v, first)
                row = Unsqueeze (s, first)
                v2 = Concat <axis = 0> (v, row)
                second = Constant <value_ints = [1]> ()
                d = ReduceMax <keepdims = 1> (w, second)
                w2 = Concat <axis = 1> (w, d, d)
            }>
    }""")
    check(m, *({"m": scalar(k), "x": f32(n, 8)} for k, n in [(300, 3), (1, 1), (0, 2), (70, 17)]))


def test_a_carried_tensor_that_changes_rank_is_refused_by_name() -> None:
    m = parsed("""
    g (int64 m, float[N] x) => (float[N] y) {
        t = Constant <value = bool {1}> ()
        y = Loop (m, t, x) <body = body (int64 i, bool go, float[N] v) => (bool go, float w) {
            w = ReduceSum <keepdims = 0> (v)
        }>
    }""")
    with pytest.raises(UnsupportedError, match="x, which an iteration turns into float32 of rank 0"):
        polydyn.compile(m)


def test_a_wrong_call_of_a_body_says_its_iteration() -> None:
    m = parsed("""
    g (int64 m, float[N] x) => (float[T] y) {
        t = Constant <value = bool {1}> ()
        y = Loop (m, t) <body = body (int64 i, bool go) => (bool go, float v) { v = Gather <axis = 0> (x, i) }>
    }""")
    program = check(m, {"m": scalar(4), "x": f32(4)})
    with pytest.raises(InputError, match="in iteration 2"):
        program.run({"m": scalar(3), "x": f32(2)})
    assert program.run({"m": scalar(2), "x": np.array([1, 2], np.float32)})["y"].tolist() == [1, 2]


@pytest.mark.parametrize("back", [slow(0), 1])
def test_scans_along_other_axes_and_backwards(back: int) -> None:
    m = parsed(f"""
    g (float[H] h, float[B, T, H] x, float[H, H] r) => (float[B, H] last, float[B, H, T] y, float[T, B, H] z) {{
        h0 = Constant <value = float {{0}}> ()
        axis = Constant <value_ints = [1]> ()
        sum = ReduceSum <keepdims = 0> (x, axis)
        none = Sub (sum, sum)
        first = Add (none, h)
        last, y, z = Scan <num_scan_inputs = 1, scan_input_axes = [1], scan_input_directions = [{back}],
                           scan_output_axes = [2, 0], scan_output_directions = [{back}, 0],
            body = body (float[B, H] s, float[B, H] v) => (float[B, H] s2, float[B, H] p, float[B, H] q) {{
                w = MatMul (s, r)
                u = Add (w, v)
                s2 = Tanh (u)
                p = Identity (s2)
                q = Add (s2, v)
            }}> (first, x)
    }}""")
    sizes = [(2, 5, 3), (1, 1, 1), (3, 40, 17)]
    check(m, *({"h": f32(h), "x": f32(b, t, h), "r": f32(h, h) / 4} for b, t, h in sizes))


def test_saved(tmp_path: Path) -> None:
    program = check(LOOP, {"m": scalar(3), "c": np.array(True), "x": f32(3), "b": f32(3)})
    program.save(tmp_path / "loop.polydyn")
    feeds = {"m": scalar(7), "c": np.array(True), "x": f32(5), "b": f32(5)}
    loaded = polydyn.load(tmp_path / "loop.polydyn").run(feeds)
    assert all(np.array_equal(a, loaded[n]) for n, a in program.run(feeds).items())


@pytest.mark.parametrize("op", ["Add", "Max", "Where"])
def test_a_carried_tensor_grows_by_a_broadcast(op: str) -> None:
    """Exporters write ``total = zeros(1)`` before a loop that adds rows."""
    step = {"Where": "p = Greater (e, total)  next = Where (p, e, total)"}.get(op, f"next = {op} (total, e)")
    text = f"""
    g (float[T, N] x) => (float[M] y) {{
        zero = Constant <value_ints = [0]> ()
        n = Shape <start = 0, end = 1> (x)
        turns = Squeeze (n, zero)
        first = Constant <value = float[1] {{0.0}}> ()
        y = Loop <body = body (int64 i, bool c, float[K] total) => (bool c2, float[L] next) {{
            c2 = Identity (c)
            e = Gather (x, i)
            {step}
        }}> (turns, , first)
    }}"""
    check(parsed(text), *({"x": f32(*s)} for s in ((3, 4), (1, 1), (5, 2), (2, 1))))


def test_sequences_whose_elements_are_known_are_written_away() -> None:
    text = """
    g (float[N, 6] x, float[N, 2] z) => (float[N, 7] y, float[K, N, 2] s, int64 n, float[N, 3] last, float[N, M] t) {
        sizes = Constant <value_ints = [2, 1, 3]> ()
        q = SplitToSequence <axis = 1> (x, sizes)
        one = Constant <value = int64 {1}> ()
        erased = SequenceErase (q, one)
        longer = SequenceInsert (erased, z, one)
        y = ConcatFromSequence <axis = 1> (longer)
        back = Constant <value = int64 {-1}> ()
        last = SequenceAt (longer, back)
        first = Constant <value = int64 {0}> ()
        a = SequenceAt (longer, first)
        pair = SequenceConstruct (a, z)
        s = ConcatFromSequence <axis = 0, new_axis = 1> (pair)
        n = SequenceLength (longer)
        empty = SequenceEmpty ()
        yes = Constant <value = bool {1}> ()
        turns = Constant <value = int64 {2}> ()
        filled = Loop <body = body (int64 i, bool c, seq(float[N, 2]) before) => (bool c2, seq(float[N, 2]) after) {
            c2 = Identity (c)
            f = Cast <to = 1> (i)
            w = Add (z, f)
            after = SequenceInsert (before, w)
        }> (turns, yes, empty)
        t = ConcatFromSequence <axis = 1> (filled)
    }"""
    check(parsed(text), *({"x": f32(n, 6), "z": f32(n, 2)} for n in (1, 7)))
    data = text.replace("turns = Constant <value = int64 {2}> ()", "turns = Size (x)")
    check(parsed(data), *({"x": f32(n, 6), "z": f32(n, 2)} for n in (1, 2)))
    with pytest.raises(UnsupportedError, match="SequenceEmpty"):
        polydyn.compile(parsed(data.replace("SequenceInsert (before, w)", "SequenceInsert (before, w, i)")))
