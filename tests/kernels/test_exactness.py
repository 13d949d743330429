"""Long sums of products begin again after some steps: their errors are those of short chains."""

from __future__ import annotations

import numpy as np
import pytest

from polydyn.compiler import compile
from tests.support.tiny import model, node

RNG = np.random.default_rng(11)
STEPS, CHANNELS, COLUMNS = 2304, 256, 24
CONSTANTS = {
    "w": RNG.standard_normal((STEPS, COLUMNS)).astype(np.float32),
    "taps": RNG.standard_normal((COLUMNS, CHANNELS, 3, 3)).astype(np.float32),
}
MODEL = model(
    [
        node("MatMul", "x w", "constant"), node("MatMul", "p q", "computed"),
        node("Conv", "image taps", "window", strides=[2, 2]),
    ],
    {
        "x": ("float32", ["M", STEPS]), "p": ("float32", ["M", "K"]), "q": ("float32", ["K", COLUMNS]),
        "image": ("float32", ["N", CHANNELS, "H", 7]),
    },
    ["constant", "computed", "window"],
    CONSTANTS,
)  # fmt: skip


def error(result: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> float:
    """Return the mean error of a product over that of the sums added one step after another."""
    exact = rows.astype(np.float64) @ columns.astype(np.float64)
    chain = np.zeros(exact.shape, np.float32)
    for k in range(rows.shape[1]):
        chain += rows[:, k, None] * columns[None, k]
    return float(abs(result - exact).mean() / abs(chain - exact).mean())


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_long_sums_have_the_errors_of_short_chains(rows: int) -> None:
    program = compile(MODEL, threads=1)
    x = RNG.standard_normal((rows, STEPS)).astype(np.float32)
    image = RNG.standard_normal((1, CHANNELS, 2 * rows + 1, 7)).astype(np.float32)
    out = program.run({"x": x, "p": x, "q": CONSTANTS["w"], "image": image})
    pixels = np.lib.stride_tricks.sliding_window_view(image, (3, 3), (2, 3))[:, :, ::2, ::2]
    pixels = pixels.transpose(0, 2, 3, 1, 4, 5).reshape(-1, STEPS)
    window = np.asarray(out["window"]).transpose(0, 2, 3, 1).reshape(-1, COLUMNS)
    taps = CONSTANTS["taps"].reshape(COLUMNS, STEPS).T
    assert error(np.asarray(out["constant"]), x, CONSTANTS["w"]) < 0.5
    assert error(np.asarray(out["computed"]), x, CONSTANTS["w"]) < 0.5
    assert error(window, pixels, taps) < 0.5
