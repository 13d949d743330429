"""Four kernels through all stages, as texts to read: fusion plan, schedule matrix, trees, loops and passes, C, CUDA.

``pytest tests/test_golden_kernels.py --update-golden`` rewrites them; the difference is then read like code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from polydyn.compiler import Options, plan_graph
from polydyn.debug import stages
from polydyn.graph.expand import import_model
from polydyn.graph.ir import Graph

Golden = Callable[[str, str], None]
Shapes = Mapping[str, Sequence[int | str]]


def node(kind: str, inputs: str, output: str, **attributes: object) -> onnx.NodeProto:
    return helper.make_node(kind, inputs.split(), [output], **attributes)


def ones(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.ones(shape, np.float32)


def model(nodes: list[onnx.NodeProto], inputs: Shapes, **constants: np.ndarray) -> Graph:  # type: ignore[type-arg]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info(n, TensorProto.FLOAT, list(s)) for n, s in inputs.items()],
        [helper.make_empty_tensor_value_info(nodes[-1].output[0])],
        [numpy_helper.from_array(a, n) for n, a in constants.items()],
    )  # fmt: skip
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return import_model(made)


KERNELS: dict[str, tuple[Graph, str]] = {
    "matmul_gelu": (
        model(
            [node("MatMul", "x w", "p"), node("Add", "p b", "s"), node("Gelu", "s", "y")],
            {"x": ("M", 64)}, w=ones(64, 16), b=ones(16),
        ),
        "tf32_64x64x16_4_16_16_wide",
    ),
    "softmax": (model([node("Softmax", "x", "y")], {"x": ("R", "C")}), "warp"),
    "layer_norm": (
        model([node("LayerNormalization", "x g b", "y")], {"x": ("R", 48)}, g=ones(48), b=ones(48)), "warp_wide",
    ),
    "attention": (
        model(
            [
                node("Transpose", "k", "kt", perm=[0, 2, 1]), node("MatMul", "q kt", "s"), node("Mul", "s c", "t"),
                node("Softmax", "t", "p"), node("MatMul", "p v", "y"),
            ],
            {"q": ("H", 6, 16), "k": ("H", "T", 16), "v": ("H", "T", 16)}, c=np.float32(0.25).reshape(()),
        ),
        "attention_tf32_64x32x32_16_16_16_wide",
    ),
}  # fmt: skip
"""Maps a name to its graph, and the version of the CUDA kernel that is shown."""


@pytest.fixture(scope="module", params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def dumps(kernel: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Yield the dumps of the debug ladder for the kernel: a mapping from a target to the folder of one version."""
    root, (graph, version) = tmp_path_factory.mktemp(kernel), KERNELS[kernel]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLYDYN_DUMP_DIR", str(root))
        for target in ("cpu:avx2", "cuda:sm_80"):
            with stages(target):
                plan_graph(graph, target=target, options=Options(tf32="cuda" in target))
        cpu, cuda = sorted(root.iterdir())
        (text,) = cpu.glob("*/*_kernel.c")
        names = {f.name: f for f in cuda.iterdir() if f.name.endswith(f"_{version}") and "_again_" not in f.name}
        (chosen,) = (f for n, f in names.items() if not n.endswith(f"_split_{version}"))
        yield {"cpu": text.parent, "cuda": chosen}


def read(folder: Path, stage: str) -> str:
    """Return the text of a stage, without the content hashes of names."""
    (path,) = folder.glob(f"[0-9][0-9]_{stage}.*")
    return re.sub(r"_[0-9a-f]{12}", "_0", path.read_text())


def test_the_fusion_plan(kernel: str, golden: Golden, dumps: dict[str, Path]) -> None:
    golden(f"{kernel}/plan.txt", read(dumps["cpu"].parent, "fuse"))


def test_the_schedule_matrix(kernel: str, golden: Golden, dumps: dict[str, Path]) -> None:
    golden(f"{kernel}/matrix.txt", f"{read(dumps['cpu'], 'group')}\n{read(dumps['cpu'], 'matrix')}")


def test_the_schedule_trees(kernel: str, golden: Golden, dumps: dict[str, Path]) -> None:
    golden(f"{kernel}/tree.txt", "\n".join(f"{name}:\n{read(f, 'tree')}" for name, f in dumps.items()))


def test_the_loops_and_the_passes_over_them(kernel: str, golden: Golden, dumps: dict[str, Path]) -> None:
    text = ""
    for name, folder in dumps.items():
        steps = sorted(f for f in folder.glob("*.txt") if f.read_text().startswith("// "))
        listed = [f"{f.stem[3:]}: {f.read_text().splitlines()[0][3:]}" for f in steps]
        text += f"{name}:\n{read(folder, 'loops')}passes that change something:\n" + "\n".join(listed) + "\n\n"
    golden(f"{kernel}/loops.txt", text)


def test_the_c_text(kernel: str, golden: Golden, dumps: dict[str, Path]) -> None:
    golden(f"{kernel}/c.txt", read(dumps["cpu"], "kernel"))


def test_the_cuda_text(kernel: str, golden: Golden, dumps: dict[str, Path]) -> None:
    golden(f"{kernel}/cuda.txt", read(dumps["cuda"], "kernel_int32_t"))
