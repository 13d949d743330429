"""Counts how many of ONNX's own node tests import and evaluate correctly through the reference evaluator.

Run: ``python -m benchmarks.conformance [part of a test's name]``. Prints refused operators by name and every failure.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
from onnx.backend.test.case.node import collect_testcases

from polydyn.errors import InputError, PolydynError, UnsupportedError
from polydyn.graph import reference
from polydyn.graph.expand import import_model


def cases(part: str = "") -> Iterator[Any]:
    """ONNX's node tests whose name contains ``part``."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        found = collect_testcases(None)
    yield from (c for c in found if part in c.name)


def freeze(case: Any) -> onnx.ModelProto:
    """The model with its small integer inputs after the first as initializers.

    The node tests feed axes, shapes and sizes as inputs of the model; a compiler needs them as constants.
    """
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    if len(case.data_sets) != 1:
        return model
    for info, array in list(zip(model.graph.input, map(as_array, case.data_sets[0][0]), strict=False))[1:]:
        if (array is not None and array.ndim <= 1 and array.dtype.kind == "i") or info.name in ("scales", "roi"):
            model.graph.input.remove(info)
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, info.name))
    return model


def as_array(x: Any) -> Any:
    """The test's data as a numpy array; None when it is a sequence, optional or string."""
    if isinstance(x, onnx.TensorProto):
        return onnx.numpy_helper.to_array(x)
    return x if isinstance(x, np.ndarray | np.generic) else None


def run_case(case: Any) -> str:
    """``passed``, ``refused: ...`` (by name, on purpose) or ``failed: ...``."""
    result = run_model(case, case.model)
    return run_model(case, freeze(case)) if result.startswith("refused") else result


def run_model(case: Any, model: onnx.ModelProto) -> str:
    """As run_case, for a model that computes what the case's does."""
    try:
        graph = import_model(model)
        for inputs, outputs in case.data_sets:
            feeds = dict(zip((x.name for x in case.model.graph.input), map(as_array, inputs), strict=False))
            outputs = [as_array(x) for x in outputs]
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
