"""Tree ensembles of ai.onnx.ml: all trees descend one level at a time through tables of nodes.

Every sample has one position in each tree. All positions move to a child, once per level of the deepest tree; a leaf is
its own child. The levels are written one after another, because constants then bound every position
(``graph/intervals.py``): no level checks its subscripts. A Loop repeats one level for trees of more than ``LEVELS``.
The weights of the leaves are then combined per target (``functions/scores.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from polydyn.errors import ModelError
from polydyn.graph.bodies import OPSET, Body, body
from polydyn.graph.functions.scores import ML, class_outputs, one_of_two, post_transform, set_one_class
from polydyn.graph.importer import ImportedGraph, ModelInput, inner_prefix
from polydyn.graph.operators.registry import OnnxNode
from polydyn.schedules.expr import Array

MODES = ("LEQ", "LT", "GTE", "GT", "EQ", "NEQ", "MEMBER")
"""Comparisons of a feature with a node's value, in the order of TreeEnsemble's codes. MEMBER: is in a set."""
COMPARISONS = {"LEQ": "LessOrEqual", "LT": "Less", "GTE": "GreaterOrEqual", "GT": "Greater", "EQ": "Equal"}
LEAF = -1
COLUMNS = ("feature", "yes", "no", "mode")
"""Columns of the table of nodes: a visit reads one line of the cache."""
LEVELS = 64
"""Maximum levels that are written one after another."""
AGGREGATES = {"SUM": "ReduceSum", "AVERAGE": "ReduceSum", "MIN": "ReduceMin", "MAX": "ReduceMax"}


@dataclass(frozen=True)
class Forest:
    """Trees as tables over nodes.

    int64 ``mode`` (index in ``MODES``, or LEAF), ``feature``, children ``yes`` and ``no``. ``value``: thresholds.
    ``missing``: whether NaN goes to ``yes``. ``members`` [nodes, max members]: sets, padded with NaN. ``roots``: one
    node per tree. ``targets``, ``weights`` [nodes, max entries of a leaf]: the target of each entry of a leaf, and its
    weight; target -1 is unused.
    """

    mode: Array
    feature: Array
    value: Array
    yes: Array
    no: Array
    missing: Array
    roots: Array
    targets: Array
    weights: Array
    members: Array

    def depth(self) -> int:
        """Return the steps from the roots to the deepest leaf. Raises ModelError for an invalid child or a cycle."""
        steps, front = 0, np.unique(self.roots)
        while (inner := front[self.mode[front] != LEAF]).size:
            front, steps = np.unique(np.concatenate([self.yes[inner], self.no[inner]])), steps + 1
            if front[0] < 0 or front[-1] >= self.mode.size or steps > self.mode.size:
                raise ModelError("a child of a tree's node does not exist, or the nodes form a cycle", rule="trees")
        return steps


# -- reading -----------------------------------------------------------------------------------------------------------


def _table(b: Body, name: str, dtype: str, default: Any = ()) -> Array:
    """Return an attribute, or its tensor form, as a vector."""
    tensor = b.attribute(f"{name}_as_tensor")
    plain = b.attribute(name, default)
    chosen = tensor if tensor is not None and np.size(tensor) else plain
    return np.asarray(chosen, dtype).reshape(-1)


def _old_forest(b: Body, entries: str, dtype: str) -> Forest:
    """Read the trees of TreeEnsembleClassifier and TreeEnsembleRegressor. ``entries``: ``class`` or ``target``."""
    trees, ids = _table(b, "nodes_treeids", "int64"), _table(b, "nodes_nodeids", "int64")
    names = np.array([str(m) for m in b.attribute("nodes_modes", ())])
    codes = {f"BRANCH_{m}": k for k, m in enumerate(MODES[:-1])} | {"LEAF": LEAF}
    if unknown := sorted(set(names) - codes.keys()):
        raise b.refuse(f"the mode {unknown[0]}")
    mode = np.array([codes[m] for m in names], np.int64)
    place = {(int(t), int(n)): k for k, (t, n) in enumerate(zip(trees, ids, strict=True))}
    yes, no = (_table(b, f"nodes_{w}nodeids", "int64") for w in ("true", "false"))

    def children(nodes: Array) -> Array:
        own = np.arange(mode.size)
        rows = zip(own, mode, trees, nodes, strict=True)
        return np.array([k if m == LEAF else place.get((int(t), int(c)), -2) for k, m, t, c in rows], np.int64)

    _, first = np.unique(trees, return_index=True)
    at = [place.get((int(t), int(n)), -2) for t, n in zip(
        _table(b, f"{entries}_treeids", "int64"), _table(b, f"{entries}_nodeids", "int64"), strict=True
    )]  # fmt: skip
    if -2 in at:
        raise ModelError(f"{entries}_nodeids names a node that does not exist", node=b.node.name)
    targets, weights = _entries(
        mode.size, np.array(at, np.int64), _table(b, f"{entries}_ids", "int64"), _table(b, f"{entries}_weights", dtype)
    )  # fmt: skip
    if entries == "target" and b.attribute("n_targets", 1) == 1:  # as in ONNX Runtime, the first weight of a leaf
        targets, weights = targets[:, :1], weights[:, :1]  # counts: skl2onnx repeats it for each class
    missing = _table(b, "nodes_missing_value_tracks_true", "int64")
    b.ignore("nodes_hitrates", "nodes_hitrates_as_tensor")
    return Forest(
        mode, _table(b, "nodes_featureids", "int64"), _table(b, "nodes_values", dtype), children(yes), children(no),
        missing.astype(bool) if missing.size else np.zeros(mode.size, bool), np.sort(first), targets, weights,
        np.zeros((mode.size, 0), dtype),
    )  # fmt: skip


def _entries(nodes: int, at: Array, targets: Array, weights: Array) -> tuple[Array, Array]:
    """Return [nodes, max entries of one]: target ids and weights, in the order of each node's entries."""
    order = np.argsort(at, kind="stable")
    counts = np.bincount(at, minlength=nodes)
    row = at[order]
    column = np.arange(at.size) - np.concatenate([[0], np.cumsum(counts)])[row]
    wide = max(int(counts.max(initial=0)), 1)
    ids, values = np.full((nodes, wide), -1, np.int64), np.zeros((nodes, wide), weights.dtype)
    ids[row, column], values[row, column] = targets[order], weights[order]
    return ids, values


