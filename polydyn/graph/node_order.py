"""A topological order of a file's nodes.

ONNX requires one, and ONNX Runtime does not: its converter to float16 writes casts after the nodes that read them.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx

from polydyn.errors import ModelError


def ordered_nodes(proto: onnx.GraphProto) -> list[tuple[int, onnx.NodeProto]]:
    """Return the nodes with their positions in the file, every node after the nodes whose results it or its bodies
    read. The file's order is kept where possible. Raises ModelError for a cycle.
    """
    nodes = list(enumerate(proto.node))
    producers: dict[str, int] = {}
    for k, n in nodes:
        for o in filter(None, n.output):
            producers.setdefault(o, k)
    needs = [list(dict.fromkeys(producers[x] for x in names_read(n) if x in producers)) for _, n in nodes]
    if all(before < k for k, befores in enumerate(needs) for before in befores):
        return nodes
    done: dict[int, None] = {}
    waiting: set[int] = set()
    for k, _ in nodes:
        stack = [k]
        while stack:
            last = stack[-1]
            missing = [x for x in needs[last] if x not in done]
            if last in done or not missing:
                done.setdefault(last)
                waiting.discard(stack.pop())
            elif last in waiting:
                raise _cycle(proto.node[last], last, needs[last], proto)
            else:
                waiting.add(last)
                stack += reversed(missing)
    return [nodes[k] for k in done]


def names_read(n: onnx.NodeProto) -> Iterator[str]:
    """Yield the names that a node reads, and those that its bodies read from outside of them."""
    yield from n.input
    for a in n.attribute:
        for body in (a.g, *a.graphs):
            inside = {x.name for x in (*body.input, *body.initializer)} | {o for m in body.node for o in m.output}
            inside |= {t.values.name for t in body.sparse_initializer}
            read = (*(x for m in body.node for x in names_read(m)), *(o.name for o in body.output))
            yield from (x for x in read if x not in inside)


def _cycle(n: onnx.NodeProto, position: int, needs: list[int], proto: onnx.GraphProto) -> ModelError:
    results = {o for k in needs for o in proto.node[k].output}
    tensor = next(x for x in names_read(n) if x in results)
    return ModelError(
        f"{tensor} is read before it is computed, in a cycle", node=n.name or f"{n.op_type}_{position}", tensor=tensor,
        rule="no node depends on its own result", remedy="the model is cyclic: export it again",
    )  # fmt: skip
