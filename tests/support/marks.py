"""Marks of parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from _pytest.mark import ParameterSet


def slow(*values: object) -> ParameterSet:
    """Mark a case that ``make test`` omits and ``make test-long`` runs: other cases cover its mechanism."""
    return pytest.param(*values, marks=pytest.mark.slow)
