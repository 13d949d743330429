"""torch.compile(backend="polydyn", dynamic=True), compared with eager and Inductor: ``python -m
benchmarks.torch_models``.

Models with random weights: seven transformers and three networks for images, at ten shapes each. Every result is
compared with eager torch; the numbers of programs, graphs, and graphs that fell back to torch are printed. ``--time``
adds medians of the whole call at each shape, alternating, for eager, Inductor (dynamic=True) and polydyn (and polydyn
with frozen parameters). Sizes: ``--width`` of the transformers, ``--layers``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers as hf

from polydyn import torch_backend

SHAPES = [(2, 5), (3, 7), (4, 9), (9, 33), (2, 64), (5, 17), (7, 3), (6, 21), (2, 50), (3, 40)]
TOLERANCE = 1e-5
"""Maximum error relative to the largest value of eager torch's result."""


def text(b: int, n: int) -> dict[str, Any]:
    ids = torch.randint(0, 100, (b, n))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def image(b: int, n: int) -> dict[str, Any]:
    return {"pixel_values": torch.randn(b, 3, 64 + n, 72 + n)}


def fixed_image(b: int, n: int) -> dict[str, Any]:
    return {"pixel_values": torch.randn(b, 3, 32, 32)}


def models(w: int, layers: int) -> Iterator[tuple[str, Callable[[], Any], Callable[[int, int], dict[str, Any]]]]:
    base = {
        "hidden_size": w, "num_hidden_layers": layers, "num_attention_heads": 4, "intermediate_size": 2 * w,
        "vocab_size": 120,
    }  # fmt: skip
    heads = {"num_heads": 4, "vocab_size": 120}
    yield "bert", lambda: hf.BertModel(hf.BertConfig(**base)), text
    yield "albert", lambda: hf.AlbertModel(hf.AlbertConfig(embedding_size=16, **base)), text
    dist = {"dim": w, "n_layers": layers, "n_heads": 4, "hidden_dim": 2 * w, "vocab_size": 120}
    yield "distilbert", lambda: hf.DistilBertModel(hf.DistilBertConfig(**dist)), text
    gpt = {"n_embd": w, "n_layer": layers, "n_head": 4, "vocab_size": 120, "use_cache": False}
    gpt |= {"bos_token_id": 0, "eos_token_id": 0}
    yield "gpt2", lambda: hf.GPT2Model(hf.GPT2Config(**gpt)), text
    t5 = {"d_model": w, "d_kv": w // 4, "d_ff": 2 * w, "num_layers": layers, **heads}
    yield "t5 encoder", lambda: hf.T5EncoderModel(hf.T5Config(**t5)), text
    yield "llama", lambda: hf.LlamaModel(hf.LlamaConfig(num_key_value_heads=2, use_cache=False, **base)), text
    vit = {k: v for k, v in base.items() if k != "vocab_size"} | {"image_size": 32, "patch_size": 8}
    yield "vit", lambda: hf.ViTModel(hf.ViTConfig(**vit)), fixed_image
    sizes = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
    resnet = {"embedding_size": 8, "layer_type": "basic", **sizes}
    yield "resnet", lambda: hf.ResNetModel(hf.ResNetConfig(**resnet)), image
    yield "mobilenet", lambda: hf.MobileNetV2Model(hf.MobileNetV2Config(depth_multiplier=0.25)), image
    yield "convnext", lambda: hf.ConvNextModel(hf.ConvNextConfig(**sizes)), image


def first(result: Any) -> Any:
    return result[0]


def check(name: str, module: Any, inputs: Callable[[int, int], dict[str, Any]]) -> bool:
    """Compare at all shapes and print the numbers of programs and graphs."""
    graphs: list[torch_backend.CompiledGraph] = []
    make = torch_backend.CompiledGraph

    def watched(*arguments: Any) -> torch_backend.CompiledGraph:
        graphs.append(make(*arguments))
        return graphs[-1]

    torch._dynamo.reset()
    torch_backend.CompiledGraph = watched  # type: ignore[assignment, misc]
    try:
        fast = torch.compile(module, backend=torch_backend.backend, dynamic=True)
        worst, start, begun = 0.0, time.perf_counter(), 0.0
        for shape in SHAPES:
            x = inputs(*shape)
            got, want = first(fast(**x)), first(module(**x))
            begun = begun or time.perf_counter() - start
            worst = max(worst, float((got - want).abs().max() / want.abs().max()))
    finally:
        torch_backend.CompiledGraph = make  # type: ignore[misc]
    programs, eager = sum(len(g.programs) for g in graphs), sum(g.eager for g in graphs)
    ok = worst <= TOLERANCE and programs == len(graphs) and not eager
    print(f"{name}: worst error {worst:.1e}, {len(graphs)} graphs, {programs} programs for {len(SHAPES)} shapes, "
          f"{eager} left to torch, first call {begun:.1f} s", flush=True)  # fmt: skip
    return ok


def measure(name: str, module: Any, inputs: Callable[[int, int], dict[str, Any]], rounds: int) -> None:
    """Return medians of whole calls in microseconds; the calls alternate."""
    torch._dynamo.reset()
    ways = {"eager": module}
    for way, backend, options in (
        ("inductor", "inductor", None), ("polydyn", torch_backend.backend, {"strict": True}),
        ("frozen", torch_backend.backend, {"strict": True, "freeze": True}),
    ):  # fmt: skip
        ways[way] = torch.compile(module, backend=backend, dynamic=True, options=options)
    for shape in SHAPES:
        x = inputs(*shape)
        times: dict[str, list[float]] = {w: [] for w in ways}
        for _ in range(rounds + 2):
            for way, call in ways.items():
                start = time.perf_counter()
                call(**x)
                times[way].append(time.perf_counter() - start)
        line = ", ".join(f"{w} {statistics.median(t[2:]) * 1e6:.0f}" for w, t in times.items())
        print(f"{name} at {shape}: us {line}", flush=True)


def main() -> int:
    """Run the command line; return 1 if a result differs, a graph fell back to torch, or a graph had two programs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="names of models; default all")
    parser.add_argument("--time", type=int, metavar="ROUNDS", help="measure ROUNDS rounds")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--layers", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(0)
    ok = True
    with torch.no_grad():
        for name, make, inputs in models(args.width, args.layers):
            if args.names and name not in args.names:
                continue
            module = make().eval()
            ok &= check(name, module, inputs)
            if args.time:
                measure(name, module, inputs, args.time)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
