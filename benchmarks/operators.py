"""The table of operators in ``docs/operators.md``: how each is built, for which opsets, and its node cases.

Run: ``python -m benchmarks.operators [RESULTS.json]``; ``polydyn.testing.conformance --json`` writes the results.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import onnx
import onnx.defs

from polydyn.graph.bodies import BODIES, split_name
from polydyn.graph.propagate import load_operators
from polydyn.graph.sequences import RULES
from polydyn.testing.conformance import cases

PLACE = Path(__file__).parents[1] / "docs" / "operators.md"
HEAD = """# Operators

Written by `python -m benchmarks.operators RESULTS.json`, after
`python -m polydyn.testing.conformance --json RESULTS.json`.

- *primitives*: a shape rule and an expansion (`polydyn/graph/operators/`).
- *body*: written as other operators (`polydyn/graph/functions/`); it fuses as its decomposed form does.
- *function*: replaced by ONNX's own function body.
- *host step*: the host finds places or sizes between two parts of the program (docs/adr/0027-parts.md), the rest is
  primitives; other operators have such a step only where data decide their sizes.

Opsets: the versions of the operator that ONNX defines, from the oldest on; a part of an operator that is not built is
rejected by name. Cases: ONNX's node cases of this operator alone that pass compiled for the CPU, of all there are.
Numbers of random generators follow from place and seed, the same ones in every call; their cases count by type and
shape (`docs/adr/0023-types.md`). Operators of other domains can be registered (`docs/extending.md`).

ONNX's reference evaluator and ONNX Runtime disagree in these cases:

| operator | ONNX's reference | ONNX Runtime | here |
|---|---|---|---|
| GridSample, cubic, padding `border` | moves the coordinate inside | moves each neighbour inside, as torch | as torch |
| Resize, `align_corners`, sizes that are rounded | divides by the size before | behind, as torch | as torch |
| Resize: the size 30 * 0.7 | 20, the float being below 0.7 | 21, as ONNX's shape inference and torch | 21 |
| Resize, nearest, the position 2 / 0.4 | 4, the float being above 0.4 | 5, as torch | 5 |
| Resize of integers, linear | rounds half to even | truncates | rounds, and saturates |
| Resize up to opset 10, nearest | no answer | up where the axis shrinks, else down | as ONNX Runtime |
| AffineGrid, `align_corners`, a size of 1 | -1 | 1 | -1 |
| Pad, mode `wrap`, a negative side | no answer | cuts first, repeats what is left | as ONNX Runtime |
| Slice, a negative step, the end INT32_MAX or INT64_MAX | the last element | the first element | as ONNX Runtime |
| MaxUnpool: indices, with `output_shape` | count in the inferred shape | in `output_shape` | as ONNX's reference |
| a pool whose window is larger than its padded map | nothing is left | size 1, or nothing | rejected, as torch |
| Concat of tensors without elements, of other sizes | rejected | these tensors are skipped | rejected |
| ReduceMean over an axis of size 0 | NaN, as torch | 0 | NaN |
| ReduceLogSumExp of integers | the float result, truncated | sums of truncated terms | as ONNX's reference |
| Sign of NaN | NaN | NaN, of float16 0 | NaN |
| Dropout up to opset 10, the mask | true | false | true |
| Pow of the integer 0 to a negative integer | an error | the least integer | 0 |
| MaxPool with NaN | skips NaN, and fails where nothing is left | NaN where it is the first element of a window | NaN |
| GlobalMaxPool of -inf alone, or with NaN | -inf, NaN | the lowest number, without the NaN | as ONNX's reference |
| Pow of integers, a result beyond 2^53 | exact | rounded by way of float64 | exact |
| PRelu up to opset 6, slopes of channels | no answer | along the last axis if that has size 1 | along channels |
| MeanVarianceNormalization below rank 4, default axes | an error | leaves out axes past the rank | as ONNX Runtime |
| TreeEnsembleRegressor, one target, several weights of a leaf | their sum | the first | as ONNX Runtime |
| Cast of a float to an integer that cannot hold it | low bits | differs by lane | low bits (of int32 for 8 and 16) |

GridSample interpolates floats and booleans; integers are rejected, as the reference's weights are integers too.
Attributes and inputs of old opsets are rewritten as nodes of newer ones (`polydyn/graph/older.py`).

