"""torch.compile with polydyn behaves like eager torch: types, special values, empty axes, outputs, errors."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the extra [torch] is not installed")
pytest.importorskip("onnxscript", reason="the extra [torch] is not installed")

import polydyn.torch_backend as under_test  # noqa: E402
from polydyn.errors import PolydynError  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")  # torch warns about its own plans

F = torch.nn.functional
NAN, INF = float("nan"), float("inf")
SPECIAL = [NAN, INF, -INF, 0.0, -0.0, 1e-45, -1e-40, 1e-8, -1e-8, 1e-3, -0.5, 0.1, 1.0, -2.5, 20.0, -20.0, 100.0, 3e38]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def compiled(function: Any, **options: Any) -> Any:
    return torch.compile(function, backend=under_test.backend, dynamic=True, options={"strict": True, **options})


def agree(functions: Mapping[str, Callable[..., Any]], *arguments: Any, ulps: int = 4) -> None:
    """Check that all functions in one graph equal eager torch: type, strides, NaN, signs of zeros, nearly all digits.
    """
    got = compiled(lambda *a: tuple(f(*a) for f in functions.values()))(*arguments)
    wrong = {}
    for (name, function), g in zip(functions.items(), got, strict=True):
        e = function(*arguments)
        if (g.dtype, g.shape, g.stride()) != (e.dtype, e.shape, e.stride()):
            wrong[name] = f"{g.dtype} {tuple(g.shape)} {g.stride()} instead of {e.dtype} {tuple(e.shape)} {e.stride()}"
        elif e.dtype.is_floating_point:
            bound = ulps * torch.finfo(e.dtype).eps
            same = torch.isclose(g.double(), e.double(), rtol=bound, atol=1e-44, equal_nan=True)
            same &= (e != 0) | (torch.signbit(g) == torch.signbit(e))
            if not same.all():
                wrong[name] = f"{g[~same].tolist()} instead of {e[~same].tolist()}"
        elif not torch.equal(g, e):
            wrong[name] = f"{g.tolist()} instead of {e.tolist()}"
    assert not wrong, wrong


UNARY: dict[str, Callable[..., Any]] = {
    "expm1": torch.expm1, "log1p": torch.log1p, "erfc": torch.erfc, "elu": F.elu, "selu": F.selu, "celu": F.celu,
    "softplus": F.softplus, "softplus of 3": lambda x: F.softplus(x, 3, 5), "logsigmoid": F.logsigmoid,
    "sign": torch.sign, "trunc": torch.trunc, "signbit": torch.signbit, "any": lambda x: x.any(0),
}  # fmt: skip
BINARY: dict[str, Callable[..., Any]] = {
    "remainder": torch.remainder, "fmod": torch.fmod, "floor": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"), "//": lambda a, b: a // b, "atan2": torch.atan2,
    "copysign": torch.copysign, "heaviside": torch.heaviside, "fmax": torch.fmax, "fmin": torch.fmin,
    "hypot": torch.hypot, "xlogy": torch.xlogy, "logaddexp": torch.logaddexp, "logaddexp2": torch.logaddexp2,
}  # fmt: skip


def test_functions_of_one_number_at_special_values() -> None:
    agree(UNARY, torch.tensor(SPECIAL))


def test_functions_of_two_numbers_at_special_values() -> None:
    x = torch.tensor([v for v in SPECIAL if abs(v) != 1e-45 and v != -1e-40])
    remainders = {n: BINARY[n] for n in ("remainder", "fmod")}
    agree({n: f for n, f in BINARY.items() if n not in remainders}, x[:, None], x[None, :].flip(1))
    x = x[~(x.abs() > 1e30) | x.isinf()]  # eager's vectors give NaN for quotients of this size, its scalars do not
    agree(remainders, x[:, None], x[None, :].flip(1))


def test_integers_are_divided_as_integers() -> None:
    big = torch.tensor([16777217, 123456789, -(2**40) - 1, -7, 7, 0])
    names = ("remainder", "fmod", "floor", "trunc", "//")
    agree({n: BINARY[n] for n in names}, big[:, None], torch.tensor([1, -1, 3, -3]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_stay_halves(dtype: Any) -> None:
    functions: dict[str, Callable[..., Any]] = {
        "prod": lambda x: x.prod(1), "mse": lambda x: F.mse_loss(x, x + 1), "cumsum": lambda x: x.cumsum(1),
        "cosine": lambda x: F.cosine_similarity(x, x + 1), "norm": lambda x: torch.linalg.vector_norm(x, dim=1),
        "sum": lambda x: x.sum(), "sums": lambda x: x.sum((0, 1), keepdim=True), "mean": lambda x: x.mean(1),
        "remainder": lambda x: x % 0.3, "double": lambda x: x * 2, "up": lambda x: x.float(),
    }  # fmt: skip
    agree(functions, torch.randn(3, 5).to(dtype))


def test_floats_of_8_bits_come_in_and_go_out() -> None:
    functions: dict[str, Callable[..., Any]] = {"up": lambda x: x.float(), "again": lambda x: x.float().to(x.dtype)}
    x = torch.tensor([1.0, -2.5, 0.1]).to(torch.float8_e4m3fn)
    got = compiled(lambda x: tuple(f(x) for f in functions.values()))(x)
    assert torch.equal(got[0], x.float()) and torch.equal(got[1].view(torch.uint8), x.view(torch.uint8))


def test_numbers_of_float64_keep_all_digits() -> None:
    functions: dict[str, Callable[..., Any]] = {
        "leaky": lambda x: F.leaky_relu(x, 0.03), "elu": lambda x: F.elu(x, 0.3), "clamp": lambda x: x.clamp(-0.3, 0.3),
        "hardsigmoid": F.hardsigmoid, "threshold": lambda x: F.threshold(x, 0.1, 0.3), "sum": lambda x: x + 0.1,
        "scaled": lambda x: torch.sub(x, 0.1, alpha=0.3), "rsub": lambda x: 0.1 - x, "power": lambda x: 0.3**x,
        "above": lambda x: x > 0.1, "full": lambda x: torch.full_like(x, 0.1), "degrees": torch.deg2rad,
        "filled": lambda x: x.masked_fill(x > 0, 0.1), "product": lambda x: torch.addmm(x, x, x, beta=0.3, alpha=0.1),
        "layer norm": lambda x: F.layer_norm(x, (4,)), "group norm": lambda x: F.group_norm(x[None], 2),
        "instance norm": lambda x: F.instance_norm(x[None]), "softshrink": lambda x: F.softshrink(x, 0.3),
        "batch norm": lambda x: F.batch_norm(x, x[0] + 9, x[1].abs()),
        "huber": lambda x: F.huber_loss(x, 2 * x, delta=0.3),
    }  # fmt: skip
    agree(functions, torch.randn(4, 4, dtype=torch.float64), ulps=128)


def test_numbers_near_0_and_1_are_no_0_and_1() -> None:
    tiny, one = 1e-9, 1.000001
    functions = {"+": lambda x: x + tiny, "-": lambda x: x - tiny, "*": lambda x: x * one, "/": lambda x: x / one,
                 "close": lambda x: torch.isclose(x, x * 0)}  # fmt: skip
    agree(functions, torch.tensor([0.0, -0.0, 1e-9, 3.0, 1e-8]), ulps=0)


def test_second_names_of_operators_promote_types_and_sums_begin_at_0() -> None:
    names = ("divide", "true_divide", "multiply", "subtract", "greater", "greater_equal", "less", "less_equal")
    functions = {n: getattr(torch, n) for n in names}
    agree(functions, torch.tensor([1.0, NAN, INF]), torch.tensor([3, 0, -2]))
    zeros = {"frac": torch.frac, "cumsum": lambda x: x.cumsum(0), "sum": lambda x: x.sum(0)}
    agree(zeros, torch.tensor([-0.0, -0.0]))
    agree({"rest": torch.frac}, torch.tensor(SPECIAL))


def test_losses_against_probabilities_and_smoothed_labels() -> None:
    smooth = lambda x, p, c: F.cross_entropy(x, c, label_smoothing=0.2, reduction="sum")  # noqa: E731
    functions = {"probabilities": lambda x, p, c: F.cross_entropy(x, p), "smooth": smooth}
    agree(functions, torch.randn(3, 4), torch.rand(3, 4), torch.tensor([1, 0, 3]), ulps=16)


def test_running_reductions_and_orders() -> None:
    x = torch.tensor([[1.0, 3.0, 2.0, 3.0], [NAN, 1.0, 2.0, 0.5], [-200.0, 1.0, INF, 2.0]])
    functions: dict[str, Callable[..., Any]] = {
        "logcumsumexp": lambda x: x.logcumsumexp(1), "cumprod": lambda x: x.cumprod(1),
        "cummax": lambda x: x.cummax(1)[0], "its places": lambda x: x.cummax(1)[1], "cummin": lambda x: x.cummin(0)[0],
        "argsort": lambda x: torch.argsort(x, dim=1, stable=True), "median": lambda x: x.median(1)[0],
        "kthvalue": lambda x: x.kthvalue(2, 1)[0], "columns": lambda x: torch.column_stack((x, x)),
        "rows": lambda x: torch.vstack((x, x)), "unbind": lambda x: torch.cat(x.unbind(0)[::-1]),
        "diagonal": lambda x: x.diagonal() + 1,
    }  # fmt: skip
    agree(functions, x)


def test_nothing_is_reduced() -> None:
    agree({n: lambda x, n=n: getattr(x, n)(1) for n in ("any", "all", "sum", "prod")}, torch.zeros(3, 0))


def test_a_row_that_sees_no_key_is_zero() -> None:
    q, mask = torch.randn(1, 2, 3, 4), torch.tensor([[True, True, False], [False] * 3, [True] * 3])
    functions: dict[str, Callable[..., Any]] = {
        "bool": lambda q, m: F.scaled_dot_product_attention(q, q, q, m),
        "float": lambda q, m: F.scaled_dot_product_attention(q, q, q, torch.where(m, 0.0, -INF)),
        "causal": lambda q, m: F.scaled_dot_product_attention(q, q, q, is_causal=True),
    }
    agree(functions, q, mask, ulps=30)


def test_a_row_that_sees_no_key_has_nan_where_values_have() -> None:
    q, v = torch.randn(1, 1, 3, 2), torch.randn(1, 1, 3, 2)
    v[0, 0, 1, 1] = NAN
    mask = torch.tensor([[True] * 3, [False] * 3, [True] * 3])
    agree({"math": lambda q, v, m: F.scaled_dot_product_attention(q, q, v, m)}, q, v, mask, ulps=30)


def test_images_are_interpolated_next_to_infinities_and_empty_batches_have_patches() -> None:
    functions: dict[str, Callable[..., Any]] = {
        "linear": lambda x: F.interpolate(x, size=4, mode="linear"),
        "corners": lambda x: F.interpolate(x, size=7, mode="linear", align_corners=True),
        "scale": lambda x: F.interpolate(x, scale_factor=2.5, mode="linear"),
        "divisor": lambda x: F.avg_pool2d(x[None], (1, 2), padding=(0, 1), divisor_override=5),
    }
    agree(functions, torch.tensor([[[INF, INF, 1.0, 2.0, -INF, 3.0]]]))
    patches = compiled(lambda x: F.unfold(x, (2, 3), padding=1, stride=2))
    assert patches(torch.zeros(0, 2, 5, 5)).shape == (0, 12, 9)
    x = torch.randn(2, 2, 5, 4)
    assert torch.equal(patches(x), F.unfold(x, (2, 3), padding=1, stride=2))


def test_signs_of_zeros_pass_and_digits_near_zero_are_kept() -> None:
    functions: dict[str, Callable[..., Any]] = {
        "relu": torch.relu, "clamp": lambda x: x.clamp(min=0.0), "both": lambda x: x.clamp(-1, 0),
        "logcumsumexp": lambda x: torch.where(x == x, x * 0, -20.0).logcumsumexp(0)[:1],
    }  # fmt: skip
    agree(functions, torch.tensor([-0.0, 0.0, NAN, 1.0, -2.0, INF, -INF]))
    agree({"logcumsumexp": lambda x: x.logcumsumexp(0)}, torch.tensor([0.0, -20.0, -18.0, -30.0]))


def test_outputs_share_memory_and_have_strides_as_in_eager() -> None:
    def views(x: Any) -> Any:
        y = x * 2
        return y, y[0:1], y.t(), (x + 1).permute(1, 0), x[1:], (x + 3)[:, 1:]

    x = torch.ones(3, 4)
    got, want = compiled(views)(x), views(x)
    assert [g.stride() for g in got] == [w.stride() for w in want]
    for some in (got, want):
        some[1].zero_()
        some[4].add_(5)
    assert all(torch.equal(g, w) for g, w in zip(got[:4], want[:4], strict=True)) and x[1:].eq(11).all()


def test_a_tensor_that_changed_its_shape_is_read_anew_and_none_is_kept() -> None:
    f, x = compiled(lambda x: x.sum(0)), torch.arange(12.0).reshape(4, 3)
    f(x)
    x.resize_(2, 3)
    assert torch.equal(f(x), x.sum(0))
    x.data = torch.arange(12.0).view(3, 4)
    assert torch.equal(f(x), x.sum(0))
    kept = weakref.ref(x)
    del x
    gc.collect()
    assert kept() is None


def test_writes_that_torch_does_not_count_are_seen() -> None:
    linear, x = torch.nn.Linear(64, 64), torch.randn(2, 64)
    f = under_test.Settings.of({"freeze": True})
    assert f.freeze
    g = torch.compile(linear, backend=under_test.backend, dynamic=True, options={"freeze": True})
    assert torch.allclose(g(x), linear(x), atol=1e-5)
    linear.weight.data[3, 5] = 9.0
    assert torch.allclose(g(x), linear(x), atol=1e-5)


def test_lazy_negations_are_read() -> None:
    z = torch.complex(torch.ones(3), torch.ones(3)).conj().imag
    assert torch.equal(compiled(lambda v: v * 2)(z), z * 2)


def test_indices_that_eager_refuses_are_refused() -> None:
    f = torch.compile(F.embedding, backend=under_test.backend, dynamic=True)
    weight = torch.arange(6.0).reshape(3, 2)
    assert torch.equal(f(torch.tensor([0, 2]), weight), weight[[0, 2]])
    with pytest.raises(IndexError):
        f(torch.tensor([0, -1]), weight)


def test_a_refusal_names_the_operator_and_the_line() -> None:
    def user(x: Any) -> Any:
        y = x + 1
        return torch.linalg.svdvals(y)

    with pytest.raises(Exception, match=r"aten\._linalg_svd") as e:
        compiled(user)(torch.randn(3, 4))
    said = e.value if isinstance(e.value, PolydynError) else e.value.__cause__
    assert "test_torch_semantics.py" in str(said) and "in user: return torch.linalg.svdvals(y)" in str(said)


def _complex(x: Any) -> Any:
    return torch.complex(x, x)


def _writes(x: Any) -> Any:
    x.mul_(2)
    return x + 1


@pytest.mark.parametrize("function", [_complex, _writes])
def test_a_refusal_of_an_output_names_the_line(function: Any) -> None:
    with pytest.raises(Exception, match=r"complex64|writes") as e:
        compiled(function)(torch.randn(3, 4))
    assert f"in {function.__name__}" in f"{e.value} {e.value.__cause__}"


def test_windows_that_no_size_divides_are_one_program() -> None:
    functions: dict[str, Callable[..., Any]] = {
        "mean": lambda x: F.adaptive_avg_pool2d(x, (3, 5)), "rows": lambda x: F.adaptive_avg_pool2d(x, (None, 2)),
        "maximum": lambda x: F.adaptive_max_pool2d(x, (2, 3)), "solid": lambda x: F.adaptive_avg_pool3d(x, (2, 1, 3)),
        "place": lambda x: F.adaptive_max_pool2d(x, (2, 3), return_indices=True)[1],
        "linear": lambda x: F.interpolate(x[1:], scale_factor=0.4, mode="bilinear", antialias=True),
        "cubic": lambda x: F.interpolate(x[1:], size=(5, 9), mode="bicubic", antialias=True),
    }  # fmt: skip
    fast = compiled(lambda x: tuple(f(x) for f in functions.values()))
    for high, wide in [(9, 10), (7, 11)]:
        x = torch.randn(3, 3, high, wide)
        x[0, 0, 0, 0] = INF
        for name, got in zip(functions, fast(x), strict=True):
            want = functions[name](x)
            assert got.dtype == want.dtype and torch.allclose(got, want, atol=1e-5, equal_nan=True), (name, high, wide)


def test_scattered_means_and_infinities() -> None:
    index, src = torch.tensor([0, 2, 2, 0, 2]), torch.tensor([1.0, -INF, -INF, 3.0, -INF])
    agree({
        f"{kind} {own}": lambda x, index, src, kind=kind, own=own: x.scatter_reduce(
            0, index, src, kind, include_self=own)
        for kind in ("mean", "amax", "amin", "sum") for own in (True, False)
    }, torch.tensor([5.0, 7.0, 1.0]), index, src)  # fmt: skip
