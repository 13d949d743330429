"""Fused operators of com.microsoft for images, as ONNX Runtime's optimizer writes them into diffusion models for GPUs.

Their maps have channels last by default. ONNX Runtime has no kernel for them on CPUs; its documentation of contrib
operators defines them.
"""

from __future__ import annotations

from collections.abc import Sequence

from polydyn.graph.bodies import Body, body
from polydyn.graph.functions.attention import MICROSOFT

TO_FIRST_AXIS, TO_LAST_AXIS = (0, 3, 1, 2), (0, 2, 3, 1)
"""Permutations from channels last to channels first, and back."""


@body(f"{MICROSOFT}::BiasAdd")
def bias_add(b: Body) -> None:
    """Compute ``x + bias + skip``."""
    b.set_output(b.op("Add", b.op("Add", b.input(0), b.input(1)), b.input(2)))


@body(f"{MICROSOFT}::NhwcConv")
def nhwc_conv(b: Body) -> None:
    """Expand to a convolution between two transposes. The weight is [M, kernel height, kernel width, C / group]."""
    attributes = b.given("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
    maps = [b.op("Transpose", b.input(k), perm=TO_FIRST_AXIS) for k in (0, 1)]
    y = b.op("Conv", *maps, *filter(None, (b.input(2),)), **attributes)
    b.set_output(b.op("Transpose", y, perm=TO_LAST_AXIS))


@body(f"{MICROSOFT}::GroupNorm")
def group_norm(b: Body) -> None:
    """Normalise groups of channels, perhaps with the Swish of the result."""
    x, gamma, beta = (b.input(i) for i in range(3))
    b.set_output(_normalized(b, x, gamma, beta))


@body(f"{MICROSOFT}::SkipGroupNorm")
def skip_group_norm(b: Body) -> None:
    """Compute GroupNorm of x + skip + bias. The sum is the second output. ``skip``: a map, or one row per sample."""
    x, gamma, beta, skip, bias = (b.input(i) for i in range(5))
    channels = -1 if b.attribute("channels_last", 1) else 1
    if len(b.tensor(skip).shape) == 2:
        skip = b.op("Unsqueeze", skip, b.constant([1, 2] if channels == -1 else [2, 3]))
    total = b.op("Add", x, skip)
    if bias:
        total = b.op("Add", total, bias if channels == -1 else b.op("Unsqueeze", bias, b.constant([1, 2])))
    b.set_output(_normalized(b, total, gamma, beta))
    b.set_output(total, 1)


def _normalized(b: Body, x: str, gamma: str, beta: str) -> str:
    """Return the normalised map in the type of the node's first input. 16-bit floats are widened to float32."""
    dtype = b.tensor(b.input(0)).dtype
    last = b.attribute("channels_last", 1)
    if (activation := b.attribute("activation", 0)) not in (0, 1):
        raise b.refuse(f"activation={activation}", "0 is none, 1 is Swish")

    def moved(name: str, perm: Sequence[int]) -> str:
        return b.op("Transpose", name, perm=perm) if last else name

    operands = [moved(b.cast(x, "float32"), TO_FIRST_AXIS), b.cast(gamma, "float32"), b.cast(beta, "float32")]
    settings = {"num_groups": b.attribute("groups"), "epsilon": b.attribute("epsilon", 1e-5)}
    y = b.op("GroupNormalization", *operands, **settings)
    y = b.op("Mul", y, b.op("Sigmoid", y)) if activation else y
    return moved(b.cast(y, dtype), TO_LAST_AXIS)
