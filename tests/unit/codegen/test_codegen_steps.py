"""The steps of a kernel: a step that breaks the loop IR is named, and the result of each is shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from polydyn.codegen.ir import Alloc, Body, Def, FlatLoad, For, Inst, Let, Reg, Set, Store, rewrite
from polydyn.codegen.pipeline import Step, run
from polydyn.compiler import plan_program
from polydyn.debug import stages
from polydyn.schedules.errors import CodegenError
from polydyn.schedules.expr import const, load
from polydyn.schedules.index import ONE, ZERO, Index
from polydyn.testing import kernel_graphs
from tests.support.tiny import model, node

ix = Index.of
NAMES = ("n", "x", "y")
WORD, WIDE = const(0, "float32"), Reg("float32", "r", 8)
LOOP: Body = (For("i", ZERO, ix("n"), (Inst("S", (ix("i"),), ("i",)),)),)
COPY = Store("y", ix("i"), FlatLoad("float32", "x", ix("i")))


def replace_instances(*nodes: object) -> Callable[[Body], Body]:
    return lambda b: rewrite(b, lambda n: nodes if isinstance(n, Inst) else n)  # type: ignore[arg-type, return-value]


GOOD = Step("lower", "statements become stores", replace_instances(COPY))


def with_bug(purpose: str, f: Callable[[Body], Body]) -> tuple[Step, ...]:
    return GOOD, Step("broken", purpose, f), Step("last", "nothing", lambda b: b)


@pytest.mark.parametrize(
    ("message", "f"),
    [
        (r"unbound \['i'\]", lambda b: b[0].body),
        ("bound twice", lambda b: (replace(b[0], body=(Let("i", ONE, b[0].body),)),)),
        ("store to unknown buffer z", lambda b: (*b, Store("z", ZERO, const(0, "float32")))),
        ("load from unknown buffer z", lambda b: (*b, Store("y", ZERO, FlatLoad("float32", "z", ZERO)))),
        ("register r", lambda b: (*b, Set("r", const(0, "float32")))),
        ("register r is used with 8 lanes", lambda b: (*b, Def("r", WORD), Store("y", ZERO, WIDE, None, 8))),
        ("x is allocated twice", lambda b: (Alloc("x", "float32", ONE, "stack", b),)),
    ],
)  # fmt: skip
def test_the_step_that_breaks_the_loop_ir_is_named(
    message: str, f: Callable[[Body], Body], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLYDYN_VERIFY", "1")
    with pytest.raises(CodegenError, match=f"kernel_0: after the step broken \\(a bug\\): .*{message}"):
        run("kernel_0", LOOP, with_bug("a bug", f), NAMES)
    monkeypatch.setenv("POLYDYN_VERIFY", "0")
    run("kernel_0", LOOP, with_bug("a bug", f), NAMES)


def test_a_name_may_be_used_before_the_step_that_binds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYDYN_VERIFY", "1")
    scaled = replace_instances(Store("t", ix("i") * "s", load("x", ("i",), "float32")))
    binding = Step("bind", "binds both", lambda b: (Let("s", ONE, (Alloc("t", "float32", ix("n"), "stack", b),)),))
    with pytest.raises(CodegenError, match="unbound"):
        run("k", LOOP, (Step("lower", "uses s and t", scaled), binding), NAMES)
    out = run("k", LOOP, (Step("lower", "uses s and t", scaled, ("s", "t")), binding), NAMES)
    assert isinstance(out[0], Let)


def test_what_is_free_before_the_first_step_stays_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYDYN_VERIFY", "1")
    body: Body = (For("j", ZERO, ix("P_j"), LOOP),)
    run("k", body, (GOOD,), NAMES)
    with pytest.raises(CodegenError, match="P_k"):
        run("k", body, (GOOD, Step("more", "another size", lambda b: (For("k", ZERO, ix("P_k"), b),))), NAMES)


def test_each_step_is_shown_with_what_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYDYN_DUMP_DIR", str(tmp_path))
    with stages("m"):
        run("k", LOOP, (GOOD, Step("same", "leaves it", lambda b: b), Step("drop", "empties it", lambda b: ())), NAMES)
        run("hidden", LOOP, (GOOD,), NAMES, shown=False)
    (folder,) = tmp_path.iterdir()
    assert [f.name for f in folder.iterdir()] == ["k"]
    assert sorted(f.name for f in (folder / "k").iterdir()) == ["00_lower.txt", "01_drop.txt"]
    text = (folder / "k" / "00_lower.txt").read_text()
    assert text == "// statements become stores\nserial i in [0, n)\n  y[i] = x[i]\n"


@pytest.mark.parametrize("target", ["cpu:avx512", "cpu:avx2", "cuda:sm_90a"])
def test_steps_of_a_product_whose_weights_stream_from_memory(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of a product of this size prefetch the next panel; tiny models do not."""
    monkeypatch.setenv("POLYDYN_VERIFY", "1")
    weights = np.ones((768, 3072), np.float32)
    m = model([node("MatMul", "x w", "y")], {"x": ("float32", ["M", 768])}, ["y"], {"w": weights})
    (kernel, *_) = plan_program(m, target=target).kernels
    assert ("pd_prefetch_far_f32" in kernel.text) == (target == "cpu:avx512")


@pytest.mark.parametrize("target", ["cpu:amx-emulated", "cpu:avx2"])
def test_every_step_of_the_kernels_of_bytes_is_whole(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYDYN_VERIFY", "1")
    assert plan_program(kernel_graphs.graph("bytes"), target=target).kernels
