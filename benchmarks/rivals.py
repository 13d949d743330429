"""Contestants behind one interface: ``load(kind, path, threads)`` returns a Player, which makes calls.

A call computes one model at one shape from given inputs, into memory that is allocated before the clock starts if the
contestant allows it: polydyn by ``bind``, ONNX Runtime by io binding, PyTorch and numpy by ``out=`` for products.
PyTorch and numpy have no ONNX importer. For models of the zoo PyTorch runs the source module (the same weights, its
default form of attention); for other models both run the nodes one after another, by their own fastest functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import onnx

if TYPE_CHECKING:
    from polydyn import Program

Feeds = Mapping[str, npt.NDArray[Any]]
Call = Callable[[], Any]
"""Computes once more; returns outputs (arrays, tensors or a mapping or list of them)."""

POLYDYN: Mapping[str, Mapping[str, Any]] = {
    "polydyn": {},
    "polydyn-direct": {"without": ("winograd",)},
    "polydyn-unstitched": {"without": ("stitch",)},
    "polydyn-tiles2": {"winograd": 2},
    "polydyn-tiles4": {"winograd": 4},
}
"""polydyn with ``Options``; a name with ``tiles`` uses Winograd tiles even if they are not expected to pay."""
KINDS = (*POLYDYN, "onnxruntime", "onnxruntime-nospin", "torch", "torch-inductor", "openvino", "numpy")

NUMPY = ("MatMul", "Add", "Transpose")
"""Operators for which numpy has a single function."""


@dataclass(frozen=True)
class Player:
    """``prepare`` makes the call for one set of inputs; ``version`` is the version of the library that computes.

    ``before`` runs in the process before every call, outside of the measured time.
    """

    prepare: Callable[[Feeds], Call]
    version: str
    before: Callable[[], Any] | None = None


def load(kind: str, path: str, threads: int) -> Player:
    """Return the player of one of KINDS for a model file. Raises the library's own error if it cannot run the model.

    ``KIND+torch+numpy``: before every call these libraries compute a product on their own threads, in this process.
    """
    kind, *others = kind.split("+")
    player = _load(kind, path, threads)
    return replace(player, before=_products(others, threads)) if others else player


def _products(libraries: Sequence[str], threads: int) -> Callable[[], None]:
    """Compute a product of 16 x 768 x 768 by each library; the threads of torch and numpy then spin until the next one.
    """
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape, dtype=np.float32) for shape in ((16, 768), (768, 768)))
    calls: list[Call] = []
    for name in libraries:
        if name == "torch":
            import torch

            torch.set_num_threads(threads)
            a, b = torch.from_numpy(x.copy()), torch.from_numpy(w.copy())
            calls.append(lambda a=a, b=b: a @ b)  # type: ignore[misc]
        elif name == "numpy":
            calls.append(lambda: x @ w)
        else:
            raise ValueError(f"no product by {name!r}; known: torch, numpy")

    def run() -> None:
        for call in calls:
            call()

    return run


def _load(kind: str, path: str, threads: int) -> Player:
    if kind in POLYDYN:
        return _polydyn(path, threads, kind)
    if kind.startswith("onnxruntime"):
        return _onnxruntime(path, threads, spinning=kind == "onnxruntime")
    if kind.startswith("torch"):
        return _torch(path, threads, inductor=kind == "torch-inductor")
    if kind == "openvino":
        return _openvino(path, threads)
    if kind == "numpy":  # its BLAS reads the thread count from the environment, see protocol.py
        return _numpy(path)
    raise ValueError(f"no contestant {kind!r}; known: {', '.join(KINDS)}")


def compiled(path: str, threads: int, kind: str) -> Program:
    """Compile the program of one of ``POLYDYN``."""
    import polydyn
    from polydyn.fusion import winograd

    always = patch.object(winograd, "pays", lambda *_: True) if "tiles" in kind else nullcontext()
    with always:
        return polydyn.compile(path, threads=threads, options=polydyn.Options(**POLYDYN[kind]), cache=False)


def _polydyn(path: str, threads: int, kind: str) -> Player:
    import polydyn

    program = compiled(path, threads, kind)

    def prepare(feeds: Feeds) -> Call:
        return program.bind(feeds)

    return Player(prepare, polydyn.__version__)


def _onnxruntime(path: str, threads: int, spinning: bool) -> Player:
    """Open a session on the CPU with all optimisations (its default)."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(spinning)))
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]

    def prepare(feeds: Feeds) -> Call:
        binding = session.io_binding()
        outputs = dict(zip(names, session.run(names, dict(feeds)), strict=True))
        values = {n: ort.OrtValue.ortvalue_from_numpy(a) for n, a in (feeds | outputs).items()}
        for name in feeds:
            binding.bind_ortvalue_input(name, values[name])
        for name in names:
            binding.bind_ortvalue_output(name, values[name])

        def call() -> Any:
            session.run_with_iobinding(binding)
            return values[names[0]]  # all values stay referenced here: nothing else owns the bound memory

        return call

    return Player(prepare, str(ort.__version__))


def _openvino(path: str, threads: int) -> Player:
    """Run one request at a time in fp32: without the hint OpenVINO computes in bfloat16 if the processor can."""
    import openvino

    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
    request = openvino.Core().compile_model(path, "CPU", settings).create_infer_request()

    def prepare(feeds: Feeds) -> Call:
        tensors = {n: openvino.Tensor(a, shared_memory=True) for n, a in feeds.items()}
        for name, tensor in tensors.items():
            request.set_tensor(name, tensor)

        def call() -> Any:
            request.infer()
            # feeds stay referenced here: nothing else owns their memory
            return feeds and request.get_output_tensor(0).data

        return call

    return Player(prepare, str(openvino.__version__))


