"""Convert isl ASTs to loop IR, by getters only (isl callbacks that raise corrupt the heap: docs/polyhedral.md 1)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import islpy as isl

from polydyn.clock import timed
from polydyn.codegen.indices import substitute
from polydyn.codegen.ir import Body, Compare, For, If, Inst, Mark, rewrite, walk
from polydyn.codegen.passes.tiles import mark_parallel
from polydyn.schedules.errors import CodegenError
from polydyn.schedules.index import Index, maximum, minimum
from polydyn.schedules.isl_util import param_set
from polydyn.schedules.tiling import TiledGroup
from polydyn.schedules.tree import TileStatement, Tree, build_ast, to_isl

_NODE, _EXPR, _OP = isl.ast_node_type, isl.ast_expr_type, isl.ast_expr_op_type
_RELATION = {_OP.eq: "==", _OP.ge: ">=", _OP.gt: ">", _OP.le: "<=", _OP.lt: "<"}


@timed("loops by isl")
def generate(tiled: TiledGroup) -> Body:
    """Return the loop IR of a tiled group, with instances that are not lowered yet.

    Loops are named by their coordinates, those of the coincident band are parallel, and extents are bound.
    """
    body = _generate(tiled.tree, tiled.statements, tiled.params)
    return mark_parallel(substitute(body, tiled.extents), tiled.coincident)


@lru_cache(maxsize=256)
def _generate(tree: Tree, statements: tuple[TileStatement, ...], params: tuple[str, ...]) -> Body:
    """Return one isl AST for all groups of one form (tile sizes and extents are parameters)."""
    ast = build_ast(to_isl(tree, statements, params), param_set(params))
    return name_loops(from_isl(ast), {s.name: s.coords for s in statements})


def from_isl(node: Any) -> Body:
    """Return the loop IR of an isl AST node; statement instances stay ``Inst``."""
    kind = node.get_type()
    if kind == _NODE.for_:
        return _loop(node)
    if kind == _NODE.if_:
        orelse = from_isl(node.if_get_else_node()) if node.if_has_else_node() else ()
        return (If(_condition(node.if_get_cond()), from_isl(node.if_get_then_node()), orelse),)
    if kind == _NODE.block:
        children = node.block_get_children()
        return tuple(n for i in range(children.n_ast_node()) for n in from_isl(children.get_at(i)))
    if kind == _NODE.mark:
        return (Mark(node.mark_get_id().name, from_isl(node.mark_get_node())),)
    e = node.user_get_expr()
    args = tuple(_index(e.get_op_arg(i)) for i in range(1, e.get_op_n_arg()))
    return (Inst(e.get_op_arg(0).to_C_str(), args),)


def _loop(node: Any) -> Body:
    var, lo = node.for_get_iterator().to_C_str(), _index(node.for_get_init())
    body = from_isl(node.for_get_body())
    if node.for_is_degenerate():
        return substitute(body, {var: lo})
    cond = node.for_get_cond()
    hi = _index(cond.get_op_arg(1)) + (0 if cond.get_op_type() == _OP.lt else 1)
    if _index(node.for_get_inc()) != 1:
        raise CodegenError(f"loop {var} has a step other than 1")
    return (For(var, lo, hi, body),)


def _condition(e: Any) -> tuple[Compare, ...]:
    op = e.get_op_type()
    if op in (_OP.and_, _OP.and_then):
        return tuple(c for i in range(e.get_op_n_arg()) for c in _condition(e.get_op_arg(i)))
    if op not in _RELATION:
        raise CodegenError(f"isl guard {e.to_C_str()} is not a conjunction of comparisons")
    return (Compare(_RELATION[op], _index(e.get_op_arg(0)), _index(e.get_op_arg(1))),)


def _index(e: Any) -> Index:
    kind = e.get_type()
    if kind == _EXPR.int:
        return Index.of(e.get_val().to_python())
    if kind == _EXPR.id:
        return Index.of(e.get_id().name)
    op, args = e.get_op_type(), [_index(e.get_op_arg(i)) for i in range(e.get_op_n_arg())]
    if op == _OP.add:
        return args[0] + args[1]
    if op == _OP.sub:
        return args[0] - args[1]
    if op == _OP.mul:
        return args[0] * args[1]
    if op == _OP.minus:
        return -args[0]
    if op == _OP.min:
        return minimum(*args)
    if op == _OP.max:
        return maximum(*args)
    if op in (_OP.fdiv_q, _OP.pdiv_q):
        return args[0] // args[1]
    if op == _OP.pdiv_r:
        return args[0] % args[1]
    raise CodegenError(f"isl expression {e.to_C_str()} has no Index form")


def name_loops(body: Body, coordinates: dict[str, tuple[str, ...]]) -> Body:
    """Rename isl's loop variables (c0, c1, ...) to the coordinates that the statements inside use them for.

    Instances get the names of their coordinates.
    """

    def f(n: Any) -> Any:
        if isinstance(n, Inst):
            return Inst(n.statement, n.args, coordinates[n.statement])
        if not isinstance(n, For):
            return n
        for inst in walk(n.body):
            if isinstance(inst, Inst):
                for coordinate, arg in zip(coordinates[inst.statement], inst.args, strict=True):
                    if arg == Index.of(n.var) and n.var != coordinate:
                        return For(coordinate, n.lo, n.hi, substitute(n.body, {n.var: coordinate}), n.kind)
        return n

    return rewrite(body, f)
