"""Contestants of ``benchmarks.language`` behind one interface: each reads ids behind the positions in its caches.

``load(kind, path, threads, weights)`` opens one. Each uses the fastest form of its documented interface: polydyn
``generation.State``, ONNX Runtime its own values, OpenVINO a state, llama.cpp a sequence for each text, torch the cache
of transformers, the two libraries named GenAI their own loops.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import metadata
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import onnx

Array = npt.NDArray[Any]

CHUNK = 512
"""Positions of a prompt that polydyn and llama.cpp read at once: their defaults."""
ROOM = 64
"""Positions behind the last one that a turn may add before it begins again."""


class Engine(Protocol):
    """A decoder that is open. Positions are counted over all calls since ``start``."""

    version: str

    def start(self, batch: int, room: int) -> None:
        """Begin ``batch`` empty texts of at most ``room`` positions."""

    def read(self, ids: Array) -> None:
        """Read ids [batch, positions]; the logits of the last position are then known."""

    def logits(self) -> Array:
        """Return the logits [batch, vocabulary] of the last position."""

    def cut(self, length: int) -> None:
        """Forget the positions from ``length`` on."""


class Polydyn:
    """An artifact, read as ``polydyn.generate`` does."""

    def __init__(self, path: str, threads: int) -> None:
        import polydyn

        self.program = polydyn.load(path, threads=threads)
        self.version = polydyn.__version__

    def start(self, batch: int, room: int) -> None:
        """Begin; the caches double when they are full."""
        from polydyn.generation import State

        self.state = State(self.program, batch)

    def read(self, ids: Array) -> None:
        """Read in chunks."""
        for begin in range(0, ids.shape[1], CHUNK):
            self._logits = self.state.run(ids[:, begin : begin + CHUNK])

    def logits(self) -> Array:
        """Return the last logits."""
        return self._logits

    def cut(self, length: int) -> None:
        """Keep the first positions, in place."""
        self.state.truncate(length)


class OnnxRuntime:
    """ONNX Runtime with the same model; its outputs, which it owns, are its next inputs."""

    def __init__(self, path: str, threads: int, spinning: bool) -> None:
        import onnxruntime as ort

        self.ort, self.version = ort, str(ort.__version__)
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        options.add_session_config_entry("session.intra_op.allow_spinning", str(int(spinning)))
        self.session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.names = [o.name for o in self.session.get_outputs()]
        self.caches = {i.name: i for i in self.session.get_inputs() if len(i.shape) == 4}
        self.pairs = dict(zip(self.names[1:], self.caches, strict=True))

    def start(self, batch: int, room: int) -> None:
        """Begin with caches of no position."""
        self.past = {
            n: self.ort.OrtValue.ortvalue_from_numpy(np.zeros((batch, i.shape[1], 0, i.shape[3]), np.float32))
            for n, i in self.caches.items()
        }
        self.length = 0

    def read(self, ids: Array) -> None:
        """Run the session and keep its values."""
        value = self.ort.OrtValue.ortvalue_from_numpy
        after = self.length + ids.shape[1]
        feeds = {"input_ids": value(ids), "attention_mask": value(np.ones((len(ids), after), np.int64))}
        out = dict(zip(self.names, self.session.run_with_ort_values(self.names, feeds | self.past), strict=True))
        self.past = {past: out[present] for present, past in self.pairs.items()}
        self.length, self._out = after, out[self.names[0]]

    def logits(self) -> Array:
        """Return the last logits."""
        return np.asarray(self._out.numpy()[:, -1])

    def cut(self, length: int) -> None:
        """Copy the first positions."""
        value = self.ort.OrtValue.ortvalue_from_numpy
        self.past = {n: value(np.ascontiguousarray(v.numpy()[:, :, :length])) for n, v in self.past.items()}
        self.length = length


def with_state(path: str) -> Any:
    """Return OpenVINO's model of an ONNX file, whose caches are a state that begins with no position."""
    import openvino
    from openvino import opset13 as ops
    from openvino._offline_transformations import apply_make_stateful_transformation

    graph = onnx.load(path, load_external_data=False).graph
    caches = [v.name for v in graph.input if len(v.type.tensor_type.shape.dim) == 4]
    model = openvino.Core().read_model(path)
    apply_make_stateful_transformation(model, dict(zip(caches, [o.name for o in graph.output[1:]], strict=True)))
    sizes = ops.shape_of(model.input("input_ids"), output_type="i64")
    batch = ops.gather(sizes, ops.constant(np.array([0])), ops.constant(np.array(0)))
    for node in model.get_ops():
        if node.get_type_name() == "ReadValue":
            _, heads, _, size = (d.min_length for d in node.get_output_partial_shape(0))
            parts = [batch, *(ops.constant(np.array([n])) for n in (heads, 0, size))]
            node.set_arguments([ops.broadcast(ops.constant(np.float32(0)), ops.concat(parts, axis=0))])
    model.validate_nodes_and_infer_types()
    return model


