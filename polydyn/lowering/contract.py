"""Lower matmul-like groups: roles of iterators, packed constants, the accumulator and its epilogues."""

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
from polydyn.lowering.footprints import match_footprint
from polydyn.lowering.group import Canonical, LoweredGroup, Pack
from polydyn.lowering.implicit_gemm import as_matrix_product, in_place, needs_promotion
from polydyn.lowering.k_packing import BF16X2, INT16X2, KPacking, pack_k, pack_k_of_footprint
from polydyn.lowering.nest import lower_nest
from polydyn.lowering.nibbles import in_bytes, over_nibbles
from polydyn.lowering.output import output_array
from polydyn.lowering.roles import choose_roles
from polydyn.lowering.rounding import HALF
from polydyn.schedules.errors import Declined
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

MAX_DOT_COLUMNS, MIN_DOT_STEPS = 10, 32
"""Maximum columns and minimum reduction steps for vectors that run along the reduction."""
COPY_BYTES, MIN_TRANSPOSED_SIZE = 16, 64
"""Bytes of a vector copy on a GPU, and the minimum of constant rows, and of steps, for rows to become columns."""
TRANSPOSE_PAYBACK = 8
"""Operations of a transposed product that cost as much as its one additional move of a result."""


NO_NIBBLES = Declined("it has no weights of 4 bits whose columns are its own")
NO_REDUCTION = Declined("it is not one reduction over products")


@dataclass(frozen=True)
class ContractGroup:
    """A lowered group of kind contract, the roles of its iterators, and its packed arrays.

    ``dot``: there are few columns, so vectors run along the reduction. ``fill``: the row operand is copied to scratch,
    as its ``footprint`` if it has one. ``k_packed``: operands are K-packed (several steps in 32 bits). ``transposed``:
    the transposed product, in which its constant rows are packed columns. ``window``: the window form, whose vectors
    may run along image rows. Both use the same names. ``fixed``: no launch writes the column operand (used by CUDA).
    """

    lowered: LoweredGroup
    roles: Roles
    packed: frozenset[str]
    dot: bool = False
    fill: bool = False
    footprint: Footprint | None = None
    k_packed: bool = False
    transposed: ContractGroup | None = None
    window: Group | None = None
    fixed: bool = False


def lower_contract(
    plan: FusionPlan, group: FusedGroup, width: int, promotion: bool = False, along_k: Collection[str] = (),
    kinds: Sequence[KPacking] = (INT16X2,), shared: int = 0, vectors: int = 1,
) -> ContractGroup | Declined:  # fmt: skip
    """Return the matmul-like form; declined if no pair of iterators separates the operands.

    ``width``: columns of a panel of packed constants. If it is 0, constants keep their layout, except filters and the
    dtypes ``along_k``, which get the layout required by 16-byte copies (``_Builder._panel_columns``). ``promotion``:
    the target can copy a row operand to scratch; without it there are no prologues. ``kinds``: the K packings that the
    target multiplies. If ``BF16X2`` is one of them, float32 products round their operands where these can be packed.
    ``shared``: column elements that stay in a cache and may be read again for every row of an image. ``vectors``:
    vectors per panel of 4-bit weights.
    """
    first = group.nodes[0]
    if promotion and width and _narrow_groups(flatten(plan, group, first), width):
        return Declined("it has groups of few channels: a vector holds several of them")
    nibbles = _lower_nibbles(plan, group, width, vectors) if promotion else NO_NIBBLES
    if not isinstance(nibbles, Declined):
        return nibbles
    if BF16X2 in kinds:
        words = _lower_implicit_gemm(plan, group, width, kinds, shared)
        if not isinstance(words, Declined) and words.k_packed:
            return words
        kinds = [k for k in kinds if k != BF16X2]
    if promotion and (group.prologue or is_windowed(first) or _converts(first)):
        convolution = _lower_implicit_gemm(plan, group, width, kinds, shared)
        if not isinstance(convolution, Declined) or group.prologue or is_windowed(first):
            return convolution
    matrix = _lower_matrix(plan, group, width, along_k)
    if not (promotion and _widens(first)) or (not isinstance(matrix, Declined) and matrix.dot):
        return matrix
    widened = _lower_implicit_gemm(plan, group, width, kinds, shared)
    return matrix if isinstance(widened, Declined) else widened


