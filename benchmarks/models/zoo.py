"""The torch architectures that are exported, at full size and tiny. Weights are random and seeded, shapes symbolic.

Each entry defines how to build the module, which example inputs trace it, and which input axes have which symbol.
Example sizes differ from each other and from every configured size, so that a size that tracing freezes shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as hf

Axes = Mapping[str, Mapping[int, str]]
EAGER = {"attn_implementation": "eager"}


@dataclass(frozen=True)
class Source:
    """A module ready to be traced: ``inputs`` by name in the order of ``forward``, ``axes`` of inputs and outputs.

    ``newer``: exported by torch's newer exporter (``dynamo=True``), which infers the axes of outputs itself; else by
    the exporter that traces TorchScript.
    """

    module: torch.nn.Module
    inputs: Mapping[str, torch.Tensor]
    outputs: tuple[str, ...]
    axes: Axes = field(default_factory=dict)
    newer: bool = False


class First(torch.nn.Module):
    """Calls a Hugging Face module by keyword and returns the first tensor of its output."""

    def __init__(self, module: torch.nn.Module, names: tuple[str, ...], **fixed: Any) -> None:
        super().__init__()
        self.module, self.names, self.fixed = module, names, fixed

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        """Return the first output; positional arguments are in the order of ``names``."""
        inputs = dict(zip(self.names, args, strict=True))
        result: torch.Tensor = self.module(**inputs, **self.fixed, return_dict=True)[0]
        return result


class WithPast(torch.nn.Module):
    """A decoder whose key/value cache is passed in and out as plain tensors (B, heads, past, head size) per layer."""

    def __init__(self, module: torch.nn.Module, layers: int) -> None:
        super().__init__()
        self.module, self.layers = module, layers

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, *past: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return (the first output, key and value of layer 0, of layer 1, ...); the mask covers past and present."""
        pairs = [(past[2 * i], past[2 * i + 1]) for i in range(self.layers)]
        cache = hf.DynamicCache(pairs)
        out = self.module(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True)
        present = [t for layer in out.past_key_values.layers for t in (layer.keys, layer.values)]
        return (out[0], *present)


def draw_constants(module: torch.nn.Module) -> None:
    """Redraw parameters that initialisation left at 0 or 1, so that a dropped bias, scale or statistic changes the
    output.
    """
    with torch.no_grad():
        for name, p in module.named_parameters():
            if p.dim() == 1 and name.endswith("weight"):
                p.uniform_(0.5, 1.5)
            elif p.dim() == 1 or p.std() == 0:
                p.normal_(0, 0.1)
        for m in module.modules():
            if isinstance(m, torch.nn.BatchNorm2d):
                torch.nn.init.normal_(m.running_mean, 0, 0.1)
                torch.nn.init.uniform_(m.running_var, 0.5, 1.5)


def _text(module: torch.nn.Module, vocabulary: int) -> Source:
    ids = torch.randint(0, vocabulary, (2, 11))
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[1, 7:] = 0
    axes = {name: {0: "B", 1: "L"} for name in ("input_ids", "attention_mask", "last_hidden_state")}
    names = ("input_ids", "attention_mask")
    return Source(First(module, names), {names[0]: ids, names[1]: mask}, ("last_hidden_state",), axes)


def _image(module: torch.nn.Module, size: tuple[int, int], *, free: bool, output: str, **fixed: Any) -> Source:
    axes = {"pixel_values": {0: "N", 2: "H", 3: "W"} if free else {0: "N"}, output: {0: "N"}}
    pixels = {"pixel_values": torch.randn(2, 3, *size)}
    return Source(First(module, ("pixel_values",), **fixed), pixels, (output,), axes)


def bert(**config: Any) -> Source:
    """Build an encoder over (B, L) token ids with a mask."""
    c = hf.BertConfig(**EAGER, **config)
    return _text(hf.BertModel(c), c.vocab_size)


def albert(**config: Any) -> Source:
    """Build a BERT whose layers share their weights, with a factored embedding."""
    c = hf.AlbertConfig(**EAGER, **config)
    return _text(hf.AlbertModel(c), c.vocab_size)


