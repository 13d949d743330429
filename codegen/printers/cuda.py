"""CUDA text of a kernel: calls of ``codegen/device/pd_device.cuh`` and C++ control flow, nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from polydyn.codegen.indices import node_indices
from polydyn.codegen.ir import Alloc, Body, Call, Compare, Def, For, If, Let, Mark, Node, Reg, Set, Store, bodies, walk
from polydyn.codegen.printers.cuda_values import REGISTER, STORAGE, CudaValues, Place
from polydyn.schedules.errors import CodegenError
from polydyn.schedules.expr import ITEMSIZE, REDUCTIONS, Op
from polydyn.schedules.index import ZERO, Index, maximum

PRELUDE = """#include "pd_device.cuh"

// At which byte element (row, column) of a swizzled tile lies: P elements of S bytes a row, chunks of C elements that
// move as one, L chunks in the 128 bytes of all banks. Chunks of one column in consecutive rows have different banks.
// Rows and columns count modulo 2^32: multiples of what the permutation repeats itself after may stand outside.
template <int P, int C, int L, int S> PD_DEV int pd_swizzled(uint32_t row, uint32_t column) {
  constexpr int chunks = P / C, fold = chunks >= L ? 1 : L / chunks, mask = (chunks >= L ? L : chunks) - 1;
  return (int)(row * (P * S) + ((column / C) ^ (row / fold & mask)) * (C * S) + column % C * S);
}
"""
"""The start of every file, once."""
HOPPER_PRELUDE = PRELUDE.replace("pd_device.cuh", "pd_hopper.cuh")
"""The start of every file of kernels with tensor maps or clusters."""
BEGIN = "pd_grid_begin"
"""Call of all threads before they access global memory, at the start of a kernel unless its body has it later."""
ALIGN = 16
LANES = 8
"""Lanes of a warp per short row."""
THREAD = {"tid": "pd_tid()", "bid": "pd_bid_x()", "lane": "pd_tid() % 32", "warp": "pd_tid() / 32"}
"""Symbols that every kernel may use."""
THREAD_MAPPINGS = {
    "warp": ("pd_tid() % 32", "32"), "lanes": (f"pd_tid() % {LANES}", f"{LANES}"), "block": ("pd_tid()", "{threads}"),
    "columns": ("pd_tid() / 32", "{threads} / 32"),
}  # fmt: skip
"""Kind of a thread-mapped loop -> the first iteration of a thread, and the distance to its next one."""


def shared_bytes(body: Body) -> Index:
    """Return a block's dynamic shared memory: nested allocations add up, those next to each other share memory."""
    around = ZERO
    while len(body) == 1 and len(inside := tuple(bodies(body[0]))) == 1:  # hundreds of names may be nested
        around, body = around + _own_bytes(body[0]), inside[0]
    return around + _most(_node_bytes(n) for n in body)


def _node_bytes(n: Node) -> Index:
    return _most(map(shared_bytes, bodies(n))) + _own_bytes(n)


def _own_bytes(n: Node) -> Index:
    return _bytes(n) if isinstance(n, Alloc) and n.scope == "shared" else ZERO


def _most(sizes: Iterable[Index]) -> Index:
    used = [s for s in sizes if s != ZERO]
    return maximum(*used) if used else ZERO


def _bytes(n: Alloc) -> Index:
    return (n.size * ITEMSIZE[n.dtype]).ceildiv(ALIGN) * ALIGN


