"""Architectures of torchvision, timm and transformers with small random weights, for ``benchmarks/census.py``.

A family defines the inputs of its models and their dynamic axes. Models of transformers are shrunk: each setting in
``SMALL_SETTINGS`` that a configuration has is replaced. Needs torch and the family's package.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FAMILIES = {
    "classifier": """
        resnet18 shufflenet_v2_x1_0 mobilenet_v2 mobilenet_v3_large regnet_y_400mf regnet_x_400mf googlenet
        resnext50_32x4d efficientnet_v2_s swin_t maxvit_t vit_b_32 vgg11_bn
    """,
    "segmenter": "lraspp_mobilenet_v3_large deeplabv3_mobilenet_v3_large",
    "video": "r3d_18 r2plus1d_18 s3d mvit_v2_s swin3d_t",
    "flow": "raft_small",
    "detector": """
        ssdlite320_mobilenet_v3_large fasterrcnn_mobilenet_v3_large_320_fpn retinanet_resnet50_fpn
        fcos_resnet50_fpn ssd300_vgg16 maskrcnn_resnet50_fpn keypointrcnn_resnet50_fpn
    """,
    "timm": """
        lcnet_050 ghostnet_050 edgenext_xx_small efficientvit_b0 efficientformerv2_s0 mambaout_femto
        xcit_nano_12_p16_224 deit_tiny_patch16_224 tiny_vit_5m_224 repvit_m0_9 tf_efficientnetv2_b0 gcvit_xxtiny
        levit_128s cs3darknet_s pit_ti_224 crossvit_tiny_240 hgnetv2_b0 tnt_s_patch16_224 coatnet_nano_rw_224
        maxvit_tiny_rw_224 visformer_tiny botnet26t_256 efficientformer_l1 poolformer_s12 selecsls42
        res2net50_14w_8s resnetv2_50 rdnet_tiny davit_tiny caformer_s18 gmlp_s16_224 sequencer2d_s tresnet_m
        convit_tiny xception41
    """,
    "text": """
        bert distilbert albert mpnet ernie splinter gpt2 opt gptj gpt_neo gpt_neox mpt falcon xlm flaubert layoutlm
        megatron-bert modernbert nomic_bert eurobert mistral gemma phi3 olmo olmoe stablelm starcoder2 gemma2
        granite ministral nemotron xglm ctrl convbert squeezebert rembert longformer gemma3n_text mamba recurrent_gemma
        jamba rwkv exaone4 deepseek_v3 jetmoe olmo2 hunyuan_v1_dense bert-generation siglip_text_model
        jina_embeddings_v3 gte doge qwen3_moe smollm3 seed_oss mixtral qwen2_moe
    """,
    "translator": "t5 mt5 umt5 bart plbart longt5 switch_transformers bigbird_pegasus nllb-moe",
    "listener": "speech_to_text",
    "image": """
        deit beit dinov2 mobilevit levit mobilenet_v1 mobilenet_v2 poolformer resnet regnet cvt swin
        swinv2 yolos focalnet vit_mae siglip_vision_model aimv2_vision_model conditional_detr rt_detr swin2sr
        depth_anything zoedepth vitpose vitmatte mask2former upernet
    """,
    "audio": "wav2vec2 wavlm hubert unispeech-sat data2vec-audio sew encodec dac audio-spectrogram-transformer",
}
"""Maps a family to its models, small ones first."""
ROUNDINGS = 16 * 2.0**-24
"""Relative change of an operator's result in a float64 run that imitates float32: 16 roundings."""
TORCHVISION = ("classifier", "segmenter", "video", "flow", "detector")
HIDDEN = ("hidden_size", "d_model", "dim", "n_embd", "emb_dim", "embedding_size")
LAYERS = (
    "num_hidden_layers",
    "num_layers",
    "n_layer",
    "n_layers",
    "encoder_layers",
    "decoder_layers",
    "num_decoder_layers",
)
HEADS = (
    "num_attention_heads", "num_heads", "n_head", "n_heads", "encoder_attention_heads", "decoder_attention_heads",
    "num_encoder_attention_heads", "num_decoder_attention_heads",
)  # fmt: skip
INNER = ("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "d_ff", "hidden_dim")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
SMALL_SETTINGS: Mapping[str, int] = {
    **dict.fromkeys(HIDDEN, 64), **dict.fromkeys(LAYERS, 2), **dict.fromkeys(HEADS, 4), **dict.fromkeys(INNER, 128),
    **dict.fromkeys(EXPERTS, 4), "num_key_value_heads": 2, "num_kv_heads": 2, "head_dim": 16, "attention_head_size": 16,
    "d_kv": 16, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "vocab_size": 512,
    "num_experts_per_tok": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 256,
    "entity_vocab_size": 50, "mamba_d_state": 8, "state_size": 8, "q_lora_rank": 32, "kv_lora_rank": 32,
    "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "rotary_dim": 16, "expand": 1, "n_groups": 1, "mamba_n_heads": 8, "mamba_d_head": 16,
    "num_kv_shared_layers": 0,
}  # fmt: skip
PICTURES = {"vitpose": (256, 192), "upernet": (192, 192)}
"""Height and width for configurations without them: people are upright; pools of 6 positions divide them."""
UNSET = ("head_dim", "num_key_value_heads", "num_experts_per_tok")
"""Settings that are also replaced if a configuration has None."""
SIZES = (
    {"B": 2, "L": 16, "D": 7, "N": 2, "H": 160, "W": 160, "S": 9600},
    {"B": 1, "L": 1, "D": 1, "N": 1, "H": 224, "W": 192, "S": 8000},
    {"B": 3, "L": 37, "D": 5, "N": 3, "H": 192, "W": 224, "S": 12011},
    {"B": 1, "L": 64, "D": 64, "N": 1, "H": 288, "W": 256, "S": 16000},
)
"""The sizes at which every model is compared."""


@dataclass(frozen=True)
class Source:
    """A module, example inputs by name, and the names of their dynamic axes."""

    module: Any
    inputs: Mapping[str, Any]
    axes: Mapping[str, Mapping[int, str]]


def source(family: str, name: str) -> Source:
    """Build the model with seeded random weights."""
    import torch

    torch.manual_seed(0)
    if family in TORCHVISION:
        return _torchvision(family, name)
    return _timm(name) if family == "timm" else _transformers(family, name)


def _torchvision(family: str, name: str) -> Source:
    import torch
    import torchvision

    parts = {"weights_backbone": None} if family in ("segmenter", "detector") else {}
    module = torchvision.models.get_model(name, weights=None, **parts)
    if family == "detector":
        return Source(module, {"image": torch.rand(3, 224, 288)}, {"image": {1: "H", 2: "W"}})
    if family == "flow":
        images = {"image1": torch.randn(1, 3, 128, 128), "image2": torch.randn(1, 3, 128, 128)}
        return Source(module, images, {x: {0: "N"} for x in images})
    if family == "video":
        side = 224 if name in ("mvit_v2_s", "s3d") else 112
        return Source(module, {"x": torch.randn(1, 3, 16, side, side)}, {"x": {0: "N"}})
    if name == "googlenet":
        module.aux_logits = False
    return _pictures(module, "x", 224, any(part in name for part in ("vit", "swin", "vgg")))


def _pictures(module: Any, name: str, side: int, fixed: bool) -> Source:
    import torch

    axes = {0: "N"} if fixed else {0: "N", 2: "H", 3: "W"}
    return Source(module, {name: torch.randn(2, 3, side, side)}, {name: axes})


def _timm(name: str) -> Source:
    import timm

    module = timm.create_model(name, pretrained=False, exportable=True)
    one_size = (
        "vit",
        "mixer",
        "levit",
        "coat",
        "gcvit",
        "nest",
        "botnet",
        "eva",
        "xcit",
        "deit",
        "pit",
        "gmlp",
    )
    fixed = module.default_cfg.get("fixed_input_size", False) or any(part in name for part in one_size)
    return _pictures(module, "x", module.default_cfg["input_size"][-1], fixed)


def _configuration(name: str) -> Any:
    """Return a small configuration of transformers."""
    import transformers

    kind = transformers.models.auto.configuration_auto.CONFIG_MAPPING[name]
    base = kind()
    known = {k: v for k, v in SMALL_SETTINGS.items() if type(getattr(base, k, None)) is int}
    known |= {k: SMALL_SETTINGS[k] for k in UNSET if getattr(base, k, 0) is None}
    if "kv_lora_rank" in known:  # keys of a latent have as many heads as queries
        known["num_key_value_heads"] = SMALL_SETTINGS["num_attention_heads"]
    if getattr(base, "layer_types", None) and not isinstance(getattr(kind, "layer_types", None), property):
        known["layer_types"] = list(base.layer_types[:2])
    if name == "swin2sr":  # 6 heads share the channels
        del known["hidden_size"]
    try:
        small = kind(**known)
    except Exception:  # of any class: settings that do not fit together; set one by one those that do
        small = base
        for k, v in known.items():
            with contextlib.suppress(AttributeError):
                setattr(small, k, v)
    if name == "vitmatte":  # adds the sizes to a list whose first entry is its backbone's
        small.fusion_hidden_sizes = list(small.fusion_hidden_sizes)
        small.hidden_size = small.backbone_config.hidden_size
    if hasattr(small, "use_cache"):
        small.use_cache = False
    return small


def _transformers(family: str, name: str) -> Source:
    import torch
    import transformers

    settings = _configuration(name)
    if family != "audio":
        settings._attn_implementation = settings._experts_implementation = "eager"
    stem = type(settings).__name__.removesuffix("Config")
    kinds = [n for n in (stem + "Model", *dir(transformers)) if n == stem + "Model" or n.startswith(stem + "For")]
    model = next((c for n in kinds if (c := getattr(transformers, n, None)) is not None), None)
    if model is None or type(settings) in transformers.AutoModel._model_mapping:
        module = transformers.AutoModel.from_config(settings)
    else:  # the first with a task
        module = model(settings)

    def ids(length: int) -> Any:
        return torch.randint(3, 90, (2, length))

    if family in ("text", "translator"):
        inputs = {"input_ids": ids(16), "attention_mask": torch.ones(2, 16, dtype=torch.long)}
        axes = {x: {0: "B", 1: "L"} for x in inputs}
        if family == "text":
            return Source(module, inputs, axes)
        return Source(
            module, inputs | {"decoder_input_ids": ids(7)}, axes | {"decoder_input_ids": {0: "B", 1: "D"}}
        )  # fmt: skip
    if family == "listener":
        heard, shape = {
            "whisper": ("input_features", (2, 80, 3000)), "speech_to_text": ("input_features", (2, 64, 80)),
            "moonshine": ("input_values", (2, 8000)),
        }[name]  # fmt: skip
        data = torch.randn(shape)
        axes = {heard: {0: "B", 1: "S"} if name == "moonshine" else {0: "B"}, "decoder_input_ids": {0: "B", 1: "D"}}
        return Source(module, {heard: data, "decoder_input_ids": ids(7)}, axes)
    if family == "image":
        side = getattr(settings, "image_size", None) or 224
        side = side[0] if isinstance(side, (list, tuple)) else side if isinstance(side, int) else 224
        channels = getattr(settings, "num_channels", 3) or 3
        data = torch.randn(2, channels, *PICTURES.get(name, (min(side, 512), min(side, 512))))
        inputs = {"pixel_values": data}
        if name == "vit_mae":  # otherwise it masks at random
            inputs["noise"] = torch.rand(2, (side // settings.patch_size) ** 2)
        return Source(module, inputs, {x: {0: "N"} for x in inputs})
    if name in ("encodec", "dac"):
        return Source(module, {"input_values": torch.randn(2, 1, 9600)}, {"input_values": {0: "B", 2: "S"}})
    if name == "audio-spectrogram-transformer":
        data = torch.randn(2, settings.max_length, settings.num_mel_bins)
        return Source(module, {"input_values": data}, {"input_values": {0: "B"}})
    return Source(module, {"input_values": torch.randn(2, 8000)}, {"input_values": {0: "B", 1: "S"}})


def _tensors(result: Any) -> Iterator[Any]:
    """Yield all tensors of a nested result."""
    import torch

    if torch.is_tensor(result):
        yield result
    elif isinstance(result, dict):
        for value in result.values():
            yield from _tensors(value)
    elif isinstance(result, (list, tuple)):
        for value in result:
            yield from _tensors(value)


def results(family: str, model: Source, inputs: Iterable[Any]) -> tuple[Any, ...]:
    """Return the results that a model is compared by: the first three, or all of a detector."""
    if family == "detector":
        return tuple(_tensors(model.module(list(inputs))))
    if family in TORCHVISION or family == "timm":
        result = model.module(*inputs)
    else:
        result = model.module(**dict(zip(model.inputs, inputs, strict=True)), return_dict=True)
    tensors = list(_tensors(result))
    return tuple(x for x in tensors if x.is_floating_point())[:3] or tuple(tensors[:3])


def in_float64(family: str, name: str) -> Callable[[Mapping[str, Any], int], list[Any]]:
    """Return the model in PyTorch with weights, inputs and sums in float64: a function of feeds and the number of a
    run.

    Run 0 is exact. In every other run, each element that an operator computes moves at random by up to ``ROUNDINGS`` of
    its value (Monte Carlo arithmetic): a result that then changes is not determined by float32. Integers stay.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_map_only

    class Moved(TorchDispatchMode):  # type: ignore[misc]
        def __init__(self, run: int) -> None:
            super().__init__()
            self.numbers = torch.Generator().manual_seed(run)

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if any(r.alias_info for r in func._schema.returns):  # a view, or written in place
                return result
            return tree_map_only(torch.Tensor, self.move, result)

        def move(self, x: Any) -> Any:
            if not x.is_floating_point():
                return x
            share = ROUNDINGS * (2 * torch.rand(x.shape, generator=self.numbers) - 1)
            return torch.where(x == x.round(), x, x * (1 + share.to(x.dtype)))

    model = source(family, name)
    model.module.eval().double()

    def run(feeds: Mapping[str, Any], number: int) -> list[Any]:
        given = [torch.from_numpy(feeds[x]) for x in model.inputs]
        wide = [x.double() if x.is_floating_point() else x for x in given]
        with torch.no_grad(), Moved(number) if number else contextlib.nullcontext():
            return [x.numpy() for x in results(family, model, wide)]

    return run


def export(family: str, name: str, path: Path) -> None:
    """Writes the model as ONNX, by the TorchScript exporter."""
    import torch

    model = source(family, name)

    class Flat(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = model.module

        def forward(self, *given: Any) -> Any:
            return results(family, model, given)

    torch.backends.mha.set_fastpath_enabled(False)  # otherwise an attention is one operator that is not exported
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Flat().eval(), tuple(model.inputs.values()), str(path), input_names=list(model.inputs),
            dynamic_axes={k: dict(v) for k, v in model.axes.items()}, opset_version=17, dynamo=False,
            external_data=False,
        )  # fmt: skip