def _lower_nibbles(plan: FusionPlan, group: FusedGroup, width: int, vectors: int) -> ContractGroup | Declined:
    """Return the form of a product with 4-bit weights.

    Declined if there are none, or if the columns of the product are not the columns of the weights.
    """
    nodes = collapse_shared(tuple(flatten(plan, group, n) for n in group.nodes))
    core = over_nibbles(plan, nodes[0])
    if core is None or any(n.inner for n in nodes):
        return NO_NIBBLES
    roles = choose_roles(core)
    if isinstance(roles, Declined):
        return roles
    if not all(_packable(plan, core, roles, x) for v in children(core.body) if is_decoded(v) for x in loads(v)):
        return NO_NIBBLES
    nodes = _with_rows((core, *nodes[1:]), roles)
    fill = needs_promotion(nodes[0], roles) and not in_bytes(nodes[0], roles)
    return replace(_Builder(plan, group, nodes[0], nodes, roles, width, vectors=vectors).build(), fill=fill)


def _with_rows(nodes: tuple[FlatNode, ...], roles: Roles) -> tuple[FlatNode, ...]:
    """Add the single row of a vector-matrix product to the nodes."""
    if roles.row != "one":
        return nodes
    return tuple(replace(n, shared=(("one", ONE), *n.shared)) for n in nodes)


def _narrow_groups(n: FlatNode, width: int) -> bool:
    """Check whether vectors along the output's channels hold several groups that are contiguous in the operand too.

    Then the product is a window whose loads are spread over their group, and not a product of few columns per group.
    """
    read = [x.index[0] for x in loads(n.body)]

    def spread(x: str) -> bool:
        groups = [group_size(i, x) for i in read]
        dense = all(m or i.split(x)[0] == ONE for m, i in zip(groups, read, strict=True))
        return dense and any(m in NARROW_GROUP_SIZES and width % m == 0 for m in groups)

    along = [x for x, _ in n.shared if n.address.split(x)[0] == ONE]
    return n.dtype == "float32" and len(n.reduction) > 1 and any(map(spread, along))


def _lower_matrix(
    plan: FusionPlan, group: FusedGroup, width: int, along_k: Collection[str]
) -> ContractGroup | Declined:  # fmt: skip
    """Return the form of a product whose operands are loads at affine addresses."""
    nodes = collapse_shared(tuple(flatten(plan, group, n) for n in group.nodes))
    core = collapse_reduction(nodes[0])
    if not core.reduction or any(n.inner for n in nodes):
        return NO_REDUCTION
    roles = choose_roles(core)
    if isinstance(roles, Declined):
        return roles
    dot = _few_columns(plan, core, roles)
    nodes, (core,) = _with_rows(nodes, roles), _with_rows((core,), roles)
    is_transposable, cost = width > 0 and not dot and _is_transposable(plan, core, roles), None
    if is_transposable:
        sizes = dict(core.shared)
        cost = transpose_cost(sizes[roles.row], sizes[roles.col], width).constant
    if cost is not None and cost <= 0:
        roles = _transposed(roles)
    builder = _Builder(plan, group, core, nodes, roles, 1 if dot else width, along_k)
    built = replace(builder.build(), dot=dot)
    return replace(built, transposed=builder.transpose(built)) if is_transposable and cost is None else built


