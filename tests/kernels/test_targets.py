"""Kernels of all kinds for every processor of this architecture: always compiled, and run if the processor can.

One model has several results of a kind, so that a target needs a handful of compilations.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from polydyn.build import compilers
from polydyn.build.compiler import architecture_of, compile_flags, find_compiler, required_features
from polydyn.build.features import architecture, machine_features
from polydyn.codegen.cpu.target import leaf_headers
from polydyn.compiler import Options, compile_artifact, plan_program
from polydyn.graph import reference
from polydyn.graph.dtypes import numpy_dtype
from polydyn.graph.expand import import_model
from polydyn.runtime.opening import open_program
from polydyn.testing import kernel_graphs

TARGETS = ("cpu:amx-emulated", "cpu:avx512", "cpu:avx2")
KINDS = ("products", "words", "rounded", "windows", "rows", "attention")
SIZES = ({"M": 33, "B": 2, "K": 19, "N": 2, "H": 7}, {"M": 1, "B": 1, "K": 1, "N": 1, "H": 3})
ROUNDS = {"words": 2e-3, "rounded": 2.0**-6}


def can_run(target: str) -> bool:
    """Return whether this processor executes code for a target."""
    return set(required_features(find_compiler(), target)) <= machine_features()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_compile_for_every_processor_and_run_where_it_is(
    kind: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if architecture_of(target) != architecture():
        pytest.skip("for another architecture")
    if not can_run(target):  # types and intrinsics are checked without optimisation too, in a third of the time
        monkeypatch.setattr(compilers, "OPTIMISATION", dict.fromkeys(compilers.OPTIMISATION, ("-O0",)))
    made, graph = kernel_graphs.graph(kind), import_model(kernel_graphs.graph(kind))
    artifact, _ = compile_artifact(
        made, target=target, options=Options(precision="bf16" if kind == "rounded" else None)
    )
    if not can_run(target):
        return
    program, close = open_program(artifact, threads=2), ROUNDS.get(kind, 1e-4)
    for sizes in SIZES:
        given = kernel_graphs.operands(made, sizes)
        want, got = reference.evaluate(graph, given), program.run(given)
        for name, x in want.items():
            y = got[name].view(numpy_dtype(graph.tensors[name].dtype)).astype(np.float64)
            largest = max(1.0, np.abs(x.astype(np.float64)).max(initial=0))
            np.testing.assert_allclose(y, x.astype(np.float64), rtol=0, atol=close * largest, err_msg=f"{name} {sizes}")


@pytest.mark.parametrize("target", [*TARGETS, "cpu:amx", "cpu:baseline"])
@pytest.mark.parametrize("width", [4, 8, 16])
def test_the_headers_of_kernels_have_no_warnings(target: str, width: int, tmp_path: Path) -> None:
    """Later compilers reject what earlier ones warn of: gcc 14 has no pointers of other types."""
    if architecture_of(target) != architecture():
        pytest.skip("for another architecture")
    for name, text in leaf_headers(width).items():
        (tmp_path / name).write_text(text)
    unit = "".join(f'#include "{name}"\n' for name in leaf_headers(width))
    found = find_compiler()
    (tmp_path / "all.c").write_text(unit)
    strict = ["-Wall", "-Wno-psabi", "-Werror", "-c", "all.c", "-o", "all.o"]
    command = [*found.command, *compile_flags(found, target), *strict]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert not run.returncode, run.stderr[:2000]


def test_the_matrix_unit_multiplies_rows_that_are_stored_as_words() -> None:
    """Pairs of bfloat16 and quads of bytes in memory are loaded unchanged."""
    kernels = [
        k for kind in ("rounded", "words")
        for k in plan_program(kernel_graphs.graph(kind), target=TARGETS[0], options=Options(precision="bf16")).kernels
    ]  # fmt: skip
    unit = [k for k in kernels if k.amx]
    assert {x for k in unit for x in ("pd_amx_add_bf16", "pd_amx_add_quads") if x in k.text} == {
        "pd_amx_add_bf16", "pd_amx_add_quads",
    }  # fmt: skip
    assert sum("rows copied" not in " ".join(k.notes) and "pd_amx_add_bf16" in k.text for k in unit) == 1
