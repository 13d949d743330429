"""One decoder in every format that the contestants of ``benchmarks.language`` read.

It is ``zoo.llama`` with random weights (seed 0), exported by torch's newer exporter, then quantized by
``polydyn.quantize``. Each other tool gets the same weights by its own tool: GGUF by the package ``gguf``, the model of
onnxruntime-genai by its builder, the model of OpenVINO GenAI from the ONNX file with its caches as a state.
"""

from __future__ import annotations

import functools
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from polydyn.quantization.sizes import tensor_bytes
from polydyn.schedules.expr import Array

if TYPE_CHECKING:
    from benchmarks.models.zoo import Source

WEIGHTS = ("float32", "4", "8")
"""Forms of the weights: float32, and 4 or 8 bits in blocks of 32 with a scale each."""
POSITIONS = 8192
MAX_IN_ONE_FILE = 1 << 30
"""Bytes of weights above which they lie next to the ONNX file."""
ROWS = ("Gather", "GatherBlockQuantized", "GroupQueryAttention", "RotaryEmbedding")
"""Operators that read a few rows of a constant: embeddings, and angles by position."""
GENAI_PRECISION = {"float32": "fp32", "4": "int4", "8": "int8"}
GGUF_TYPE = {"float32": "F32", "4": "Q4_0", "8": "Q8_0"}


