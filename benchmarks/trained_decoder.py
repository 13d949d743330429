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
import math
import sysconfig
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from polydyn.schedules.expr import Array

if TYPE_CHECKING:
    pass

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


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(usage=(__doc__ or "").split("usage: ")[1].split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=["train"])
    a = parser.parse_args()
    a.folder.mkdir(parents=True, exist_ok=True)
    if "train" in a.only:
        train(a.folder, a.steps, a.threads)


if __name__ == "__main__":
    main()
