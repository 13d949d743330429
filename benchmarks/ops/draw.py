"""Draws the list of products that benchmarks/gemm.py times: python -m benchmarks.ops.draw writes gemm_list.json.

Ranges of Vortex (Table 3), sizes uniform in their logarithm, drawn with a fixed seed; a draw that would take more than
MAX_FLOPS or an operand above MAX_ELEMENTS is drawn again. Each (N, K) is one weight: compiled once, run at several M.
``regular`` and ``skinny`` are not drawn: shapes of transformers, and shapes at which libraries are known to be weak.
``batched``: both operands dynamic, all four sizes symbolic, one program for all of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

LIST = Path(__file__).parent / "gemm_list.json"
SEED = 2024
MAX_FLOPS = 6e9
MAX_ELEMENTS = 12_000_000

Range = tuple[int, int]
TABLE3: dict[str, tuple[Range, Range, Range]] = {
    "deepbench": ((35, 8448), (1, 6000), (128, 500_000)),
    "transformer": ((1, 476), (768, 4096), (768, 4096)),
    "cnn": ((1, 128), (80, 25_088), (10, 4096)),
    "gnn": ((2708, 1_888_584), (2, 121), (8, 3703)),
}
"""Maps a name to inclusive ranges of M, N and K."""

WEIGHTS, ROWS = 11, 3
"""Draws per range: distinct (N, K), and M for each."""

REGULAR_MS = (1, 3, 7, 16, 48, 61, 128, 333, 1008)
REGULAR = ((768, 768), (3072, 768), (768, 3072))
SKINNY = (
    (4, 2640, 1054),
    (16, 1160, 3727),
    (10, 7473, 903),
    (1, 3632, 814),
    (503, 10, 2312),
    (982, 4, 1812),
    (87_237, 6, 506),
    (6963, 2, 38),
    (40_904, 35, 423),
    (7, 225, 12),
)
"""(M, N, K) at which baselines were measured first."""

BATCHES: tuple[Range, Range, Range, Range] = ((1, 96), (1, 256), (1, 256), (8, 256))
BATCHED_CASES = 30


@dataclass(frozen=True)
class Gemm:
    """One weight and its row counts; fp32."""

    family: str
    n: int
    k: int
    ms: tuple[int, ...]


def _draw(r: np.random.Generator, low_high: Range) -> int:
    low, high = low_high
    return int(np.clip(round(float(np.exp(r.uniform(np.log(low), np.log(high))))), low, high))


def _fits(m: int, n: int, k: int) -> bool:
    return 2.0 * m * n * k <= MAX_FLOPS and max(m * n, n * k, m * k) <= MAX_ELEMENTS


def _family(r: np.random.Generator, name: str) -> Iterator[Gemm]:
    ms_range, n_range, k_range = TABLE3[name]
    count = 0
    while count < WEIGHTS:
        n, k = _draw(r, n_range), _draw(r, k_range)
        ms = [m for m in (_draw(r, ms_range) for _ in range(20)) if _fits(m, n, k)]
        if len(set(ms)) >= ROWS:
            yield Gemm(name, n, k, tuple(sorted(list(dict.fromkeys(ms))[:ROWS])))
            count += 1


def gemms() -> list[Gemm]:
    """Return every weight with its row counts."""
    r = np.random.default_rng(SEED)
    fixed = [Gemm("regular", n, k, REGULAR_MS) for n, k in REGULAR]
    fixed += [Gemm("skinny", n, k, (m,)) for m, n, k in SKINNY]
    return fixed + [g for name in TABLE3 for g in _family(r, name)]


def batched() -> list[tuple[int, int, int, int]]:
    """Return (B, M, N, K) of products with two dynamic operands."""
    r = np.random.default_rng(SEED + 1)
    out: list[tuple[int, int, int, int]] = []
    while len(out) < BATCHED_CASES:
        b, m, n, k = (_draw(r, x) for x in BATCHES)
        if _fits(b * m, n, k):
            out.append((b, m, n, k))
    return out


def read() -> tuple[list[Gemm], list[tuple[int, int, int, int]]]:
    """Read the committed list: weights with their rows, and batched sizes."""
    content = json.loads(LIST.read_text())
    weights = [Gemm(g["family"], g["n"], g["k"], tuple(g["ms"])) for g in content["gemm"]]
    return weights, [(b, m, n, k) for b, m, n, k in content["batched"]]


def text() -> str:
    """Return the expected content of gemm_list.json: one weight or one batched case a line."""
    weights = ",\n".join(f"  {json.dumps(asdict(g))}" for g in gemms())
    batches = ",\n".join(f"  {json.dumps(b)}" for b in batched())
    return f'{{\n "seed": {SEED},\n "gemm": [\n{weights}\n ],\n "batched": [\n{batches}\n ]\n}}\n'


if __name__ == "__main__":
    LIST.write_text(text())
    print(f"{LIST.name}: {sum(len(g.ms) for g in gemms())} products of {len(gemms())} weights, {BATCHED_CASES} batched")