@dataclass(frozen=True)
class Size:
    """The sizes of a decoder: rotary positions, one head of keys for four of queries, a head that is not tied."""

    layers: int = 8
    hidden: int = 1024
    vocabulary: int = 16000
    head: int = 64

    @property
    def heads(self) -> int:
        """The number of heads of queries."""
        return self.hidden // self.head

    @property
    def key_heads(self) -> int:
        """The number of heads of keys and values."""
        return max(1, self.heads // 4)

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values of one position as float32."""
        return 2 * 4 * self.layers * self.key_heads * self.head

    def config(self) -> dict[str, Any]:
        """Return the arguments of ``LlamaConfig``."""
        return {
            "vocab_size": self.vocabulary, "hidden_size": self.hidden, "num_hidden_layers": self.layers,
            "intermediate_size": -(-self.hidden * 11 // 4 // 64) * 64, "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_heads, "head_dim": self.head, "max_position_embeddings": POSITIONS,
            "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
        }  # fmt: skip


SMOKE = Size(layers=2, hidden=128, vocabulary=256, head=32)
"""The smallest size that every tool accepts."""


@dataclass(frozen=True)
class Made:
    """A file or folder that a contestant opens. ``read_bytes``: bytes of the weights that every step reads."""

    path: str
    read_bytes: int
    seconds: float


@functools.cache
def source(size: Size) -> Source:
    """Build the module with its random weights."""
    import torch

    from benchmarks.models.zoo import draw_constants, llama

    torch.manual_seed(0)
    built = llama(**size.config())
    torch.manual_seed(1)
    draw_constants(built.module)
    built.module.eval()
    return built


def hugging_face(folder: Path, size: Size) -> Path:
    """Write the module as transformers stores it, with a tokenizer of one word for each id."""
    target = folder / "hf"
    if (target / "tokenizer.json").exists():
        return target
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    module: Any = source(size).module
    module.module.save_pretrained(target)
    tokenizer = Tokenizer(models.WordLevel({f"w{k}": k for k in range(size.vocabulary)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="w0", eos_token="w0", unk_token="w0")
    fast.save_pretrained(target)
    return target


def float_onnx(folder: Path, size: Size) -> Path:
    """Write the ONNX model with caches as inputs and outputs."""
    path = folder / "float32.onnx"
    if path.exists():
        return path
    import torch

    from benchmarks.models.export import forget_machine, newer_export

    with torch.no_grad():
        model = newer_export(source(size))
    forget_machine(model)
    folder.mkdir(parents=True, exist_ok=True)
    apart = sum(map(tensor_bytes, model.graph.initializer)) > MAX_IN_ONE_FILE
    onnx.save_model(model, str(path), save_as_external_data=apart, location=path.name + ".data")
    return path


def onnx_model(folder: Path, size: Size, weights: str) -> Path:
    """Write the ONNX model with these weights."""
    whole = float_onnx(folder, size)
    if weights == "float32":
        return whole
    path = folder / f"{weights}bits.onnx"
    if not path.exists():
        import polydyn

        polydyn.quantize(whole, path, bits=int(weights))
    return path


def onnx_bytes(path: Path) -> int:
    """Return the bytes of all constants but those of which a node reads some rows."""
    graph = onnx.load(path, load_external_data=False).graph
    rows = {name for n in graph.node if n.op_type in ROWS for name in n.input}
    return sum(tensor_bytes(t) for t in graph.initializer if t.name not in rows)


def artifact(folder: Path, size: Size, weights: str) -> Path:
    """Compile and save polydyn's program, in a process of its own: its memory does not count as that of opening."""
    path = folder / f"{weights}.polydyn"
    if not path.exists():
        code = "import sys, polydyn; polydyn.compile(sys.argv[1]).save(sys.argv[2])"
        subprocess.run([sys.executable, "-c", code, str(onnx_model(folder, size, weights)), str(path)], check=True)
    return path


def gguf_model(folder: Path, size: Size, weights: str) -> Path:
    """Write the GGUF file: norms as float32, all else in one type, without a vocabulary."""
    path = folder / f"{weights}.gguf"
    if path.exists():
        return path
    import gguf

    module: Any = source(size).module
    config = module.module.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(size.layers)
    writer.add_context_length(POSITIONS)
    writer.add_embedding_length(size.hidden)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(size.heads)
    writer.add_head_count_kv(size.key_heads)
    writer.add_key_length(size.head)
    writer.add_value_length(size.head)
    writer.add_rope_dimension_count(size.head)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(size.vocabulary)
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, size.layers)
    kind = gguf.GGMLQuantizationType[GGUF_TYPE[weights]]
    for name, parameter in module.module.state_dict().items():
        data: Array = parameter.numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            data = _pairs_adjacent(data, size.heads if "q_proj" in name else size.key_heads)
        stored = gguf.GGMLQuantizationType.F32 if data.ndim == 1 else kind
        target = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(target, gguf.quants.quantize(np.ascontiguousarray(data), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _pairs_adjacent(w: Array, heads: int) -> Array:
    """Reorder the rows of a projection: transformers rotates element k with k + half, GGUF's llama 2 k with 2 k + 1."""
    return w.reshape(heads, 2, w.shape[0] // heads // 2, w.shape[1]).swapaxes(1, 2).reshape(w.shape)


def gguf_bytes(path: Path) -> int:
    """Return the bytes of all tensors but the embedding."""
    import gguf

    return sum(int(t.n_bytes) for t in gguf.GGUFReader(str(path)).tensors if t.name != "token_embd.weight")


def genai_model(folder: Path, size: Size, weights: str) -> Path:
    """Run the builder of onnxruntime-genai, with blocks of 32 and its own accuracy level 4 for 4 bits."""
    target = folder / f"genai_{weights}"
    if (target / "genai_config.json").exists():
        return target
    importlib.import_module("onnxruntime_genai")
    extra = ["int4_block_size=32", "int4_is_symmetric=true", "int4_accuracy_level=4"] if weights != "float32" else []
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(hugging_face(folder, size)),
               "-o", str(target), "-p", GENAI_PRECISION[weights], "-e", "cpu", "-c", str(folder / "genai_cache"),
               *(["--extra_options", *extra] if extra else [])]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the builder ended with {done.returncode}: {done.stderr.strip().splitlines()[-1:]}")
    return target


def openvino_genai_model(folder: Path, size: Size, weights: str) -> Path:
    """Write the ONNX model as OpenVINO's, its caches a state, as OpenVINO GenAI reads it."""
    target = folder / f"openvino_genai_{weights}"
    if (target / "openvino_model.xml").exists():
        return target
    importlib.import_module("openvino_genai")
    import openvino

    from benchmarks.language_engines import with_state

    model = with_state(str(onnx_model(folder, size, weights)))
    rows = openvino.opset13.parameter([-1], openvino.Type.i32, name="beam_idx")
    rows.output(0).get_tensor().set_names({"beam_idx"})
    model.add_parameters([rows])
    target.mkdir(exist_ok=True)
    openvino.save_model(model, str(target / "openvino_model.xml"), compress_to_fp16=False)
    (target / "config.json").write_text((hugging_face(folder, size) / "config.json").read_text())
    return target


def made(folder: Path, size: Size, weights: str, kind: str) -> Made:
    """Make what a contestant opens, if it does not exist. Raises the error of its tool."""
    makers: dict[str, Callable[[], Path]] = {
        "polydyn": lambda: artifact(folder, size, weights),
        "llama.cpp": lambda: gguf_model(folder, size, weights),
        "onnxruntime-genai": lambda: genai_model(folder, size, weights),
        "openvino-genai": lambda: openvino_genai_model(folder, size, weights),
        "torch": lambda: hugging_face(folder, size),
    }
    kind = kind.removesuffix("-plain")
    begin = time.perf_counter()
    path = makers.get(kind, lambda: onnx_model(folder, size, weights))()
    seconds = time.perf_counter() - begin
    if kind == "llama.cpp":
        count = gguf_bytes(path)
    elif kind == "torch":  # 8 bits: a scale for each matrix
        count = onnx_bytes(float_onnx(folder, size)) // (1 if weights == "float32" else 4)
    elif kind == "onnxruntime-genai":
        count = onnx_bytes(path / "model.onnx")
    else:
        count = onnx_bytes(onnx_model(folder, size, weights))
    return Made(str(path), count, seconds)


def folder_of(root: Path, size: Size) -> Path:
    """Return the folder of a size below ``root``, with a file that says what it holds."""
    folder = root / f"llama_{size.layers}x{size.hidden}_{size.vocabulary}"
    folder.mkdir(parents=True, exist_ok=True)
    about: Mapping[str, Any] = {"size": asdict(size), "config": size.config()}
    (folder / "about.json").write_text(json.dumps(about, indent=1) + "\n")
    return folder
