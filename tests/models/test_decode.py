"""Decoding with caches that grow in place: no element of the past is moved, and the numbers are ONNX Runtime's."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import polydyn
from polydyn.build.compiler import find_compiler
from polydyn.errors import InputError, PolydynError
from polydyn.fusion import separate
from polydyn.program.assemble import build_program
from polydyn.program.plan import Buffer, HostPlan
from polydyn.runtime.program import Program
from polydyn.schedules.index import Index
from polydyn.testing.accuracy import TOLERANCE, error
from tests.support.paths import ROOT, TESTS
from tests.support.programs import example
from tests.support.stored import compiled, path_of

HEADS, SIZE, ROOM = 4, 8, 80
TOKEN_BYTES = 4 * HEADS * SIZE * 4  # keys and values of two layers, float32
Arrays = dict[str, np.ndarray[Any, Any]]


@pytest.fixture(scope="module")
def program() -> Program:
    return compiled("gpt2_past_tiny", 1)


@pytest.fixture(scope="module")
def session() -> ort.InferenceSession:
    return ort.InferenceSession(path_of("gpt2_past_tiny"), providers=["CPUExecutionProvider"])


def caches(program: Program, batch: int) -> Arrays:
    return {name: np.full((batch, HEADS, ROOM, SIZE), np.nan, np.float32) for name in program.appendable}


def views(cache: Arrays, length: int) -> Arrays:
    return {name: c[:, :, :length] for name, c in cache.items()}


def past_of(program: Program, present: Arrays) -> Arrays:
    return {past: present[name] for name, past in program.appendable.items()}


def text(batch: int, length: int, before: int, seed: int) -> Arrays:
    mask = np.ones((batch, before + length), np.int64)
    mask[0, : (before + length) // 3] = 0
    return {"input_ids": np.random.default_rng(seed).integers(0, 120, (batch, length)), "attention_mask": mask}


def follow(
    program: Program, session: ort.InferenceSession, batch: int, prompt: int, step: Callable[[Arrays, int, int], Arrays]
) -> None:
    """Run a prompt (none if 0) and 64 steps of one token; ``step(inputs, before, after)`` returns polydyn's outputs."""
    names = [o.name for o in session.get_outputs()]
    past = {p: np.zeros((batch, HEADS, 0, SIZE), np.float32) for p in program.appendable.values()}
    before = 0
    for k, length in enumerate([prompt] * (prompt > 0) + [1] * 64):
        inputs = text(batch, length, before, k)
        expected = dict(zip(names, session.run(None, {**inputs, **past}), strict=True))
        got = step(inputs, before, before + length)
        assert error(got, expected) <= TOLERANCE, k
        past, before = past_of(program, expected), before + length


def test_the_pairs_are_found(program: Program) -> None:
    assert program.appendable == {f"present_{i}_{k}": f"past_{i}_{k}" for i in (0, 1) for k in ("key", "value")}


@pytest.mark.parametrize(("batch", "prompt"), [(1, 0), (1, 7), (3, 5)])
def test_64_steps_move_only_what_they_append(
    program: Program, session: ort.InferenceSession, batch: int, prompt: int
) -> None:
    cache = caches(program, batch)

    def step(inputs: Arrays, before: int, after: int) -> Arrays:
        start = program.counters["bytes_copied"]
        out = program.run({**inputs, **past_of(program, views(cache, before))}, views(cache, after))
        assert program.counters["bytes_copied"] - start == batch * (after - before) * TOKEN_BYTES
        assert all(out[name].base is cache[name] for name in cache)
        assert all(np.isnan(c[:, :, after:]).all() for c in cache.values()), "wrote behind the present"
        return out

    follow(program, session, batch, prompt, step)


def test_dense_arrays_are_copied_and_right(program: Program, session: ort.InferenceSession) -> None:
    past = {p: np.zeros((2, HEADS, 0, SIZE), np.float32) for p in program.appendable.values()}
    start = program.counters["bytes_copied"]

    def step(inputs: Arrays, before: int, after: int) -> Arrays:
        out = program.run({**inputs, **past})
        past.update(past_of(program, out))
        return out

    follow(program, session, 2, 3, step)
    assert program.counters["bytes_copied"] - start == 2 * TOKEN_BYTES * sum(range(3, 68))


