"""Translations of torch operators whose meaning torch's exporter changes, or which it lacks.

A translation is a function of torch operators with the meaning of eager torch: NaN, infinities, signs of zeros, empty
axes, result dtypes, accuracy to the precision of the dtype. Modules of this package register translations with
``translate``.
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
    """Map torch operators to replacements, as ``torch.export.ExportedProgram.run_decompositions`` takes them.

    Operators that torch's exporter lacks are decomposed in the same run, by torch's rules. Their components are
    translated too.
    """
    from torch.onnx._internal.exporter import _decomp, _registration  # torch has no public list

    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    exported = _decomp.get_onnx_implemented_overloads(_registration.ONNXRegistry.from_torchlib())
    rules = _decomp.create_onnx_friendly_decomposition_table(set(exported))
    return {**rules, **decompositions(exported, torch._decomp.decomposition_table), **TABLE}
