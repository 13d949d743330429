"""Local functions of a model: the nodes of one call, with the call's names and attributes.

ONNX's own inliner forgets the default values of attributes, and leaves out functions of another opset than the
model's. The nodes of a function keep the function's opsets here (``importer._Reader``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

import onnx
import onnx.defs
import onnx.helper

from polydyn.errors import ModelError, UnsupportedError

Key: TypeAlias = tuple[str, str, str]
"""Domain, name and overload of a function."""


MAX_NODES = 1_000_000
"""Maximum nodes of a model with functions. Each function that calls another one twice doubles them."""


def opsets_of(imports: Iterable[onnx.OperatorSetIdProto]) -> dict[str, int]:
    """Return the version of each domain; ONNX's own domain is called ``ai.onnx``."""
    return {o.domain or "ai.onnx": o.version for o in imports}


def functions_of(proto: onnx.ModelProto) -> dict[Key, onnx.FunctionProto]:
    """Return the local functions of a model.

    Raises ModelError if one calls itself, and UnsupportedError if all calls together have more than MAX_NODES nodes.
    """
    functions = {(_domain(f.domain), f.name, f.overload): f for f in proto.functions}
    calls = {k: set(map(called, _every(f.node))) for k, f in functions.items()}
    nodes: dict[Key, int] = {}
    while free := [k for k, inner in calls.items() if not inner & calls.keys()]:
        for k in free:
            del calls[k]
            nodes[k] = sum(nodes.get(called(n), 1) for n in _every(functions[k].node))
    if calls:
        domain, name, _ = min(calls)
        raise ModelError(
            f"the function {domain}::{name} calls itself", rule="functions of ONNX are not recursive",
            remedy="export the model again",
        )  # fmt: skip
    whole = sum(nodes.get(called(n), 1) for n in _every(proto.graph.node)) if functions else 0
    if whole > MAX_NODES:
        raise UnsupportedError(
            f"the model has {whole} nodes with those of its calls of functions",
            rule=f"a model has at most {MAX_NODES} nodes after every call is replaced by the function's nodes",
            remedy="export the model without functions that call others many times",
        )  # fmt: skip
    return functions


def called(node: onnx.NodeProto) -> Key:
    """Return the key of the function that a node calls, if it calls one."""
    return _domain(node.domain), node.op_type, node.overload


def body_of(function: onnx.FunctionProto, call: onnx.NodeProto, node: str) -> onnx.GraphProto:
    """Return the nodes of a call as a graph over the names outside of the function.

    ``node``: the name of the call, which is unique. Names inside the function, in graphs of its nodes too, follow it.
    """
    if len(call.input) > len(function.input) or len(call.output) > len(function.output):
        raise ModelError(
            f"{call.op_type} is called with {len(call.input)} inputs and {len(call.output)} outputs, the function has "
            f"{len(function.input)} and {len(function.output)}", node=node, remedy="export the model again",
        )  # fmt: skip
    names = {"": "", **dict.fromkeys(function.input, ""), **dict(zip(function.input, call.input, strict=False))}
    copies: list[onnx.NodeProto] = []
    for inner, outer in zip(function.output, call.output, strict=False):
        if outer and inner in names:  # an input, or an output that has a name already
            copies.append(onnx.helper.make_node("Identity", [names[inner]], [outer], f"{node}/{inner}"))
        elif outer:
            names[inner] = outer
    attributes = {a.name: a for a in function.attribute_proto} | {a.name: a for a in call.attribute}
    graph = onnx.GraphProto(name=function.name)
    graph.node.extend(_renamed(n, names, f"{node}/", attributes) for n in function.node)
    graph.node.extend(copies)
    for v in function.value_info:
        if v.name in names:
            graph.value_info.add().CopyFrom(v)
            graph.value_info[-1].name = names[v.name]
    return graph


def check_versions(function: onnx.FunctionProto, opsets: Mapping[str, int], node: str) -> None:
    """Raise ModelError if an operator of a function has another form in the function's opset than in the model's.

    ONNX forbids it, and ONNX Runtime takes the operator of the model's opset. ``opsets``: the versions of the model.
    """
    own = opsets_of(function.opset_import)
    for n in _every(function.node):
        domain = n.domain or "ai.onnx"
        versions = own.get(domain, 1), opsets.get(domain, own.get(domain, 1))
        if versions[0] != versions[1] and _form(n, versions[0]) != _form(n, versions[1]):
            raise ModelError(
                f"{n.op_type} of the function {function.name} is of opset {versions[0]}, the model of {versions[1]}",
                node=node, rule="an operator of a function has the same form in the function's opset and the model's",
                remedy="export the model again with one opset",
            )  # fmt: skip


def _form(n: onnx.NodeProto, version: int) -> object:
    """Return what an operator's meaning depends on besides its types, None if ONNX does not define it."""
    try:
        schema = onnx.defs.get_schema(n.op_type, version, _domain(n.domain))
    except onnx.defs.SchemaError:
        return None
    attributes = {k: (a.type, a.required, a.default_value.SerializeToString()) for k, a in schema.attributes.items()}
    return attributes, [(x.name, x.option) for x in schema.inputs], [(x.name, x.option) for x in schema.outputs]


def _renamed(
    n: onnx.NodeProto, names: dict[str, str], prefix: str, attributes: Mapping[str, onnx.AttributeProto]
) -> onnx.NodeProto:
    """Rename tensors and node, and replace references to attributes of the function.

    ``names`` gets the results of the node.
    """
    out = onnx.NodeProto()
    out.CopyFrom(n)
    out.name = prefix + n.name if n.name else ""
    out.input[:] = [names.get(x, prefix + x) for x in n.input]
    out.output[:] = [names.setdefault(x, prefix + x) for x in n.output]
    del out.attribute[:]
    for a in n.attribute:
        value = attributes.get(a.ref_attr_name) if a.ref_attr_name else a
        if value is None:
            continue
        made = out.attribute.add()
        made.CopyFrom(value)
        made.name = a.name
        if not a.ref_attr_name:
            for g in (*made.graphs, *([made.g] if made.HasField("g") else [])):
                _rename_graph(g, names, prefix, attributes)
    return out


def _rename_graph(
    graph: onnx.GraphProto, outer: Mapping[str, str], prefix: str, attributes: Mapping[str, onnx.AttributeProto]
) -> None:
    """Rename the tensors of a graph inside a node, in place. Its own names hide those around it."""
    names = dict(outer)
    for v in (*graph.input, *graph.initializer, *(t.values for t in graph.sparse_initializer)):
        v.name = names[v.name] = prefix + v.name
    made = {o for n in graph.node for o in n.output if o}
    names |= {o: prefix + o for o in made}
    nodes = [_renamed(n, names, prefix, attributes) for n in graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    for v in (*graph.output, *graph.value_info):
        v.name = names.get(v.name, prefix + v.name)


def _domain(name: str) -> str:
    return "" if name == "ai.onnx" else name


def _every(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield nodes, and those of the graphs inside them."""
    for n in nodes:
        yield n
        for a in n.attribute:
            for g in (*a.graphs, *([a.g] if a.HasField("g") else [])):
                yield from _every(g.node)
