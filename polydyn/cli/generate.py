"""``polydyn generate``: continue a text with the decoder and the tokenizer of a folder."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from polydyn.cli.group import main
from polydyn.cli.machine import CompileSettings, as_json, of_program
from polydyn.cli.output import print_json
from polydyn.errors import InputError, MissingModelError, MissingPackageError

MODELS = ("model.onnx", "onnx/model.onnx")
"""Where exporters write the model inside a folder."""
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer writes for bytes that are not yet a whole character."""


@main.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.argument("text")
@click.option("--model", type=click.Path(path_type=Path), help="A model or an artifact; default FOLDER/model.onnx.")
@click.option("--max-tokens", type=int, default=256, help="Default 256.")
@click.option("--temperature", type=float, default=0.0, help="0, the default, takes the likeliest token.")
@click.option("--top-k", type=int, default=0, help="Draw from so many tokens; 0, the default: from all.")
@click.option("--top-p", type=float, default=1.0, help="Draw from the likeliest tokens of this probability.")
@click.option("--seed", type=int, default=0, help="Equal seeds give equal texts. Default 0.")
@click.option("--stop", multiple=True, metavar="TEXT", help="A text that ends the output; it is not printed.")
@as_json
@of_program
def generate(
    folder: Path, text: str, model: Path | None, max_tokens: int, temperature: float, top_k: int, top_p: float,
    seed: int, stop: tuple[str, ...], as_json: bool, settings: CompileSettings,
) -> None:  # fmt: skip
    """Continue TEXT with the model in FOLDER, which has tokenizer.json and perhaps config.json beside it."""
    import polydyn

    tokenizer = open_tokenizer(folder)
    program = settings.open(str(model or find_model(folder)))
    prompt = tokenizer.encode(text).ids
    start = time.perf_counter()
    ids: list[int] = []

    def counted() -> Iterator[int]:
        for token in polydyn.generate(
            program, prompt, max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed,
            stop=end_ids(folder),
        ):  # fmt: skip
            ids.append(token)
            yield token

    parts = []
    for part in stream_text(tokenizer, counted(), end_ids(folder), stop):
        parts.append(part)
        if not as_json:
            print(part, end="", flush=True)
    seconds = time.perf_counter() - start
    if as_json:
        print_json({"text": "".join(parts), "prompt_tokens": len(prompt), "ids": ids, "seconds": seconds})
    else:
        print()


def open_tokenizer(folder: Path) -> Any:
    """Open FOLDER/tokenizer.json. MissingPackageError: ``tokenizers`` is not installed. InputError: no such file."""
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as e:
        raise MissingPackageError(
            "polydyn generate needs the package tokenizers", remedy="pip install 'polydyn[generate]'"
        ) from e
    path = folder / "tokenizer.json"
    try:
        return Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise InputError(f"cannot read {path}: {e.strerror}", remedy="name a folder with tokenizer.json") from e
    except Exception as e:  # the package raises the base class
        raise InputError(f"{path} is no tokenizer: {e}", remedy="export the model's folder again") from e


def find_model(folder: Path) -> Path:
    """Return the model of a folder: the usual names, else the only .onnx file."""
    found = [folder / name for name in MODELS if (folder / name).is_file()] or sorted(folder.glob("*.onnx"))
    if not found or (len(found) > 1 and found[0].name != "model.onnx"):
        names = ", ".join(p.name for p in found) or "no .onnx file"
        raise MissingModelError(f"{folder} has {names}", remedy="choose a model with --model FILE")
    return found[0]


def end_ids(folder: Path) -> list[int]:
    """Return the ids that end a text, by generation_config.json and config.json."""
    for name in ("generation_config.json", "config.json"):
        try:
            value = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError):
            continue
        if value is not None:
            return [int(x) for x in (value if isinstance(value, list) else [value])]
    return []


def stream_text(tokenizer: Any, ids: Iterator[int], ends: list[int], stop: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the text of ids piece by piece, whole characters only, without the ids in ``ends``.

    It stops before the first of the texts ``stop``; what may be the beginning of one is held back.
    """
    read: list[int] = []
    shown, longest = 0, max(map(len, stop), default=1) - 1
    for token in ids:
        if token in ends:
            break
        read.append(token)
        text = tokenizer.decode(read)
        places = [p for s in stop if (p := text.find(s, max(0, shown - longest))) >= 0]
        if places:
            yield text[shown : min(places)]
            return
        end = len(text) - longest
        if not text.endswith(UNFINISHED) and end > shown:
            yield text[shown:end]
            shown = end
    yield tokenizer.decode(read)[shown:]