def transpose_cost(rows: Index, columns: Index, width: int) -> Index:
    """Return the extra cost of transposing the product.

    It is 0 or less if a product of ``rows`` constant rows is better transposed, because the columns would fill too
    little of a vector.
    """

    def lanes(n: Index) -> Index:
        return n.ceildiv(width) * width

    return lanes(rows) * columns * (TRANSPOSE_PAYBACK + 1) - rows * lanes(columns) * TRANSPOSE_PAYBACK


def _is_transposable(plan: FusionPlan, n: FlatNode, roles: Roles) -> bool:
    """Check whether the rows are a constant with enough rows and steps to become columns, and the columns are not."""
    sizes = dict((*n.shared, *n.reduction))
    few = min(sizes[x].constant or 0 for x in (roles.row, roles.block)) < MIN_TRANSPOSED_SIZE
    if few or roles.inner or n.dtype != "float32":
        return False
    operands = [v for v in children(n.body) if isinstance(v, Load)]
    rows = [v for v in operands if roles.row in v.index[0].symbols() and _packable(plan, n, _transposed(roles), v)]
    return len(operands) == 2 and len(rows) == 1 and not any(_packable(plan, n, roles, v) for v in operands)


def _transposed(roles: Roles) -> Roles:
    """Exchange rows and columns in the roles."""
    return replace(roles, row=roles.col, col=roles.row)


def _converts(n: Compute) -> bool:
    """Check whether an operand of an integer product is more than a load: a conversion, which runs once per row."""
    assert isinstance(n.body, Op)
    return n.body.dtype == "int32" and not all(isinstance(v, Load) for v in n.body.args)


def _widens(n: Compute) -> bool:
    """Check whether an operand has a storage-only dtype. Rows are then widened once, in the copy, and not at every
    use.
    """
    assert isinstance(n.body, Op)
    return any(not isinstance(v, Load) and read_of(v) for v in n.body.args)


def _lower_implicit_gemm(
    plan: FusionPlan, group: FusedGroup, width: int, kinds: Sequence[KPacking], shared: int
) -> ContractGroup | Declined:
    """Return the form of a convolution, or of another product whose row operand is more than a load (packed rows always
    are).
    """
    flat = tuple(flatten(plan, group, n) for n in group.nodes)
    product = NO_REDUCTION if any(n.inner for n in flat) else as_matrix_product(plan, flat, longest=not width)
    if isinstance(product, Declined):
        return product
    (core, *rest), roles = product
    fill, steps = needs_promotion(core, roles), None
    columns = [v for v in children(core.body) if (x := read_of(v)) and _packable(plan, core, roles, x)]
    rounded = BF16X2 in kinds and core.dtype == "float32" and not _few_columns(plan, core, roles)
    floats = core.dtype == "float32" and not rounded
    plain = fill and width and bool(columns)
    strips = _lower_footprint(plan, group, flat, width, () if floats else kinds, shared) if plain else None
    if isinstance(strips, Declined) and core.dtype == "int32" and all(k.steps < 4 for k in kinds):
        # two steps in a word gain less than rows that are copied tap by tap lose
        strips = _lower_footprint(plan, group, flat, width, (), shared)
    if isinstance(strips, ContractGroup):
        return strips
    lines = in_place(plan, flat) if plain and floats and _column_elements(core, roles) <= shared else None
    if isinstance(lines, tuple):
        nodes, roles = lines
        return _Builder(plan, group, nodes[0], nodes, roles, width).build()
    if (fill or rounded) and width and columns:
        steps, core = core.reduction[-1][1].constant, pack_k(plan, core, columns[0], kinds)
    assert isinstance(core.body, Op)
    words = next((k for k in kinds if k.dot == core.body.name), None)
    vectors = words.vectors if words and _column_elements(core, roles) > shared else 1
    nodes = _with_rows((core, *rest), roles)
    built = _Builder(plan, group, nodes[0], nodes, roles, width, steps=steps, vectors=vectors).build()
    return replace(built, fill=needs_promotion(core, roles), k_packed=words is not None)