def test_one_buffer_for_all_caches(program: Program, session: ort.InferenceSession) -> None:
    """Interleaved caches, batch innermost but one; the present may also be stored elsewhere than the past."""
    whole = np.zeros((HEADS, 2, len(program.appendable), ROOM, SIZE), np.float32)
    cache = {name: whole[:, :, k].transpose(1, 0, 2, 3) for k, name in enumerate(program.appendable)}
    other = {name: c.copy() for name, c in cache.items()}

    def step(inputs: Arrays, before: int, after: int) -> Arrays:
        nonlocal cache, other
        start, moved = program.counters["bytes_copied"], 0
        if after % 9 == 0:
            moved = 2 * before * TOKEN_BYTES
            out = program.run({**inputs, **past_of(program, views(cache, before))}, views(other, after))
            cache, other = other, cache
        else:
            out = program.run({**inputs, **past_of(program, views(cache, before))}, views(cache, after))
        assert program.counters["bytes_copied"] - start == moved + 2 * (after - before) * TOKEN_BYTES
        return out

    follow(program, session, 2, 0, step)


def test_a_past_of_other_strides_is_made_dense(program: Program, session: ort.InferenceSession) -> None:
    turned = {name: np.zeros((2, ROOM, HEADS, SIZE), np.float32) for name in program.appendable}
    backwards = {name: c[:, ::-1].transpose(0, 2, 1, 3) for name, c in turned.items()}

    def step(inputs: Arrays, before: int, after: int) -> Arrays:
        start = program.counters["bytes_copied"]
        out = program.run({**inputs, **past_of(program, views(backwards, before))})
        twice = 2 * before * TOKEN_BYTES * 2  # once to be dense, once into the present
        assert program.counters["bytes_copied"] - start == twice + 2 * (after - before) * TOKEN_BYTES
        for name, c in backwards.items():
            c[:, :, before:after] = out[name][:, :, before:after]
        return out

    follow(program, session, 2, 4, step)


def test_saved_and_loaded_programs_decode_too(program: Program, session: ort.InferenceSession, tmp_path: Path) -> None:
    program.save(tmp_path / "gpt2.polydyn")
    loaded = polydyn.load(tmp_path / "gpt2.polydyn", threads=2)
    cache = caches(loaded, 2)

    def step(inputs: Arrays, before: int, after: int) -> Arrays:
        return loaded.run({**inputs, **past_of(loaded, views(cache, before))}, views(cache, after))

    follow(loaded, session, 2, 6, step)
    assert loaded.counters["bytes_copied"] == 2 * 70 * TOKEN_BYTES