class OpenVino:
    """OpenVINO with its caches as a state. ``exact``: computes in float32, which is not its default."""

    def __init__(self, path: str, threads: int, exact: bool) -> None:
        import openvino

        self.ov, self.version = openvino, str(openvino.__version__)
        settings: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
        if exact:
            settings |= {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
        self.request = openvino.Core().compile_model(with_state(path), "CPU", settings).create_infer_request()

    def start(self, batch: int, room: int) -> None:
        """Empty the state."""
        self.batch, self.length = batch, 0
        self.request.reset_state()

    def read(self, ids: Array) -> None:
        """Run the request."""
        self.length += ids.shape[1]
        mask = np.ones((self.batch, self.length), np.int64)
        self.request.infer({"input_ids": ids, "attention_mask": mask}, share_inputs=True)

    def logits(self) -> Array:
        """Return the last logits."""
        return np.array(self.request.get_output_tensor(0).data[:, -1], np.float32)

    def cut(self, length: int) -> None:
        """Copy the first positions."""
        if not length:
            self.start(self.batch, 0)
            return
        self.length = length
        for state in self.request.query_state():
            state.state = self.ov.Tensor(np.ascontiguousarray(np.array(state.state.data)[:, :, :length]))


class Torch:
    """The module of transformers, its head on the last position. ``bits`` 8: linear layers quantized dynamically."""

    def __init__(self, path: str, threads: int, weights: str) -> None:
        import torch
        from transformers import LlamaForCausalLM

        if weights == "4":
            raise ValueError("torch has no linear layers of 4 bits for processors without another package")
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self.torch, self.version = torch, str(torch.__version__)
        self.module: Any = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        if weights == "8":
            self.module = torch.ao.quantization.quantize_dynamic(self.module, {torch.nn.Linear})

    def start(self, batch: int, room: int) -> None:
        """Begin with an empty cache."""
        from transformers import DynamicCache

        self.cache = DynamicCache()

    def read(self, ids: Array) -> None:
        """Call the module."""
        out = self.module(
            input_ids=self.torch.from_numpy(ids), past_key_values=self.cache, use_cache=True, logits_to_keep=1
        )
        self._logits, self.cache = out.logits, out.past_key_values

    def logits(self) -> Array:
        """Return the last logits."""
        return np.asarray(self._logits[:, -1].numpy())

    def cut(self, length: int) -> None:
        """Keep the first positions."""
        if surplus := self.cache.get_seq_length() - length:
            self.cache.crop(-surplus)


class LlamaCpp:
    """llama.cpp through the functions of llama-cpp-python: a sequence for each text, logits of the last position.

    ``flash``: its default form of attention; without it, tokens behind long texts are faster on some processors.
    """

    def __init__(self, path: str, threads: int, flash: bool) -> None:
        import llama_cpp

        self.lib, self.threads, self.flash = llama_cpp, threads, flash
        self.version = f"llama-cpp-python {llama_cpp.__version__}"
        self._silent = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._silent, None)
        llama_cpp.llama_backend_init()
        settings = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), settings)
        if not self.model:
            raise RuntimeError("llama.cpp cannot open the file")
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.context: Any = None

    def start(self, batch: int, room: int) -> None:
        """Make a context with caches of float16, its default, and a stream for each text."""
        lib = self.lib
        if self.context:
            lib.llama_free(self.context)
        c = lib.llama_context_default_params()
        c.n_ctx, c.n_seq_max, c.n_batch, c.n_ubatch = batch * (-(-room // 256) * 256), batch, max(CHUNK, batch), CHUNK
        c.n_threads = c.n_threads_batch = self.threads
        c.kv_unified = False
        if not self.flash:
            c.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.context = lib.llama_init_from_model(self.model, c)
        if not self.context:
            raise RuntimeError(f"llama.cpp makes no context of {c.n_ctx} positions")
        self.batch, self.length = batch, 0
        self.places = lib.llama_batch_init(c.n_batch, 0, 1)

    def read(self, ids: Array) -> None:
        """Decode, at most CHUNK tokens of all texts at once."""
        step = max(1, CHUNK // self.batch)
        for begin in range(0, ids.shape[1], step):
            self._decode(ids[:, begin : begin + step], begin + step >= ids.shape[1])

    def _decode(self, ids: Array, last: bool) -> None:
        b, (rows, positions) = self.places, ids.shape
        b.n_tokens = rows * positions
        for k in range(b.n_tokens):
            row, place = divmod(k, positions)
            b.token[k], b.pos[k] = int(ids[row, place]), self.length + place
            b.n_seq_id[k], b.seq_id[k][0] = 1, row
            b.logits[k] = last and place == positions - 1
        self.length += positions
        if code := self.lib.llama_decode(self.context, b):
            raise RuntimeError(f"llama_decode returned {code}")
        self.lib.llama_synchronize(self.context)
        self.ends = [(r + 1) * positions - 1 for r in range(rows)]

    def logits(self) -> Array:
        """Return the last logits."""
        rows = [self.lib.llama_get_logits_ith(self.context, k) for k in self.ends]
        return np.stack([np.ctypeslib.as_array(r, (self.vocabulary,)).copy() for r in rows])

    def cut(self, length: int) -> None:
        """Remove the positions from ``length`` on."""
        memory = self.lib.llama_get_memory(self.context)
        for row in range(self.batch):
            self.lib.llama_memory_seq_rm(memory, row, length, -1)
        self.length = length


class OnnxRuntimeGenai:
    """onnxruntime-genai: a token is ``generate_next_token``, whose greedy choice is the id that it reads next."""

    def __init__(self, path: str, threads: int) -> None:
        import onnxruntime_genai as genai

        self.lib, self.version = genai, str(genai.__version__)
        config = genai.Config(path)
        options = {"intra_op_num_threads": threads}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self.model = genai.Model(config)

    def start(self, batch: int, room: int) -> None:
        """Make a generator with room in its caches."""
        self.batch, self.room = batch, room
        settings = self.lib.GeneratorParams(self.model)
        settings.set_search_options(batch_size=batch, max_length=room, min_length=room, do_sample=False)
        self.generator, self.texts = self.lib.Generator(self.model, settings), np.zeros((batch, 0), np.int32)
        self.drawn = False

    def read(self, ids: Array) -> None:
        """Read a prompt, or one token of each text."""
        if self.drawn and ids.shape[1] == 1:
            self.generator.generate_next_token()
            return
        self.generator.append_tokens(ids.astype(np.int32))
        self.texts = np.concatenate([self.texts, ids], axis=1)

    def settle(self) -> None:
        """Choose the token that the next call reads."""
        self.generator.generate_next_token()
        self.drawn = True

    def logits(self) -> Array:
        """Return the last logits."""
        logits = np.array(self.generator.get_logits(), np.float32)
        return logits.reshape(self.batch, -1, logits.shape[-1])[:, -1]

    def cut(self, length: int) -> None:
        """Go back; a batch can only begin again, with the first positions."""
        kept = self.texts[:, :length]
        if self.batch > 1 or not length:
            self.start(self.batch, self.room)
        else:
            self.generator.rewind_to(length - 1)
            self.texts, self.drawn, kept = kept[:, :-1], False, kept[:, -1:]
        if length:
            self.read(kept)


class OpenVinoGenai:
    """OpenVINO GenAI, whose pipeline only generates: the times are those of its own clock, its logits are not seen."""

    def __init__(self, path: str, threads: int) -> None:
        import openvino
        import openvino_genai

        self.ov, self.lib, self.version = openvino, openvino_genai, metadata.version("openvino-genai")
        settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
        self.pipeline = openvino_genai.LLMPipeline(path, "CPU", **settings)

    def generated(self, ids: Array, count: int) -> Any:
        """Generate ``count`` ids of each text. Return the metrics."""
        settings = self.lib.GenerationConfig()
        settings.max_new_tokens, settings.ignore_eos, settings.eos_token_id = count, True, 0
        inputs = self.lib.TokenizedInputs(self.ov.Tensor(ids), self.ov.Tensor(np.ones(ids.shape, np.int64)))
        return self.pipeline.generate(inputs, settings).perf_metrics.raw_metrics

    def prompt_seconds(self, ids: Array, repeat: int) -> list[float]:
        """Return the seconds to the first id, of ``repeat`` calls."""
        return [self.generated(ids, 1).m_times_to_first_token[0] / 1e6 for _ in range(repeat)]

    def token_seconds(self, ids: Array, repeat: int) -> list[float]:
        """Return the seconds between the ids that follow."""
        return [t / 1e6 for t in self.generated(ids, repeat + 1).m_durations[-repeat:]]


def load(kind: str, path: str, threads: int, weights: str) -> Engine | OpenVinoGenai:
    """Open a contestant. Raises the library's own error, or that of its import."""
    makers: dict[str, Callable[[], Engine | OpenVinoGenai]] = {
        "polydyn": lambda: Polydyn(path, threads),
        "onnxruntime": lambda: OnnxRuntime(path, threads, spinning=True),
        "onnxruntime-nospin": lambda: OnnxRuntime(path, threads, spinning=False),
        "openvino": lambda: OpenVino(path, threads, exact=True),
        "openvino-default": lambda: OpenVino(path, threads, exact=False),
        "torch": lambda: Torch(path, threads, weights),
        "llama.cpp": lambda: LlamaCpp(path, threads, flash=True),
        "llama.cpp-plain": lambda: LlamaCpp(path, threads, flash=False),
        "onnxruntime-genai": lambda: OnnxRuntimeGenai(path, threads),
        "openvino-genai": lambda: OpenVinoGenai(path, threads),
    }
    if kind not in makers:
        raise ValueError(f"no tool {kind!r}; known: {', '.join(makers)}")
    return makers[kind]()
