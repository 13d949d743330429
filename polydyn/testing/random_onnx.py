"""Random ONNX models in exporters' style, and in any form that ONNX allows: a model is a function of its seed.

Every model has a theme, which defines its inputs and likely motifs; the theme ``operators`` has single operators of any
opset, first one version of one operator. ``random_case`` makes the model with its calls.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polydyn.testing import motifs as m
from polydyn.testing import motifs_control as c
from polydyn.testing import motifs_layers as n
from polydyn.testing import motifs_moved as v
from polydyn.testing import motifs_tables as t
from polydyn.testing.drafts import MAX_OPSET, PLAIN, SIZES, Case, Dims, Draft, Rejected
from polydyn.testing.motifs import Motif
from polydyn.testing.operator_cases import operator, operator_of, subject

VIEWS: Mapping[Motif, float] = {
    m.taken_apart: 3, m.cuts_joined: 2, m.concat: 2, m.cut: 2, m.reshape: 3, m.transpose: 2, m.roll: 1, t.gather: 0.7,
}  # fmt: skip
MAPS: Mapping[Motif, float] = {m.unary: 3, m.binary: 2, n.reduction: 1, n.softmax: 0.8, n.norm: 1, n.matmul: 2}


@dataclass(frozen=True)
class Theme:
    """A theme of models: dims of the first input, motifs and their weights, number of steps; ``oldest`` opset."""

    inputs: Sequence[Dims]
    motifs: Mapping[Any, float]
    steps: Sequence[int] = (2, 3, 5, 7)
    oldest: int = 7
    rarely: int = 1
    """One in ``rarely`` models is planned or compiled, of the models that otherwise would be."""
    sizes: Sequence[int] = SIZES


THEMES: Mapping[str, Theme] = {
    "views": Theme([["B", 8], ["B", "L", 8], ["B", "L", 4], [6, "L"], ["B", 4, 6, 6], [2, 8], ["L", 12],
                    [1, 3, "H", "W"], ["B", 40, 9]], {**MAPS, **VIEWS, **{k: 2 * v for k, v in VIEWS.items()}}),
    "products": Theme([["B", "L", 8], ["L", 6], ["B", 4, "L"]], {
        **MAPS, n.product: 2, n.other_product: 4, n.attention: 2, m.transpose: 1, n.cache: 1, m.taken_apart: 0.5}),
    "vision": Theme([["B", 3, "H", "W"], [1, 4, "H", "W"], ["B", 4, "H", 16]], {
        n.pyramid: 4, n.conv: 2, n.batch_norm: 1, m.unary: 2, m.binary: 1, m.focus: 1, m.taken_apart: 1, m.concat: 1,
        n.reduction: 0.5}, sizes=(8, 16, 32, 64, 24, 1, 2, 3, 7, 12, 33)),
    "windows": Theme([["B", "L", 4]], {m.windows: 5, m.roll: 1, n.norm: 0.5, n.matmul: 0.5, m.unary: 1}, (1, 2, 3)),
    "tables": Theme([["B", 6], ["B", 5, "L"], [4, "L", 3]], {
        t.bag: 4, t.gather: 2, t.gather_elements: 2, t.scatter: 1.5, t.running: 1, t.top: 1.5, **MAPS}),
    "sizes": Theme([["B", "L", 8], ["B", "L"], ["B", 3, "L"], ["L"]], {
        c.sized_slice: 3, c.sized_made: 2, c.sized_reshape: 2, c.flat_index: 1, n.conv: 0.5, **MAPS, m.concat: 1}),
    "control": Theme([["B", "L"], ["B", 4], ["L", 3]], {
        c.branch: 2, c.squeeze_branch: 1, c.loop: 2, c.scan: 2, c.recurrence: 3, **MAPS}, (1, 2, 3, 4)),
    "bytes": Theme([["B", "L", 8], ["B", 8], ["L", 4]], {
        c.quantized: 4, c.dynamic_bytes: 2, c.rounded: 2, n.matmul: 1, m.unary: 1, m.taken_apart: 0.5, n.norm: 0.5},
        oldest=11),
    "operators": Theme([["B", "L"], ["B", 3], [2, "L"], ["B", 4, "L"], ["B", 4, "H", "W"], ["N"], ["B", 3, 5, 7]],
        {operator: 1}, (3, 5, 8), 1, 4),
    "moved": Theme([["B", 3, "H", "W"], ["B", 2, "L"], [1, 4, "H", 6], ["B", 1, 2, "H", "W"], ["B", 3, 5, "W"]], {
        v.moved_window: 6, m.unary: 1, n.batch_norm: 0.5, n.reduction: 0.5, m.concat: 0.5}, (1, 1, 2, 3)),
    "mixed": Theme([["B", "L", 8], ["B", 4, "H", "W"], ["B", "L"]], {
        **MAPS, **VIEWS, n.attention: 1, n.pyramid: 1, t.bag: 1, c.sized_slice: 1, c.branch: 0.5, c.loop: 0.5,
        c.recurrence: 0.5, c.quantized: 1, c.rounded: 1, operator: 1.5, t.scatter: 0.5, t.running: 0.5, t.top: 0.5},
        (4, 6, 9)),
}  # fmt: skip
SHARES = {"views": 3, "products": 2, "vision": 1.5, "windows": 0.6, "tables": 1.5, "sizes": 1.5, "control": 1.2,
          "bytes": 1.2, "operators": 8, "mixed": 2, "moved": 1}  # fmt: skip
"""Relative frequency of each theme."""
TRIES = 12
TILE_SIZES = (8, 16, 32, 64)
"""Sizes of vectors and tiles; a call of every model has sizes around one of them."""
SPECIAL = 0.06
"""Share of models outside the theme ``operators`` whose inputs have special values."""


def random_case(seed: int, theme: str = "") -> Case:
    """Return the model of a seed. ``theme``: use this theme instead of the seed's own."""
    r = random.Random(seed)
    drawn = _theme(r)
    theme = theme or drawn
    of = THEMES[theme]
    opset, about = r.randint(of.oldest, MAX_OPSET), None
    if theme == "operators" and r.random() < 0.9:
        about, opset = subject(r)
    kind = r.choices(["float32", "float64", "float16"], [10, 1, 0 if theme in ("vision", "bytes") else 1])[0]
    b = Draft(seed, opset if opset > 6 or theme == "operators" else 7, kind)
    special = theme == "operators" and r.random() < 0.1
    special = special or random.Random(f"{seed} special").random() < SPECIAL
    b.loose = special or (theme == "operators" and r.random() < 0.3)
    first = r.choice(of.inputs)
    b.input(first)
    if r.random() < 0.4:
        b.input(r.choice([first, r.choice(of.inputs)]))
    steps, found = r.choice(of.steps), 0
    if about is not None:
        with contextlib.suppress(Rejected):
            operator_of(b, about)
    for _ in range(TRIES * steps):
        try:
            r.choices(list(of.motifs), list(of.motifs.values()))[0](b)
            found += 1
        except Rejected:
            pass
        if found == steps:
            break
    return b.finish(f"seed{seed}_{theme}", _outputs(b), _calls(b, of), special)


