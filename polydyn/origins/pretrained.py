"""``polydyn.from_pretrained``: the ONNX model, and the program, of a folder that Hugging Face's transformers wrote.

A folder holds an ONNX file, or ``config.json`` with weights (safetensors or torch's). Nothing is downloaded, and no
code of the folder runs.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polydyn.errors import InputError, UnsupportedError, needing_packages
from polydyn.program_cache import compile as compile_model

if TYPE_CHECKING:
    import onnx

    from polydyn.runtime.program import Program
    from polydyn.shapes.sizes import Sizes

ONNX_FILES = ("model.onnx", "onnx/model.onnx")
"""Where a folder has its ONNX file, in this order."""
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
TEXTS = ("input_ids", "attention_mask", "token_type_ids")
"""Inputs of a tokenizer, in their order."""
CACHES = ("past_key_values", "cache")
"""Names of a decoder's cache, in older and newer versions of transformers."""
EXAMPLE = {"batch": 2, "sequence": 6, "past_sequence": 5, "decoder_sequence": 4}
"""Sizes of the example call of an export."""


def from_pretrained(folder: str | os.PathLike[str], *, past: bool | None = None, **arguments: Any) -> Program:
    """Compile the model of a folder of Hugging Face's transformers, as ``save_pretrained`` writes it.

    Inputs have the names that the folder's tokenizer or processor gives (``input_ids``, ``attention_mask``,
    ``pixel_values`` ...), outputs those of the model's result (``logits``, ``last_hidden_state`` ...). Dims are
    ``batch``, ``sequence``, ``decoder_sequence``. ``past``: whether a decoder takes and returns the cache of past keys
    and values, ``past_key_values.N.key`` and ``present.N.key``, with the dim ``past_sequence``; by default, where the
    model generates text. Weights are float32. A folder that holds ``model.onnx`` or ``onnx/model.onnx``, or one other
    ONNX file, is compiled as it is. ``arguments``: those of ``polydyn.compile``, as in ``dims={"batch": (1, 64)}``.

    InputError: there is no such folder, or no model in it. UnsupportedError: transformers or torch is missing, or
    cannot load or export it. Other errors as of ``polydyn.compile``.
    """
    model, arguments = folder_model(folder, arguments, past=past)
    return compile_model(model, **arguments)


def folder_model(
    folder: str | os.PathLike[str], arguments: Mapping[str, Any], *, past: bool | None = None
) -> tuple[str | onnx.ModelProto, dict[str, Any]]:
    """Return the path of a folder's ONNX file, or the model that torch exports; and arguments of ``polydyn.compile``,
    with the sizes for which that model is right. Errors: ``from_pretrained``."""
    place = Path(folder)
    if not place.is_dir():
        raise InputError(f"{place} is not a folder", rule="from_pretrained",
                         remedy="give a folder that save_pretrained wrote; polydyn.compile takes a file")  # fmt: skip
    if found := _onnx_file(place):
        return str(found), dict(arguments)
    if not (place / "config.json").is_file():
        raise InputError(f"{place} has neither config.json nor an ONNX file", rule="from_pretrained",
                         remedy="give a folder that save_pretrained wrote")  # fmt: skip
    if not any(any(place.glob(pattern)) for pattern in WEIGHTS):
        raise InputError(f"{place} has a config.json, but no weights", rule="from_pretrained",
                         remedy=f"copy the files {' or '.join(WEIGHTS)} there too")  # fmt: skip
    model, allowed = _exported(place, past)
    from polydyn.origins.torch_modules import within

    return model, within(arguments, allowed)


def _onnx_file(place: Path) -> Path | None:
    """Return the ONNX file of a folder, if it has one. InputError: it has several, none named model.onnx."""
    for name in ONNX_FILES:
        if (place / name).is_file():
            return place / name
    found = sorted([*place.glob("*.onnx"), *place.glob("onnx/*.onnx")])
    if len(found) > 1:
        raise InputError(f"{place} has several ONNX files: {', '.join(str(f.relative_to(place)) for f in found)}",
                         rule="from_pretrained", remedy="compile one of them")  # fmt: skip
    return found[0] if found else None


@dataclass(frozen=True)
class _Plan:
    """What is exported: example tensors and axes by input, names of outputs, number of layers with a cache."""

    example: Mapping[str, Any]
    axes: Mapping[str, Sequence[str | None]]
    layers: int = 0


def _exported(place: Path, past: bool | None) -> tuple[onnx.ModelProto, dict[str, Sizes]]:
    with needing_packages("polydyn.from_pretrained"):
        import torch
        import transformers

        from polydyn.origins.torch_modules import torch_model
    model = _loaded(place, transformers, torch)
    plan = _planned(place, model, past, torch)
    names = list(plan.example)
    wrapped = _wrapper(torch, transformers, model, names, plan.layers)
    with torch.no_grad():
        outputs = list(wrapped.named(*plan.example.values()))
    return torch_model(
        wrapped, tuple(plan.example.values()), symbols={"tensors": [plan.axes[n] for n in names]}, inputs=names,
        outputs=outputs, axes=plan.axes,
    )  # fmt: skip


