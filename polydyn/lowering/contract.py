"""Lowering of matmul-like groups: roles of iterators, packed constants, the accumulator and its epilogues."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace

from polydyn.fusion.plan import FusedGroup, FusionPlan
from polydyn.fusion.products import NARROW_GROUP_SIZES, group_size, is_windowed
from polydyn.graph.ir import Compute
from polydyn.lowering.collapse import collapse_reduction, collapse_shared
from polydyn.lowering.flatten import FlatNode, flatten
from polydyn.lowering.group import Canonical, LoweredGroup, Pack
from polydyn.lowering.nest import lower_nest
from polydyn.lowering.nibbles import in_bytes, over_nibbles
from polydyn.lowering.output import output_array
from polydyn.lowering.pixels import as_matrix_product, in_place, needs_promotion
from polydyn.lowering.rounding import HALF
from polydyn.lowering.strips import as_strips
from polydyn.lowering.words import PAIRS, ROUNDED, Words, in_words, strips_in_words
from polydyn.schedules.expr import (
    DOTS,
    ITEMSIZE,
    NIBBLE,
    NIBBLES,
    Load,
    Op,
    Value,
    bitcast,
    children,
    indices,
    is_decoded,
    loads,
    neutral,
    read_of,
    transform,
    walk,
)
from polydyn.schedules.group.footprint import Axis, Footprint
from polydyn.schedules.index import ONE, ZERO, Index, product
from polydyn.schedules.model import Group, Statement, touched
from polydyn.schedules.ranges import simplify
from polydyn.schedules.tiling import Roles
from polydyn.schedules.tree.strategies import ACC, DONE, INIT

DOT_COLUMNS, DOT_STEPS = 10, 32
"""Up to so many columns, and from so many reduction steps on, vectors run along the reduction."""
VECTOR, LEAST_TURNED = 16, 64
"""Bytes that a GPU copies at once; rows of a constant, and steps, from which they may be columns."""
TURNED = 8
"""A product is turned where that saves more than one of so many of its operations: results are moved once more then."""
LARGE = 1000
"""What a symbolic extent counts for when iterators are ranked."""


@dataclass(frozen=True)
class ContractGroup:
    """A lowered group of kind contract, the roles of its iterators, and its packed arrays.

    ``dot``: few columns, so that vectors run along the reduction. ``fill``: the row operand is copied to scratch; as
    its ``footprint`` where it has one. ``in_words``: operands are words of several steps. ``turned``: the product with
    its constant rows as columns, in panels; ``window``: as a window, whose vectors may run along lines of pixels. Both
    are under the same names. ``fixed``: no launch writes the column operand (CUDA asks).
    """

    lowered: LoweredGroup
    roles: Roles
    packed: frozenset[str]
    dot: bool = False
    fill: bool = False
    footprint: Footprint | None = None
    in_words: bool = False
    turned: ContractGroup | None = None
    window: Group | None = None
    fixed: bool = False


def lower_contract(
    plan: FusionPlan, group: FusedGroup, width: int, promotion: bool = False, along_k: Collection[str] = (),
    kinds: Sequence[Words] = (PAIRS,), shared: int = 0, vectors: int = 1,
) -> ContractGroup | None:  # fmt: skip
    """The matmul-like form, or None when no pair of iterators separates the operands.

    ``width``: columns of a panel of packed constants; with 0 they stay as they are, but for filters and the dtypes
    ``along_k``, laid out as copies of 16 bytes want them (``_Builder._wanted``). ``promotion``: the target can
    copy a row operand to scratch; without it there are no prologues. ``kinds``: of words that it multiplies;
    ``ROUNDED`` among them: products of float32 round their operands where they can be words. ``shared``: elements of
    columns that stay in a cache, and may be read again for every line of rows. ``vectors``: of a panel of 4-bit words.
    """
    first = group.nodes[0]
    if promotion and width and _narrow_groups(flatten(plan, group, first), width):
        return None
    if promotion and (nibbles := _lower_nibbles(plan, group, width, vectors)):
        return nibbles
    if ROUNDED in kinds:
        if (words := _lower_pixels(plan, group, width, kinds, shared)) and words.in_words:
            return words
        kinds = [k for k in kinds if k != ROUNDED]
    if promotion and (group.prologue or is_windowed(first) or _converts(first)):
        found = _lower_pixels(plan, group, width, kinds, shared)
        if found is not None or group.prologue or is_windowed(first):
            return found
    if promotion and _widens(first):
        dot = _lower_matrix(plan, group, width, along_k)
        return dot if dot and dot.dot else _lower_pixels(plan, group, width, kinds, shared) or dot
    return _lower_matrix(plan, group, width, along_k)


def _lower_nibbles(plan: FusionPlan, group: FusedGroup, width: int, vectors: int) -> ContractGroup | None:
    """The form of a product with weights of 4 bits; None: it is none, or its columns are not alone in the weights."""
    nodes = collapse_shared(tuple(flatten(plan, group, n) for n in group.nodes))
    core = over_nibbles(plan, nodes[0])
    if core is None or any(n.inner for n in nodes) or (roles := choose_roles(core)) is None:
        return None
    if not all(_packable(plan, core, roles, x) for v in children(core.body) if is_decoded(v) for x in loads(v)):
        return None
    nodes = _with_rows((core, *nodes[1:]), roles)
    fill = needs_promotion(nodes[0], roles) and not in_bytes(nodes[0], roles)
    return replace(_Builder(plan, group, nodes[0], nodes, roles, width, vectors=vectors).build(), fill=fill)


def _with_rows(nodes: tuple[FlatNode, ...], roles: Roles) -> tuple[FlatNode, ...]:
    """The nodes with the one row that a product of a vector has."""
    if roles.row != "one":
        return nodes
    return tuple(replace(n, shared=(("one", ONE), *n.shared)) for n in nodes)


def _narrow_groups(n: FlatNode, width: int) -> bool:
    """Whether vectors along the output's channels hold several groups, which lie together in the operand too: then the
    product is a window whose loads are spread over their group, and not a product of few columns for each group.
    """
    read = [x.index[0] for x in loads(n.body)]

    def spread(x: str) -> bool:
        groups = [group_size(i, x) for i in read]
        dense = all(m or i.split(x)[0] == ONE for m, i in zip(groups, read, strict=True))
        return dense and any(m in NARROW_GROUP_SIZES and width % m == 0 for m in groups)

    along = [x for x, _ in n.shared if n.address.split(x)[0] == ONE]
    return n.dtype == "float32" and len(n.reduction) > 1 and any(map(spread, along))


def _lower_matrix(plan: FusionPlan, group: FusedGroup, width: int, along_k: Collection[str]) -> ContractGroup | None:
    """The form of a product whose operands are loads at affine addresses."""
    nodes = collapse_shared(tuple(flatten(plan, group, n) for n in group.nodes))
    core = collapse_reduction(nodes[0])
    if not core.reduction or any(n.inner for n in nodes):
        return None
    roles = choose_roles(core)
    if roles is None:
        return None
    dot = _few_columns(plan, core, roles)
    nodes, (core,) = _with_rows(nodes, roles), _with_rows((core,), roles)
    turns, better = width > 0 and not dot and _turnable(plan, core, roles), None
    if turns:
        sizes = dict(core.shared)
        better = missing_to_turn(sizes[roles.row], sizes[roles.col], width).constant
    if better is not None and better <= 0:
        roles = _turned(roles)
    builder = _Builder(plan, group, core, nodes, roles, 1 if dot else width, along_k)
    built = replace(builder.build(), dot=dot)
    return replace(built, turned=builder.turned(built)) if turns and better is None else built


def missing_to_turn(rows: Index, columns: Index, width: int) -> Index:
    """At most 0: a product of so many constant rows is better turned, as vectors of columns would be too empty."""

    def lanes(n: Index) -> Index:
        return n.ceildiv(width) * width

    return lanes(rows) * columns * (TURNED + 1) - rows * lanes(columns) * TURNED


def _turnable(plan: FusionPlan, n: FlatNode, roles: Roles) -> bool:
    """Whether rows are a constant, of so many rows and steps that they may be columns, and columns are none."""
    sizes = dict((*n.shared, *n.reduction))
    few = min(sizes[x].constant or 0 for x in (roles.row, roles.block)) < LEAST_TURNED
    if few or roles.inner or n.dtype != "float32":
        return False
    operands = [v for v in children(n.body) if isinstance(v, Load)]
    rows = [v for v in operands if roles.row in v.index[0].symbols() and _packable(plan, n, _turned(roles), v)]
    return len(operands) == 2 and len(rows) == 1 and not any(_packable(plan, n, roles, v) for v in operands)


def _turned(roles: Roles) -> Roles:
    """Roles with rows and columns exchanged."""
    return replace(roles, row=roles.col, col=roles.row)


def _converts(n: Compute) -> bool:
    """Whether an operand of an integer product is more than a load: a conversion, which is made once for each row."""
    assert isinstance(n.body, Op)
    return n.body.dtype == "int32" and not all(isinstance(v, Load) for v in n.body.args)


def _widens(n: Compute) -> bool:
    """Whether an operand is of a type of memory only: rows are widened once, in the copy, and not at every use."""
    assert isinstance(n.body, Op)
    return any(not isinstance(v, Load) and read_of(v) for v in n.body.args)


def _lower_pixels(
    plan: FusionPlan, group: FusedGroup, width: int, kinds: Sequence[Words], shared: int
) -> ContractGroup | None:
    """The form of a convolution, or of another product whose row operand is more than a load, as words always are."""
    flat = tuple(flatten(plan, group, n) for n in group.nodes)
    found = None if any(n.inner for n in flat) else as_matrix_product(plan, flat, longest=not width)
    if found is None:
        return None
    (core, *rest), roles = found
    fill, steps = needs_promotion(core, roles), None
    columns = [v for v in children(core.body) if (x := read_of(v)) and _packable(plan, core, roles, x)]
    rounded = ROUNDED in kinds and core.dtype == "float32" and not _few_columns(plan, core, roles)
    floats = core.dtype == "float32" and not rounded
    plain = fill and width and bool(columns)
    strips = _lower_strips(plan, group, flat, width, () if floats else kinds, shared) if plain else None
    if strips is not None:
        return strips
    lines = in_place(plan, flat) if plain and floats and _column_elements(core, roles) <= shared else None
    if lines is not None:
        nodes, roles = lines
        return _Builder(plan, group, nodes[0], nodes, roles, width).build()
    if (fill or rounded) and width and columns:
        steps, core = core.reduction[-1][1].constant, in_words(plan, core, columns[0], kinds)
    assert isinstance(core.body, Op)
    words = next((k for k in kinds if k.dot == core.body.name), None)
    vectors = words.vectors if words and _column_elements(core, roles) > shared else 1
    nodes = _with_rows((core, *rest), roles)
    built = _Builder(plan, group, nodes[0], nodes, roles, width, steps=steps, vectors=vectors).build()
    return replace(built, fill=needs_promotion(core, roles), in_words=words is not None)


def _lower_strips(
    plan: FusionPlan, group: FusedGroup, flat: tuple[FlatNode, ...], width: int, kinds: Sequence[Words], shared: int
) -> ContractGroup | None:
    """The form of a convolution whose rows are copied as their footprint; None: it has none.

    ``kinds``: of words that it must multiply; none: single steps. These may be a window too, which reads the weights
    again for every line.
    """
    found = as_strips(plan, flat)
    if found is None:
        return None
    (core, *rest), roles, footprint = found
    steps = None
    if kinds:
        steps, words = core.reduction[-1][1].constant, strips_in_words(plan, core, footprint, kinds)
        if words is None:
            return None
        core, footprint = words
    builder = _Builder(plan, group, core, (core, *rest), roles, width, steps=steps, footprint=footprint)
    built = replace(builder.build(), fill=True, in_words=bool(kinds))
    if kinds or _column_elements(core, roles) > shared:
        return built
    window = lower_nest(plan, group, builder.names).group
    return replace(built, window=replace(window, arrays=touched(window.arrays, window.statements)))


def _column_elements(n: FlatNode, roles: Roles) -> int:
    """Of all columns, which are constants."""
    sizes = dict((*n.shared, *n.reduction))
    return int(product(sizes[x] for x in (roles.col, roles.block, *roles.inner)))


def _few_columns(plan: FusionPlan, n: FlatNode, roles: Roles) -> bool:
    """Whether vectors should run along the reduction: few columns, both operands of unit stride along it.

    A constant column operand is packed by columns, so its own layout does not matter.
    """
    assert isinstance(n.body, Op)
    columns, steps = dict(n.shared)[roles.col].constant, dict(n.reduction)[roles.block].constant
    if n.dtype != "float32" or columns is None or columns > DOT_COLUMNS:
        return False
    if roles.inner or (steps is not None and steps < DOT_STEPS):
        return False
    if n.address.split(roles.col)[0] != ONE:
        return False
    for x in loads(n.body):
        column = any(roles.col in i.symbols() for i in x.index)
        stride, rest = x.index[0].split(roles.block)
        if not (column and x.buffer in plan.graph.constants) and (stride != ONE or roles.block in rest.symbols()):
            return False
    return True


def choose_roles(n: FlatNode) -> Roles | None:
    """Which iterator is the vector side, which the broadcast side (TSCompiler 5.1: the instruction's loops).

    The column is in one operand only, at best of unit stride in the output; the row in the other operand only.
    """
    assert isinstance(n.body, Op)
    extents = dict(n.shared)
    operands = [frozenset(s for i in indices(v) for s in i.symbols()) for v in n.body.args]
    best: tuple[tuple[int, ...], str, str] | None = None
    for x in extents:
        inside = [x in s for s in operands]
        if sum(inside) != 1:
            continue
        own, other = (operands[0], operands[1]) if inside[0] else (operands[1], operands[0])
        rows = [y for y in extents if y in other and y not in own]
        row = max(rows, key=lambda y: (_weight(extents[y]), list(extents).index(y)), default="one")
        score = (n.address.split(x)[0] == ONE, row != "one", _weight(extents[x]))
        if best is None or tuple(map(int, score)) > best[0]:
            best = tuple(map(int, score)), x, row
    if best is None:
        return None
    _, col, row = best
    batch = tuple(x for x in extents if x not in (col, row))
    block, *inner = (x for x, _ in n.reduction)
    return Roles(batch, row, col, block, tuple(inner))


def _weight(e: Index) -> int:
    return LARGE if e.constant is None else min(e.constant, LARGE)


class _Builder:
    def __init__(
        self, plan: FusionPlan, group: FusedGroup, core: FlatNode, nodes: tuple[FlatNode, ...], roles: Roles,
        width: int, along_k: Collection[str] = (), steps: int | None = None, footprint: Footprint | None = None,
        vectors: int = 1,
    ) -> None:  # fmt: skip
        """``steps``: of the last reduction, single ones, where the product is over words. ``vectors``: of a panel."""
        self.footprint, self.vectors = footprint, vectors
        self.plan, self.core, self.nodes, self.roles, self.width = plan, core, nodes, roles, width
        self.along_k, self.steps = along_k, steps
        self.outputs = group.outputs
        self.names = Canonical(plan.graph)
        self.packs: dict[str, Pack] = {}

    def build(self) -> ContractGroup:
        """Initialiser, accumulation, one epilogue for each output."""
        core, names = self.core, self.names
        iters = tuple((x, names.extent(e)) for x, e in core.shared)
        red = tuple((x, names.extent(e)) for x, e in core.reduction)
        own = frozenset(x for x, _ in (*iters, *red))
        acc = names.local(core.dtype, tuple(e for _, e in iters))
        at = tuple(Index.of(x) for x, _ in iters)
        value = self._value()
        single = (*red[:-1], (red[-1][0], Index.of(self.steps))) if self.steps else red
        footprint = self.footprint and _canonical(self.footprint, names, own, single)
        statements = [
            Statement(INIT, iters, acc, at, neutral("sum", core.dtype), None, "init"),
            Statement(ACC, (*iters, *red), acc, at, value, core.reduce, "backbone"),
        ]
        made = epilogue_values(names, self.nodes, own, Load(core.dtype, acc, at))
        for n in self.nodes:
            if n.output in self.outputs:
                array, index = output_array(names, n, iters, shared=bool(self.width))
                name = f"{DONE}{len(statements) - 2}"
                statements.append(Statement(name, iters, array, index, made[n.output], None, "epilogue"))
        lowered = names.group(statements, self.packs)
        packed = frozenset(a for a, b in names.buffers.items() if b in self.packs)
        return ContractGroup(lowered, self.roles, packed, footprint=footprint)

    def turned(self, built: ContractGroup) -> ContractGroup:
        """What ``build`` has made, with rows and columns exchanged. Its panels join the buffers of both."""
        other = copy(self)
        other.roles = _turned(self.roles)
        value = other._value()
        made = tuple(replace(s, value=value) if s.name == ACC else s for s in built.lowered.group.statements)
        arrays = touched(self.names.arrays, made)
        packed = frozenset(n for n in arrays if self.names.buffers.get(n) in self.packs)
        group = replace(built.lowered.group, arrays=arrays, statements=made)
        return ContractGroup(replace(built.lowered, group=group), other.roles, packed)

    def _value(self) -> Value:
        """What is summed, in names of the group."""
        own = frozenset(x for x, _ in (*self.core.shared, *self.core.reduction))
        return self.names.value(self._packed(self.core.body), own, {})

    def _packed(self, body: Value) -> Value:
        """The column operand from panels, when it is a constant with constant extents."""
        assert isinstance(body, Op)
        return replace(body, args=tuple(self._operand(v, body.name) for v in body.args))

    def _operand(self, v: Value, product: str) -> Value:
        """An operand of ``product``, from panels where ``_packable`` says so."""
        roles = self.roles
        if is_decoded(v):
            return self._decoded(v)
        if isinstance(v, Op) and read_of(v):
            return replace(v, args=tuple(self._operand(x, product) for x in v.args))
        if not (isinstance(v, Load) and _packable(self.plan, self.core, roles, v)):
            return v
        width = self.width or self._wanted(v)
        return self._panel(v, self._pack(v, self.reductions, width, DOTS.get(product, 1))) if width else v

    @property
    def reductions(self) -> tuple[str, ...]:
        """Their iterators, the one that is divided into blocks first."""
        return self.roles.block, *self.roles.inner

    def _decoded(self, v: Value) -> Value:
        """``(nibble(word, step) - z) * s``: words and scales are one panel, as wide as a register tile, so that memory
        is read from end to end.
        """
        scale = children(v)[1]
        word = next(x.args[0] for x in walk(v) if isinstance(x, Op) and x.name == NIBBLE)
        assert isinstance(scale, Load) and isinstance(word, Load)
        blocks = [x for x in self.reductions if x in scale.index[0].symbols()]
        scales = self._pack(scale, blocks, self.width, 1)
        pack = replace(self._pack(word, self.reductions, self.width, NIBBLES), scales=scales)
        words = self._panel(word, pack)
        last = len(words.index) - len(pack.lanes)
        line = (*words.index[: last - 2], Index.of(pack.reduction[-2][1]), *words.index[last - 1 :])

        def panel(x: Value) -> Value:
            if x in (word, scale):
                return words if x == word else bitcast(replace(words, index=line), "float32")
            return self._panel(x, self._pack(x, blocks, self.width, 1)) if isinstance(x, Load) else x

        return transform(v, panel)

    def _pack(self, v: Load, along: Sequence[str], width: int, count: int) -> Pack:
        """The panels of a constant, with steps ``along`` reductions, words of ``count`` of them."""
        core, col = self.core, self.roles.col
        extents = dict((*core.shared, *core.reduction))
        batch = tuple((x, int(extents[x])) for x, _ in core.shared if x in v.index[0].symbols() and x != col)
        steps = [(x, int(extents[x])) for x in along]
        if self.steps:
            steps[-1] = (steps[-1][0], self.steps)
        columns = int(extents[col])
        vectors = max(1, min(self.vectors, -(-columns // width)))
        return Pack(v.buffer, batch, (col, columns), tuple(steps), v.index[0], width, count, vectors)

    def _wanted(self, v: Load) -> int:
        """Columns of a panel of a constant; 0: it stays as it is. Filters are always wanted in the order of the steps.

        1 where a constant is wanted along the reduction and does not lie so. All of them, filled up to whole vectors,
        where the steps of filters of 16 bits are none: along columns copies have 16 bytes, along steps they had 2.
        """
        core, size = self.core, ITEMSIZE[v.dtype]
        whole = int(product(e for _, e in core.reduction)) * size % VECTOR == 0
        if self.roles.inner and not whole and v.dtype in HALF:
            vector = VECTOR // size
            return int(dict(core.shared)[self.roles.col].ceildiv(vector) * vector)
        wanted = bool(self.roles.inner) or v.dtype in self.along_k
        return int(wanted and v.index[0].split(core.reduction[-1][0])[0] != ONE and whole)

    def _panel(self, v: Load, pack: Pack) -> Load:
        digest = hashlib.sha256(repr(pack).encode()).hexdigest()[:12]
        name = f"{pack.source}@{digest}"
        self.packs[name] = pack
        dtype = "int32" if pack.steps > 1 else v.dtype
        self.names.packed(name, dtype, tuple(map(Index.of, pack.shape)))
        self.names.dtypes[name] = dtype
        col = Index.of(pack.col[0])
        steps = [Index.of(x) for x, _ in pack.reduction]
        if pack.steps == NIBBLES:  # one word, of which the product takes one step after the other
            steps[-1] = ZERO
        index = (*(Index.of(x) for x, _ in pack.batch), col // pack.columns, *steps, *pack.lanes)
        if not self.width:  # all columns may be one panel
            index = tuple(simplify(i, {pack.col[0]: Index.of(pack.col[1])}) for i in index)
        return Load(dtype, name, index)


def _canonical(f: Footprint, names: Canonical, own: frozenset[str], steps: tuple[Axis, ...]) -> Footprint:
    """A footprint in the names of the group."""
    value = names.value(f.value, own | {x for x, _ in f.places}, {})
    pixels = tuple((x, names.index(e, own)) for x, e in f.pixels)
    return replace(f, value=value, pixels=pixels, steps=steps)


def _packable(plan: FusionPlan, n: FlatNode, roles: Roles, v: Load) -> bool:
    """Whether an operand moves along the column and is a constant of constant extents, which is kept in panels."""
    if v.buffer not in plan.graph.constants:
        return False
    used, extents = v.index[0].symbols(), dict((*n.shared, *n.reduction))
    fixed = roles.col in used and used <= extents.keys()
    return fixed and all(extents[x].constant is not None for x in used | {roles.block, *roles.inner})


def epilogue_values(
    names: Canonical, nodes: tuple[FlatNode, ...], own: frozenset[str], accumulator: Load
) -> dict[str, Value]:
    """The value of every node of a contraction group over its accumulator, each put in place of its reads."""
    made: dict[str, Value] = {nodes[0].output: accumulator}
    for n in nodes[1:]:
        marked = {t: f"%made{k}" for k, t in enumerate(made)}
        back = {m: made[t] for t, m in marked.items()}

        def mark(v: Value, marked: Mapping[str, str] = marked) -> Value:
            return replace(v, buffer=marked[v.buffer], index=()) if isinstance(v, Load) and v.buffer in marked else v

        def put(v: Value, back: Mapping[str, Value] = back) -> Value:
            return back[v.buffer] if isinstance(v, Load) and v.buffer in back else v

        named = names.value(transform(n.body, mark), own, {m: (m, ()) for m in back})
        made[n.output] = transform(named, put)
    return made