def _new_forest(b: Body, dtype: str) -> Forest:
    """Read the trees of TreeEnsemble. Leaves are numbered separately; here they follow the inner nodes."""
    mode = _table(b, "nodes_modes", "int64")
    inner, own = mode.size, _table(b, "leaf_targetids", "int64")
    leaves = own.size
    children = []
    for way in ("true", "false"):
        ids, is_leaf = _table(b, f"nodes_{way}nodeids", "int64"), _table(b, f"nodes_{way}leafs", "int64")
        children.append(np.concatenate([ids + inner * (is_leaf != 0), np.arange(inner, inner + leaves)]))
    yes, no = children
    roots = _table(b, "tree_roots", "int64")
    alone = (yes[roots] == no[roots]) & (yes[roots] >= inner)  # a tree that is a leaf
    roots = np.where(alone, yes[roots], roots)
    missing = _table(b, "nodes_missing_value_tracks_true", "int64", (0,) * inner) != 0
    ids, values = _entries(inner + leaves, np.arange(inner, inner + leaves), own, _table(b, "leaf_weights", dtype))
    b.ignore("nodes_hitrates")

    def padded(table: Array, fill: Any) -> Array:
        return np.concatenate([table, np.full(leaves, fill, table.dtype)])

    return Forest(
        padded(mode, LEAF), padded(_table(b, "nodes_featureids", "int64"), 0),
        padded(_table(b, "nodes_splits", dtype), 0), yes, no, padded(missing, False), roots, ids, values,
        _members(b, mode, inner + leaves, dtype),
    )  # fmt: skip


