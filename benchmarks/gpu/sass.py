"""Checks the machine code of one CUDA kernel of each kind for the instructions that make it fast.

    pip install nvidia-cuda-nvdisasm; python -m benchmarks.gpu.sass [--only NAME ...]

Kernels are generated like in ``polydyn.compile``, compiled (no GPU is needed) and disassembled. Each line has all
instructions of a kernel; the instructions of its inner loop, the one with the most multiplications; the instructions of
the loop that no branch skips, and the number of multiplications among them; registers, shared memory, blocks per SM.
Results go to benchmarks/results/gpu_sass.json. The exit status is the number of kernels that lack a required
instruction, have too many instructions in the loop, or keep registers in local memory (LDL, STL).
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import record
from benchmarks.gpu import weights
from benchmarks.gpu.programs import inner_convolution, mean_of_pixels, model, node
from benchmarks.gpu.timed import attention_model, float8_layer, layer
from polydyn.backends import Options
from polydyn.backends.cuda import Cuda
from polydyn.codegen.cuda.emit import LONG_SUFFIX
from polydyn.codegen.cuda.work import bounded_registers
from polydyn.codegen.kernel import Kernel
from polydyn.gpu.compiler import KernelUse, compile_cuda, compiler_version
from polydyn.gpu.hardware import DEVICES, load
from polydyn.graph.expand import import_model

COPIES, TENSOR, WIDE = r"LDGSTS\.E\.BYPASS.*128", ("LDSM", "HMMA"), r"STG\.E\.128"
SPILL_OPS = ("LDL", "STL")
BOXES = (r"UTMALDG.*BOXES", "UCGABAR_WAIT")
"""Instructions that load boxes into several blocks of a cluster, and the barrier of a cluster."""
REMOTE_LOADS = (r"LD\.E", "UCGABAR_WAIT")
"""Instructions that read another block's shared memory, and the cluster barrier."""
ARRIVAL_COUNTER = (r"ATOMG?\.E\.INC", "MEMBAR", r"LDG\.E.*STRONG\.GPU")
"""Instructions that count arriving blocks and read their partial sums."""
PIXELS = (r"UTMALDG\.4D\.IM2COL", r"UTMALDG\.2D")
"""Instructions that load pixels of an image, and filters."""
PDL, PREFETCH, FETCH = ("ACQBULK", "PREEXIT"), r"UTMACCTL\.PF", r"UTMAPF\.L2"
"""Instructions of programmatic dependent launch, on sm_90a; of prefetches of tensor maps, and of weights."""
SETMAXREG = "USETMAXREG"
"""Instruction that moves a producer's registers to consumers; the compiler omits it if it finds no bound for them."""
TENSOR_CORES = ("HMMA", "IMMA", "QMMA", "HGMMA", "IGMMA", "QGMMA")
HEADING = "instructions loop path multiplications registers shared blocks"


@dataclass(frozen=True)
class Kind:
    """A kernel: its model, a prefix ``version`` of the version's name, and patterns of required instructions.

    ``loop``: maximum instructions of its inner loop, ``size``: maximum instructions of the whole kernel,
    ``min_powers``: powers that overlap with products in flight, between two waits for them, ``ahead``: loads that
    precede the first store of a storing loop; 0: any number.
    """

    name: str
    model: Any
    version: str
    patterns: tuple[str, ...]
    arch: str = "sm_80"
    tf32: bool = False
    precision: str | None = None
    loop: int = 0
    size: int = 0
    min_powers: int = 0
    ahead: int = 0


def _product(dtype: str, turned: bool = False) -> Any:
    """Build relu(a b + c); ``turned``: b is stored as [N, K]."""
    sizes = {"a": (dtype, ["M", "K"]), "b": (dtype, ["N", "K"] if turned else ["K", "N"]), "c": (dtype, ["N"])}
    first = [node("Transpose", "b", to="bt", perm=[1, 0])] if turned else []
    nodes = [node("MatMul", "a", "bt" if turned else "b", to="t"), node("Add", "t", "c", to="u"), node("Relu", "u")]
    return model([*first, *nodes], sizes)


