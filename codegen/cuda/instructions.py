"""The instructions of CUDA products: their shapes, and how lanes hold and load fragments.

``fma``   a thread and one element, float32 or int32 on CUDA cores; ``lanes`` a warp and m16n8k4, float32 on CUDA cores
with the sums held as tensor cores hold them (attention); ``tf32``  a warp and m16n8k8 on tensor cores: float32 rounded
to 10 bits of mantissa, sums in float32; ``tf32x3`` three times ``tf32``, on float32 split in two parts of 10 bits: the
rounded value and the remainder; ``mma``   a warp and m16n8k16 on tensor cores: float16 or bfloat16, sums in float32;
``imma``  a warp and m16n8k32 on tensor cores: int8 or uint8, each operand either, sums in int32 (they wrap); ``qmma``
like ``imma`` for float8_e4m3fn or float8_e5m2, sums in float32: sm_89 and newer.

With g = lane / 4 and t = lane mod 4 a lane holds rows g, g + 8 and two columns of a fragment of sums: 2t and 2t + 1. If
the columns are the steps of another product (``scores``), it holds t and t + 4. For bytes that are contiguous along the
columns, a lane holds four columns, 4t to 4t + 3, in two fragments: the even ones in the first (``_byte_columns``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from polydyn.codegen.ir import Alloc, Apply, Body, Call, FlatLoad, Pointer, Store, Tile
from polydyn.codegen.kernel import BASE
from polydyn.codegen.printers.cuda_values import BYTES, HALF
from polydyn.schedules.expr import FLOAT8, FromIndex, Op, Value
from polydyn.schedules.index import ZERO, Index

V = Index.of
LANE = V("lane")
HALVES, PAIR = V("row_half"), V("column_of_pair")
ROW, COLUMN = LANE // 4 + HALVES * 8, LANE % 4 * 2 + PAIR
"""A lane's row and column in a fragment of sums."""
KEY = LANE % 4 + PAIR * 4
"""A lane's column if the columns are the steps of another product."""
UNSPLIT = "raw"
"""The registers that a load fills before they are split."""
FLOAT8_ARCH = "sm_89"
"""The oldest architecture that multiplies 8-bit floats."""
At = Callable[[Index, Index], Tile]
"""(row or column in the tile, step in the tile) -> the element in shared memory."""


@dataclass(frozen=True)
class Instruction:
    """One instruction: (m, n, k), threads of a unit, operands' dtypes, registers of a fragment of A and of B.

    ``register``: the type of the registers of operands (the dtype of the sums if a thread has single elements).
    ``times``: the number of instructions per fragment, for operands that are split in parts.
    """

    name: str
    shape: tuple[int, int, int]
    threads: int
    dtypes: tuple[str, ...]
    registers: tuple[int, int]
    register: str
    times: int = 1

    @property
    def rounds(self) -> bool:
        """Whether it multiplies float32 that is rounded to tf32."""
        return self.name.startswith("tf32")

    @property
    def warp(self) -> bool:
        """Whether a warp executes it."""
        return self.threads > 1

    @property
    def of_bytes(self) -> bool:
        """Whether operands are bytes, which ldmatrix does not transpose."""
        return self.shape[2] == 32

    @property
    def arch(self) -> str:
        """The oldest architecture that supports it."""
        return FLOAT8_ARCH if self.dtypes == FLOAT8 else BASE

    @property
    def loads(self) -> int:
        """Rows or columns that one load of fragments fills."""
        return 16 if self.warp else 1


INSTRUCTIONS = {
    i.name: i
    for i in (
        Instruction("fma", (1, 1, 1), 1, ("float32", "int32"), (1, 1), ""),
        Instruction("lanes", (16, 8, 4), 32, ("float32",), (8, 8), "float32"),
        Instruction("tf32", (16, 8, 8), 32, ("float32",), (4, 2), "uint32"),
        Instruction("tf32x3", (16, 8, 8), 32, ("float32",), (8, 4), "uint32", 3),
        Instruction("mma", (16, 8, 16), 32, HALF, (4, 2), "uint32"),
        Instruction("imma", (16, 8, 32), 32, BYTES, (4, 2), "uint32"),
        Instruction("qmma", (16, 8, 32), 32, FLOAT8, (4, 2), "uint32"),
    )
}
TENSOR = {
    ("float16", "float16"): "f16", ("bfloat16", "bfloat16"): "bf16", ("float32", "float32"): "tf32",
    ("float8_e4m3fn", "float8_e4m3fn"): "e4m3", ("float8_e5m2", "float8_e5m2"): "e5m2",
    ("float8_e4m3fn", "float8_e5m2"): "e4m3e5m2", ("float8_e5m2", "float8_e4m3fn"): "e5m2e4m3",
    ("int8", "int8"): "s8", ("uint8", "uint8"): "u8", ("uint8", "int8"): "u8s8", ("int8", "uint8"): "s8u8",
}  # fmt: skip
"""Operands' dtypes -> the suffix of the tensor core instruction."""