def _members(b: Body, mode: Array, nodes: int, dtype: str) -> Array:
    """Return [nodes, max members of a set]: the sets of nodes of mode MEMBER, which the attribute separates by NaN."""
    values, sets = _table(b, "membership_values", dtype), [list[Any]()]
    for v in values:
        if np.isnan(v):
            sets.append([])
        else:
            sets[-1].append(v)
    at = np.flatnonzero(mode == MODES.index("MEMBER"))
    if at.size > len(sets):
        raise ModelError("membership_values has too few sets", node=b.node.name, rule="one for each BRANCH_MEMBER")
    table = np.full((nodes, max(map(len, sets)) if at.size else 0), np.nan, dtype)
    for k, members in zip(at, sets, strict=False):
        table[k, : len(members)] = members
    return table


# -- walking -----------------------------------------------------------------------------------------------------------


class _Walk:
    """Writes one level: nodes over tables, by ``op`` (operator, inputs, attributes -> result) and ``table`` (array ->
    its name).
    """

    def __init__(self, forest: Forest, op: Callable[..., str], table: Callable[[Array], str]) -> None:
        self.op = op
        inner = forest.mode != LEAF
        forest = replace(forest, feature=np.where(inner, forest.feature, 0))  # leaves may have any feature
        packed = np.stack([forest.feature, forest.yes, forest.no, forest.mode], 1)
        self.tables = {"nodes": table(_compact(packed.reshape(-1))), "value": table(forest.value)}
        self.tables |= {"width": table(np.array(4, np.int32))}
        self.tables |= {c: table(np.array(k, np.int32)) for k, c in enumerate(COLUMNS)}
        self.used = [MODES[m] for m in np.unique(forest.mode[inner])]
        if len(self.used) > 1:
            self.tables |= {m: table(np.array(MODES.index(m), np.int32)) for m in self.used}
        if "MEMBER" in self.used:
            self.tables |= {"members": table(forest.members), "axis": table(np.array([-1]))}
        if forest.missing.any():
            self.tables["missing"] = table(forest.missing)

    def level(self, x: str, at: str) -> str:
        """Return the positions one level below the positions ``at``."""
        first = self.op("Mul", at, self.tables["width"])
        value = self.op("GatherElements", x, self._column("feature", first), axis=1)
        goes = self._goes(value, at, first)
        if "missing" in self.tables:
            goes = self.op("Or", goes, self.op("And", self.op("IsNaN", value), self._pick("missing", at)))
        return self.op("Where", goes, self._column("yes", first), self._column("no", first))

    def _column(self, name: str, first: str) -> str:
        return self._pick("nodes", self.op("Add", first, self.tables[name]))

    def _pick(self, table: str, at: str) -> str:
        return self.op("Gather", self.tables[table], at, axis=0)

    def _goes(self, value: str, at: str, first: str) -> str:
        """Return whether a position continues to ``yes``, by the mode of its node if there are several modes."""
        goes_yes = ""
        modes = self._column("mode", first) if len(self.used) > 1 else ""
        split = self._pick("value", at)
        for name in self.used:
            if name == "MEMBER":
                axis, sets = self.tables["axis"], self._pick("members", at)
                same = self.op("Equal", self.op("Unsqueeze", value, axis), sets)
                hits = self.op("ReduceMax", self.op("Cast", same, to=6), axis, keepdims=0)
                one = self.op("Cast", hits, to=9)
            elif name == "NEQ":
                one = self.op("Not", self.op("Equal", value, split))
            else:
                one = self.op(COMPARISONS[name], value, split)
            if goes_yes:
                one = self.op("Where", self.op("Equal", modes, self.tables[name]), one, goes_yes)
            goes_yes = one
        return goes_yes