class CudaPrinter:
    """Prints one kernel."""

    def __init__(
        self,
        name: str,
        buffers: Mapping[str, str],
        outputs: Sequence[str],
        symbols: Sequence[str],
        threads: int,
        index_type: str = "int64_t",
        maps: Sequence[str] = (),
        fast: bool = False,
        cluster: int = 1,
    ) -> None:
        """Set up the printer.

        ``buffers``: parameter name -> dtype, in order; ``outputs``: written buffers; ``symbols``: int64 parameters.
        ``index_type``: the type of all index arithmetic; the parameters are int64 in any case. ``maps``: tensor maps,
        which are the first parameters. ``fast``: results are finally rounded to 16 bits (``CudaValues``). ``cluster``:
        blocks of a cluster.
        """
        self.maps = tuple(maps)
        self.name, self.outputs, self.symbols, self.threads = name, set(outputs), tuple(symbols), threads
        self.index_type, self.cluster = index_type, cluster
        self.places = {n: Place(d, "global") for n, d in buffers.items()}
        self.values = CudaValues(self.places, index_type, fast)
        self.offset = ZERO

    def kernel(self, body: Body, blocks: int = 1) -> str:
        """Return the file: includes, the kernel, its export. ``blocks``: targeted blocks per multiprocessor."""
        arguments = (*self.places, *self.symbols)
        params = [f"{'' if b in self.outputs else 'const '}{STORAGE[p.dtype]} *{b}" for b, p in self.places.items()]
        narrow = self.index_type != "int64_t"
        params = [*(f"PD_TMAP({m})" for m in self.maps), *params]
        params += [f"int64_t {s}{'_wide' if narrow else ''}" for s in self.symbols]
        used = {s for n in walk(body) for i in node_indices(n) for s in i.symbols()}
        text = self._body(body, 1)
        kinds = {s: "int" if s != "bid" else self.index_type for s in THREAD}
        head = "".join(f"  const {kinds[s]} {s} = {THREAD[s]};\n" for s in THREAD if s in used)
        if narrow:
            t = self.index_type
            head = "".join(f"  const {t} {s} = ({t}){s}_wide;\n" for s in self.symbols) + head
        if not any(isinstance(n, Call) and n.function == BEGIN for n in walk(body)):
            head += f"  {BEGIN}();\n"
        first = "".join(f"    pd_tma_prefetch(&{m});\n" for m in self.maps)
        head += f"  if (pd_tid() == 0) {{\n{first}  }}\n" if first else ""
        smem = "  PD_DYN_SMEM(smem);\n" if "smem" in text else ""
        unused = "".join(f"  (void){s};\n" for s in arguments)
        kind, bounds = "PD_KERNEL", [self.name, self.threads, blocks]
        if self.cluster > 1:
            kind, bounds = "PD_KERNEL_CLUSTER", [*bounds, self.cluster]
        head = f"{kind}({', '.join(map(str, bounds))})({', '.join(params)}) {{\n{smem}{head}{unused}"
        prelude = HOPPER_PRELUDE if self.maps or self.cluster > 1 else PRELUDE
        return f"{prelude}{head}{text}}}\nPD_EXPORT({self.name}, {self.threads});\n"

    def _body(self, body: Body, depth: int) -> str:
        return "".join(self._node(n, depth) for n in body)

    def _node(self, n: object, depth: int) -> str:
        t = "  " * depth
        if isinstance(n, For):
            return self._for(n, depth)
        if isinstance(n, If):
            orelse = f" else {{\n{self._body(n.orelse, depth + 1)}{t}}}" if n.orelse else ""
            cond = " && ".join(map(self._compare, n.cond))
            return f"{t}if ({cond}) {{\n{self._body(n.then, depth + 1)}{t}}}{orelse}\n"
        if isinstance(n, Let):
            head = f"const {self.index_type} {n.var} = {self.values.index(n.value)};"
            return f"{t}{{\n{t}{head}\n{self._body(n.body, depth)}{t}}}\n"
        if isinstance(n, Alloc):
            return self._alloc(n, depth)
        if isinstance(n, Call):
            return f"{t}{n.function}({', '.join(map(self.values.call_argument, n.args))});\n"
        if isinstance(n, Store):
            return f"{t}{self.values.store(n)}\n"
        if isinstance(n, Def):
            return f"{t}{REGISTER[n.value.dtype]} {n.reg} = {self.values.text(n.value)};\n"
        if isinstance(n, Set):
            old = Reg(n.value.dtype, n.reg)
            value = n.value if n.reduce is None else Op(n.value.dtype, REDUCTIONS[n.reduce], (old, n.value))
            return f"{t}{n.reg} = {self.values.text(value)};\n"
        if isinstance(n, Mark):
            raise CodegenError(f"mark {n.name} was not consumed")
        raise CodegenError(f"no CUDA form for {n!r}")

    def _for(self, n: For, depth: int) -> str:
        """Print a loop: ``unroll`` (fully), ``unroll<n>``; ``warp``, ``block``: mapped to its lanes or threads."""
        t, lo, hi = "  " * depth, self.values.index(n.lo), self.values.index(n.hi)
        step, unrolled = f"++{n.var}", n.kind.startswith("unroll")
        kind = "int" if unrolled and n.hi.constant is not None else self.index_type
        if n.kind in THREAD_MAPPINGS:
            first, by = THREAD_MAPPINGS[n.kind]
            lo, step = f"{lo} + {first}", f"{n.var} += {by.format(threads=self.threads)}"
        elif not unrolled and n.kind not in ("serial", "parallel"):
            raise CodegenError(f"loop {n.var} of kind {n.kind} has no CUDA form")
        pragma = f"{t}PD_UNROLL\n" if n.kind == "unroll" else f"#pragma unroll {n.kind[6:]}\n" if unrolled else ""
        head = f"for ({kind} {n.var} = {lo}; {n.var} < {hi}; {step})"
        return f"{pragma}{t}{head} {{\n{self._body(n.body, depth + 1)}{t}}}\n"

    def _alloc(self, n: Alloc, depth: int) -> str:
        t = "  " * depth
        if n.scope == "shared":
            start = self.offset
            self.places[n.buffer] = Place(n.dtype, "shared", start)
            self.offset = start + _bytes(n)
            text = self._body(n.body, depth)
            self.offset = start
            return text
        if n.scope != "register":
            raise CodegenError(f"{n.buffer}: scope {n.scope} has no CUDA form")
        self.places[n.buffer] = Place(n.dtype, "register")
        head = f"{REGISTER[n.dtype]} {n.buffer}[{self.values.index(n.size)}];"
        return f"{t}{{\n{t}{head}\n{self._body(n.body, depth)}{t}}}\n"

    def _compare(self, c: Compare) -> str:
        return f"{self.values.index(c.left)} {c.relation} {self.values.index(c.right)}"