def _quantized() -> Any:
    """Build bytes times constant bytes, scaled."""
    nodes = [node("MatMulInteger", "a", "w", to="t"), node("DequantizeLinear", "t", "s")]
    return model(nodes, {"a": ("uint8", ["M", 2048])}, w=np.ones((2048, 512), np.int8), s=np.float32(0.01))


def _attention(dtype: str, head: int = 64) -> Any:
    sizes: dict[str, tuple[str, Sequence[Any]]] = {n: (dtype, ["B", 4, "L" if n == "q" else "T", head]) for n in "qkv"}
    nodes = [
        node("Transpose", "k", to="kt", perm=[0, 1, 3, 2]), node("MatMul", "q", "kt", to="s"),
        node("Softmax", "s", to="w", axis=-1), node("MatMul", "w", "v"),
    ]  # fmt: skip
    return model(nodes, sizes)


def _rows(*nodes: Any, **constants: Any) -> Any:
    return model(nodes, {"x": ("float16", ["M", "N"])}, **constants)


def _norm(n: int) -> Any:
    """Build a norm of rows of length ``n``."""
    sizes: dict[str, tuple[str, Sequence[Any]]] = {"x": ("float16", ["M", n]), "s": ("float16", [n])}
    return model([node("LayerNormalization", "x", "s", "b", axis=-1)], sizes | {"b": ("float16", [n])})


