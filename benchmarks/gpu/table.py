"""Recomputes the review's table: float16 cases on an H200, then and now, compared with their baselines. Needs no GPU.

    python -m benchmarks.gpu.table [--only NAME ...]

Each line has, for one case, the kernel that takes longest, its machine code and resources, the estimate, the roofline,
and the baseline's time over the estimate, which should be ``MIN_RATIO``. Then come the loops that the review counted.
An estimate is the cost model's, but at least the roofline at rates that an H200 was seen to sustain. Earlier times and
times of the baselines are from a review of the kernels of commit 15eb6ea, each with its source (for means and sums
they are estimates of commit fabe426). Nothing here is measured. Results go to benchmarks/results/gpu_table.json; the
exit status is the number of lines that miss their goal.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from benchmarks import record
from benchmarks.gpu import resources, sass, timed, weights
from benchmarks.gpu.choice import roofline
from benchmarks.gpu.programs import inner_convolution, mean_of_pixels, model, node
from benchmarks.gpu.transformers import build
from polydyn.compiler import plan_program
from polydyn.gpu.compiler import KernelUse, compiler_version
from polydyn.gpu.hardware import DEVICES, Hardware, load
from polydyn.program.estimates import estimated, launch_time
from polydyn.program.plan import Candidate, HostPlan, Launch
from polydyn.schedules.index import ZERO, Index
from polydyn.testing.choice import choose

ARCH, DTYPE, MIN_RATIO = "sm_90a", "float16", 0.85
SUSTAINED_TFLOPS, SUSTAINED_GB_PER_S = 798.0, 4300.0
"""Sustained rates of an H200: torch's product of 8192^3 (bfloat16, random numbers), and its copy."""
LAUNCH = load(DEVICES[ARCH]).costs.launch_ns / 1000
"""Microseconds between launches."""
ON_H200, FROM_BYTES = "measured on an H200", "estimated from bytes"
FROM_MEMORY = "recalled from publications or estimated, not checked"
Range = tuple[float, float]
PIXELS = (
    ("1x1, 256 to 64, 56x56", 256, 64, 1, 56, 1, 1), ("1x1, 64 to 256, 56x56", 64, 256, 1, 56, 1, 1),
    ("3x3/2, 128, 56x56", 128, 128, 3, 56, 2, 1), ("3x3, 256, 14x14", 256, 256, 3, 14, 1, 1),
    ("3x3, 512, 7x7", 512, 512, 3, 7, 1, 1), ("depthwise 3x3, 144, 56x56", 144, 144, 3, 56, 1, 144),
    ("depthwise 3x3/2, 144, 56x56", 144, 144, 3, 56, 2, 144), ("depthwise 5x5, 240, 28x28", 240, 240, 5, 28, 1, 240),
    ("depthwise 7x7, 96, 56x56", 96, 96, 7, 56, 1, 96),
)  # fmt: skip
"""More convolutions of ResNet-50, depthwise ones of MobileNet-v2, v3 and ConvNeXt: channels, filters, window, side,
stride, groups.
"""


@dataclass(frozen=True)
class Rival:
    """A baseline with its microseconds, minimum and maximum, and their source."""

    name: str
    us: Range
    source: str = FROM_MEMORY


@dataclass(frozen=True)
class Case:
    """A model at sizes of its dims; ``before``: version and microseconds (minimum, maximum) from the review."""

    name: str
    model: Callable[[], Any]
    sizes: Mapping[str, int]
    before: tuple[str, Range]
    rivals: tuple[Rival, ...] = ()


def at_rate(tflops: Range, flops: float) -> Range:
    """Return microseconds, minimum and maximum, for rates in TFLOP/s."""
    return flops / tflops[1] / 1e6, flops / tflops[0] / 1e6


