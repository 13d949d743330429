"""polydyn's translations of torch's operators, where torch's exporter changes their meaning or has none.

A translation is a function of torch operators with the meaning of eager torch: NaN, infinities, signs of zeros, empty
axes, types of results, digits to the precision of the type. Modules of this package register them with ``translate``.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from polydyn.torch_backend.translations.common import TABLE
from polydyn.torch_backend.translations.doubles import decompositions


@cache
def table() -> Mapping[Any, Callable[..., Any]]:
    """torch's operator -> what it is replaced by, as ``torch.export.ExportedProgram.run_decompositions`` takes them.

    Operators that torch's exporter does not have are decomposed in the same run, by torch's rules: what they consist of
    is translated too.
    """
    from torch.onnx._internal.exporter import _decomp, _registration  # torch has no public door to what it exports

    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    exported = _decomp.get_onnx_implemented_overloads(_registration.ONNXRegistry.from_torchlib())
    rules = _decomp.create_onnx_friendly_decomposition_table(set(exported))
    return {**rules, **decompositions(exported, torch._decomp.decomposition_table), **TABLE}