On CUDA each element tests every update of ScatterElements, ScatterND and MaxUnpool, and every other element of TopK,
CumSum and CumProd, so time grows with the product of both counts. On the CPU they take linear time
(`docs/adr/0009-fusion.md`).

Forests (`TreeEnsemble` and its forms) walk down one level at a time, all samples and trees at once. If both of two
classes have weights, the larger score decides, as in ONNX's reference; ONNX Runtime then gives 1 or 0 by the
sign of the second score, whatever the labels are.

Strings are numbers inside a program (`polydyn/graph/texts.py`, `docs/adr/0032-texts.md`): the host encodes them before
a call and decodes results after it, so operators that move or compare strings and the encoders of ai.onnx.ml accept
them; labels may be strings. ZipMap must be an output of the model; it returns a list of dicts, as ONNX Runtime does.
Operators that make new strings or read their characters are rejected by name (Cast, Unique, StringNormalizer and
others), and so are maps as inputs (CastMap, DictVectorizer). In C a program takes and returns the numbers.

DynamicQuantizeLSTM quantizes the input of all steps at once and the state of the whole batch in each step, as ONNX
Runtime does on one thread; on more threads it quantizes parts of the batch, each with a scale of its own. On AVX2
ONNX Runtime's products of uint8 and int8 saturate sums of two products at 16 bits; polydyn's are exact.
"""


HOST_STEPS = ("Loop", "Scan", "NonZero", "Compress", "Unique", "NonMaxSuppression")


def opsets(op: str) -> str:
    """Return the ONNX versions of an operator."""
    domain, name = split_name(op)
    schemas = onnx.defs.get_all_schemas_with_history()
    versions = {s.since_version for s in schemas if (s.domain, s.name) == (domain, name)}
    return " ".join(map(str, sorted(versions))) or "-"


def kinds() -> dict[str, str]:
    """Map each operator to the way it is built."""
    out = dict.fromkeys(load_operators(), "primitives")
    out |= dict.fromkeys(HOST_STEPS, "host step")
    out |= dict.fromkeys((n for n in RULES if n not in out), "written away, where the elements are known")
    out |= dict.fromkeys((b for b in BODIES if b not in out), "body")
    for s in onnx.defs.get_all_schemas():
        name = f"{s.domain}::{s.name}" if s.domain else s.name
        if s.has_function or s.has_context_dependent_function:
            out.setdefault(name, "function")
    out |= {"ai.onnx.ml::CategoryMapper": "numbers in place of texts", "ai.onnx.ml::ZipMap": "the host"}
    return out | {"If": "a branch, or a host step where data decide", "Constant": "a constant"}


def counted(results: Mapping[str, str]) -> tuple[Counter[str], Counter[str]]:
    """Count the passed cases and all cases of one node, by operator."""
    passed: Counter[str] = Counter()
    every: Counter[str] = Counter()
    for case in cases():
        nodes = case.model.graph.node
        if len(nodes) == 1:
            n = nodes[0]
            name = f"{n.domain}::{n.op_type}" if n.domain not in ("", "ai.onnx") else n.op_type
            every[name] += 1
            passed[name] += results.get(case.name, "").startswith("passed")
    return passed, every


def table(results: Mapping[str, str]) -> str:
    """Return the text of the document."""
    known = kinds()
    passed, every = counted(results) if results else (Counter[str](), Counter[str]())
    lines = [HEAD, "| operator | built as | opsets | cases |", "|---|---|---|---|"]
    for op in sorted(known, key=lambda x: (split_name(x)[0], split_name(x)[1])):
        cell = f"{passed[op]} of {every[op]}" if every[op] else "-"
        lines.append(f"| {op} | {known[op]} | {opsets(op)} | {cell} |")
    schemas = {f"{s.domain}::{s.name}" if s.domain else s.name for s in onnx.defs.get_all_schemas()}
    missing = sorted(schemas - known.keys())
    lines += ["", f"Not built, rejected by name ({len(missing)} of ONNX's): {', '.join(missing)}.", ""]
    return "\n".join(lines)


def main(path: str = "") -> None:
    """Write the document."""
    PLACE.write_text(table(json.loads(Path(path).read_text()) if path else {}))
    print(PLACE)


if __name__ == "__main__":
    main(*sys.argv[1:2])