def cases() -> tuple[Case, ...]:
    """Return the cases of section 2.1 of the review."""
    large, half = 2.0 * 8192**3, 2.0 * 4096**3
    add, conv = 3 * 2 * timed.BANDWIDTH / 4300e3, 2.0 * 32 * 56 * 56 * 64 * 64 * 9
    elements = (add / 0.92, add / 0.85)
    wide, few = "wgmma_128x256x64_4", "mma_16x64x64"
    return (
        Case("8192^3", product, dims(8192, 8192, 8192), (wide, at_rate((620, 680), large)),
             (Rival("cuBLAS", at_rate((769, 798), large), ON_H200),)),
        Case("4096^3", product, dims(4096, 4096, 4096), (wide, at_rate((570, 640), half)),
             (Rival("cuBLAS", at_rate((720, 765), half)),)),
        Case("4096x3072x768, relu", layer("relu", 768, 3072), {"M": 4096}, (wide, (30, 34)),
             (Rival("cuBLAS", (28, 30)),)),
        Case("4096x3072x768, gelu", layer("gelu", 768, 3072), {"M": 4096}, (wide, (60, 75)),
             (Rival("cuBLAS", (30, 32)),)),
        Case("4096x768x3072", layer("plain", 3072, 768), {"M": 4096}, (wide, (30, 34)), (Rival("cuBLAS", (25, 26)),)),
        Case("128x3072x768", layer("plain", 768, 3072), {"M": 128}, ("mma_64x64x32", (6, 8)),
             (Rival("cuBLAS", (4.5, 5)),)),
        Case("16x3072x768", layer("plain", 768, 3072), {"M": 16}, (few, (4, 5)), (Rival("cuBLAS", (3.5, 4.5)),)),
        Case("16x768x3072", layer("plain", 3072, 768), {"M": 16}, ("split_16x64", (6, 7)),
             (Rival("cuBLAS", (4, 5)),)),
        Case("1x4096x4096", layer("plain", 4096, 4096), {"M": 1}, ("gemv_2_n8", (12, 14)),
             (Rival("cuBLAS", (9, 10)),)),
        few_rows(768, 3072), few_rows(3072, 768),
        Case("attention 8x12x512x64", attention("none"), {"B": 8, "L": 512}, ("mma.sync 64x64", (45, 60)),
             (Rival("FlashAttention-3", (20, 24)), Rival("FlashAttention-2", (28, 32)))),
        Case("the same, mask of keys", attention("keys"), {"B": 8, "L": 512}, ("mma.sync 64x64", (60, 75))),
        decoding(32, 128, 4096), decoding(12, 64, 4096),
        Case("LayerNorm 4096x768", norm, {"M": 4096, "N": 768}, ("warp or block", (5, 7)), (Rival("torch", (5, 5)),)),
        Case("element-wise, large", elementwise, {"N": timed.BANDWIDTH}, ("wide", elements),
             (Rival("torch", elements, FROM_BYTES),)),
        Case("conv 3x3, 64, 56x56, 32 images", convolution, {"B": 32}, ("mma_64x64x32", at_rate((30, 60), conv)),
             (Rival("cuDNN", at_rate((350, 350), conv)),)),
        *(pixels(*x) for x in PIXELS),
        Case("mean of 56x56 pixels, 72", partial(mean_of_pixels, 72), {"B": 1, "H": 56, "W": 56},
             ("columns", (36, 36))),
        Case("sum of 4096 rows of 64", columns, {"M": 4096, "N": 64}, ("columns", (47, 47))),
        Case("BERT-base 8x512, graph", bert, {"B": 8, "L": 512}, ("99 launches", (2400, 2900)),
             (Rival("torch", (2000, 2000)), Rival("TensorRT", (1400, 1400)))),
    )  # fmt: skip


def few_rows(k: int, n: int) -> Case:
    """Return one row by constant weights, against the bytes alone at ``MIN_RATIO`` of the bandwidth, not in the review.
    """
    us = LAUNCH + 2 * k * n / MIN_RATIO / SUSTAINED_GB_PER_S / 1000
    return Case(f"1x{n}x{k}", layer("plain", k, n), {"M": 1}, ("gemv_2_n8", (us, us)),
                (Rival("85 % of the bandwidth", (us, us), FROM_BYTES),))  # fmt: skip


def decoding(heads: int, size: int, keys: int) -> Case:
    """Return one query of many keys, against the bytes alone at ``MIN_RATIO`` of the bandwidth, not in the review."""
    us = LAUNCH + 2 * 2 * heads * size * keys / MIN_RATIO / SUSTAINED_GB_PER_S / 1000
    made = partial(timed.attention_model, heads, size, "none", "T")
    return Case(f"attention of 1 query, {keys} keys, {heads}x{size}", made, {"B": 1, "L": 1, "T": keys},
                ("mma.sync 64x64", (us, us)), (Rival("85 % of the bandwidth", (us, us), FROM_BYTES),))  # fmt: skip


