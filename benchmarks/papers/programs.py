"""Tables about whole programs: BladeDISC's Table 2 (stitching) and Vortex's Figure 13 (networks)."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

import polydyn
from benchmarks import arguments
from benchmarks.models import export
from benchmarks.papers.report import Grid, Result, Settings, number, row
from benchmarks.rows import Effort, Field, Row, Shape, geomean, name_shape, progress
from polydyn.testing import models

SECONDS = 4.0
"""Time budget for the turns of one case."""
MICRO = 1e6
PRINTED_MICROSECONDS = {"LayerNorm": (32.68, 15.70, 21.06), "Softmax": (33.40, 12.37, 16.05)}
"""BladeDISC's Table 2 in microseconds: without stitch, with stitch, PyTorch."""
UNSTITCHED_KIND = "polydyn-unstitched"


# -- BladeDISC, Table 2 ----------------------------------------------------------------------------------------------


def launches(model: onnx.ModelProto, without: Sequence[str]) -> int:
    """Return the number of kernels that a model launches."""
    program = polydyn.compile(model, options=polydyn.Options(without=frozenset(without)), cache=False)
    return len(program.manifest["launches"])


def stitch(settings: Settings) -> Result:
    """BladeDISC Table 2: latency and kernels of LayerNorm and softmax at 1024 x 1024, with stitching and without."""
    side = 32 if settings.quick else 1024
    graphs = {"LayerNorm": models.layer_norm(side), "Softmax": models.unary("Softmax", ["R", side], axis=-1)}
    players = arguments.rivals(settings.threads, (), "torch", UNSTITCHED_KIND)
    effort = Effort(settings.rounds if settings.quick else max(9, settings.rounds), SECONDS)
    rows = []
    with Field({k: k for k in players if settings.asks(k)}, settings.threads) as field:
        for name, model in graphs.items():
            with tempfile.TemporaryDirectory() as folder:
                field.load(models.save(model, Path(folder)))
                measured = field.measure({"R": side}, effort, 0.0)
            rows += _stitched(name, model, measured)
    head = ("subgraph", "us", "kernels", "over stitched", "printed us", "printed kernels", "printed over stitched")
    setup = (
        f"float32, R x {side} with R unknown until the call, R = {side}; {settings.threads} threads; polydyn with "
        'and without the pass `stitch` (`Options(without={"stitch"})`), not tuned; protocol of benchmarks/protocol.py, '
        f"at most {effort.rounds} rounds."
    )
    return Result("bladedisc-2", setup, (Grid("Times; above 1 stitching gains.", head, tuple(rows)),))


def _stitched(name: str, model: onnx.ModelProto, measured: Row) -> list[tuple[str, ...]]:
    """Return the lines of a subgraph."""
    seconds: Mapping[str, float] = measured["seconds"]
    ours, printed = seconds["polydyn"], PRINTED_MICROSECONDS[name]
    kernels = {"polydyn": str(launches(model, ())), UNSTITCHED_KIND: str(launches(model, ("stitch",)))}
    stated = {"polydyn": (printed[1], "1"), UNSTITCHED_KIND: (printed[0], "3"), "torch": (printed[2], "-")}
    texts = {"polydyn": "with stitch", UNSTITCHED_KIND: "without stitch"}
    rows = []
    for k, s in seconds.items():
        us, count = stated.get(k, (0.0, "-"))
        them = (number(us), count, number(us / printed[1])) if us else ("-", "-", "-")
        rows.append(row(f"{name}, {texts.get(k, k)}", [s * MICRO, kernels.get(k, "-"), s / ours, *them]))
    noise = f"{name}, spread of an A/A run", f"{measured['spread']:.1%}", *[""] * 5
    return [*rows, noise]


# -- Vortex, Figure 13 -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Network:
    """A network of the figure. ``printed``: Vortex's average speedup over its baselines and devices; ``symbol``: the
    dim on the figure's x-axis; ``tiny``: the stored model of quick runs.
    """

    title: str
    printed: float
    symbol: str
    tiny: str

    def shape(self, size: int, model: onnx.ModelProto) -> Shape:
        """Return the shape at one size: batch 1 for texts, images of 224 x 224 if their sizes are unknown."""
        free = {d.dim_param for v in model.graph.input for d in v.type.tensor_type.shape.dim if d.dim_param}
        return {n: size if n == self.symbol else {"B": 1, "H": 224, "W": 224}[n] for n in sorted(free)}


