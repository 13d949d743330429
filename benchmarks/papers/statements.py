"""Statements of the papers about each table, and how far measurements on a CPU may be compared with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Statement:
    """The fixed texts of a table. ``printed``: sentences of the paper, one paragraph each, with section numbers."""

    title: str
    printed: str
    comparable: str
    not_comparable: str


STATEMENTS: Mapping[str, Statement] = {
    "tscompiler-6": Statement(
        "local smoothness of a product's tiles",
        """
        "there exist some tiling tuples exhibiting high performance across various shape configurations" (5.1). The
        figure is drawn; the text has no numbers.

        Y = X W^T, X: [32 L, 1024], W: [3072, 1024] of BERT-large, 10 lengths L drawn uniformly from [1, 512], all tiles
        of a grid.
        """,
        """
        whether a few tiles are near the best at all lengths, and how equal the orders of tiles at two lengths are. Both
        are ratios of kernels of one generator on one machine.
        """,
        """
        the rates and the tiles themselves (GPU blocks against register tiles), and the number of lengths at which a
        launch fills the machine: a core is full from a few rows on, 108 multiprocessors are not.
        """,
    ),
    "bladedisc-2": Statement(
        "LayerNorm and softmax with and without stitching",
        """
        At <1024, 1024>: LayerNorm 32.68 us (3 kernels) without and 15.70 us (1 kernel) with stitching, PyTorch 21.06
        us; softmax 33.40 us (3), 12.37 us (1), PyTorch 16.05 us.

        So stitching gains 2.08x and 2.70x, and is 1.34x and 1.30x faster than PyTorch's kernels (7.3.2).
        """,
        """
        the gain of stitching and the number of kernels: one compiler with itself. The ratio to PyTorch compares with
        its own CPU kernels.
        """,
        """
        microseconds (a GPU against CPU cores). Without stitching a GPU pays a launch of some microseconds for each
        kernel, a CPU below one; 4 MB of intermediates stay in a CPU's cache, so the gain is that of fewer passes. Nor
        the number of kernels without stitching: BladeDISC then still joins maps with a reduction (3 kernels), without
        the pass `stitch` no map joins one here (5).
        """,
    ),
    "vortex-13": Statement(
        "networks over sequence length and batch",
        """
        Average speedups of Vortex over all baselines and devices: BERT 2.91, BERT-Large 2.63, GPT-2 2.94, AlexNet 2.01,
        ResNet 2.13, GoogleNet 3.24 (7.3).

        By baseline: 1.73x oneDNN and 4.26x ONNX Runtime (the CPU's), 1.43x cuBLAS, 1.71x cuDNN, 3.32x CUTLASS, 4.13x
        DietCode. The figure's bars have no numbers in the text.

        17 sequence lengths from 1 to 476; batches 1, 4, 8, .., 64.
        """,
        """
        the ratio to ONNX Runtime, with Vortex's 4.26 over all networks: the same baseline, another version of it on
        another processor.
        """,
        """
        the printed averages by network, which mix GPUs and five other baselines; oneDNN, whose kernels PyTorch and
        OpenVINO use (`make bench-cpu` has both); tuned programs (`python -m benchmarks.tuned`).
        """,
    ),
    "dietcode-10": Statement(
        "where the last rows are checked",
        """
        "local padding delivers the best performance among the three options" (4.3); checks everywhere (Baseline) cost
        "as much as 17x" (4.2). The figure's bars have no numbers in the text.

        [16T, 768] x [2304, 768], T = 60, micro-kernel dense_128x128 of Ansor, one Tesla T4.
        """,
        """
        the order of the four versions, and the cost of checks inside the computation: the same text is compared with
        itself. The rows "polydyn" (the default kernel without tuning: exact tiles, no padding and no check in a loop)
        and "ONNX Runtime" say what the micro-kernel is worth.
        """,
        """
        the rates (a T4 against a CPU core), and the size of the loss: a GPU evaluates a check in every thread, a CPU
        predicts the branch. polydyn generates local padding for CUDA only, so its generator is not what is compared.
        """,
    ),
    "dietcode-12": Statement(
        "votes, performance and size of the binary",
        """
        34 programs if every instance picks its best (k = 1); one category costs 1.11x on average (5.2).

        "both the compute throughput and the binary size decrease with the increase of k". The curve has no numbers in
        the text.

        [16T, 768] x [2304, 768], T = 1..128, a Tesla T4.
        """,
        """
        the shape of the trade: number of programs and mean throughput over k, and the loss of a single category.
        """,
        """
        the number of programs (tiles that a launch binds share a binary here, a GPU has one per tile), the rates, and k
        itself: it runs over what this search explored.
        """,
    ),
    "ftuner-14": Statement(
        "time of tuning over the number of shapes",
        """
        Dense on a V100, 1 to 128 shapes: FTuner 37.84 s for one and converging to 840 s; Roller 17.26 s for one and
        growing; HAOTuner 2728.86 s at any number (VI-B).

        Table V, 8 shapes of Dense: Ansor 6872 s, HAOTuner 1104 s, Roller 163 s, FTuner 149 s.
        """,
        """
        the growth of one row over the number of shapes, and the rows with each other: one machine, one generator.
        """,
        """
        the seconds themselves (nvcc and a V100 against gcc and a CPU), and Ansor, Roller and HAOTuner, which are not
        here: the last row has Roller's order, not its code.
        """,
    ),
}
"""Maps the name of a table to its texts."""


def paragraphs(text: str) -> list[str]:
    """Return the paragraphs of a text, each as one line."""
    return [" ".join(p.split()) for p in text.strip().split("\n\n")]
