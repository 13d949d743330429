"""Functions of torch from its own table of tests (``op_db``), as cases of ``fuzz_torch``.

Every seed is one function in one of its variants and types. Its arguments are the table's, with special values, with
axes of 0, 1 or more elements, and in memory of other layouts; arguments that eager torch rejects are left out.
"""

from __future__ import annotations

import importlib.util
import random
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

import torch

from polydyn.testing.torch_check import Case, Session
from polydyn.testing.torch_values import DTYPES, FLOATS_OF_8_BITS, laid_out, resized, split, with_special_values

SAMPLES = 60
"""Samples of the table from which some are chosen."""
SAMPLES_PER_GRAPH = 3
"""Samples in one graph."""
MAX_ELEMENTS = 4096
"""Maximum number of elements of a sample's tensor."""


@cache
def functions() -> tuple[Any, ...]:
    """Return the functions of torch's table without gradient tests, in an order that is independent of names."""
    if importlib.util.find_spec("expecttest") is None:  # torch's tables import one class of it
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in
    from torch.testing._internal.common_methods_invocations import op_db

    found = sorted(op_db, key=lambda o: (o.name, o.variant_test_name))
    random.Random(1).shuffle(found)
    return tuple(found)


@dataclass(frozen=True)
class Sample:
    """The tensors of a call, and a function that calls with other tensors in their places."""

    tensors: tuple[torch.Tensor, ...]
    call: Callable[[Sequence[torch.Tensor]], Any]


def aten_case(seed: int) -> Case | None:
    """Return the case of a seed, or None if the function has no samples that eager torch runs."""
    return _case(seed, None)


def single_cases(seed: int) -> Iterator[Case]:
    """Yield each sample of a seed's case alone."""
    for k in range(SAMPLES_PER_GRAPH):
        made = _case(seed, k)
        if made is not None:
            yield made


def _case(seed: int, only: int | None) -> Case | None:
    r = random.Random(f"aten {seed}")
    known = functions()
    info = known[seed % len(known)]
    dtype, through = _dtype(info, r)
    variants = [v for v in (info.op, info.method_variant, info.inplace_variant, info.operator_variant) if v is not None]
    function = info.op if r.random() < 0.7 else r.choice(variants)
    torch.manual_seed(seed)
    try:
        found = list(islice(info.sample_inputs("cpu", dtype, requires_grad=False), SAMPLES))
    except Exception:
        return None
    in_place = function is info.inplace_variant
    chosen = [_sample(function, s, in_place, through, r) for s in r.sample(found, min(SAMPLES_PER_GRAPH, len(found)))]
    samples = [s for s in chosen if s is not None]
    if only is not None:
        samples = samples[only : only + 1]
    if not samples:
        return None
    resizes = random.Random(f"sizes {seed}")
    again = [_resized(s, resizes) for s in samples]
    name = f"aten {info.full_name or info.name} {str(through or dtype).removeprefix('torch.')}"

    def build() -> Session:
        return _joined(samples), _calls(samples, again)

    return Case(name, build, _text(samples), specialize=True)


def _dtype(info: Any, r: random.Random) -> tuple[Any, Any]:
    """Return a type of the table, and an 8-bit float type for the input tensors, or None."""
    allowed = [d for d in DTYPES if d in info.dtypes] or [d for d in info.dtypes if not d.is_complex] or [torch.float32]
    dtype = torch.float32 if torch.float32 in allowed and r.random() < 0.3 else r.choice(allowed)
    return dtype, r.choice(FLOATS_OF_8_BITS) if dtype == torch.float32 and r.random() < 0.1 else None


def _sample(function: Any, s: Any, in_place: bool, through: Any, r: random.Random) -> Sample | None:
    """Return a sample with other values and layouts: the first of some attempts that eager torch accepts."""
    tensors, rebuilt = split((s.input, tuple(s.args), dict(s.kwargs)))
    if not tensors or any(t.is_sparse or t.is_complex() or t.numel() > MAX_ELEMENTS for t in tensors):
        return None

    def call(tensors: Sequence[torch.Tensor]) -> Any:
        if through is not None:
            tensors = [t.to(torch.float32) if t.dtype == through else t for t in tensors]
        first, args, kwargs = rebuilt(tensors)
        return function(first.clone() if in_place else first, *args, **kwargs)

    special, layouts = r.random() < 0.7, r.random() < 0.5
    for floats_only in (False, True):
        made = [t.detach() for t in tensors]
        if special:
            made = [
                with_special_values(t, r) if t.dtype.is_floating_point or not floats_only else t.clone() for t in made
            ]
        if layouts:
            made = [laid_out(t, r) for t in made]
        if through is not None:
            made = [t.to(through) if t.dtype == torch.float32 else t for t in made]
        for candidate in (made,) if not floats_only else (made, [t.detach() for t in tensors]):
            if _runs(call, candidate):
                return Sample(tuple(candidate), call)
    return None


def _runs(call: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> bool:
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call([t.clone() for t in tensors])
    except Exception:
        return False
    return True


def _resized(s: Sample, r: random.Random) -> Sample | None:
    """Return the sample at other sizes, or None if eager torch rejects them."""
    try:
        tensors = resized(s.tensors, r)
    except Exception:
        return None
    return Sample(tuple(tensors), s.call) if _runs(s.call, tensors) else None


def _joined(samples: Sequence[Sample]) -> Callable[..., Any]:
    counts = [len(s.tensors) for s in samples]

    def joined(*tensors: torch.Tensor) -> Any:
        results, first = [], 0
        for s, n in zip(samples, counts, strict=True):
            results.append(s.call(tensors[first : first + n]))
            first += n
        return results

    return joined


def _calls(samples: Sequence[Sample], resized: Sequence[Sample | None]) -> Iterator[tuple[Any, ...]]:
    def copies(chosen: Sequence[Sample]) -> tuple[Any, ...]:
        return tuple(_copy(t) for s in chosen for t in s.tensors)

    yield copies(samples)
    if any(s is not None for s in resized):
        yield copies([b if b is not None else a for a, b in zip(samples, resized, strict=True)])


def _copy(t: torch.Tensor) -> torch.Tensor:
    """Return a copy in memory of the same layout."""
    if t.is_neg() or 0 in t.stride():
        return t
    whole = torch.as_strided(t, (t.untyped_storage().nbytes() // t.element_size(),), (1,), 0)
    return torch.as_strided(whole.clone(), t.shape, t.stride(), t.storage_offset())


def _text(samples: Sequence[Sample]) -> str:
    return "; ".join(
        ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}/{list(t.stride())}" for t in s.tensors)
        for s in samples
    )