def gpt2(**config: Any) -> Source:
    """Build a decoder over (B, L) without a cache."""
    c = hf.GPT2Config(use_cache=False, **EAGER, **config)
    return _text(hf.GPT2Model(c), c.vocab_size)


def gpt2_past(**config: Any) -> Source:
    """Build a decoder with its cache in and out (see ``decoder_source``)."""
    c = hf.GPT2Config(**EAGER, **config)
    cache = (c.n_layer, c.n_head, c.n_embd // c.n_head)
    return decoder_source(hf.GPT2Model(c), c.vocab_size, cache, "last_hidden_state")


def llama(**config: Any) -> Source:
    """Build a decoder with rotary positions and fewer key heads than query heads, its cache in and out.

    Attention is the default of transformers (``sdpa``), as in users' exports.
    """
    c = hf.LlamaConfig(**config)
    cache = (c.num_hidden_layers, c.num_key_value_heads, c.head_dim)
    return decoder_source(hf.LlamaForCausalLM(c), c.vocab_size, cache, "logits", newer=True)


def decoder_source(
    module: torch.nn.Module, vocabulary: int, cache: tuple[int, int, int], output: str, newer: bool = False
) -> Source:
    """Build a decoder with symbols B, L (new tokens), P (past), T = P + L (the mask's length).

    ``cache``: layers, heads, size of a head.
    """
    layers, heads, size = cache
    batch, length, past = 2, 3, 7
    inputs = {
        "input_ids": torch.randint(0, vocabulary, (batch, length)),
        "attention_mask": torch.ones(batch, past + length, dtype=torch.long),
    }
    axes: dict[str, dict[int, str]] = {
        "input_ids": {0: "B", 1: "L"},
        "attention_mask": {0: "B", 1: "T"},
        output: {0: "B", 1: "L"},
    }
    outputs = [output]
    for layer in range(layers):
        for kind in ("key", "value"):
            inputs[f"past_{layer}_{kind}"] = torch.randn(batch, heads, past, size)
            axes[f"past_{layer}_{kind}"] = {0: "B", 2: "P"}
            axes[f"present_{layer}_{kind}"] = {0: "B", 2: "T"}
            outputs.append(f"present_{layer}_{kind}")
    return Source(WithPast(module, layers), inputs, tuple(outputs), axes, newer)


def t5_encoder(**config: Any) -> Source:
    """Build the encoder half of T5: relative position buckets, RMS norm."""
    c = hf.T5Config(**EAGER, **config)
    return _text(hf.T5EncoderModel(c), c.vocab_size)


def vit(**config: Any) -> Source:
    """Build a vision transformer at its configured image size: symbol N."""
    c = hf.ViTConfig(**EAGER, **config)
    return _image(hf.ViTModel(c), (c.image_size, c.image_size), free=False, output="last_hidden_state")


def vit_free(**config: Any) -> Source:
    """Build a vision transformer for any image size, with interpolated position embeddings. Symbols N, H, W."""
    c = hf.ViTConfig(**EAGER, **config)
    size = (c.image_size + 2 * c.patch_size, c.image_size - c.patch_size)
    return _image(hf.ViTModel(c), size, free=True, output="last_hidden_state", interpolate_pos_encoding=True)


def resnet(**config: Any) -> Source:
    """Build a residual network for images of any size: symbols N, H, W."""
    module = hf.ResNetModel(hf.ResNetConfig(**config))
    return _image(module, (75, 58), free=True, output="last_hidden_state")


def vision(kind: str, part: str = "Model", **config: Any) -> Source:
    """Build one of transformers' networks for images of any size, ``kind`` its name there: symbols N, H, W."""
    module = getattr(hf, f"{kind}{part}")(getattr(hf, f"{kind}Config")(**config))
    return _image(module, (204, 173), free=True, output="logits" if "Segmentation" in part else "last_hidden_state")


def torchvision_network(name: str) -> Source:
    """Build one of torchvision's classifiers for images of any size: symbols N, H, W."""
    import torchvision

    axes = {"pixel_values": {0: "N", 2: "H", 3: "W"}, "logits": {0: "N"}}
    pixels = {"pixel_values": torch.randn(2, 3, 204, 173)}
    return Source(getattr(torchvision.models, name)(), pixels, ("logits",), axes)


# Tiny models are narrow: only with larger weights do attention scores reach the size they have in the full models.
_BERT_TINY = {"vocab_size": 120, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
              "intermediate_size": 64, "max_position_embeddings": 160, "initializer_range": 0.25}  # fmt: skip
_GPT2_TINY = {"vocab_size": 120, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 160, "initializer_range": 0.25}
_VIT_TINY = {"image_size": 32, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
             "intermediate_size": 64, "initializer_range": 0.25}  # fmt: skip
_LLAMA_TINY = {"vocab_size": 120, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
               "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 160,
               "initializer_range": 0.15, "tie_word_embeddings": True}  # fmt: skip


def build_source(name: str) -> Source:
    """Build the model by name, in inference mode; the same weights on every call, and for gpt2 with and without a
    cache.
    """
    torch.manual_seed(0)
    source = TORCH_MODELS[name]()
    torch.manual_seed(1)
    draw_constants(source.module)
    source.module.eval()
    return source


VISION: dict[str, Callable[[], Source]] = {
    "mobilenet_v2": lambda: vision("MobileNetV2", tf_padding=False),
    "efficientnet_b0": lambda: vision(
        "EfficientNet", width_coefficient=1.0, depth_coefficient=1.0, image_size=224, hidden_dim=1280
    ),
    "regnet_y_400mf": lambda: vision(
        "RegNet", hidden_sizes=[48, 104, 208, 440], depths=[1, 3, 6, 6], groups_width=8, layer_type="y"
    ),
    "convnext_tiny": lambda: vision("ConvNext"),
    "poolformer_s12": lambda: vision("PoolFormer"),
    "segformer_b0": lambda: vision("Segformer"),
    "deeplab_mobilenet": lambda: vision("MobileNetV2", "ForSemanticSegmentation", tf_padding=False),
    "resnext50": lambda: torchvision_network("resnext50_32x4d"),
    "mobilenet_v3_large": lambda: torchvision_network("mobilenet_v3_large"),
}
"""Networks for images of full size, which form the group ``vision``."""

NOT_IN_ALL = {"bert_large", *VISION}
"""Not part of ``all``. bert_large: 1.2 GB of weights (the vocabulary is cut), needed to count its kernels only."""

TORCH_MODELS: dict[str, Callable[[], Source]] = {
    "bert_base": bert,
    "bert_large": lambda: bert(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, vocab_size=1000
    ),
    "albert_base": lambda: albert(hidden_size=768, num_attention_heads=12, intermediate_size=3072),
    "gpt2": gpt2,
    "gpt2_past": gpt2_past,
    "t5_small": t5_encoder,
    "vit_base": vit,
    "vit_base_hw": vit_free,
    "resnet50": resnet,
    **VISION,
    "bert_tiny": lambda: bert(**_BERT_TINY),
    "albert_tiny": lambda: albert(embedding_size=16, **_BERT_TINY),
    "gpt2_tiny": lambda: gpt2(**_GPT2_TINY),
    "gpt2_past_tiny": lambda: gpt2_past(**_GPT2_TINY),
    "llama_tiny": lambda: llama(**_LLAMA_TINY),
    "t5_tiny": lambda: t5_encoder(vocab_size=120, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4),
    "vit_tiny": lambda: vit(**_VIT_TINY),
    "vit_hw_tiny": lambda: vit_free(**_VIT_TINY),
    "resnet_tiny": lambda: resnet(embedding_size=8, hidden_sizes=[16, 24], depths=[2, 1], layer_type="bottleneck"),
    "mobilenet_v2_tiny": lambda: vision(
        "MobileNetV2", tf_padding=False, depth_multiplier=0.1, finegrained_output=False
    ),
    "segformer_tiny": lambda: vision(
        "Segformer", hidden_sizes=[8, 16, 20, 32], depths=[1, 1, 1, 1], mlp_ratios=[2, 2, 2, 2], initializer_range=0.25
    ),
}