def kinds() -> tuple[Kind, ...]:
    """Return all checked kinds of kernels."""
    half, single, turned, quantized = _product("float16"), _product("float32"), _product("float32", True), _quantized()
    gelu, float8, attention = layer("gelu", 768, 3072), float8_layer(2048, 512), _attention("float16")
    causal, keyed = attention_model(12, 64, "causal"), attention_model(12, 64, "keys")
    image = inner_convolution(weights.convolution(64, 64, 3), ("H", "W"))
    depthwise = inner_convolution(weights.convolution(1, 64, 3), ("H", "W"), groups=64)
    return (
        Kind("product f16", half, "mma_128", (COPIES, *TENSOR, WIDE), loop=140),
        Kind("product f16, 64", half, "mma_64x64", (COPIES, *TENSOR, WIDE), loop=70),
        Kind("product f16, split", half, "split_mma", (COPIES, *TENSOR), loop=80),
        Kind("product f16, counted", half, "counted_8_mma_16x64", (COPIES, *TENSOR, *ARRIVAL_COUNTER, WIDE)),
        Kind("product f16, few rows", half, "gemv_8", (r"LDG\.E.*128", "SHFL")),
        Kind("product f16, few rows, counted", half, "gemv_2_n8_counted_8", (r"LDG\.E.*128", "SHFL", *ARRIVAL_COUNTER)),
        Kind("product f16, few rows of clusters", half, "gemv_2_n8_cluster_8", (r"LDG\.E.*128", *REMOTE_LOADS),
             "sm_90a"),
        Kind("product f16, wgmma", half, "wgmma_128x256", ("HGMMA", "UTMALDG", "SYNCS", WIDE), "sm_90a", loop=75),
        Kind("product f16, wgmma 64", half, "wgmma_64x128", ("HGMMA", "UTMALDG", "SYNCS", WIDE), "sm_90a", loop=65),
        Kind("product f16, in turn", half, "wgmma_128x128x64_5_turns", ("HGMMA", "UTMALDG", "SYNCS", "UTMASTG"),
             "sm_90a", loop=100),
        Kind("product f16, clusters", half, "wgmma_128x256x64_4_cluster", ("HGMMA", *BOXES, "SYNCS", WIDE), "sm_90a",
             loop=80),
        Kind("product f16, clusters in turn", half, "wgmma_128x128x64_5_turns_cluster", ("HGMMA", *BOXES, "UTMASTG"),
             "sm_90a", loop=105),
        Kind("product f16, wgmma, parts", half, "wgmma_128x128x64_4_parts_4", ("HGMMA", "UTMALDG", *REMOTE_LOADS, WIDE),
             "sm_90a", loop=80),
        Kind("product f16, wgmma, split", half, "split_wgmma_128x128", ("HGMMA", "UTMALDG", "SYNCS", WIDE), "sm_90a",
             loop=90),
        Kind("product f32", single, "fma_128", (COPIES, "FFMA")),
        Kind("product tf32", single, "tf32_128", (COPIES, "LDSM|LDS", r"HMMA\.1688\.F32\.TF32", WIDE), tf32=True,
             loop=335),
        Kind("product 3xtf32", single, "tf32x3_128", (COPIES, "LDSM|LDS", r"HMMA\.1688\.F32\.TF32", WIDE),
             precision="3xtf32", loop=560),
        Kind("product tf32, wgmma", turned, "wgmma_tf32_128x256", (r"HGMMA.*TF32", "UTMALDG", "SYNCS", WIDE), "sm_90a",
             tf32=True),
        Kind("product s8", quantized, "imma_128", (COPIES, "LDSM", r"IMMA\.16832\.U8\.S8", WIDE), loop=140),
        Kind("product s8, split", quantized, "split_imma", (COPIES, "LDSM", r"IMMA\.16832\.U8\.S8")),
        Kind("product s8, few rows", quantized, "gemv_8", (r"LDG\.E.*128", r"IDP\.4A", "SHFL")),
        Kind("product s8, wgmma", quantized, "wgmma_128x256", (r"IGMMA.*U8\.S8", "UTMALDG", "SYNCS", WIDE), "sm_90a"),
        Kind("product f8", float8, "qmma_128", (COPIES, "LDSM", r"QMMA\.16832\.F32\.E4M3\.E4M3", WIDE), "sm_89",
             loop=140),
        Kind("product f8, wgmma", float8, "wgmma_128x128", (r"QGMMA.*E4M3\.E4M3", "UTMALDG", "SYNCS", WIDE), "sm_90a"),
        Kind("product f8, clusters", float8, "wgmma_128x128x128_4_cluster", (r"QGMMA.*E4M3\.E4M3", *BOXES, WIDE),
             "sm_90a"),
        Kind("product f16 and gelu, wgmma", gelu, "wgmma_128x256", ("HGMMA", r"MUFU\.EX2", WIDE), "sm_90a", size=1400),
        Kind("product f16, gelu, in turn", gelu, "wgmma_128x192x64_3_turns", ("HGMMA", r"MUFU\.EX2", "UTMASTG"),
             "sm_90a", loop=100, size=1450),
        Kind("convolution f16", image, "mma_128x64", (COPIES, *TENSOR, WIDE), loop=120),
        Kind("convolution f16, depthwise", depthwise, "window", (r"LDG\.E.*128", "FFMA", WIDE), loop=285),
        Kind("convolution f16, wgmma", image, "wgmma_128x64x64_4", ("HGMMA", *PIXELS, "SYNCS", WIDE), "sm_90a",
             loop=80),
        Kind("convolution f16, in turn", image, "wgmma_128x64x64_8_turns", ("HGMMA", *PIXELS, "UTMASTG"), "sm_90a",
             loop=100),
        Kind("attention f16", attention, "attention_64", (COPIES, *TENSOR, "SHFL", WIDE), loop=460),
        Kind("attention f16", attention, "attention_64", (COPIES, *TENSOR, "SHFL", WIDE), "sm_90a", loop=460),
        *(Kind("attention f16, 128 rows", attention, "attention_128", (COPIES, *TENSOR, "SHFL", WIDE), x, loop=745)
          for x in ("sm_80", "sm_89", "sm_90a")),
        Kind("attention f16, wgmma", attention, "attention_wgmma", ("HGMMA", "UTMALDG", "SYNCS", WIDE), "sm_90a",
             loop=600, min_powers=64),
        Kind("attention f16, shares", attention, "split_attention_64", (COPIES, *TENSOR, "SHFL", WIDE), loop=460),
        Kind("attention f16, shares", attention, "split_attention_64", (COPIES, *TENSOR, "SHFL", WIDE), "sm_90a",
             loop=460),
        Kind("attention f16, causal", causal, "attention_64", (COPIES, *TENSOR, "SHFL", WIDE), loop=500),
        Kind("attention f16, mask", keyed, "attention_64", (COPIES, *TENSOR, "SHFL", WIDE), loop=790),
        *(Kind("attention f16, mask, 128 rows", keyed, "attention_128", (COPIES, *TENSOR, "SHFL", WIDE), x, loop=1360)
          for x in ("sm_80", "sm_89")),
        Kind("attention f16, mask, wgmma", keyed, "attention_wgmma", ("HGMMA", "UTMALDG", "SYNCS", WIDE), "sm_90a",
             loop=1210),
        *(Kind("attention f16, causal, 128 rows", causal, "attention_128", (COPIES, *TENSOR, "SHFL", WIDE), x, loop=820)
          for x in ("sm_80", "sm_89")),
        Kind("attention f16, causal, wgmma", causal, "attention_wgmma", ("HGMMA", "UTMALDG", "SYNCS", WIDE), "sm_90a",
             loop=660, min_powers=64),
        *(Kind("attention f16, 128, 128 rows", _attention("float16", 128), "attention_128",
               (COPIES, *TENSOR, "SHFL", WIDE), x, loop=640) for x in ("sm_80", "sm_89")),
        Kind("attention f16, 256", _attention("float16", 256), "attention_64", (COPIES, *TENSOR, "SHFL", WIDE)),
        Kind("attention f16, 256, wgmma", _attention("float16", 256), "attention_wgmma",
             ("HGMMA", "UTMALDG", "SYNCS", WIDE), "sm_90a", min_powers=32),
        Kind("attention f32", _attention("float32"), "attention_lanes", (COPIES, "FFMA", r"LDS\.128", "SHFL", WIDE)),
        Kind("attention tf32", _attention("float32"), "attention_tf32",
             (COPIES, "LDSM", r"HMMA\.1688\.F32\.TF32", WIDE), tf32=True),
        Kind("element-wise", _rows(node("Erf", "x")), "wide", (r"LDG\.E.*128", WIDE)),
        Kind("element-wise", _rows(node("Erf", "x")), "wide", (r"LDG\.E.*128", WIDE), "sm_90a"),
        Kind("softmax, a warp", _rows(node("Softmax", "x", axis=-1)), "warp", ("LDG", "SHFL", "STG"), ahead=4),
        Kind("norm of 64, some lanes", _norm(64), "lanes_wide", (r"LDG\.E.*128", "SHFL", WIDE), "sm_90a", size=160),
        Kind("norm of 768, a warp", _norm(768), "warp_wide", (r"LDG\.E.*128", "SHFL", WIDE), "sm_90a", size=360),
        Kind("sum of columns, warps", _rows(node("ReduceSum", "x", "axis"), axis=[0]), "columns", ("LDG", "BAR", "STG"),
             "sm_90a"),
        Kind("mean of pixels, shares", mean_of_pixels(64), "split_wide", (r"LDG\.E.*128", "FADD", WIDE), "sm_90a"),
        Kind("softmax, a block", _rows(node("Softmax", "x", axis=-1)), "block", ("LDG", "SHFL", "BAR")),
    )  # fmt: skip