def pixels(name: str, channels: int, filters: int, window: int, side: int, stride: int, groups: int) -> Case:
    """Return a convolution of 32 images; the review has no times for it.

    It is compared with cuDNN's rate above (for groups, ``MIN_RATIO`` of the rate of CUDA cores) or, if that takes
    longer, with the bytes alone at ``MIN_RATIO`` of the bandwidth.
    """
    results, rate = 32 * (side // stride) ** 2 * filters, 350.0
    if groups > 1:
        rate = MIN_RATIO * load(DEVICES[ARCH]).peak_tflops["f32"]
    computed, _ = at_rate((rate, rate), 2.0 * results * channels // groups * window**2)
    moved = 2 * (32 * side**2 * channels + results) / MIN_RATIO / SUSTAINED_GB_PER_S / 1000
    us = LAUNCH + max(computed, moved)
    w = weights.convolution(channels // groups, filters, window)
    rival = Rival(f"{rate:.0f} TFLOP/s, 85 % of the bandwidth", (us, us), FROM_BYTES)
    made = partial(inner_convolution, w, (side, side), stride, groups)
    return Case(f"conv {name}", made, {"B": 32}, ("mma_64x64x32", (us, us)), (rival,))


def product() -> Any:
    """Build a b, all sizes unknown."""
    return model([node("MatMul", "a", "b")], {"a": (DTYPE, ["M", "K"]), "b": (DTYPE, ["K", "N"])})


def dims(m: int, n: int, k: int) -> dict[str, int]:
    """Return the sizes of a product."""
    return {"M": m, "N": n, "K": k}


def layer(after: str, k: int, n: int) -> Callable[[], Any]:
    """Return a product with constant weights."""
    return lambda: timed.layer(after, k, n)


def attention(mask: str) -> Callable[[], Any]:
    """Return attention of 12 heads of 64."""
    return lambda: timed.attention_model(12, 64, mask)


def norm() -> Any:
    """Build a norm of rows."""
    inputs: dict[str, tuple[str, Sequence[Any]]] = {"x": (DTYPE, ["M", "N"]), "s": (DTYPE, ["N"]), "b": (DTYPE, ["N"])}
    return model([node("LayerNormalization", "x", "s", "b", axis=-1)], inputs)


def columns() -> Any:
    """Build a sum over rows."""
    return model([node("ReduceSum", "x", "axis")], {"x": (DTYPE, ["M", "N"])}, axis=np.asarray([0]))


def elementwise() -> Any:
    """Build a sum of two tensors."""
    return model([node("Add", "x", "z")], {"x": (DTYPE, ["N"]), "z": (DTYPE, ["N"])})


def convolution() -> Any:
    """Build a layer of resnet50, channels-last like the baseline's."""
    return inner_convolution(weights.convolution(64, 64, 3), (56, 56))


def bert() -> Any:
    """Build all of BERT, weights from a seed."""
    return build("bert_base", DTYPE)


@dataclass(frozen=True)
class Taken:
    """A kernel that a case launches ``count`` times: microseconds of one launch, the roofline of its launch (0 if it
    follows another kernel); bytes moved, and bytes in flight per SM.

    ``loop``, ``path``: instructions of its inner loop, and those that no branch skips; ``multiplications``:
    multiplications in the loop; ``element``: instructions per result of the loop that stores results, or None if there
    is no such loop.
    """

    version: str
    count: int
    us: float
    bound_us: float
    instructions: int
    loop: int
    path: int
    multiplications: int
    element: float | None
    registers: int
    shared: int
    blocks: int
    moved: int
    flight: int


class Program:
    """The kernels that a case launches, compiled, with their times."""

    def __init__(self, case: Case, device: Hardware) -> None:
        self.device, self.plan = device, plan_program(case.model(), target=f"cuda:{device.arch}")
        self.env = resources.environment(self.plan, case.sizes, device)
        peaks = {**device.peak_tflops, "f16": SUSTAINED_TFLOPS}
        self.sustained = replace(device, memory_gb_per_s=SUSTAINED_GB_PER_S, peak_tflops=peaks)
        self.built: dict[str, tuple[sass.Code, KernelUse]] = {}
        self.launches = self._choose()

    def _choose(self) -> list[tuple[Launch, Candidate]]:
        """Select the launched versions; compiling them gives their register counts, so repeat until the selection is
        stable.
        """
        texts = {k.name: k.text for k in self.plan.kernels}
        while True:
            found = [(x, choose(x, self.env, self.device)) for x in self._estimated().launches]
            found = [(x, c) for x, c in found if x.elements.evaluate(self.env) > 0]
            new = {k.kernel for _, c in found for k in c.sequence} - self.built.keys()
            if not new:
                return found
            self.built |= {n: sass.built(texts[n], n, self.device.arch) for n in sorted(new)}

    def _estimated(self) -> HostPlan:
        registers = {n: {self.device.arch: {"registers": u.registers}} for n, (_, u) in self.built.items()}
        return estimated(self.plan, self.device, registers)

    def launched(self) -> list[Taken]:
        """Return the kernels, the one with the largest total time first."""
        rows: dict[Taken, int] = {}
        for launch, c in self.launches:
            ideal = roofline(launch, self.env, DTYPE, self.sustained)
            for n, k in enumerate(c.sequence):
                row = self._row(k, ZERO if n else launch.bytes, c.workspace, 0.0 if n else ideal)
                rows[row] = rows.get(row, 0) + 1
        return sorted((replace(r, count=n) for r, n in rows.items()), key=lambda r: -r.us * r.count)

    def _row(self, k: Candidate, moved: Index, cached: Index, ideal: float) -> Taken:
        code, used = self.built[k.kernel]
        b, d = k.block, self.device
        assert b is not None
        shared, grid = k.scratch.evaluate(self.env), k.tasks.evaluate(self.env)
        blocks = d.resident_blocks(b.threads, used.registers, shared)
        launch = d.costs.launch_ns
        time, flight = Index.of(round(launch)), 0
        if b.work:
            time = launch_time(b.work, b.threads, k.tasks, k.scratch, moved, d, used.registers, cached)
            flight = min(blocks, -(-grid // d.multiprocessors)) * b.work.flight * b.work.traffic
        inner, ns = code.inner(), max(time.evaluate(self.env), ideal + launch)
        return Taken(
            k.name, 1, ns / 1000, ideal / 1000, len(code.instructions), len(inner), code.path(),
            next(filter(None, sass.multiplications(inner)), 0), of_a_result(code), used.registers, shared, blocks,
            (moved + cached).evaluate(self.env), flight,
        )  # fmt: skip


def row(case: Case, device: Hardware) -> dict[str, Any]:
    """Return a line of the table: the fastest baseline counts, and the middle of a range, as in the review."""
    kernels = Program(case, device).launched()
    us, bound = (sum(getattr(k, n) * k.count for k in kernels) for n in ("us", "bound_us"))
    fastest = min((sum(r.us) / 2 for r in case.rivals), default=None)
    version, before = case.before
    return {
        "case": case.name, "sizes": dict(case.sizes), "us": us, "bound_us": bound,
        "ratio": None if fastest is None else fastest / us, "launches": sum(k.count for k in kernels),
        "rivals": [asdict(r) for r in case.rivals], "before": {"version": version, "us": before},
        "kernels": [asdict(k) for k in kernels],
    }  # fmt: skip


@dataclass(frozen=True)
class Count:
    """A number of instructions, or a ratio of two: ``before``, in the review's best ``trial``, ``now``."""

    name: str
    before: float
    trial: float
    now: float
    wanted: float


def counts() -> list[Count]:
    """Return the counts of section 2.2 of the review: the loop of attention by warps; gelu's epilogue over relu's.

    Both epilogues are on the same tile. They were unrolled then, so the instructions of the whole kernel covered all
    elements of a thread.
    """
    looked = {k.name: k for k in sass.kinds() if k.arch == ARCH}
    loop = sass.check(looked["attention f16"])["loop"]
    found = [Count("attention, 64 keys of 64 queries by mma.sync", 1035, 514, loop, 520)]
    for version in ("wgmma_128x256", "wgmma_128x192x64_3_turns"):
        kinds = (sass.Kind(n, timed.layer(n, 768, 3072), version, (), ARCH) for n in ("relu", "gelu"))
        relu, gelu = map(code_of, kinds)
        ratios = {
            "all of the kernel": len(gelu.instructions) / len(relu.instructions),
            "of a result": (of_a_result(gelu) or 0) / (of_a_result(relu) or 1),
        }
        found += [Count(f"gelu over relu, {version}, {n}", 9000 / 2240, 4432 / 2240, r, 1.5) for n, r in ratios.items()]
    return found


def code_of(kind: sass.Kind) -> sass.Code:
    """Return the machine code of a kind."""
    k = sass.kernel_of(kind)
    return sass.built(k.text, k.name, kind.arch)[0]


def of_a_result(code: sass.Code) -> float | None:
    """Return the instructions per 2-byte result of the loop with 16-byte stores, to memory or to a box of TMA.

    If epilogues are not a loop, count all instructions after the products. Return None if there are no such stores.
    """
    parts = [code.instructions[slice(*x)] for x in code.loops]
    loops = [x for x in parts if vectors(x) and not sass.multiplications(x)[0]]
    part = min(loops, key=len, default=code.after_loop())
    return len(part) / (8 * vectors(part)) if vectors(part) else None


def vectors(part: Sequence[str]) -> int:
    """Count stores of 16 bytes."""
    return sum(i.startswith("STG.E.128") for i in part) or sum(i.startswith("STS.128") for i in part)


NUMBERS = "    us  bound  rival ratio before  loop  path elem regs shared blocks   moved flight"


def line(r: Mapping[str, Any]) -> str:
    """Format a row; microseconds, bytes of shared memory, MB moved, KB in flight."""
    k, rival = r["kernels"][0], "" if r["ratio"] is None else f"{r['ratio'] * r['us']:6.1f}"
    ratio = "" if r["ratio"] is None else f"{r['ratio']:5.2f}"
    element = "" if k["element"] is None else f"{k['element']:4.1f}"
    return (f"{r['case']:31} {k['version']:36} {r['us']:6.1f} {r['bound_us']:6.1f} {rival:>6} {ratio:>5} "
            f"{sum(r['before']['us']) / 2:6.1f} {k['loop']:5} {k['path']:5} {element:>4} {k['registers']:4} "
            f"{k['shared']:6} {k['blocks']:6} {sum(x['moved'] * x['count'] for x in r['kernels']) / 1e6:7.1f} "
            f"{k['flight'] / 1e3:6.1f}{'  BELOW' if (r['ratio'] or 1) < MIN_RATIO else ''}")  # fmt: skip


def main() -> int:
    """Print both tables; return the number of lines that miss their goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="names of cases")
    options = parser.parse_args()
    device, rows = load(DEVICES[ARCH]), []
    print(f"{'case':31} {'kernel':36} {NUMBERS}")
    for case in cases():
        if not options.only or case.name in options.only:
            rows.append(row(case, device))
            print(line(rows[-1]), flush=True)
    if options.only:
        return sum((r["ratio"] or 1) < MIN_RATIO for r in rows)
    print(f"\n{'instructions':55} before  trial    now wanted")
    found = counts()
    for c in found:
        print(f"{c.name:55} {c.before:6.4g} {c.trial:6.4g} {c.now:6.4g} {c.wanted:6.4g}"
              f"{'  ABOVE' if c.now > c.wanted else ''}")  # fmt: skip
    about = {"compiler": compiler_version(), "review": "kernels of commit 15eb6ea, by hand from text and machine code"}
    sustained = {"tflops": SUSTAINED_TFLOPS, "gb_per_s": SUSTAINED_GB_PER_S, "source": ON_H200}
    record.save("gpu_table", **about, sustained=sustained, rows=rows, counts=[asdict(c) for c in found])
    return sum((r["ratio"] or 1) < MIN_RATIO for r in rows) + sum(c.now > c.wanted for c in found)


if __name__ == "__main__":
    raise SystemExit(main())