def test_a_step_is_profiled_as_it_runs_and_its_sharing_is_checked_quickly(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, inputs = caches(program, 2), text(2, 1, 5, 0)
    feeds, out = {**inputs, **past_of(program, views(cache, 5))}, views(cache, 6)
    before = program.counters["bytes_copied"]
    in_place = program.profile(feeds, 1, out)
    assert program.counters["bytes_copied"] - before == 2 * 2 * 1 * TOKEN_BYTES, "two calls append a token of two texts"
    assert [t.label for t in in_place] == [t.label for t in program.profile(feeds, 1)]
    assert program.counters["bytes_copied"] - before > 2 * 2 * 6 * TOKEN_BYTES, "without out the past is copied"
    assert program.trace(feeds, 1, out)
    monkeypatch.setattr(sys.modules[Program.__module__], "reject_sharing", None)  # the slow check is not called
    program.run(feeds, out)
    whole = np.zeros((2, HEADS, len(out), ROOM, SIZE), np.float32)
    mixed = {name: whole[:, :, k] for k, name in enumerate(out)}
    with pytest.raises(TypeError, match="not callable"):  # interleaved caches need it
        program.run({**inputs, **past_of(program, views(mixed, 5))}, views(mixed, 6))
    monkeypatch.undo()
    program.run({**inputs, **past_of(program, views(mixed, 5))}, views(mixed, 6))


def test_refuses_wrong_sharing(program: Program) -> None:
    cache = {name: np.zeros((2, HEADS, ROOM, SIZE), np.float32) for name in program.appendable}
    name, second = list(cache)[:2]
    c = cache[name]
    inputs = {**text(2, 1, 5, 0), **past_of(program, views(cache, 5))}
    packed = c.reshape(-1)[: 2 * HEADS * 6 * SIZE].reshape(2, HEADS, 6, SIZE)  # the past's address, other strides
    wrong = {
        f"'{name}'] may share memory with 'past_0_key', but has another layout": packed,
        "but has another layout": c[:, :, 1:7],
        f"share memory with '{program.appendable[second]}'": cache[second][:, :, :6],
        "positive strides of whole elements": np.zeros((2, HEADS, SIZE, 6), np.float32).swapaxes(2, 3),
        "dense from axis 2": c[:, :, ::-1][:, :, :6],
        "must be an array of 4 axes": c[0, :, :6],
        "shape (2, 4, 6, 8) in this call": c[:, :, :7],
        "aligned and writeable": np.broadcast_to(c[:, :, :6], (2, HEADS, 6, SIZE)),
    }
    for message, out in wrong.items():
        with pytest.raises(InputError, match=re.escape(message)):
            program.run(inputs, {name: out})
    with pytest.raises(InputError, match="share memory"):
        program.run(inputs, dict.fromkeys((name, second), c[:, :, :6]))
    with pytest.raises(InputError, match="C-contiguous"):
        program.run(inputs, {"last_hidden_state": np.zeros((2, 1, 64), np.float32)[:, :, ::2]})
    program.run(inputs, {name: c[:, :, :6]})  # a rejected call leaves nothing behind


def queue(axis: int) -> bytes:
    """Build ``longer = concat(kept, x * 2)`` along ``axis``; ``double`` also reads ``kept``, ``sums`` the whole."""
    shape = ["B", "C"]
    shape[axis] = "P"
    added = [*shape[:axis], "L", *shape[axis + 1 :]]
    f = TensorProto.FLOAT
    nodes = [
        helper.make_node("Add", ["x", "x"], ["twice"]),
        helper.make_node("Concat", ["kept", "twice"], ["longer"], axis=axis),
        helper.make_node("Add", ["kept", "kept"], ["double"]),
        helper.make_node("ReduceSum", ["longer", "axes"], ["sums"], keepdims=0),
    ]
    io = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "queue", [io("kept", f, shape), io("x", f, added)],
        [io("longer", f, [None, None]), io("double", f, shape), io("sums", f, [None])],
        [helper.make_tensor("axes", TensorProto.INT64, [1], [axis])],
    )  # fmt: skip
    return onnx.ModelProto.SerializeToString(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    )


@pytest.mark.parametrize("axis", [0, 1])
def test_any_concatenation_behind_an_input_grows_in_place(axis: int) -> None:
    program = polydyn.compile(queue(axis), threads=2)
    assert program.appendable == {"longer": "kept"}
    rng = np.random.default_rng(axis)
    store = rng.standard_normal((300, 37) if axis == 0 else (37, 300)).astype(np.float32)
    expected, length = store.take(range(5), axis), 5
    for count in (1, 0, 17, 2, 130):
        x = rng.standard_normal((count, 37) if axis == 0 else (37, count)).astype(np.float32)
        kept, longer = (store[(slice(None),) * axis + (slice(n),)] for n in (length, length + count))
        before = expected
        expected = np.concatenate([expected, x + x], axis)
        start = program.counters["bytes_copied"]
        out = program.run({"kept": kept, "x": x}, {"longer": longer})
        assert program.counters["bytes_copied"] == start
        np.testing.assert_array_equal(store.take(range(length + count), axis), expected)
        np.testing.assert_array_equal(out["double"], before * 2)
        np.testing.assert_allclose(out["sums"], expected.sum(axis), rtol=1e-4, atol=1e-4)
        length += count


