"""Counts how many of ONNX's own node tests import and evaluate correctly through the reference evaluator.

Run: ``python benchmarks/conformance.py [part of a test's name]``. Prints refused operators by name and every failure.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
from onnx.backend.test.case.node import collect_testcases

from polydyn import reference
from polydyn.errors import InputError, PolydynError, UnsupportedError
from polydyn.graph.expand import import_model


def cases(part: str = "") -> Iterator[Any]:
    """ONNX's node tests whose name contains ``part``."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        found = collect_testcases(None)
    yield from (c for c in found if part in c.name)


def run_case(case: Any) -> str:
    """``passed``, ``refused: ...`` (by name, on purpose) or ``failed: ...``."""
    try:
        graph = import_model(case.model)
        for inputs, outputs in case.data_sets:
            feeds = dict(zip((x.name for x in case.model.graph.input), inputs, strict=False))
            got = reference.evaluate(graph, feeds)
            for (name, array), want in zip(got.items(), outputs, strict=True):
                if array.dtype != want.dtype or array.shape != want.shape:
                    return f"failed: {name} is {array.dtype}{array.shape}, expected {want.dtype}{want.shape}"
                np.testing.assert_allclose(array.astype(np.float64), want.astype(np.float64), case.rtol, case.atol)
    except (UnsupportedError, InputError) as e:
        return "refused: " + str(e).replace("\n", ";")
    except PolydynError as e:
        return f"failed: {type(e).__name__}: " + str(e).replace("\n", ";")
    except AssertionError as e:
        return "failed: values differ " + " ".join(str(e).split())[:160]
    except Exception as e:  # a script that reports on everything
        return f"failed: {type(e).__name__}: {e}"[:240]
    return "passed"


def main(part: str = "") -> None:
    """Prints every failure, the refused operators with their number of cases, and the counts."""
    counts: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for case in cases(part):
        result = run_case(case)
        kind = result.split(":")[0]
        counts[kind] += 1
        if kind == "failed":
            print(f"{case.name}: {result}")
        if kind == "refused":
            operators = sorted({n.op_type for n in case.model.graph.node})
            refused[", ".join(operators)] += 1
            if part:
                print(f"{case.name}: {result}")
    print("refused:", ", ".join(f"{name} ({n})" for name, n in sorted(refused.items())))
    print(dict(counts))


if __name__ == "__main__":
    main(*sys.argv[1:2])
