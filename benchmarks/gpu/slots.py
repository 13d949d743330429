"""Counts issue slots of a CUDA kernel's operations in machine code and compares them with the estimates.

    pip install nvidia-cuda-nvdisasm; python -m benchmarks.gpu.slots

Slots are the instructions per element that an operation adds to an element-wise kernel for sm_90a, or 8 for each
function of the special unit (MUFU), which evaluates 16 per clock on an SM, whichever is larger. The exit status is the
number of operations that differ from ``polydyn.codegen.cuda.slots`` by more than a quarter and one slot. No GPU is
needed.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.gpu import sass
from benchmarks.gpu.programs import model, node
from polydyn.codegen.cuda.slots import of_operation

NODES = {
    "Add": "add", "Mul": "mul", "Div": "div", "Max": "max", "Abs": "abs", "Sqrt": "sqrt", "Exp": "exp", "Log": "log",
    "Erf": "erf", "Tanh": "tanh", "Sigmoid": "sigmoid", "Floor": "floor", "Sin": "sin", "Cos": "cos", "Pow": "pow",
    "Tan": "tan", "Asinh": "asinh",
}  # fmt: skip
"""Maps an operator to the operation that it becomes."""
PAIRS = ("Add", "Mul", "Div", "Max", "Pow")
SPECIAL = 8


def code(dtype: str, *more: str) -> Sequence[str]:
    """Return the machine code of x + z, followed by further operators."""
    sizes = {n: (dtype, ["M", 1024]) for n in "xz"}
    nodes = [
        node("Add", "x", "z", **({"to": "t"} if more else {})),
        *(node(o, "t", *["z"] * (o in PAIRS)) for o in more),
    ]
    k = sass.kernel_of(sass.Kind("", model(nodes, sizes), "wide", (), "sm_90a"))
    return [i for i in sass.built(k.text, k.name, "sm_90a")[0].instructions if not i.startswith(("NOP", "BRA"))]


def counted(dtype: str, operator: str) -> float:
    """Return the slots of an operator per element; a thread has 16 bytes of elements."""
    base, whole = code(dtype), code(dtype, operator)
    special = sum(i.startswith("MUFU") for i in whole)
    return max(len(whole) - len(base), SPECIAL * special) / {"float16": 8, "float32": 4}[dtype]


def main() -> int:
    """Print a line for each operation; return the number of operations that differ."""
    differ = 0
    print("operation    float16 supposed  float32 supposed")
    for operator, name in NODES.items():
        pairs = [(counted(d, operator), of_operation(name, d == "float16")) for d in ("float16", "float32")]
        wrong = sum(abs(a - b) > b / 4 + 1 for a, b in pairs)
        differ += wrong
        numbers = " ".join(f"{a:8.1f} {b:8}" for a, b in pairs)
        print(f"{name:10} {numbers}{'  DIFFERS' * bool(wrong)}")
    return differ


if __name__ == "__main__":
    raise SystemExit(main())