def _compact(array: Array) -> Array:
    """Return numbers of nodes and features as int32, half the memory."""
    return array.astype(np.int32) if array.dtype == np.int64 else array


def _repeated_level(prefix: str, forest: Forest, x: str) -> ImportedGraph:
    """Return the body of a Loop from (iteration, condition, positions) to (condition, positions one level deeper)."""
    p = f"{prefix}walk."
    nodes: list[OnnxNode] = []
    constants: dict[str, Array] = {}

    def op(name: str, *inputs: str, **attributes: Any) -> str:
        output = f"{p}{name}_{len(nodes)}"
        nodes.append(OnnxNode(output, name, inputs, (output,), attributes, OPSET))
        return output

    def table(array: Array) -> str:
        name = f"{p}table_{len(constants)}"
        constants[name] = array
        return name

    new = _Walk(forest, op, table).level(x, p + "at")
    more = op("Identity", p + "more")
    inputs = (ModelInput(p + "i", "int64", ()), ModelInput(p + "more", "bool", ()), ModelInput(p + "at", "int32", None))
    return ImportedGraph("walk", inputs, (more, new), tuple(nodes), constants)


def _leaves(b: Body, forest: Forest, x: str) -> str:
    """Return [samples, trees]: the leaf in which each sample ends in each tree."""
    depth = forest.depth()
    used = forest.feature[forest.mode != LEAF]
    known = b.tensor(b.input(0)).shape[-1]
    if used.size:
        if used.min() < 0:
            raise ModelError("a negative feature number", node=b.node.name)
        b.ctx.at_most(known * 0 + int(used.max()) + 1, known, f"{b.node.name} reads feature {int(used.max())}")
    trees = forest.roots.size
    roots = _compact(forest.roots.reshape(1, trees))
    at = b.op("Expand", b.constant(roots, "int32"), b.shape(b.size(x, 0), trees))
    if depth > LEVELS:
        graph = _repeated_level(inner_prefix(b.node), forest, x)
        return b.op("Loop", b.constant(depth), b.constant(True, "bool"), at, body=graph)
    walk = _Walk(forest, b.op, lambda array: b.constant(array, str(array.dtype)))
    for _ in range(depth):
        at = walk.level(x, at)
    return at


def _aggregated(b: Body, forest: Forest, at: str, count: int, aggregate: str) -> tuple[str, str]:
    """Return [samples, targets] of the leaves' weights, and whether a target has any ("" if each always has one)."""
    if aggregate not in AGGREGATES:
        raise b.refuse(f"the aggregate function {aggregate}")
    ids, weights = forest.targets, forest.weights
    if ids.max(initial=-1) >= count:
        raise ModelError(f"a leaf has the target {ids.max()} of {count}", node=b.node.name)
    picked = b.op("Gather", b.constant(weights, str(weights.dtype)), at, axis=0)  # [samples, trees, entries]
    filled = ids[(ids >= 0).any(1)]
    if filled.size and filled.shape[1] == count and (filled == np.arange(count)).all():
        totals, has = b.reduce(AGGREGATES[aggregate], picked, 1, keepdims=0), ""
    else:
        last = b.constant([-1])
        owners = b.op("Unsqueeze", b.op("Gather", b.constant(ids), at, axis=0), last)
        mine = b.op("Equal", owners, b.constant(np.arange(count)))
        neutral = {"MIN": np.inf, "MAX": -np.inf}.get(aggregate, 0.0)
        each = b.op("Where", mine, b.op("Unsqueeze", picked, last), b.constant(neutral, str(weights.dtype)))
        totals = b.reduce(AGGREGATES[aggregate], each, 1, 2, keepdims=0)
        has = b.cast(b.reduce("ReduceMax", b.cast(mine, "int32"), 1, 2, keepdims=0), "bool")
        if aggregate in ("MIN", "MAX"):
            totals = b.op("Where", has, totals, b.constant(0.0, str(weights.dtype)))
    if aggregate == "AVERAGE":
        totals = b.op("Div", totals, b.constant(float(forest.roots.size), str(weights.dtype)))
    return totals, has