@functools.cache
def find_nvdisasm() -> str | None:
    """Find nvdisasm on PATH, in the CUDA toolkit, or in the wheel ``nvidia-cuda-nvdisasm``."""
    homes = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    for candidate in ("nvdisasm", *(f"{h}/bin/nvdisasm" for h in homes if h)):
        path = shutil.which(candidate)
        if path:
            return path
    found = (p for folder in sys.path for p in Path(folder or ".").glob("nvidia/*/bin/nvdisasm"))
    return next((str(p) for p in found), None)


def kernel_of(kind: Kind) -> Kernel:
    """Return the version with 32-bit indices."""
    backend = Cuda(f"cuda:{kind.arch}", Options(tf32=kind.tf32, precision=kind.precision))
    plan = backend.fuse(backend.rewrite(import_model(kind.model)))
    versions = (k for p in backend.place(backend.builder(plan)).placed for k in p.kernels)
    return next(k for k in versions if k.version.startswith(kind.version) and not k.version.endswith(LONG_SUFFIX))


@dataclass(frozen=True)
class Code:
    """The instructions of an image, without operands; ``loops``: (first, one past the last) of each backward branch,
    ``skips``: (branch, target) of each forward one.
    """

    instructions: tuple[str, ...]
    loops: tuple[tuple[int, int], ...]
    skips: tuple[tuple[int, int], ...] = ()

    def inner(self) -> tuple[str, ...]:
        """Return the instructions of the loop with the most multiplications and copies, or nothing.

        Of several such loops it is the shortest.

        Code after an end of the kernel is out of line (a wait that was not over at once): it jumps back into other
        code.
        """
        return self.instructions[slice(*self._inner())]

    def path(self) -> int:
        """Return the number of instructions of the inner loop that no branch inside it skips."""
        a, b = self._inner()
        over = {n for x, y in self.skips if a <= x and y < b for n in range(x + 1, y)}
        return b - a - len(over)

    def after_loop(self) -> tuple[str, ...]:
        """Return the instructions after the inner loop, up to the end of the kernel."""
        after = self.instructions[self._inner()[1] :]
        return after[: after.index("EXIT")] if "EXIT" in after else after

    def _inner(self) -> tuple[int, int]:
        whole = [x for x in self.loops if "EXIT" not in self.instructions[slice(*x)]]
        most = max(whole, key=lambda x: (*self._work(x), x[0] - x[1]), default=(0, 0))
        return most if any(multiplications(self.instructions[slice(*most)])) else (0, 0)

    def _work(self, loop: tuple[int, int]) -> tuple[int, ...]:
        """Return a loop's multiplications, and its copies: the last steps of a reduction have none."""
        code = self.instructions[slice(*loop)]
        return (*multiplications(code), sum(i.startswith("LDGSTS") for i in code))


