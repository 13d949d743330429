"""Which devices have the instructions of which CUDA architecture, and what of them kernels can do without."""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["EARLY", "FEATURES", "Feature", "capability", "features_of", "runs_on"]


EARLY = "early_launches"
"""The feature that launches use, not kernels: a launch begins before the one before it has ended."""


class Feature(NamedTuple):
    """Something that kernels of an architecture may use, or do without where a device is found to do it wrong.

    Regular expressions: ``uses`` finds it in a kernel's text; ``cases`` are whole names of the cases of
    ``benchmarks.gpu.conformance`` that test it.
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
"""By name. Compiled programs know them by their position: a new one stands at the end."""


def features_of(text: str) -> tuple[str, ...]:
    """The features that a kernel's text uses."""
    return tuple(n for n, f in FEATURES.items() if re.search(f.uses, text))


def capability(arch: str) -> int:
    """The compute capability of an architecture: 90 for sm_90a."""
    return int("".join(c for c in arch if c.isdigit()))


def runs_on(arch: str, device: int) -> bool:
    """Whether a device of a compute capability has the instructions of an architecture.

    Those of a name that ends in a letter (sm_90a) no other has; all else newer devices have too.
    """
    return capability(arch) == device if arch[-1].isalpha() else capability(arch) <= device