# -- models run node by node -----------------------------------------------------------------------------------------

Step = tuple[str, tuple[str, ...], str, dict[str, Any]]
"""Operator, inputs, output, attributes."""


def _steps(model: onnx.ModelProto) -> list[Step]:
    def attributes(node: onnx.NodeProto) -> dict[str, Any]:
        return {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}

    return [(n.op_type, tuple(n.input), n.output[0], attributes(n)) for n in model.graph.node]


def _constants(model: onnx.ModelProto) -> dict[str, npt.NDArray[Any]]:
    return {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}


def _numpy(path: str) -> Player:
    model = onnx.load(path)
    (step,) = _steps(model)
    operator, inputs, _, attributes = step
    constants = _constants(model)
    if operator not in NUMPY:
        raise ValueError(f"numpy has no single function for {operator}")

    def prepare(feeds: Feeds) -> Call:
        values = [{**constants, **feeds}[name] for name in inputs]
        if operator == "Transpose":
            view = values[0].transpose(attributes["perm"])
            target = np.empty(view.shape, view.dtype)
            return lambda: (np.copyto(target, view), target)[1]
        function = np.matmul if operator == "MatMul" else np.add
        out = function(*values)
        return lambda: function(*values, out=out)

    return Player(prepare, np.__version__)


def _torch(path: str, threads: int, inductor: bool) -> Player:
    import torch

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    model = onnx.load(path)
    run = _torch_zoo(path) or _torch_nodes(model)
    compiled = _inductor(run) if inductor else run

    def prepare(feeds: Feeds) -> Call:
        tensors = {n: torch.from_numpy(a) for n, a in feeds.items()}
        if not inductor and (product := _torch_product(model, tensors)):
            return product
        return lambda: compiled(tensors)

    return Player(prepare, str(torch.__version__))


def _inductor(run: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap ``torch.compile(dynamic=True)``, which compiles in the first call, and again if B or L is 1.

    Its count of recompilations restarts with every model, and exceeding the limit is an error instead of a silent
    return to eager.
    """
    import torch
    import torch._dynamo as dynamo

    dynamo.reset()
    dynamo.config.fail_on_recompile_limit_hit = True
    return torch.compile(run, dynamic=True)


def _torch_zoo(path: str) -> Callable[[Any], Any] | None:
    """Return the source module of a model of the zoo by its file's name, or None for other models."""
    try:
        from benchmarks.models.zoo import build_source

        source = build_source(Path(path).stem)
    except (ImportError, KeyError):
        return None
    module = source.module.eval()
    inner = getattr(module, "module", module)
    if getattr(inner, "_supports_sdpa", False):  # exported node by node, but users of the module get this
        inner.set_attn_implementation("sdpa")
    return lambda tensors: module(*(tensors[n] for n in source.inputs))


def _torch_product(model: onnx.ModelProto, tensors: Mapping[str, Any]) -> Call | None:
    """Return ``torch.mm`` or ``torch.matmul`` with ``out=`` if the model is one product."""
    import torch

    steps = _steps(model)
    if len(steps) != 1 or steps[0][0] != "MatMul":
        return None
    values = {n: torch.from_numpy(a.copy()) for n, a in _constants(model).items()} | dict(tensors)
    a, b = (values[name] for name in steps[0][1])
    function = torch.mm if a.dim() == b.dim() == 2 else torch.matmul
    out = function(a, b)
    return lambda: function(a, b, out=out)


def _torch_nodes(model: onnx.ModelProto) -> Callable[[Any], Any]:
    """Run the nodes in order; ``torch`` in the model's metadata names a function here that replaces all of them."""
    import torch
    from torch.nn import functional

    steps, constants = _steps(model), {n: torch.from_numpy(a.copy()) for n, a in _constants(model).items()}
    metadata = {p.key: p.value for p in model.metadata_props}

    def attention(v: Mapping[str, Any]) -> Any:
        heads = int(metadata["heads"])
        q, k, w = (v[n].unflatten(-1, (heads, -1)).transpose(1, 2) for n in ("q", "k", "v"))
        mask = (v["attention_mask"] != 0)[:, None, None, :]
        return functional.scaled_dot_product_attention(q, k, w, attn_mask=mask).transpose(1, 2).flatten(2)

    if metadata.get("torch") == "attention":
        return attention
    functions: dict[str, Callable[..., Any]] = {
        "MatMul": lambda x, y: x @ y,
        "Add": lambda x, y: x + y,
        "Relu": functional.relu,
        "Gelu": functional.gelu,
        "Exp": torch.exp,
        "Tanh": torch.tanh,
        "Softmax": lambda x, axis=-1: torch.softmax(x, axis),
        "Transpose": lambda x, perm: x.permute(perm).contiguous(),
        "LayerNormalization": lambda x, w, b, axis=-1, epsilon=1e-5: functional.layer_norm(x, w.shape, w, b, epsilon),
        "Concat": lambda *x, axis: torch.cat(x, axis),
    }
    missing = {s[0] for s in steps} - set(functions)
    if missing:
        raise ValueError(f"no torch function is listed for {', '.join(sorted(missing))}")

    def run(tensors: Mapping[str, Any]) -> Any:
        values = {**constants, **tensors}
        for operator, inputs, output, attributes in steps:
            values[output] = functions[operator](*(values[i] for i in inputs), **attributes)
        return values[steps[-1][2]]

    return run


def first_output(result: Any) -> npt.NDArray[Any]:
    """Return the first output of a call as an array, for the return type of any library."""
    if isinstance(result, Mapping):
        result = next(iter(result.values()))
    if isinstance(result, (list, tuple)):
        result = result[0]
    return np.asarray(result.numpy() if hasattr(result, "numpy") else result)
