"""polydyn's translations of torch's operators, where torch's exporter changes their meaning or has none.

A translation is a function of torch operators with the meaning of eager torch: of NaN, infinities, signs of zeros, empty
axes, types of results, and to the precision of the type. The modules of this package register them with ``translate``.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from polydyn.torch_backend.translations.common import TABLE


@cache
def table() -> Mapping[Any, Callable[..., Any]]:
    """torch's operator -> its translation, as ``torch.export.ExportedProgram.run_decompositions`` takes them."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return TABLE
