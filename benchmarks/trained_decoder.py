"""Train a small decoder here, export it with caches, and judge generation and quantization on it.

usage: python -m benchmarks.trained_decoder FOLDER [--steps N] [--threads N] [--only train export ids quality]

Random weights say nothing about quality: their logits are flat and ties decide. The text is the Python sources of the
standard library; every twentieth file is kept out of the training. ``train`` makes a byte-pair tokenizer of 2048 tokens
and a Llama-like decoder of 6 million parameters with tied embeddings (torch, transformers, seed 0). ``export`` writes
config.json, tokenizer.json and model.onnx, whose caches are inputs and outputs. ``ids`` compares greedy ids of
``polydyn.generate`` with those of transformers over 200 tokens, for one text and for a ragged batch. ``quality``
compares quantized models: perplexity, and KL divergence from the float model, on the files kept out. Weights are not
committed; the results are in benchmarks/results/trained_decoder.json with ``--save``.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import record
from polydyn.schedules.expr import Array

SEED = 0
VOCABULARY = 2048
LENGTH = 256
"""Tokens of a training sequence."""
BATCH = 8
"""Sequences of a training step."""
PEAK_RATE = 2e-3
"""Largest learning rate; it rises over the first steps, then falls as a cosine."""
STEPS = 1000
SETTINGS = {
    "vocab_size": VOCABULARY, "hidden_size": 320, "intermediate_size": 864, "num_hidden_layers": 5,
    "num_attention_heads": 10, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048,
    "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
STAGES = ["train", "export", "ids", "quality"]
TOKENS = 200
"""Greedy ids that are compared."""
HEAD: dict[str, Any] = {"keep": ["*lm_head*"]}
"""ONNX Runtime's quantizer leaves the head, which is tied to the embedding: these rows have equal bytes."""
SETTINGS_OF_VARIANTS: dict[str, dict[str, Any]] = {
    "4 bits": HEAD,
    "4 bits, no search": {"search": False, **HEAD},
    "4 bits, calibrated": HEAD,
    "4 bits, zero points": {"symmetric": False, **HEAD},
    "4 bits, zero points, calibrated": {"symmetric": False, **HEAD},
    "4 bits, head too": {},
    "4 bits, head too, rows of bytes": {"accuracy_level": 4},
    "8 bits, head too": {"bits": 8},
    "dynamic bytes, head too": {"method": "dynamic"},
}
"""Arguments of ``polydyn.quantize`` by the name of the result."""
END_OF_TEXT = "<|end|>"
"""The token between files, id 0."""