def test_c_programs_append_in_place(tmp_path: Path) -> None:
    program = polydyn.compile(queue(1), threads=1)
    program.save(tmp_path / "queue.polydyn")
    with zipfile.ZipFile(tmp_path / "queue.polydyn") as z:
        (tmp_path / "lib.so").write_bytes(z.read("lib.so"))
        (tmp_path / "polydyn.h").write_bytes(z.read("sources/polydyn.h"))
    source = TESTS / "c" / "run_decode.c"
    flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", f"-I{tmp_path}"]
    command = [*find_compiler().command, *flags, str(source), "-o", str(tmp_path / "run_decode"), "-ldl"]
    subprocess.run(command, check=True)
    done = subprocess.run(
        [tmp_path / "run_decode", tmp_path / "lib.so", tmp_path / "queue.polydyn"], capture_output=True, text=True
    )
    assert done.stdout == "1 2 20 20 0 0 3 4 40 40 0 0 0\n"
    assert done.returncode == 2 and "the same memory, but their strides differ at axis 0" in done.stderr


def test_refuses_malformed_strides_in_plans() -> None:
    good = example()
    f, b, n = "float32", Index.of("B"), Index.of("L")
    first = good.launches[0]

    def change(buffer: Buffer, **launch: Any) -> HostPlan:
        launches = (replace(first, **launch), *good.launches[1:])
        return replace(good, buffers=good.buffers | {buffer.name: buffer}, launches=launches)

    x = good.buffers["x"]
    bad = {
        "cannot be the caller's": change(Buffer("t0", f, (b, n), "intermediate", ("t0@0",))),
        "x@1.*cannot be the caller's": change(Buffer("x", f, (b, n), "input", ("x@0", "x@1"))),
        "occurs twice": change(Buffer("x", f, (b, n), "input", ("B",))),
        "cannot be skipped when 'x' and 'scaled'": change(x, skip_if_same=("x", "scaled")),
        "cannot be skipped when 'x' and 't0'": change(x, skip_if_same=("x", "t0")),
    }
    for message, plan in bad.items():
        with pytest.raises(PolydynError, match=message):
            build_program(plan)


@pytest.mark.slow
def test_free_strides_leave_vector_code_alone(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(separate, "find_appends", lambda graph: ())
    dense = polydyn.compile(path_of("gpt2_past_tiny"), threads=1)
    assert not dense.appendable
    loads = [Counter(re.findall(r"\bv(?:load|store)\w*(?=\()", "".join(p.sources.values()))) for p in (dense, program)]
    assert loads[0] == loads[1] and loads[0]["vload_f32"] > 100


def test_the_documented_loop_runs(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "decoding.md").read_text()
    loop, generating = (x.split("```")[0] for x in text.split("```python\n")[1:])
    monkeypatch.chdir(Path(path_of("gpt2_past_tiny")).parent)
    names: dict[str, Any] = {}
    exec(loop, names)
    assert names["length"] == 12 and names["program"].counters["bytes_copied"] == 12 * TOKEN_BYTES
    exec(generating, names)
    assert len(names["ids"]) == 8 and len(names["row"]) == 2 and len(names["first"]) == len(names["other"]) == 4
    assert names["state"].tokens == [[5, 17, 3, 9, *names["first"][:3]]]


def test_refuses_an_output_that_folds_onto_itself(program: Program) -> None:
    feeds = text(2, 1, 0, 0) | {n: np.zeros((2, HEADS, 0, SIZE), np.float32) for n in program.appendable.values()}
    present = next(iter(program.appendable))
    folded = np.lib.stride_tricks.as_strided(np.zeros(64, np.float32), (2, HEADS, 1, SIZE), (32, 32, 32, 4))
    with pytest.raises(InputError, match="share memory"):
        program.run(feeds, {present: folded})
