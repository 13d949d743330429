"""Random primitives: tensors with shared symbols, element-wise, reductions, contractions, views, concatenations."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from polydyn.graph.dtypes import numpy_dtype
from polydyn.graph.ir import Compute, Concat, Dim, Node, Tensor, dim_name, reduction_name
from polydyn.schedules.expr import Array, FromIndex, Value, const, load, op
from polydyn.schedules.index import ONE, ZERO, Index, IndexLike, maximum, product

CONSTANTS = (1, 1, 2, 3, 5, 7, 16, 17, 31, 32, 33, 48, 64, 65, 100)
SIZES = (0, 1, 1, 2, 3, 5, 7, 13, 16, 17, 31, 32, 33, 47, 64, 97, 130)
LONG_EXTENTS = (769, 1024, 1601)
"""Reduction extents that need more than one reduction block."""
MAX_ELEMENTS = 40_000
MAX_WORK = 3_000_000
TABLE = 11
"""Rows of gathered tables; every integer input is in [0, TABLE)."""


class TooLarge(Exception):
    """The constant dims of a tensor alone make it too large."""


class Primitives:
    """Grows one graph by single primitives."""

    def __init__(self, seed: int, prefix: str = "") -> None:
        self.random, self.numbers = random.Random(seed), np.random.default_rng(seed)
        self.prefix, self.seed = prefix, seed
        self.tensors: dict[str, Tensor] = {}
        self.constants: dict[str, Array] = {}
        self.inputs: list[str] = []
        self.nodes: list[Node] = []
        self.live: list[str] = []
        """Float tensors that may be read next."""
        count = self.random.choice((1, 2, 2, 3, 4))
        self.symbols = [f"{prefix}{s}" for s in "ABCE"[:count]]

    # -- tensors -------------------------------------------------------------------------------------------------

    def dim(self) -> Dim:
        """Return a symbol (mostly) or a constant."""
        if self.random.random() < 0.6:
            return Index.of(self.random.choice(self.symbols))
        return Index.of(self.random.choice(CONSTANTS))

    def source(self, shape: Sequence[Dim], dtype: str = "float32", constant: float = 0.5) -> str:
        """Add a new input, or a constant if the shape permits."""
        shape = tuple(shape)
        name = f"{self.prefix}x{len(self.tensors)}"
        self.tensors[name] = Tensor(name, dtype, shape)
        fixed = [d.constant for d in shape]
        if None not in fixed and self.random.random() < constant:
            self.constants[name] = random_array(self.numbers, dtype, [int(d) for d in shape])
        else:
            self.inputs.append(name)
        return name

    def add(self, shape: Sequence[Dim], body: Value, reduction: Sequence[Dim] = (), reduce: str | None = None) -> str:
        """Add a new Compute and return its output."""
        if product(d.constant or 1 for d in (*shape, *reduction)).constant > MAX_WORK:  # type: ignore[operator]
            raise TooLarge
        name = f"{self.prefix}t{len(self.tensors)}"
        self.tensors[name] = Tensor(name, body.dtype, tuple(shape))
        self.nodes.append(Compute(name, body, tuple(reduction), reduce, origin=name))
        if body.dtype == "float32":
            self.live.append(name)
        return name

    def shape(self, t: str) -> tuple[Dim, ...]:
        """Return the tensor's shape."""
        return self.tensors[t].shape

    def pick(self) -> str:
        """Return a live tensor, a recent one more often."""
        if not self.live or self.random.random() < 0.08:
            rank = self.random.choice((1, 2, 2, 3, 3, 4))
            self.live.append(self.source([self.dim() for _ in range(rank)], constant=0.1))
            return self.live[-1]
        return self.random.choice(self.live[-3:] if self.random.random() < 0.8 else self.live)

    def at(self, t: str, axes: Sequence[Index | int | str]) -> Value:
        """Return a load of ``t``."""
        return load(t, tuple(axes), self.tensors[t].dtype)

    def own(self, t: str) -> Value:
        """Return the element of ``t`` with the output's subscripts."""
        return self.at(t, [dim_name(a) for a in range(len(self.shape(t)))])

    def aligned(self, shape: Sequence[Dim]) -> Value:
        """Return a load of some tensor that broadcasts to ``shape``: an old one that fits, or a new one."""
        fitting = [t for t in self.live if self._fits(self.shape(t), shape)]
        if fitting and self.random.random() < 0.6:
            t = self.random.choice(fitting)
        else:
            dims = [d if self.random.random() < 0.7 else ONE for d in shape]
            t = self.source(dims[self.random.randint(0, len(dims)) :] if self.random.random() < 0.3 else dims)
        skip = len(shape) - len(self.shape(t))
        return self.at(t, [dim_name(a + skip) if d != ONE else ZERO for a, d in enumerate(self.shape(t))])

    @staticmethod
    def _fits(small: Sequence[Dim], shape: Sequence[Dim]) -> bool:
        pairs = zip(small[::-1], shape[::-1], strict=False)
        return len(small) <= len(shape) and all(a in (b, ONE) for a, b in pairs)

    # -- primitives ----------------------------------------------------------------------------------------------

    def expression(self, leaves: Sequence[Value]) -> Value:
        """Return a random bounded expression over the leaves."""
        pool = list(leaves)
        for _ in range(self.random.randint(1, 4)):
            a, b = self.random.choice(pool), self.random.choice(pool)
            two = self.random.choice(("add", "sub", "mul", "max", "min"))
            one = self.random.choice(("tanh", "sigmoid", "erf", "neg", "abs", "sqrt", "exp", "reciprocal", "sin"))
            if self.random.random() < 0.5:
                pool.append(op(two, a, b))
                continue
            if one == "sqrt":
                a = op("abs", a)
            if one == "exp":
                a = op("min", a, const(3, "float32"))
            if one == "reciprocal":
                a = op("add", op("abs", a), const(1, "float32"))
            pool.append(op(one, a))
        out = pool[-1]
        for x in leaves:  # every leaf is used
            out = op("add", out, op("mul", x, const(0.25, "float32")))
        return out

    def elementwise(self) -> None:
        """Add a map over one to three tensors that broadcast."""
        t = self.pick()
        shape = self.shape(t)
        leaves = [self.own(t)]
        for _ in range(self.random.randint(0, 2)):
            leaves.append(self.aligned(shape))
        if self.random.random() < 0.1:
            places: list[IndexLike] = [*shape, *map(dim_name, range(len(shape)))]
            place = self.random.choice(places) if shape else ONE
            leaves.append(op("sin", FromIndex("float32", Index.of(place))))
        self.add(shape, self.expression(leaves))

    def reduction(self) -> None:
        """Add a reduction over random axes, kept as 1 or dropped."""
        t = self.pick()
        shape = self.shape(t)
        axes = [a for a in range(len(shape)) if self.random.random() < 0.45] or [max(0, len(shape) - 1)]
        if not shape:
            return
        self._reduce(t, axes, self.random.choice(("sum", "sum", "max", "min")), self.random.random() < 0.5)

    def _reduce(self, t: str, axes: Sequence[int], reduce: str, keep: bool, body: Value | None = None) -> str:
        """Add a reduction. ``body``: over the output's subscripts of ``t``, default its element."""
        shape = self.shape(t)
        env: list[Index] = []
        out: list[Dim] = []
        for a, d in enumerate(shape):
            if a in axes:
                env.append(Index.of(reduction_name(list(axes).index(a))))
                out += [ONE] if keep else []
            else:
                env.append(Index.of(dim_name(len(out))))
                out.append(d)
        value = self.at(t, env)
        if reduce == "sum" and self.random.random() < 0.4:
            value = op("mul", value, value)
        return self.add(out, value, [shape[a] for a in axes], reduce)

    def contraction(self) -> None:
        """Add a sum of products with batch, row, column and reduction axes in any order."""
        t = self.pick()
        shape = self.shape(t)
        if not shape:
            return
        roles = [self.random.choice("bmmkk") for _ in shape]
        if "k" not in roles:
            roles[self.random.randrange(len(roles))] = "k"
        names, rows, red = [], [], []
        for d, r in zip(shape, roles, strict=True):
            names.append((r, d))
            if r == "k":
                red.append(d)
            else:
                rows.append((r, d))
        extra = [("n", self.dim()) for _ in range(self.random.choice((0, 1, 1, 1, 2)))]
        out = rows + extra
        if self.random.random() < 0.3:
            self.random.shuffle(out)
        place = {id(p): a for a, p in enumerate(out)}
        remaining = iter(rows)
        left: list[Index] = []
        k = 0
        for r, _ in names:
            if r == "k":
                left.append(Index.of(reduction_name(k)))
                k += 1
            else:
                left.append(Index.of(dim_name(place[id(next(remaining))])))
        right: list[tuple[Dim, Index]] = [(d, Index.of(reduction_name(j))) for j, d in enumerate(red)]
        right += [(p[1], Index.of(dim_name(place[id(p)]))) for p in out if p[0] in "bn"]
        if self.random.random() < 0.6:
            self.random.shuffle(right)
        w = self._operand([d for d, _ in right])
        a, b = self.at(t, left), self.at(w, [i for _, i in right])
        if self.random.random() < 0.1:
            a = op("tanh", a)
        if self.random.random() < 0.5:
            a, b = b, a
        self.add([d for _, d in out], op("mul", a, b), red, "sum")

    def _operand(self, shape: Sequence[Dim]) -> str:
        same = [t for t in self.live if self.shape(t) == tuple(shape)]
        return self.random.choice(same) if same and self.random.random() < 0.5 else self.source(shape)

    def transpose(self) -> None:
        """Add a permutation of axes."""
        t = self.pick()
        shape = self.shape(t)
        order = list(range(len(shape)))
        self.random.shuffle(order)
        if self.random.random() < 0.5 and order:
            order = [a for a in order if a != len(shape) - 1] + [len(shape) - 1]
        index: list[Index] = [ZERO] * len(shape)
        for a, source in enumerate(order):
            index[source] = Index.of(dim_name(a))
        self.add([shape[s] for s in order], self.at(t, index))

    def reshape(self) -> None:
        """Merge two adjacent axes, or split one whose size is a product, or add an axis of size 1."""
        t = self.pick()
        shape = self.shape(t)
        splits = [(a, f) for a, d in enumerate(shape) for f in self._factors(d)]
        choice = self.random.random()
        if splits and choice < 0.45:
            a, (x, y) = self.random.choice(splits)
            index = [Index.of(dim_name(b + (b > a))) for b in range(len(shape))]
            index[a] = Index.of(dim_name(a)) * y + dim_name(a + 1)
            self.add([*shape[:a], x, y, *shape[a + 1 :]], self.at(t, index))
        elif len(shape) >= 2 and choice < 0.85:
            a = self.random.randrange(len(shape) - 1)
            merged = Index.of(dim_name(a))
            index = [Index.of(dim_name(b - (b > a))) for b in range(len(shape))]
            index[a], index[a + 1] = merged // shape[a + 1], merged % shape[a + 1]
            self.add([*shape[:a], shape[a] * shape[a + 1], *shape[a + 2 :]], self.at(t, index))
        else:
            a = self.random.randint(0, len(shape))
            index = [Index.of(dim_name(b + (b >= a))) for b in range(len(shape))]
            self.add([*shape[:a], ONE, *shape[a:]], self.at(t, index))

    @staticmethod
    def _factors(d: Dim) -> list[tuple[Dim, Dim]]:
        c = d.constant
        if c is not None:
            return [(Index.of(c // f), Index.of(f)) for f in (2, 3, 5, 8, 16) if c > f and c % f == 0]
        out = []
        if len(d.terms) == 1:
            ((m, v),) = d.terms.items()
            if v == 1 and len(m) == 2:
                out = [(Index({m[:1]: 1}), Index({m[1:]: 1})), (Index({m[1:]: 1}), Index({m[:1]: 1}))]
            elif v > 1:
                out = [(Index({m: 1}), Index.of(v)), (Index.of(v), Index({m: 1}))]
        return out

    def cut(self) -> None:
        """Add a slice: without the first element, every second one, reversed, or a constant range."""
        t = self.pick()
        shape = list(self.shape(t))
        if not shape:
            return
        a = self.random.randrange(len(shape))
        index = [Index.of(dim_name(b)) for b in range(len(shape))]
        d, i, how = shape[a], index[a], self.random.randrange(4)
        if how == 0:
            shape[a], index[a] = maximum(d - 1, 0), i + 1
        elif how == 1:
            shape[a], index[a] = d.ceildiv(2), i * 2
        elif how == 2:
            index[a] = d - 1 - i
        elif (c := d.constant) is not None and c > 2:
            shape[a], index[a] = Index.of(c - 2), i + 1
        self.add(shape, self.at(t, index))

    def expand(self) -> None:
        """Broadcast axes of size 1, or add a leading axis."""
        t = self.pick()
        shape = list(self.shape(t))
        index = [Index.of(dim_name(b)) for b in range(len(shape))]
        ones = [a for a, d in enumerate(shape) if d == ONE]
        if ones and self.random.random() < 0.7:
            a = self.random.choice(ones)
            shape[a], index[a] = self.dim(), ZERO
        elif len(shape) < 4:
            index = [Index.of(dim_name(b + 1)) for b in range(len(shape))]
            shape.insert(0, self.dim())
        self.add(shape, self.at(t, index))

    def concat(self) -> None:
        """Join tensors of equal shape except for one axis."""
        t = self.pick()
        shape = self.shape(t)
        if not shape:
            return
        axis = self.random.randrange(len(shape))
        rest = (*shape[:axis], *shape[axis + 1 :])
        parts = [t]
        for _ in range(self.random.randint(1, 2)):
            same = [
                x for x in self.live
                if len(self.shape(x)) == len(shape) and (*self.shape(x)[:axis], *self.shape(x)[axis + 1 :]) == rest
            ]  # fmt: skip
            new = self.random.random() < 0.3
            parts.append(self.source([*shape[:axis], self.dim(), *shape[axis + 1 :]]) if new else
                         self.random.choice(same))  # fmt: skip
        self.random.shuffle(parts)
        name = f"{self.prefix}t{len(self.tensors)}"
        total = sum((self.shape(p)[axis] for p in parts), ZERO)
        self.tensors[name] = Tensor(name, "float32", (*shape[:axis], total, *shape[axis + 1 :]))
        self.nodes.append(Concat(name, tuple(parts), axis, origin=name))
        self.live.append(name)


def random_array(numbers: np.random.Generator, dtype: str, shape: Sequence[int]) -> Array:
    """Return values of moderate size; integers are in [0, TABLE)."""
    if dtype == "float32":
        return numbers.standard_normal(tuple(shape)).astype(np.float32)
    return numbers.integers(0, TABLE if dtype != "bool" else 2, tuple(shape)).astype(numpy_dtype(dtype))