def permute(column: Index) -> Index:
    """Return the key of a fragment's column if a lane has columns t and t + 4 (``KEY``)."""
    return column // 2 + column % 2 * 4


def load(
    i: Instruction, which: int, along_k: bool, at: At, frag: str, number: Index, mn: Index, k: Index,
    keys: bool = False,
) -> Body:  # fmt: skip
    """Load 16 rows (``which`` 0) or 16 columns (two fragments) of shared memory, for one instruction's steps.

    ``along_k``: the tile is contiguous along the steps. ``number``: the number of the load; ``mn``, ``k``: its first
    row or column and step in the tile. ``keys``: columns are permuted (``permute``).
    """
    place = number * (i.registers[which] * (1 if which == 0 else 2))
    if i.name == "lanes":
        return _by_lane(which, along_k, at, frag, place, mn, k)
    if i.rounds and not along_k:
        return _round_columns(i, which, at, frag, place, mn, k, keys)
    if i.of_bytes and not along_k:
        assert which == 1, "copies store rows of bytes along the steps"
        return _byte_columns(at, frag, place, mn, k)
    # matrix m = lane / 8 of the four: A has rows m % 2 and k m / 2 in this order, B the reverse
    step = i.shape[2] // 2
    low, high = LANE % 16, LANE // 16 * step
    split_low, split_high = LANE // 8 % 2 * 8, LANE // 16 * 8 + (permute(LANE % 8) if keys else LANE % 8)
    if which == 0:
        mn, k = (mn + low, k + high) if along_k else (mn + split_low, k + split_high)
    else:
        mn, k = (mn + split_high, k + LANE // 8 % 2 * step) if along_k else (mn + LANE // 16 * 8, k + low)
    function = "pd_ldmatrix_x4_trans" if not along_k else "pd_ldmatrix_x4"
    if i.times > 1:
        whole = tuple(Apply("float32", "pd_bits_to_f32", (FlatLoad("uint32", UNSPLIT, V(r)),)) for r in range(4))
        read = Call(function, (Pointer("uint32", UNSPLIT, ZERO), at(mn, k)))
        return (Alloc(UNSPLIT, "uint32", V(4), "register", (read, *_parts(which, frag, place, whole))),)
    out: Body = (Call(function, (Pointer("uint32", frag, place), at(mn, k))),)
    if i.rounds:
        for r in range(4):
            value = Apply("float32", "pd_bits_to_f32", (FlatLoad("uint32", frag, place + r),))
            out += (Store(frag, place + r, Apply("uint32", "pd_f32_to_tf32", (value,))),)
    return out


def _parts(which: int, frag: str, place: Index, whole: Sequence[Value]) -> Body:
    """Split the four registers of a load in two parts. A fragment has first the rounded values, then the remainders."""
    out: Body = ()
    for r, x in enumerate(whole):
        first, size = (r, 4) if which == 0 else (r // 2 * 4 + r % 2, 2)
        out += (Store(frag, place + first, Apply("uint32", "pd_f32_to_tf32", (x,))),
                Store(frag, place + (first + size), Apply("uint32", "pd_tf32_rest", (x,))))  # fmt: skip
    return out


def _byte_columns(at: At, frag: str, place: Index, mn: Index, k: Index) -> Body:
    """Load 16 columns and 32 steps of a tile of bytes that is contiguous along its columns.

    ldmatrix transposes pairs of bytes. The pairs are separated in registers, so one fragment gets the even columns and
    the next one the odd columns. The order of the steps gives a lane its four (twice), with rows in different banks.
    """
    step = LANE // 16 * 16 + LANE % 8 // 2 * 4 + (LANE // 8 + LANE % 8 // 4) % 2 * 2 + LANE % 2
    pointer = Pointer("uint32", frag, place)
    read = Call("pd_ldmatrix_x4_trans", (pointer, at(mn, k + step)))
    return (read, Call("pd_byte_columns", (pointer, FromIndex("int32", LANE))))


def _round_columns(
    i: Instruction, which: int, at: At, frag: str, place: Index, mn: Index, k: Index, keys: bool
) -> Body:  # fmt: skip
    """Load a tile of float32 that is contiguous along its own side, which ldmatrix cannot transpose."""
    first = permute(LANE // 4) if keys else LANE // 4
    elements = []
    for r in range(4):
        side, half = (r % 2, r // 2) if which == 0 else (r // 2, r % 2)
        elements.append(at(mn + first + side * 8, k + LANE % 4 + half * 4))
    if i.times == 1:
        return tuple(Store(frag, place + r, Apply("uint32", "pd_f32_to_tf32", (x,))) for r, x in enumerate(elements))
    read = tuple(Store(UNSPLIT, V(r), x) for r, x in enumerate(elements))
    whole = [FlatLoad("float32", UNSPLIT, V(r)) for r in range(4)]
    return (Alloc(UNSPLIT, "float32", V(4), "register", (*read, *_parts(which, frag, place, whole))),)


def _by_lane(which: int, along_k: bool, at: At, frag: str, place: Index, mn: Index, k: Index) -> Body:
    """Load the elements that a lane multiplies itself, with the widest access that memory allows.

    Step e of its row or column s is register 4 s + e; for columns in a tile contiguous along them, 2 e + s.
    """
    out: Body = ()
    for f in range(1 + which):  # two fragments of columns
        first, start = (LANE // 4, ZERO) if which == 0 else (LANE % 4 * 2 + f * 8, V(f * 8))
        step = 8 if which == 0 else 1
        if along_k:
            out += tuple(
                Call("pd_lds_wide<4>", (Pointer("float32", frag, place + start + s * 4), at(mn + first + s * step, k)))
                for s in range(2)
            )
        elif which == 1:
            out += tuple(
                Call("pd_lds_wide<2>", (Pointer("float32", frag, place + start + e * 2), at(mn + first, k + e)))
                for e in range(4)
            )
        else:
            out += tuple(
                Store(frag, place + (s * 4 + e), at(mn + first + s * step, k + e))
                for s in range(2) for e in range(4)
            )  # fmt: skip
    return out


def multiply(
    i: Instruction, dtypes: tuple[str, str], along_k: bool, acc: str, frags: tuple[str, str], fragment: Index,
    a: Index, b: Index,
) -> Body:  # fmt: skip
    """Issue one instruction.

    ``fragment``: the sums, ``a`` and ``b``: the operands; ``along_k``: layout of the columns' tile.
    """
    if i.name == "fma":
        pair: tuple[Value, Value] = (FlatLoad(dtypes[0], frags[0], a), FlatLoad(dtypes[1], frags[1], b))
        return (Store(acc, fragment, Op(dtypes[0], "mul", pair), "sum"),)
    if i.name == "lanes":
        by_step, by_column = (1, 4) if along_k else (2, 1)

        def product(s: int, c: int, e: int) -> Value:
            row = FlatLoad("float32", frags[0], a * 8 + (s * 4 + e))
            return Op("float32", "mul", (row, FlatLoad("float32", frags[1], b * 8 + (c * by_column + e * by_step))))

        points = [(s, c, e) for e in range(4) for s in range(2) for c in range(2)]
        return tuple(Store(acc, fragment * 4 + (s * 2 + c), product(s, c, e), "sum") for s, c, e in points)
    args = (
        Pointer("int32" if i.name == "imma" else "float32", acc, fragment * 4),
        Pointer("uint32", frags[0], a * i.registers[0]),
        Pointer("uint32", frags[1], b * i.registers[1]),
    )
    function = f"pd_mma_m16n8k{i.shape[2]}_{TENSOR[dtypes]}"
    if i.times == 1:
        return (Call(function, args),)
    rest = tuple(replace(x, address=x.address + n // 2) for x, n in zip(args[1:], i.registers, strict=True))
    pairs = ((rest[0], args[2]), (args[1], rest[1]), args[1:])  # the smallest products first
    return tuple(Call(function, (args[0], *x)) for x in pairs)