def _theme(r: random.Random) -> str:
    return r.choices(list(SHARES), list(SHARES.values()))[0]


def theme_of(seed: int) -> Theme:
    """Return the theme of the model of a seed."""
    return THEMES[_theme(random.Random(seed))]


def _outputs(b: Draft) -> list[str]:
    """Return the last unread results, some that should be outputs, perhaps some other and a view of one."""
    r = b.random
    made = [o for n in b.nodes for o in n.output if o in b.values]
    read = {i for n in b.nodes for i in n.input}
    out = [t for t in made if t not in read][-4:]
    out += [t for t in b.extra if t in b.values and r.random() < 0.6]
    if made and r.random() < 0.4:
        out.append(r.choice(made))
    if out and r.random() < 0.2 and b.rank(out[0]) > 1 and b.opset > 4:
        with contextlib.suppress(Rejected):
            out.append(b.add("Reshape", [out[0], b.ints(-1)]))
    out += list(b.uneven)[:2]
    if not out:
        out = [b.add("Neg" if b.opset > 5 else "Abs", [b.inputs[0].name])]
    return list(dict.fromkeys(out))


def _calls(b: Draft, theme: Theme) -> list[dict[str, int]]:
    """Return sizes of several calls: the sizes of the model's construction, others, sizes around tiles, and one with an
    axis of 0 or 1 element.
    """
    r = b.random
    calls = [dict(b.samples[0])] + [{n: r.choice(theme.sizes) for n in PLAIN} for _ in range(3)]
    calls.append({n: r.choice((*theme.sizes[:4], 0, 1)) for n in PLAIN})
    if theme is THEMES["vision"]:
        calls.append({n: (2 if n == "B" else r.choice((16, 32, 64))) for n in PLAIN})
    calls.insert(len(calls) - 1, _around_tiles(b.seed))  # the first and the last call are planned: small ones
    return calls


def _around_tiles(seed: int) -> dict[str, int]:
    """Return sizes in which two dims are a tile, or differ by one; all other dims are small."""
    r = random.Random(f"{seed} tiles")
    sizes = {d: r.choice((1, 2, 3)) for d in PLAIN}
    for d in r.sample(PLAIN, 2):
        sizes[d] = r.choice(TILE_SIZES) + r.choice((-1, 0, 1))
    return sizes