NETWORKS = {
    "bert_base": Network("BERT", 2.91, "L", "bert_tiny"),
    "bert_large": Network("BERT-large", 2.63, "L", "bert_tiny"),
    "gpt2": Network("GPT-2", 2.94, "L", "gpt2_tiny"),
    "alexnet": Network("AlexNet", 2.01, "N", "alexnet_tiny"),
    "resnet50": Network("ResNet", 2.13, "N", "resnet_tiny"),
    "googlenet": Network("GoogLeNet", 3.24, "N", "googlenet_tiny"),
}
TEXTS = tuple(round(n) for n in np.linspace(1, 476, 17))
"""17 lengths from 1 to 476 (the paper does not list them)."""
BATCHES, MAX_BATCH = (1, *range(4, 65, 4)), 16
"""The paper's batches of images, and the largest one that is run: others take minutes a case."""
POINTS = 2
"""Number of sizes of each network that are run by default."""
DATA = Path(__file__).parent.parent.parent / "tests" / "data"


def sizes_of(network: Network, settings: Settings) -> list[int]:
    """Draw the sizes of a network by the seed."""
    if settings.quick:
        return [1, 5][: settings.points or 2]
    every = TEXTS if network.symbol == "L" else [n for n in BATCHES if n <= MAX_BATCH]
    return sorted(random.Random(settings.seed).sample(list(every), min(settings.points or POINTS, len(every))))


def networks(settings: Settings) -> Result:
    """Vortex Fig. 13: BERT, BERT-large, GPT-2, AlexNet, ResNet, GoogLeNet over length or batch."""
    chosen = {n: x for n, x in NETWORKS.items() if settings.asks(n)}
    if not settings.quick:
        export.main([str(settings.models), *chosen])
    effort = Effort(settings.rounds, SECONDS)
    cases: dict[str, list[Row]] = {}
    with Field(arguments.rivals(settings.threads, ()), settings.threads) as field:
        for name, network in dict(list(chosen.items())[:2] if settings.quick else chosen).items():
            path = DATA / f"{network.tiny}.onnx" if settings.quick else settings.models / f"{name}.onnx"
            field.load(path)
            model = onnx.load(path, load_external_data=False)
            cases[name] = []
            for size in sizes_of(network, settings):
                measured = field.measure(network.shape(size, model), effort, 0.0)
                cases[name].append(measured | {"case": name})
                progress(cases[name][-1])
    return _networks(settings, cases)


def _networks(settings: Settings, cases: Mapping[str, Sequence[Row]]) -> Result:
    means = tuple(
        row(NETWORKS[n].title, [geomean(rows), min((r["ratio"] for r in rows if "ratio" in r), default=0.0),
                                len(rows), NETWORKS[n].printed])
        for n, rows in cases.items()
    )  # fmt: skip
    each = tuple((NETWORKS[n].title, name_shape(r["shape"]), *_times(r)) for n, rows in cases.items() for r in rows)
    setup = (
        f"float32, {settings.threads} threads, polydyn without tuning; weights drawn at random by seed, BERT-large "
        f"with 1000 tokens; texts of batch 1, images of 224 x 224; up to {settings.points or POINTS} of the lengths, "
        f"and of the batches up to {MAX_BATCH}, drawn by seed {settings.seed}; protocol of benchmarks/protocol.py, "
        f"{settings.rounds} rounds."
    )
    heads = ("network", "over ONNX Runtime", "least", "cases", "printed, all baselines")
    grids = (
        Grid("Times of ONNX Runtime (its best form) over polydyn's.", heads, means),
        Grid("Every case.", ("network", "shape", "polydyn ms", "ONNX Runtime ms", "ratio", "spread"), each),
    )
    return Result("vortex-13", setup, grids)


def _times(r: Row) -> tuple[str, ...]:
    """Return milliseconds of both, their ratio and the spread; dashes if one refused."""
    if "ratio" not in r:
        return ("-", "-", "-", "-")
    ours = r["seconds"]["polydyn"] * 1e3
    return number(ours), number(ours * r["ratio"]), number(r["ratio"]), f"{r['spread']:.1%}"
