"""Defects of a device: features (``polydyn.capability.FEATURES``) that kernels must not use on it.

``benchmarks.gpu.conformance`` stores the failed cases in a file in the cache's folder ``devices``. Programs read it
when they are opened on the device, and ``explain`` reports it.
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
"""Environment variable: a comma-separated list of features, which replaces those in the device's file."""
FOLDER = "devices"
"""A folder of the cache. It contains measurements and is not evicted."""


def failures(results: Mapping[str, bool]) -> dict[str, list[str]]:
    """Return for each tested feature its failed cases. ``results``: case -> whether it was correct."""
    tested = {n: [c for c in results if re.fullmatch(f.cases, c)] for n, f in FEATURES.items()}
    return {n: [c for c in cases if not results[c]] for n, cases in tested.items() if cases}


def keep(device: str, results: Mapping[str, bool]) -> Path:
    """Store the failed cases for a device, identified by the driver's name for it. Features that were not tested keep
    their stored cases.

    Return the file. BuildError: the cache cannot be written. InputError: the existing file is damaged.
    """
    cache_dir(FOLDER)
    path, known = _path(device), _stored(device) | failures(results)
    try:
        write_atomically(path, json.dumps({n: cases for n, cases in known.items() if cases}, indent=1).encode())
    except OSError as e:
        raise BuildError(
            f"{path} cannot be written: {e.strerror}", remedy="set POLYDYN_CACHE to a writable folder"
        ) from e
    return path


def lacking(device: str) -> frozenset[str]:
    """Return the features that kernels must not use on a device. InputError: unknown features, or a damaged file."""
    override = os.environ.get(LACKING)
    named = frozenset(_stored(device) if override is None else filter(None, override.split(",")))
    if unknown := named - FEATURES.keys():
        where = LACKING if override is not None else str(_path(device))
        raise InputError(f"{where} names unknown features: {sorted(unknown)}", remedy=f"use {', '.join(FEATURES)}")
    return named


def _path(device: str) -> Path:
    return cache_root() / FOLDER / f"{re.sub('[^A-Za-z0-9]+', '_', device)}.json"


def _stored(device: str) -> dict[str, list[str]]:
    """Return feature -> failed cases from the device's file; empty without a file."""
    path = _path(device)
    try:
        stored: dict[str, list[str]] = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as e:
        raise InputError(
            f"{path} cannot be read: {e}", remedy="run benchmarks.gpu.conformance on the device again"
        ) from e
    return stored