def samples(b: Body) -> tuple[str, str]:
    """Return the input as [samples, features] of float32 or float64, and its dtype."""
    x, t = b.input(0), b.tensor(b.input(0))
    if len(t.shape) not in (1, 2):
        raise b.refuse(f"an input of {len(t.shape)} axes")
    dtype = t.dtype if t.dtype == "float64" else "float32"
    x = x if t.dtype == dtype else b.cast(x, dtype)
    return (x if len(t.shape) == 2 else b.op("Unsqueeze", x, b.constant([0]))), dtype


# -- operators ---------------------------------------------------------------------------------------------------------


@body(f"{ML}::TreeEnsemble")
def tree_ensemble(b: Body) -> None:
    """Expand an ensemble whose leaves have one target each. Results have the input's dtype."""
    if b.tensor(b.input(0)).dtype not in ("float32", "float64"):
        raise b.refuse(f"an input of {b.tensor(b.input(0)).dtype}")
    x, dtype = samples(b)
    forest = _new_forest(b, dtype)
    count = int(b.attribute("n_targets") or int(forest.targets.max(initial=0)) + 1)
    how = ("AVERAGE", "SUM", "MIN", "MAX")[b.attribute("aggregate_function", 1)]
    kind = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")[b.attribute("post_transform", 0)]
    totals, _ = _aggregated(b, forest, _leaves(b, forest, x), count, how)
    b.set_output(post_transform(b, totals, kind if count > 1 or kind == "PROBIT" else "NONE", dtype))


@body(f"{ML}::TreeEnsembleRegressor")
def tree_ensemble_regressor(b: Body) -> None:
    """Compute the sum, mean or extreme of the leaves' weights, plus the base values, as float32."""
    x, dtype = samples(b)
    forest = _old_forest(b, "target", dtype)
    count = int(b.attribute("n_targets", 1))
    totals, _ = _aggregated(b, forest, _leaves(b, forest, x), count, b.attribute("aggregate_function", "SUM"))
    base = _table(b, "base_values", dtype)
    totals = b.op("Add", totals, b.constant(base, dtype)) if base.size else totals
    kind = b.attribute("post_transform", "NONE")
    result = post_transform(b, totals, kind if count > 1 or kind == "PROBIT" else "NONE", dtype)
    b.set_output(b.cast(result, "float32") if dtype != "float32" else result)


@body(f"{ML}::TreeEnsembleClassifier")
def tree_ensemble_classifier(b: Body) -> None:
    """Compute the class with the largest sum of leaf weights, and the scores of all classes as float32."""
    x, dtype = samples(b)
    forest = _old_forest(b, "class", dtype)
    labels = b.attribute("classlabels_int64s", ())
    count, base = len(labels), _table(b, "base_values", dtype)
    totals, has = _aggregated(b, forest, _leaves(b, forest, x), count, "SUM")
    ids = np.unique(forest.targets[forest.targets >= 0])
    kind = b.attribute("post_transform", "NONE")
    if count == 2 and ids.size == 1:
        if base.size > 1 or (kind == "PROBIT" and ids[0] == 0):
            raise b.refuse("two base values, or PROBIT, for two classes of which one has weights")
        if base.size and ids[0] == 0:
            totals = b.op("Add", totals, b.constant(base, dtype))
        one_of_two(b, totals, labels, kind, int(ids[0]), bool((forest.weights >= 0).all()), dtype)
        return
    if base.size not in (0, count):
        raise b.refuse(f"{base.size} base values for {count} classes")
    if base.size:
        totals, has = b.op("Add", totals, b.constant(base, dtype)), ""
    ranked = b.op("Where", has, totals, b.constant(-np.inf, dtype)) if has else totals
    if count == 1:
        set_one_class(b, totals, labels, dtype)
    else:
        class_outputs(b, totals, ranked, labels, kind, dtype)