def multiplications(code: Sequence[str]) -> tuple[int, int]:
    """Return the instructions of tensor cores, or of CUDA cores if there are none."""
    tensor = sum(i.startswith(TENSOR_CORES) for i in code)
    return tensor, 0 if tensor else sum(i.startswith("FFMA") for i in code)


def overlapped_powers(code: Sequence[str]) -> int:
    """Return the number of powers between the first two waits for products of warpgroups."""
    waits = [n for n, i in enumerate(code) if i.startswith("WARPGROUP.DEPBAR")]
    return sum(i.startswith("MUFU.EX2") for i in code[waits[0] : waits[1]]) if len(waits) > 1 else 0


def loads_ahead(code: Code) -> int:
    """Return the number of loads before the first store, of the storing loop with the most of them."""
    stores = (itertools.takewhile(lambda i: not i.startswith("STG"), code.instructions[a:b]) for a, b in code.loops
              if any(i.startswith("STG") for i in code.instructions[a:b]))  # fmt: skip
    return max((sum(i.startswith("LDG") for i in x) for x in stores), default=0)


def disassembled(cubin: Path) -> Code:
    """Return nvdisasm's output for an image."""
    tool = find_nvdisasm()
    if tool is None:
        raise SystemExit("no nvdisasm: pip install nvidia-cuda-nvdisasm")
    text = subprocess.run([tool, "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
    found: list[str] = []
    labels: dict[str, int] = {}
    branches: list[tuple[int, str]] = []
    for line in text.splitlines():
        if label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = len(found)
        elif i := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]*)(.*)", line):
            found.append(i[1])
            to = re.search(r"`\((\.L_\w+)\)", i[2])
            if i[1].startswith("BRA") and to:
                branches.append((len(found) - 1, to[1]))
    ends = [(n, labels[to]) for n, to in branches if to in labels]
    return Code(tuple(found), tuple((to, n + 1) for n, to in ends if to <= n), tuple(x for x in ends if x[1] > x[0]))


