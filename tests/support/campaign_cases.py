"""Cases for the frame of fuzzers; in a module of their own, which each new process imports quickly."""

from __future__ import annotations

import os
from collections import Counter

from polydyn.testing.campaign import Finding, Kinds, Result


def numbered(seed: int, seen_kinds: Kinds, dies: int = -1) -> Result:
    """Fail for even seeds in one way, for 3 in another; end the process for ``dies``."""
    if seed == dies:
        os._exit(1)
    kind = "even" if seed % 2 == 0 else "three" if seed == 3 else ""
    finding = Finding("wrong", "test", kind) if kind else None
    files = "new" if ("wrong", kind) not in seen_kinds else ""
    return Result(seed, f"seed{seed}", Counter({"cases": 1}), finding, "no 7" * (seed == 1), files=files)


def dying(seed: int) -> None:
    """End the process."""
    os._exit(1)