def _loaded(place: Path, transformers: Any, torch: Any) -> Any:
    """Return the model of a folder. UnsupportedError: transformers cannot load it."""
    try:
        config = json.loads((place / "config.json").read_text(encoding="utf-8"))
        kind = next(iter(config.get("architectures") or ()), "AutoModel")
        loader = getattr(transformers, kind, None)
        if loader is None:
            raise UnsupportedError(
                f"this transformers has no {kind}", rule="from_pretrained",
                remedy="install the version that wrote the folder, or export it to ONNX",
            )  # fmt: skip
        with redirect_stderr(StringIO()):
            model, report = loader.from_pretrained(
                place, local_files_only=True, dtype=torch.float32, attn_implementation="sdpa", output_loading_info=True
            )
    except UnsupportedError:
        raise
    except Exception as e:  # errors of several libraries, without a common base class
        raise UnsupportedError(
            f"transformers cannot load {place}: {str(e).strip().partition(chr(10))[0]}", rule="from_pretrained",
            remedy="load it with transformers to see more",
        ) from e  # fmt: skip
    if missing := sorted(report["missing_keys"]):
        raise InputError(f"{place} has no weights for {', '.join(missing[:3])}", rule="from_pretrained",
                         remedy="copy all files of the model")  # fmt: skip
    return model.eval()


def _planned(place: Path, model: Any, past: bool | None, torch: Any) -> _Plan:
    """Choose the inputs of a model. UnsupportedError: its kind is unknown."""
    config, taken = model.config, inspect.signature(model.forward).parameters
    main = model.main_input_name
    batch, length = EXAMPLE["batch"], EXAMPLE["sequence"]
    example: dict[str, Any] = {}
    axes: dict[str, Sequence[str | None]] = {}
    generates = type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
    caches = bool(_cache_name(taken)) and generates if past is None else past
    if caches and (not _cache_name(taken) or config.is_encoder_decoder):
        raise UnsupportedError(f"{type(model).__name__} is not exported with a cache of keys and values",
                               rule="past", remedy="leave out past")  # fmt: skip
    if main == "input_ids":
        for name in _tokens(place, taken, config):
            whole = caches and name == "attention_mask"
            example[name] = torch.ones(batch, length + (EXAMPLE["past_sequence"] if whole else 0), dtype=torch.long)
            axes[name] = ("batch", "total_sequence" if whole else "sequence")
    elif main in ("pixel_values", "input_features", "input_values"):
        shape = _picture(config, main)
        example[main] = torch.randn(batch, *shape)
        axes[main] = ("batch", *(None,) * len(shape))
    else:
        raise UnsupportedError(f"{type(model).__name__} takes {main}", rule="from_pretrained",
                               remedy="export it to ONNX, or use polydyn.from_torch")  # fmt: skip
    if config.is_encoder_decoder and "decoder_input_ids" in taken:
        example["decoder_input_ids"] = torch.ones(batch, EXAMPLE["decoder_sequence"], dtype=torch.long)
        axes["decoder_input_ids"] = ("batch", "decoder_sequence")
    layers = _caches(config, example, axes, torch) if caches else 0
    return _Plan(example, axes, layers)


def _cache_name(names: Iterable[str]) -> str:
    """Return the name of a decoder's cache among the names of arguments or results; "" if there is none."""
    return next((n for n in CACHES if n in names), "")


def _tokens(place: Path, taken: Mapping[str, Any], config: Any) -> list[str]:
    """Return the inputs that the folder's tokenizer gives and the model takes."""
    try:
        said = json.loads((place / "tokenizer_config.json").read_text(encoding="utf-8")).get("model_input_names")
    except (OSError, ValueError):
        said = None
    types = getattr(config, "type_vocab_size", 0) or 0
    given = said or [n for n in TEXTS if n != "token_type_ids" or types > 1]
    return [n for n in TEXTS if n in taken and n in given]


def _picture(config: Any, main: str) -> tuple[int, ...]:
    """Return the sizes of an input of numbers other than the batch. UnsupportedError: the configuration lacks them."""
    try:
        if main == "pixel_values":
            side = config.image_size
            height, width = side if isinstance(side, (list, tuple)) else (side, side)
            return config.num_channels, height, width
        if main == "input_features":
            return config.num_mel_bins, 2 * config.max_source_positions
        return (16000,)
    except AttributeError as e:
        raise UnsupportedError(f"config.json does not say the sizes of {main}: {e}", rule="from_pretrained",
                               remedy="use polydyn.from_torch with an example") from e  # fmt: skip


def _caches(config: Any, example: dict[str, Any], axes: dict[str, Sequence[str | None]], torch: Any) -> int:
    """Add the past keys and values of every layer; return the number of layers."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for layer in range(config.num_hidden_layers):
        for kind in ("key", "value"):
            name = f"past_key_values.{layer}.{kind}"
            example[name] = torch.randn(EXAMPLE["batch"], heads, EXAMPLE["past_sequence"], size)
            axes[name] = ("batch", None, "past_sequence", None)
    return int(config.num_hidden_layers)


def _wrapper(torch: Any, transformers: Any, model: Any, names: Sequence[str], layers: int) -> Any:
    """Return a module of positional tensors, whose result is a tuple of tensors."""

    parameters = inspect.signature(model.forward).parameters

    class Flat(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def named(self, *tensors: Any) -> dict[str, Any]:
            """Return the outputs by name."""
            plain = len(names) - 2 * layers
            inputs: dict[str, Any] = dict(zip(names[:plain], tensors[:plain], strict=True))
            if layers:
                pairs = [(tensors[plain + 2 * k], tensors[plain + 2 * k + 1]) for k in range(layers)]
                inputs[_cache_name(parameters)] = transformers.DynamicCache(pairs)
            if "use_cache" in parameters:
                inputs["use_cache"] = bool(layers)
            result = self.model(**inputs)
            found = {n: t for n, t in result.items() if isinstance(t, torch.Tensor)}
            for k in range(layers):
                layer = result[_cache_name(result)].layers[k]
                found |= {f"present.{k}.key": layer.keys, f"present.{k}.value": layer.values}
            return found

        def forward(self, *tensors: Any) -> tuple[Any, ...]:
            return tuple(self.named(*tensors).values())

    return Flat().eval()
