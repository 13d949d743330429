"""Forests of scikit-learn beside ONNX Runtime, at 1, 100 and 100 000 rows.

usage: python -m benchmarks.forests [--threads 1 2] [--rounds N] [--seconds S] [--quick]

The trees are trained on 3000 rows of 20 normal random features (seed 0): 100 trees of full depth, 100 of depth 3, 30 of
depth 8. They are written as TreeEnsembleRegressor; rows N are symbolic. Times follow benchmarks/protocol.py. Results go
to benchmarks/results/forests.json, or benchmarks/out/results/forests.json for quick runs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper

from benchmarks import arguments, record, rows
from polydyn.testing import models

FEATURES = 20
ROWS = (1, 100, 100_000)
FORESTS = {"100 trees": (100, None), "100 trees, depth 3": (100, 3), "30 trees, depth 8": (30, 8)}
"""Name -> number of trees and their maximum depth."""


def trained(count: int, depth: int | None) -> onnx.ModelProto:
    """Return a regression by a trained forest."""
    from sklearn.ensemble import RandomForestRegressor

    rng = np.random.default_rng(0)
    x = rng.standard_normal((3000, FEATURES)).astype(np.float32)
    forest = RandomForestRegressor(count, max_depth=depth, random_state=0)
    forest.fit(x, x[:, 0] * x[:, 1] + np.maximum(x[:, 2], x[:, 3]))
    columns: dict[str, list[Any]] = {}
    for number, tree in enumerate(t.tree_ for t in forest.estimators_):
        _add_tree(columns, number, tree, count)
    node = helper.make_node("TreeEnsembleRegressor", ["x"], ["y"], domain="ai.onnx.ml", n_targets=1, **columns)
    inputs = [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["N", FEATURES])]
    outputs = [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["N", 1])]
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(helper.make_graph([node], "forest", inputs, outputs), opset_imports=opsets, ir_version=10)


def _add_tree(columns: dict[str, list[Any]], number: int, tree: Any, count: int) -> None:
    """Append the nodes of a tree of scikit-learn to the columns of the ONNX attributes."""
    leaf = tree.children_left < 0
    own = np.arange(tree.node_count)
    parts: Mapping[str, Any] = {
        "nodes_treeids": own * 0 + number, "nodes_nodeids": own,
        "nodes_featureids": np.where(leaf, 0, tree.feature), "nodes_values": np.where(leaf, 0, tree.threshold),
        "nodes_modes": np.where(leaf, "LEAF", "BRANCH_LEQ"),
        "nodes_truenodeids": np.where(leaf, 0, tree.children_left),
        "nodes_falsenodeids": np.where(leaf, 0, tree.children_right),
        "target_treeids": own[leaf] * 0 + number, "target_nodeids": own[leaf], "target_ids": own[leaf] * 0,
        "target_weights": tree.value[leaf, 0, 0] / count,
    }  # fmt: skip
    for name, part in parts.items():
        columns.setdefault(name, []).extend(part.tolist())


def main() -> None:
    """See the module's docstring."""
    args = arguments.parser(__doc__, seconds=3).parse_args()
    results = record.Results("forests", arguments.folder(args))
    every = []
    for threads in args.threads:
        rivals = arguments.rivals(threads, args.also)
        with rows.Field(rivals, threads) as field, tempfile.TemporaryDirectory() as folder:
            for name, (count, depth) in list(FORESTS.items())[: 1 if args.quick else None]:
                field.load(models.save(trained(count, depth), Path(folder)))
                found = [field.measure({"N": n}, arguments.effort(args), 0.0) | {"case": name} for n in ROWS]
                results.add(name, threads, found, **field.about())
                for row in found:
                    rows.progress(row)
                every += found
    rows.show(every, "forests")
    print(f"written: {results.path.name}")


if __name__ == "__main__":
    main()