def _lower_footprint(
    plan: FusionPlan, group: FusedGroup, flat: tuple[FlatNode, ...], width: int, kinds: Sequence[KPacking], shared: int
) -> ContractGroup | Declined:
    """Return the form of a convolution whose rows are copied as their footprint; declined if there is none.

    ``kinds``: the K packings that it must use; empty for unpacked steps. An unpacked product may have a window form
    too, which reads the weights again for every image row.
    """
    matched = match_footprint(plan, flat)
    if isinstance(matched, Declined):
        return matched
    (core, *rest), roles, footprint = matched
    steps = None
    if kinds:
        steps, words = core.reduction[-1][1].constant, pack_k_of_footprint(plan, core, footprint, kinds)
        if isinstance(words, Declined):
            return words
        core, footprint = words
    builder = _Builder(plan, group, core, (core, *rest), roles, width, steps=steps, footprint=footprint)
    built = replace(builder.build(), fill=True, k_packed=bool(kinds))
    if kinds or _column_elements(core, roles) > shared:
        return built
    window = lower_nest(plan, group, builder.names).group
    return replace(built, window=replace(window, arrays=touched(window.arrays, window.statements)))


def _column_elements(n: FlatNode, roles: Roles) -> int:
    """Return the number of elements in all columns, which are constants."""
    sizes = dict((*n.shared, *n.reduction))
    return int(product(sizes[x] for x in (roles.col, roles.block, *roles.inner)))


def _few_columns(plan: FusionPlan, n: FlatNode, roles: Roles) -> bool:
    """Check whether vectors should run along the reduction: few columns, both operands with unit stride along it.

    A constant column operand is packed by columns, so its own layout does not matter.
    """
    assert isinstance(n.body, Op)
    columns, steps = dict(n.shared)[roles.col].constant, dict(n.reduction)[roles.block].constant
    if n.dtype != "float32" or columns is None or columns > MAX_DOT_COLUMNS:
        return False
    if roles.inner or (steps is not None and steps < MIN_DOT_STEPS):
        return False
    if n.address.split(roles.col)[0] != ONE:
        return False
    for x in loads(n.body):
        column = any(roles.col in i.symbols() for i in x.index)
        stride, rest = x.index[0].split(roles.block)
        if not (column and x.buffer in plan.graph.constants) and (stride != ONE or roles.block in rest.symbols()):
            return False
    return True


