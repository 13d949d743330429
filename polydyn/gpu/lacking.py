"""What a device was found to do wrong: features (``polydyn.capability.FEATURES``) that its kernels do without.

``benchmarks.gpu.conformance`` keeps what failed in a file of the cache's folder ``devices``; programs read it when
they are opened on the device, and ``explain`` tells it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from polydyn.build.cache import cache_dir, cache_root, write_atomically
from polydyn.capability import FEATURES
from polydyn.errors import BuildError, InputError

__all__ = ["LACKING", "failures", "keep", "lacking"]

LACKING = "POLYDYN_LACKING"
"""The environment's features, with commas between them, in place of those of the device's file."""
FOLDER = "devices"
"""Of the cache; measurements, which stay."""


def failures(results: Mapping[str, bool]) -> dict[str, list[str]]:
    """Of each feature that cases tested, by name, those that failed; ``results``: case -> whether it was right."""
    tested = {n: [c for c in results if re.fullmatch(f.cases, c)] for n, f in FEATURES.items()}
    return {n: [c for c in cases if not results[c]] for n, cases in tested.items() if cases}


def keep(device: str, results: Mapping[str, bool]) -> Path:
    """Keeps what failed on a device, by the driver's name for it; of features that were not tested, what was known.

    The file. BuildError: the cache cannot be written. InputError: the file that was there is damaged.
    """
    cache_dir(FOLDER)
    path, known = _path(device), _kept(device) | failures(results)
    try:
        write_atomically(path, json.dumps({n: cases for n, cases in known.items() if cases}, indent=1).encode())
    except OSError as e:
        raise BuildError(
            f"{path} cannot be written: {e.strerror}", remedy="set POLYDYN_CACHE to a writable folder"
        ) from e
    return path


def lacking(device: str) -> frozenset[str]:
    """The features that kernels do without on a device. InputError: something else is named, or the file is damaged."""
    said = os.environ.get(LACKING)
    named = frozenset(_kept(device) if said is None else filter(None, said.split(",")))
    if unknown := named - FEATURES.keys():
        where = LACKING if said is not None else str(_path(device))
        raise InputError(f"{where} names no feature: {sorted(unknown)}", remedy=f"some of {', '.join(FEATURES)}")
    return named


def _path(device: str) -> Path:
    return cache_root() / FOLDER / f"{re.sub('[^A-Za-z0-9]+', '_', device)}.json"


def _kept(device: str) -> dict[str, list[str]]:
    """Feature -> cases that failed, as the file has them; nothing without a file."""
    path = _path(device)
    try:
        found: dict[str, list[str]] = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as e:
        raise InputError(
            f"{path} cannot be read: {e}", remedy="run benchmarks.gpu.conformance on the device again"
        ) from e
    return found
