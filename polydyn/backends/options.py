"""The options of a compilation. This module imports no pass, so that a cached program opens quickly."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from polydyn.errors import InputError
from polydyn.onnx_runtime import FALLBACK

BF16, TF32X3 = "bf16", "3xtf32"


@dataclass(frozen=True)
class Options:
    """Choices that change the compiled program.

    ``without``: names of passes to leave out, from ``polydyn.fusion.pipeline.PASSES``: ``merge`` (GEMM merging),
    ``stitch``, ``attention``, ``horizontal`` ... Results are equal up to rounding. An unknown name is an InputError.
    ``strategy``: the strategy whose searches in the records choose tiles (``polydyn.search.strategies``).

    ``tf32``: on CUDA, float32 products use tensor cores, which round their operands to 10 bits of mantissa; sums stay
    float32. ``precision``: "bf16" allows float32 products with constants to round both operands to bfloat16 on a CPU;
    sums stay float32, and notes report the precision of every product (docs/adr/0023-types.md). "3xtf32": on CUDA,
    float32 products use three tensor core products of operands split in two parts of 10 bits; the error is at most
    3/2^22 of each product's size (docs/adr/0015-cuda-products.md). None: full precision.

    ``winograd``: side in pixels of the Winograd tiles for 3x3 convolutions on a CPU. With 4 instead of 2 a pixel takes
    2.25 multiplications instead of 4. The errors are three to five times as large, up to twice those of a direct sum
    (docs/adr/0010-convolutions.md). ``fallback``: "onnxruntime" runs unsupported nodes in ONNX Runtime, each with a
    note and a warning; None rejects them by name.
    """

    without: Collection[str] = frozenset()
    strategy: str = "polydyn"
    tf32: bool = False
    fallback: str | None = None
    precision: str | None = None
    winograd: int = 2

    def __post_init__(self) -> None:
        if self.precision not in (None, BF16, TF32X3) or (self.tf32 and self.precision == TF32X3):
            remedy = f"pass None, {BF16!r} or {TF32X3!r}, the last one without tf32"
            raise InputError(f"unknown precision {self.precision!r}", rule="Options(precision=...)", remedy=remedy)
        if self.winograd != Options.winograd:
            self._check_winograd()
        if not isinstance(self.tf32, bool):
            raise InputError(f"tf32 is {self.tf32!r}", rule="Options(tf32=...)", remedy="pass True or False")
        if self.strategy != Options.strategy:
            from polydyn.search.strategies import strategy  # loads the searches

            strategy(self.strategy)
        if self.without:
            from polydyn.fusion.pipeline import check_names  # loads the passes

            object.__setattr__(self, "without", check_names(self.without))
        else:
            object.__setattr__(self, "without", frozenset())
        if self.fallback not in (None, FALLBACK):
            raise InputError(
                f"unknown fallback {self.fallback!r}", rule="Options(fallback=...)", remedy=f"pass None or {FALLBACK!r}"
            )

    def _check_winograd(self) -> None:
        """Check a size of Winograd tiles other than the default."""
        from polydyn.fusion.winograd import POINTS  # loads the passes

        if self.winograd not in POINTS or self.precision == BF16:
            side = Options.winograd
            remedy = f"{' or '.join(map(str, POINTS))}; {side} with precision {BF16}, which has no Winograd tiles"
            message = f"Winograd tiles of {self.winograd} pixels are not supported"
            raise InputError(message, rule="Options(winograd=...)", remedy=remedy)
