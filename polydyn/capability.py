"""The devices that support each CUDA architecture's instructions, and the features that kernels can omit."""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["EARLY", "FEATURES", "Feature", "capability", "features_of", "runs_on"]


EARLY = "early_launches"
"""A feature of launches, not of kernels: programmatic dependent launch, which begins before the previous launch
ends.
"""


class Feature(NamedTuple):
    """A feature that kernels of an architecture may use, or must avoid on a device that implements it incorrectly.

    Both are regular expressions. ``uses`` finds the feature in a kernel's text. ``cases`` matches the whole names of
    the cases of ``benchmarks.gpu.conformance`` that test it.
    """

    uses: str
    cases: str


FEATURES = {
    "warpgroups": Feature(
        r"pd_wgmma_", r"shared_places|mbarrier_.*|tma_load_(?!2d_tf32).*|(gemm_)?wgmma(_rs)?(_b?f16_.*| .*)"
    ),
    "byte_warpgroups": Feature(r"pd_wgmma_m64n\d+k\d+_[su]8", r"wgmma_[su]8.*"),
    "tf32_rounding": Feature(r"pd_wgmma_m64n\d+k\d+_tf32", r"(tma_load_2d|wgmma)_tf32.*"),
    "float8": Feature(r"mma_m\d+n\d+k\d+_e[45]m", r"(wg)?mma_e[45]m.*"),
    "tma_stores": Feature(r"pd_tma_store_", r"tma_store_.*"),
    "clusters": Feature(r"PD_KERNEL_CLUSTER", r"cluster_.*|launches_apart .* clusters"),
    "im2col": Feature(r"pd_tma_pixels_", r"tma_pixels_.*"),
    EARLY: Feature(r"(?!)", r"launches_early .*"),
}
"""Features by name. Compiled programs identify them by position: append new ones at the end."""


def features_of(text: str) -> tuple[str, ...]:
    """Return the features that a kernel's text uses."""
    return tuple(n for n, f in FEATURES.items() if re.search(f.uses, text))


def capability(arch: str) -> int:
    """Return the compute capability of an architecture: 90 for sm_90a."""
    return int("".join(c for c in arch if c.isdigit()))


def runs_on(arch: str, device: int) -> bool:
    """Check whether a device of a compute capability supports the instructions of an architecture.

    An architecture with a letter suffix (sm_90a) requires exactly its device. Newer devices support all others.
    """
    return capability(arch) == device if arch[-1].isalpha() else capability(arch) <= device