def texts() -> tuple[list[str], list[str]]:
    """Return the sources of the standard library without its tests: files to train on, and files kept out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "test", "tests", "idle_test", "lib2to3", "encodings"}
    files = [p for p in sorted(root.rglob("*.py")) if not skipped & set(p.relative_to(root).parts)]
    every = [p.read_text(errors="ignore") for p in files]
    return [t for k, t in enumerate(every) if k % 20], [t for k, t in enumerate(every) if k % 20 == 0]


def make_tokenizer(folder: Path, train: list[str]) -> Any:
    """Train a byte-level byte-pair tokenizer and write tokenizer.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END_OF_TEXT], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(train, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def token_stream(tokenizer: Any, files: list[str]) -> Array:
    """Return the ids of all files, each followed by the end of text."""
    ids = [np.array([*e.ids, 0], np.int64) for e in tokenizer.encode_batch(files)]
    return np.concatenate(ids)


def train(folder: Path, steps: int, threads: int) -> None:
    """Write tokenizer.json, config.json and model.safetensors of the trained decoder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    torch.set_num_threads(threads)
    files, _ = texts()
    stream = torch.from_numpy(token_stream(make_tokenizer(folder, files), files))
    model = LlamaForCausalLM(LlamaConfig(**SETTINGS))
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.05)
    draws = np.random.default_rng(SEED)
    count = sum(p.numel() for p in model.parameters())
    print(f"{count / 1e6:.2f} million parameters, {len(stream)} tokens of text", flush=True)
    start = time.perf_counter()
    for step in range(steps):
        warm = min(1, (step + 1) / 30)
        rate = PEAK_RATE * warm * (0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2)
        for group in optimizer.param_groups:
            group["lr"] = rate
        begins = draws.integers(0, len(stream) - LENGTH - 1, BATCH)
        ids = torch.stack([stream[b : b + LENGTH] for b in begins])
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.3f}, {time.perf_counter() - start:.0f} s", flush=True)
    model.save_pretrained(folder)


def export(folder: Path) -> None:
    """Write model.onnx with caches as inputs and outputs."""
    import onnx
    import torch
    from transformers import LlamaForCausalLM

    from benchmarks.models.export import forget_machine, newer_export
    from benchmarks.models.zoo import decoder_source

    module = LlamaForCausalLM.from_pretrained(folder).eval()
    c = module.config
    with torch.no_grad():
        source = decoder_source(
            module, c.vocab_size, (c.num_hidden_layers, c.num_key_value_heads, c.head_dim), "logits", newer=True
        )
        model = newer_export(source)
    forget_machine(model)
    onnx.checker.check_model(model, full_check=True)
    onnx.save_model(model, str(folder / "model.onnx"))


def prompts(folder: Path) -> list[list[int]]:
    """Return beginnings of files that were kept out of the training, of unequal lengths."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    _, files = texts()
    lengths = (7, 64, 23, 90, 41, 12)
    return [tokenizer.encode(f).ids[:n] for f, n in zip(files[3::5], lengths, strict=False)]


def compare_ids(folder: Path, threads: int) -> dict[str, Any]:
    """Count greedy ids that are equal to those of transformers, one text at a time and as a ragged batch."""
    import torch
    from transformers import LlamaForCausalLM

    import polydyn

    torch.set_num_threads(threads)
    module = LlamaForCausalLM.from_pretrained(folder).eval()
    expected = []
    for p in prompts(folder):
        out = module.generate(
            torch.tensor([p]), attention_mask=torch.ones(1, len(p), dtype=torch.long), do_sample=False,
            max_new_tokens=TOKENS, min_new_tokens=TOKENS, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        expected.append(out[0, len(p) :].tolist())
    program = polydyn.compile(folder / "model.onnx", threads=threads)
    alone = [list(polydyn.generate(program, p, max_tokens=TOKENS)) for p in prompts(folder)]
    rows = list(polydyn.generate(program, prompts(folder), max_tokens=TOKENS, chunk=32))
    ragged = [list(x) for x in zip(*rows, strict=True)]

    def equal(got: list[list[int]]) -> list[int]:
        """Return the ids before the first difference, for each text."""
        pairs = [zip(a, b, strict=True) for a, b in zip(got, expected, strict=True)]
        return [next((k for k, (x, y) in enumerate(pair) if x != y), TOKENS) for pair in pairs]

    return {"tokens": TOKENS, "prompts": [len(p) for p in prompts(folder)], "alone": equal(alone),
            "ragged": equal(ragged)}  # fmt: skip


def variants(folder: Path) -> dict[str, tuple[Path, int]]:
    """Write the quantized models. Return their files and the bytes of their tensors."""
    import onnx
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    import polydyn
    from polydyn.quantization.products import scopes
    from polydyn.quantization.sizes import tensor_bytes

    source, made = folder / "model.onnx", {"float32": folder / "model.onnx"}
    logging.getLogger("onnxruntime.quantization.matmul_nbits_quantizer").setLevel(logging.WARNING)
    windows = held_out(folder, 24)
    calls = [call_for(source, w) for w in windows[16:]]  # not those that judge
    for name, settings in SETTINGS_OF_VARIANTS.items():
        made[f"polydyn {name}"] = folder / f"polydyn {name}.onnx"
        calibration = calls if "calibrated" in name else None
        polydyn.quantize(source, made[f"polydyn {name}"], calibration=calibration, **{"accuracy_level": 0, **settings})
    for symmetric in (True, False):
        quantizer = MatMulNBitsQuantizer(onnx.load(source), block_size=32, is_symmetric=symmetric)
        quantizer.process()
        name = f"onnxruntime 4 bits{'' if symmetric else ', zero points'}"
        made[name] = folder / f"{name}.onnx"
        onnx.save_model(quantizer.model.model, str(made[name]))

    def size(path: Path) -> int:
        return sum(tensor_bytes(t) for s in scopes(onnx.load(path)) for t in s.constants.values())

    return {name: (path, size(path)) for name, path in made.items()}


def held_out(folder: Path, count: int) -> list[Array]:
    """Return windows of ``LENGTH`` tokens of the files kept out of the training, spread over them."""
    from tokenizers import Tokenizer

    _, files = texts()
    stream = token_stream(Tokenizer.from_file(str(folder / "tokenizer.json")), files)
    begins = np.linspace(0, len(stream) - LENGTH, count).astype(int)
    return [stream[b : b + LENGTH] for b in begins]


def call_for(path: Path, window: Array) -> dict[str, Array]:
    """Return the inputs that read a window with empty caches."""
    import onnx

    feeds: dict[str, Array] = {"input_ids": window[None], "attention_mask": np.ones((1, len(window)), np.int64)}
    for v in onnx.load(path, load_external_data=False).graph.input:
        if v.name not in feeds:
            dims = [d.dim_value for d in v.type.tensor_type.shape.dim]
            feeds[v.name] = np.zeros((1, dims[1], 0, dims[3]), np.float32)
    return feeds


def log_softmax(logits: Array) -> Array:
    """Return the logarithms of probabilities as float64."""
    wide = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


def quality(folder: Path, count: int = 16) -> dict[str, dict[str, float]]:
    """Return perplexity, KL divergence from float32 and equal top tokens of every variant, all in ONNX Runtime."""
    import onnxruntime as ort

    rows: dict[str, dict[str, float]] = {}
    expected: list[Array] = []
    windows = held_out(folder, 24)[:count]
    for name, (path, size) in variants(folder).items():
        session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        nll, divergence, same = [], [], []
        for k, w in enumerate(windows):
            logs = log_softmax(session.run(["logits"], call_for(path, w))[0][0])
            if name == "float32":
                expected.append(logs)
            nll.append(-logs[np.arange(LENGTH - 1), w[1:]].mean())
            divergence.append((np.exp(expected[k]) * (expected[k] - logs)).sum(-1).mean())
            same.append((logs.argmax(-1) == expected[k].argmax(-1)).mean())
        rows[name] = {"bytes": size, "perplexity": float(np.exp(np.mean(nll))), "kl": float(np.mean(divergence)),
                      "same_top_token": float(np.mean(same))}  # fmt: skip
        print(f"{name:40} {size / 1e6:6.2f} MB  perplexity {rows[name]['perplexity']:.3f}  KL {rows[name]['kl']:.2e}  "
              f"same top token {rows[name]['same_top_token']:.3f}", flush=True)  # fmt: skip
    return rows


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(usage=(__doc__ or "").split("usage: ")[1].split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--save", action="store_true", help="keep the results in benchmarks/results")
    a = parser.parse_args()
    a.folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"steps": a.steps}
    if "train" in a.only:
        train(a.folder, a.steps, a.threads)
    if "export" in a.only:
        export(a.folder)
    if "ids" in a.only:
        results["ids"] = compare_ids(a.folder, a.threads)
        print(json.dumps(results["ids"]), flush=True)
    if "quality" in a.only:
        results["quality"] = quality(a.folder)
    if a.save:  # the results of other stages stay
        path = record.RESULTS / "trained_decoder.json"
        kept = json.loads(path.read_text()) if path.exists() else {}
        fields = {k: v for k, v in kept.items() if k in ("ids", "quality", "steps")}
        print(record.save("trained_decoder", **(fields | results)))


if __name__ == "__main__":
    main()