def built(text: str, name: str, arch: str) -> tuple[Code, KernelUse]:
    """Return a kernel's machine code, and its resources."""
    image = compile_cuda(text, arch)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(image.image)
        return disassembled(cubin), image.kernels[name]


def launched_with(text: str) -> int:
    """Return the registers per thread that a kernel's launch bounds allow: it can redistribute them only with this
    number.
    """
    bounds = re.search(r"PD_KERNEL\w*\(\w+, (\d+), (\d+)", text)
    return bounded_registers(int(bounds[1]), int(bounds[2])) if bounds else 0


def check(kind: Kind) -> dict[str, Any]:
    """Return the instructions that a kernel's machine code has and lacks, and its resources."""
    k = kernel_of(kind)
    code, used = built(k.text, k.name, kind.arch)
    found, inner = code.instructions, code.inner()
    patterns = (*kind.patterns, *(PDL if kind.arch == "sm_90a" else ()), *([PREFETCH] if k.device.maps else []))
    patterns += (FETCH,) * ("pd_tma_fetch" in k.text)
    patterns += (SETMAXREG,) if "pd_reg_inc" in k.text else ()
    missing = [w for w in patterns if not any(re.match(w, i) for i in found)]
    missing += [f"a loop of at most {kind.loop}"] if kind.loop and not 0 < len(inner) <= kind.loop else []
    missing += [f"at most {kind.size} instructions"] if 0 < kind.size < len(found) else []
    bounded = used.registers == launched_with(k.text)
    missing += ["the registers that it moves"] if SETMAXREG in patterns and not bounded else []
    missing += [f"{kind.min_powers} overlapped powers"] if overlapped_powers(inner) < kind.min_powers else []
    missing += [f"{kind.ahead} loads before a store"] if loads_ahead(code) < kind.ahead else []
    spilled = [i for i in found if i.startswith(SPILL_OPS)]
    counts = Counter(next((w for w in kind.patterns if re.match(w, i)), i.split(".")[0]) for i in found)
    row = {"kind": kind.name, "version": k.version, "arch": kind.arch, "missing": missing, "spilled": len(spilled),
           "counts": {w: counts[w] for w in kind.patterns}, "instructions": len(found), "loop": len(inner),
           "path": code.path(), "registers": used.registers,
           "multiplications": next(filter(None, multiplications(inner)), 0)}  # fmt: skip
    if (shared := k.scratch.constant) is not None:
        device = load(DEVICES[kind.arch])
        row |= {"shared": shared, "blocks": device.resident_blocks(k.device.threads, used.registers, shared)}
    return row


def main() -> int:
    """Print a line for each kernel; return the number of kernels that lack something."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="names of kinds")
    options = parser.parse_args()
    rows = []
    print(f"{'kernel':28} {'arch':7} {'version':38} {HEADING}")
    for kind in kinds():
        if options.only and kind.name not in options.only:
            continue
        rows.append(check(kind))
        r = rows[-1]
        trouble = "".join(f"  LACKS {m}" for m in r["missing"]) + (f"  SPILLS {r['spilled']}" if r["spilled"] else "")
        numbers = " ".join(f"{r.get(n, ''):>{len(n)}}" for n in HEADING.split())
        print(f"{r['kind']:28} {r['arch']:7} {r['version']:38} {numbers}{trouble}", flush=True)
    if not options.only:
        record.save("gpu_sass", compiler=compiler_version(), kernels=rows)
    return sum(bool(r["missing"] or r["spilled"]) for r in rows)


if __name__ == "__main__":
    raise SystemExit(main())