class _Builder:
    def __init__(
        self, plan: FusionPlan, group: FusedGroup, core: FlatNode, nodes: tuple[FlatNode, ...], roles: Roles,
        width: int, along_k: Collection[str] = (), steps: int | None = None, footprint: Footprint | None = None,
        vectors: int = 1,
    ) -> None:  # fmt: skip
        """``steps``: the steps of the last reduction before K packing. ``vectors``: vectors per panel."""
        self.footprint, self.vectors = footprint, vectors
        self.plan, self.core, self.nodes, self.roles, self.width = plan, core, nodes, roles, width
        self.along_k, self.steps = along_k, steps
        self.outputs = group.outputs
        self.names = Canonical(plan.graph)
        self.packs: dict[str, Pack] = {}

    def build(self) -> ContractGroup:
        """Build the initialiser, the accumulation, and one epilogue for each output."""
        core, names = self.core, self.names
        iters = tuple((x, names.extent(e)) for x, e in core.shared)
        red = tuple((x, names.extent(e)) for x, e in core.reduction)
        iterators = frozenset(x for x, _ in (*iters, *red))
        acc = names.local(core.dtype, tuple(e for _, e in iters))
        at = tuple(Index.of(x) for x, _ in iters)
        value = self._value()
        single = (*red[:-1], (red[-1][0], Index.of(self.steps))) if self.steps else red
        footprint = self.footprint and _canonical(self.footprint, names, iterators, single)
        statements = [
            Statement(INIT, iters, acc, at, neutral("sum", core.dtype), None, "init"),
            Statement(ACC, (*iters, *red), acc, at, value, core.reduce, "backbone"),
        ]
        values = epilogue_values(names, self.nodes, iterators, Load(core.dtype, acc, at))
        for n in self.nodes:
            if n.output in self.outputs:
                array, index = output_array(names, n, iters, shared=bool(self.width))
                name = f"{DONE}{len(statements) - 2}"
                statements.append(Statement(name, iters, array, index, values[n.output], None, "epilogue"))
        lowered = names.group(statements, self.packs)
        packed = frozenset(a for a, b in names.buffers.items() if b in self.packs)
        return ContractGroup(lowered, self.roles, packed, footprint=footprint)

    def transpose(self, built: ContractGroup) -> ContractGroup:
        """Return the result of ``build`` with rows and columns exchanged. Its panels join the buffers of both forms."""
        other = copy(self)
        other.roles = _transposed(self.roles)
        value = other._value()
        statements = tuple(replace(s, value=value) if s.name == ACC else s for s in built.lowered.group.statements)
        arrays = touched(self.names.arrays, statements)
        packed = frozenset(n for n in arrays if self.names.buffers.get(n) in self.packs)
        group = replace(built.lowered.group, arrays=arrays, statements=statements)
        return ContractGroup(replace(built.lowered, group=group), other.roles, packed)

    def _value(self) -> Value:
        """Return the value that is summed, in the names of the group."""
        iterators = frozenset(x for x, _ in (*self.core.shared, *self.core.reduction))
        return self.names.value(self._packed(self.core.body), iterators, {})

    def _packed(self, body: Value) -> Value:
        """Read the column operand from panels if it is a constant with constant extents."""
        assert isinstance(body, Op)
        return replace(body, args=tuple(self._operand(v, body.name) for v in body.args))

    def _operand(self, v: Value, product: str) -> Value:
        """Return an operand of ``product``, read from panels if ``_packable`` holds."""
        roles = self.roles
        if is_decoded(v):
            return self._decoded(v)
        if isinstance(v, Op) and read_of(v):
            return replace(v, args=tuple(self._operand(x, product) for x in v.args))
        if not (isinstance(v, Load) and _packable(self.plan, self.core, roles, v)):
            return v
        width = self.width or self._panel_columns(v)
        return self._panel(v, self._pack(v, self.reductions, width, DOTS.get(product, 1))) if width else v

    @property
    def reductions(self) -> tuple[str, ...]:
        """Reduction iterators; the one that is divided into blocks is first."""
        return self.roles.block, *self.roles.inner

    def _decoded(self, v: Value) -> Value:
        """Pack ``(nibble(word, step) - z) * s``.

        Words and scales form one panel, as wide as a register tile, so that memory is read sequentially. The words of a
        second digit have a panel of their own.
        """
        scale = children(v)[1]
        word, *others = dict.fromkeys(x.args[0] for x in walk(v) if isinstance(x, Op) and x.name == NIBBLE)
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
            if x in others:
                return self._panel(x, self._pack(x, self.reductions, self.width, NIBBLES))  # type: ignore[arg-type]
            return self._panel(x, self._pack(x, blocks, self.width, 1)) if isinstance(x, Load) else x

        return transform(v, panel)

    def _pack(self, v: Load, along: Sequence[str], width: int, count: int) -> Pack:
        """Return the panels of a constant: steps ``along`` reductions, ``count`` of them packed in each word."""
        core, col = self.core, self.roles.col
        extents = dict((*core.shared, *core.reduction))
        batch = tuple((x, int(extents[x])) for x, _ in core.shared if x in v.index[0].symbols() and x != col)
        steps = [(x, int(extents[x])) for x in along]
        if self.steps:
            steps[-1] = (steps[-1][0], self.steps)
        columns = int(extents[col])
        vectors = max(1, min(self.vectors, -(-columns // width)))
        return Pack(v.buffer, batch, (col, columns), tuple(steps), v.index[0], width, count, vectors)

    def _panel_columns(self, v: Load) -> int:
        """Return the panel width for a constant, or 0 if it keeps its layout. Filters are always laid out in step
        order.

        The width is 1 if the constant is required along the reduction and has another layout. It is the number of
        columns, rounded up to whole vectors, if the steps of 16-bit filters do not fill vectors: copies along columns
        have 16 bytes, along steps they would have 2.
        """
        core, size = self.core, ITEMSIZE[v.dtype]
        whole = int(product(e for _, e in core.reduction)) * size % COPY_BYTES == 0
        if self.roles.inner and not whole and v.dtype in HALF:
            vector = COPY_BYTES // size
            return int(dict(core.shared)[self.roles.col].ceildiv(vector) * vector)
        is_required = bool(self.roles.inner) or v.dtype in self.along_k
        return int(is_required and v.index[0].split(core.reduction[-1][0])[0] != ONE and whole)

    def _panel(self, v: Load, pack: Pack) -> Load:
        digest = hashlib.sha256(repr(pack).encode()).hexdigest()[:12]
        name = f"{pack.source}@{digest}"
        self.packs[name] = pack
        dtype = "int32" if pack.steps > 1 else v.dtype
        self.names.packed(name, dtype, tuple(map(Index.of, pack.shape)))
        self.names.dtypes[name] = dtype
        col = Index.of(pack.col[0])
        steps = [Index.of(x) for x, _ in pack.reduction]
        if pack.steps == NIBBLES:  # one word, whose steps the product unpacks
            steps[-1] = ZERO
        index = (*(Index.of(x) for x, _ in pack.batch), col // pack.columns, *steps, *pack.lanes)
        if not self.width:  # a single panel may hold all columns
            index = tuple(simplify(i, {pack.col[0]: Index.of(pack.col[1])}) for i in index)
        return Load(dtype, name, index)


def _canonical(f: Footprint, names: Canonical, iterators: frozenset[str], steps: tuple[Axis, ...]) -> Footprint:
    """Translate a footprint to the names of the group."""
    value = names.value(f.value, iterators | {x for x, _ in f.places}, {})
    pixels = tuple((x, names.index(e, iterators)) for x, e in f.pixels)
    return replace(f, value=value, pixels=pixels, steps=steps)


def _packable(plan: FusionPlan, n: FlatNode, roles: Roles, v: Load) -> bool:
    """Check whether an operand moves along the column and is a constant with constant extents, so that panels can hold
    it.
    """
    if v.buffer not in plan.graph.constants:
        return False
    used, extents = v.index[0].symbols(), dict((*n.shared, *n.reduction))
    fixed = roles.col in used and used <= extents.keys()
    return fixed and all(extents[x].constant is not None for x in used | {roles.block, *roles.inner})


def epilogue_values(
    names: Canonical, nodes: tuple[FlatNode, ...], iterators: frozenset[str], accumulator: Load
) -> dict[str, Value]:
    """Return the value of every node of a contraction group over its accumulator, with all reads substituted."""
    values: dict[str, Value] = {nodes[0].output: accumulator}
    for n in nodes[1:]:
        marked = {t: f"%made{k}" for k, t in enumerate(values)}
        back = {m: values[t] for t, m in marked.items()}

        def mark(v: Value, marked: Mapping[str, str] = marked) -> Value:
            return replace(v, buffer=marked[v.buffer], index=()) if isinstance(v, Load) and v.buffer in marked else v

        def substitute_mark(v: Value, back: Mapping[str, Value] = back) -> Value:
            return back[v.buffer] if isinstance(v, Load) and v.buffer in back else v

        named = names.value(transform(n.body, mark), iterators, {m: (m, ()) for m in back})
        values[n.output] = transform(named, substitute_mark)
    return values
