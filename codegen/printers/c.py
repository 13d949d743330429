"""Print loop IR as C for CPUs. Every form of the IR has one printed form; leaves are in ``leaf/pd_cpu.h``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from polydyn.codegen import ir
from polydyn.codegen.indices import mentions, node_buffers
from polydyn.codegen.printers.c_values import CTYPE, CVALUE, ValuePrinter, index_text, vector_type
from polydyn.schedules.errors import CodegenError
from polydyn.schedules.expr import C_FUNCTIONS, REDUCTIONS, FromIndex, Op, Value


class KernelPrinter:
    """Prints one kernel and the functions outlined from it."""

    def __init__(
        self,
        name: str,
        buffers: Mapping[str, str],
        outputs: Sequence[str],
        symbols: Sequence[str],
        inline_math: bool = False,
        width: int = 0,
    ) -> None:
        """Set up the printer.

        ``buffers``: parameter name -> dtype, in ABI order; ``outputs``: written buffers; ``symbols``: in ABI order.
        ``width``: lanes of a whole vector, if there are narrow vectors too.
        """
        self.inline_math, self.width = inline_math, width
        self.name, self.buffers, self.outputs, self.symbols = name, dict(buffers), set(outputs), list(symbols)
        self.dtypes = dict(buffers)
        self.functions: dict[str, str] = {}
        self.outlined: dict[str, tuple[set[str], set[str]]] = {}

    def kernel(self, body: ir.Body) -> str:
        """Return the kernel's C text (without headers)."""
        for n in ir.walk(body):
            if isinstance(n, ir.Alloc):
                self.dtypes[n.buffer] = n.dtype
        used, free = self._names(body)
        text = self._body(body, 1)
        decl = "".join(
            f"  {self._pointer(b)} = buf[{i}];\n" for i, b in enumerate(self.buffers) if b in used
        ) + "".join(f"  const i64 {s} = sym[{i}];\n" for i, s in enumerate(self.symbols) if s in free)
        unused = "  (void)buf; (void)sym; (void)scratch; (void)begin; (void)end;\n"
        head = f"void {self.name}(void *const *buf, const int64_t *sym, int64_t begin, int64_t end, void *scratch) {{\n"
        return _c_functions(body) + "".join(self.functions.values()) + head + decl + unused + text + "}\n"

    def _names(self, body: ir.Body) -> tuple[set[str], set[str]]:
        """Return (buffers used but not allocated, symbols used but not bound); cached for outlined functions."""
        buffers: set[str] = set()
        used: set[str] = set()
        bound: set[str] = set()
        allocated: set[str] = set()

        def visit(b: ir.Body) -> None:
            for n in b:
                if isinstance(n, ir.Outline):
                    inner = self.outlined.get(n.name) or self._names(n.body)
                    self.outlined[n.name] = inner
                    buffers.update(inner[0])
                    used.update(inner[1])
                    continue
                if isinstance(n, (ir.For, ir.Let)):
                    bound.add(n.var)
                if isinstance(n, ir.Alloc):
                    allocated.add(n.buffer)
                buffers.update(node_buffers(n))
                used.update(mentions(n)[0])
                for x in ir.bodies(n):
                    visit(x)

        visit(body)
        return buffers - allocated, used - bound

    def _pointer(self, buffer: str) -> str:
        const = "" if buffer in self.outputs or buffer not in self.buffers else "const "
        return f"{const}{CTYPE[self.dtypes[buffer]]} *restrict {buffer}"

    def _body(self, body: ir.Body, depth: int) -> str:
        return "".join(self._node(n, depth) for n in body)

    def _node(self, n: object, depth: int) -> str:
        t = "  " * depth
        if isinstance(n, ir.For):
            pragma = f"{t}#pragma GCC unroll {n.kind[6:]}\n" if n.kind.startswith("unroll") else ""
            head = f"for (i64 {n.var} = {index_text(n.lo)}; {n.var} < {index_text(n.hi)}; ++{n.var})"
            return f"{pragma}{t}{head} {{\n{self._body(n.body, depth + 1)}{t}}}\n"
        if isinstance(n, ir.If):
            orelse = f" else {{\n{self._body(n.orelse, depth + 1)}{t}}}" if n.orelse else ""
            cond = " && ".join(map(_compare, n.cond))
            return f"{t}if ({cond}) {{\n{self._body(n.then, depth + 1)}{t}}}{orelse}\n"
        if isinstance(n, ir.Let):
            return f"{t}{{\n{t}const i64 {n.var} = {index_text(n.value)};\n{self._body(n.body, depth)}{t}}}\n"
        if isinstance(n, ir.Mark):
            raise CodegenError(f"mark {n.name} was not consumed")
        if isinstance(n, ir.Alloc):
            return self._alloc(n, depth)
        if isinstance(n, ir.Switch):
            return self._switch(n, depth)
        if isinstance(n, ir.Outline):
            return self._outline(n, depth)
        if isinstance(n, (ir.Store, ir.Def, ir.Set)):
            return t + self._assignment(n) + "\n"
        if isinstance(n, ir.Call):
            return f"{t}{n.function}({', '.join(map(self._argument, n.args))});\n"
        raise CodegenError(f"no C form for {n!r}")

    def _argument(self, v: Value) -> str:
        if isinstance(v, ir.Pointer):
            return f"{v.buffer}, {index_text(v.address)}"
        return index_text(v.index) if isinstance(v, FromIndex) else ValuePrinter(self.dtypes).text(v)

    def _switch(self, n: ir.Switch, depth: int) -> str:
        t, cases, before = "  " * depth, "", 0
        for k, b in n.cases:
            labels = f"case {k}" if before == k - 1 else f"case {before + 1} ... {k}"
            cases += f"{t}{labels}: {{\n{self._body(b, depth + 1)}{t}}} break;\n"
            before = k
        return f"{t}switch ({index_text(n.on)}) {{\n{cases}{t}}}\n"

    def _alloc(self, n: ir.Alloc, depth: int) -> str:
        t = "  " * depth
        if n.scope == "stack":
            head = f"PD_STACK({CTYPE[n.dtype]}, {n.buffer}, {index_text(n.size)});"
            return f"{t}{{\n{t}{head}\n{self._body(n.body, depth)}{t}}}\n"
        step = f"(({index_text(n.size)}) * (i64)sizeof({CTYPE[n.dtype]}) + 63) / 64 * 64"
        place = f"PD_SCRATCH({CTYPE[n.dtype]}, {n.buffer}, {index_text(n.size)}, scratch)"
        head = f"{self._pointer(n.buffer)} = {place}; void *scratch_{n.buffer} = (char *)scratch + {step};"
        inner = f"{t}{{ void *scratch = scratch_{n.buffer}; (void)scratch;\n{self._body(n.body, depth)}{t}}}\n"
        return f"{t}{{\n{t}{head}\n{inner}{t}}}\n"

    def _outline(self, n: ir.Outline, depth: int) -> str:
        buffers, free = map(sorted, self._names(n.body))
        params = [self._pointer(b) for b in buffers] + [f"i64 {v}" for v in free] + ["void *scratch"]
        if n.name not in self.functions:  # several pieces call one function
            text = f"{{\n  (void)scratch;\n{self._body(n.body, 1)}}}\n"
            self.functions[n.name] = f"static __attribute__((noinline)) void {n.name}({', '.join(params)}) {text}"
        return f"{'  ' * depth}{n.name}({', '.join([*buffers, *free, 'scratch'])});\n"

    def _assignment(self, n: ir.Store | ir.Def | ir.Set) -> str:
        values = ValuePrinter(self.dtypes, self.inline_math, self.width)
        dtype = n.value.dtype
        if isinstance(n, ir.Def):
            scalar = "int" if dtype == "bool" else CVALUE[dtype]
            kind = scalar if n.lanes == 1 else values.prefix(n.lanes, dtype) + vector_type(dtype)[1:]
            return f"{kind} {n.reg} = {values.text(n.value, n.lanes)};"
        if isinstance(n, ir.Set):
            return f"{n.reg} = {values.text(_combined(n.reduce, ir.Reg(dtype, n.reg, n.lanes), n.value), n.lanes)};"
        return values.store(n)


def _c_functions(body: ir.Body) -> str:
    """Return the C functions that a kernel calls, each once in a translation unit."""
    values = (n.value for n in ir.walk(body) if isinstance(n, (ir.Store, ir.Def, ir.Set))) if C_FUNCTIONS else ()
    names = dict.fromkeys(
        x.name for v in values for x in ir.walk_value(v) if isinstance(x, Op) and x.name in C_FUNCTIONS
    )
    return "".join(f"#ifndef PD_HAS_{n}\n#define PD_HAS_{n}\n{C_FUNCTIONS[n].strip()}\n#endif\n" for n in names)


def _combined(reduce: str | None, old: Value, new: Value) -> Value:
    return new if reduce is None else Op(new.dtype, REDUCTIONS[reduce], (old, new))


def _compare(c: ir.Compare) -> str:
    return f"{index_text(c.left)} {c.relation} {index_text(c.right)}"
