"""A matmul-like group for CUDA kernels: operands as they are stored, extents, epilogues."""

from __future__ import annotations

from collections.abc import Mapping

from polydyn.codegen.lower import flat
from polydyn.codegen.operands import operands
from polydyn.codegen.printers.cuda_values import BYTES, HALF
from polydyn.codegen.sharing import UNSHARED, Sharing
from polydyn.schedules.errors import CodegenError, Declined
from polydyn.schedules.expr import FLOAT8, Op, Value, cast, op
from polydyn.schedules.index import Index, IndexLike, product
from polydyn.schedules.model import Group, Statement
from polydyn.schedules.tiling import Roles


def product_refusal(group: Group, roles: Roles) -> Declined | None:
    """Return the reason why CUDA does not support a product, or None."""
    row, col = _narrow(operands(group.backbone, roles))
    dtypes = {row.dtype, col.dtype}
    compatible = len(dtypes) == 1 or dtypes <= set(BYTES) or dtypes <= set(FLOAT8)
    if compatible and row.dtype in ("float32", "int32", *HALF, *BYTES, *FLOAT8):
        return None
    return Declined(f"CUDA kernels do not support a product of {row.dtype} and {col.dtype}")


class ProductGroup:
    """A matmul-like group: its operands as stored, its extents. ``sharing``: how launches share its reduction.

    ``dtypes``: dtypes of the stored operands; ``dtype``: that of the rows; ``sums``: the accumulator's dtype, float32
    or int32. ``widened``: 8-bit floats are treated as float32. ``fixed``: no launch writes the column operand.
    """

    def __init__(
        self, name: str, group: Group, roles: Roles, sharing: Sharing = UNSHARED, widened: bool = False,
        fixed: bool = False,
    ) -> None:  # fmt: skip
        self.fixed = fixed
        self.name, self.group, self.roles, self.sharing = name, group, roles, sharing
        self.acc, self.epilogues = group.backbone, group.epilogues
        self.extents = dict(self.acc.iters)
        self.M, self.N = self.extents[roles.row], self.extents[roles.col]
        self.K = product(self.extents[x] for x in (roles.block, *roles.inner))
        row, col = operands(self.acc, roles) if widened else _narrow(operands(self.acc, roles))
        self.sums = self.acc.value.dtype
        self.dtype, self.dtypes, self.values = row.dtype, (row.dtype, col.dtype), (row, col)
        if refusal := product_refusal(group, roles):
            raise CodegenError(str(refusal))  # the caller has checked it

    @property
    def shares(self) -> Index:
        """The number of K slices that are tasks."""
        return self.sharing.slices

    def epilogue_value(self, s: Statement, env: Mapping[str, IndexLike], total: Value) -> Value:
        """Return the value that an epilogue stores; ``total`` is the sum of the products."""
        return flat(self.group, s.value, env, lambda x: total if x.buffer == self.acc.array else None)

    def term(self, a: Value, b: Value) -> Value:
        """Return the accumulated term for two elements as stored."""
        return op("mul", cast(a, self.sums), cast(b, self.sums))


def _narrow(pair: tuple[Value, Value]) -> tuple[Value, Value]:
    """Return the stored operands if they have at most 16 bits and were only widened.

    Tensor cores multiply them exactly, into float32 or int32. Other operands, such as bytes minus a zero point, stay
    float32 or int32.
    """
    wide = pair[0].dtype
    inner = [v.args[0] if isinstance(v, Op) and v.name == "cast" and v.dtype == wide else v for v in pair]
    dtypes = {v.dtype for v in inner}
    halves = len(dtypes) == 1 and dtypes <= set(HALF)
    floats = wide == "float32" and (halves or dtypes <= set(FLOAT8))
    return (inner[0], inner[1]) if floats or (wide == "int32" and dtypes <= set(BYTES)) else pair
