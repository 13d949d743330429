"""``polydyn quantize`` and ``polydyn to-half``: write a model with fewer bits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from polydyn.cli.group import main
from polydyn.cli.machine import as_json
from polydyn.cli.output import keep_source, print_json, print_text
from polydyn.cli.parsing import sizes

if TYPE_CHECKING:
    from polydyn.quantization import Converted


def of_conversions(f: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of both commands."""
    options = [
        click.argument("model"),
        click.option("-o", "--output", required=True, help="The ONNX file to write."),
        click.option("--keep", multiple=True, metavar="PATTERN", help="Names of nodes or weights that stay floats."),
        click.option("--compare", type=sizes, metavar="B=1,L=8",
                     help="Sizes at which both models run on random inputs; prints the error of each output."),
    ]  # fmt: skip
    return functools.reduce(lambda g, option: option(g), reversed(options), f)


@main.command()
@of_conversions
@click.option("--bits", type=click.Choice(["4", "8"]), default="4", help="Bits of a weight. Default 4.")
@click.option("--block", type=int, default=32, help="Weights of a column that share a scale. Default 32.")
@click.option("--asymmetric", is_flag=True, help="Give every block a zero point.")
@click.option("--method", type=click.Choice(["blocks", "dynamic"]), default="blocks",
              help="Blocks of weights only, or bytes of weights and of rows.")  # fmt: skip
@click.option("--max-error", type=float, help="Bound on the error of a layer: then 8 bits, then floats.")
@click.option("--no-search", is_flag=True, help="Do not try several clippings of each block.")
@click.option("--accuracy-level", type=click.IntRange(0, 4), help="ONNX Runtime's accuracy level of the products.")
@click.option("--calibration", multiple=True, metavar="FILE.npz", help="Inputs of a call that weigh the errors.")
@as_json
def quantize(
    model: str, output: str, keep: tuple[str, ...], compare: dict[str, int] | None, bits: str, block: int,
    asymmetric: bool, method: str, max_error: float | None, no_search: bool, accuracy_level: int | None,
    calibration: tuple[str, ...], as_json: bool,
) -> None:  # fmt: skip
    """Round the weights of MODEL's products to 4 or 8 bits. The result is ONNX that other runtimes run too."""
    import polydyn

    keep_source(model, output)
    done = polydyn.quantize(
        model, output, bits=int(bits), block=block, symmetric=not asymmetric, method=method, max_error=max_error,
        keep=keep, search=not no_search, accuracy_level=accuracy_level, compare=compare,
        calibration=[_call(path) for path in calibration] or None,
    )  # fmt: skip
    _answer(done, output, as_json)


@main.command("to-half")
@of_conversions
@click.option("--dtype", type=click.Choice(["float16", "bfloat16"]), default="float16", help="Default float16.")
@click.option("--keep-io", is_flag=True, help="Inputs and outputs stay float32.")
@as_json
def to_half(
    model: str, output: str, keep: tuple[str, ...], compare: dict[str, int] | None, dtype: str, keep_io: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Store the weights and activations of MODEL in 16-bit floats."""
    import polydyn

    keep_source(model, output)
    done = polydyn.to_half(model, output, dtype=dtype, keep=keep, keep_io=keep_io, compare=compare)
    _answer(done, output, as_json)


def _call(path: str) -> dict[str, Any]:
    """Load the inputs of a call from a file of ``numpy.savez``."""
    import numpy as np

    from polydyn.errors import InputError

    try:
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays)
    except (OSError, ValueError, EOFError, AttributeError, TypeError) as e:
        raise InputError(f"cannot read {path}: {e}", remedy="give a file that numpy.savez wrote") from e


def _answer(done: Converted, output: str, as_json: bool) -> None:
    """Print the report."""
    if as_json:
        print_json({"output": output, **done.report.to_json()})
    else:
        print_text(str(done.report))
        print_text(f"written: {output}")
