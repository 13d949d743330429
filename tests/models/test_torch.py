"""torch.compile with polydyn as its backend: one program for all sizes; unsupported parts run in torch."""

from __future__ import annotations

import configparser
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT

torch = pytest.importorskip("torch", reason="the extra [torch] is not installed")
pytest.importorskip("onnxscript", reason="the extra [torch] is not installed")

import polydyn  # noqa: E402
import polydyn.torch_backend as under_test  # noqa: E402
from polydyn.errors import InputError, PolydynError, UnsupportedError  # noqa: E402
from polydyn.torch_backend import running  # noqa: E402
from polydyn.torch_backend.exporting import _sentence  # noqa: E402
from polydyn.torch_backend.translations import table  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")  # torch warns about its own plans

nn = torch.nn
SHAPES = [(2, 5), (3, 7), (4, 9), (9, 33), (2, 64), (5, 17), (7, 3), (6, 21), (2, 50), (3, 40)]


class Block(nn.Module):  # type: ignore[misc, name-defined]
    """A transformer's block: attention with a mask, norms, a feed-forward part."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Any, mask: Any) -> Any:
        b, n, w = x.shape
        q, k, v = self.qkv(self.first(x)).reshape(b, n, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / (w // self.heads) ** 0.5 + mask[:, None, None, :]
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, w))
        return x + self.down(torch.nn.functional.gelu(self.up(self.second(x))))


class Images(nn.Module):  # type: ignore[misc, name-defined]
    """Convolutions, a residual, pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(8, 10)

    def forward(self, x: Any) -> Any:
        y = torch.relu(self.norm(self.a(x)))
        y = torch.nn.functional.max_pool2d(y + self.b(y), 2)
        return self.head(y.mean((2, 3)))


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Yield the graphs that a test's models were compiled to."""
    found: list[Any] = []

    class Watched(under_test.CompiledGraph):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            found.append(self)

    torch._dynamo.reset()
    torch.manual_seed(0)
    monkeypatch.setattr(under_test, "CompiledGraph", Watched)
    with torch.no_grad():
        yield found


def compiled(module: Any, **options: Any) -> Any:
    return torch.compile(module, backend=under_test.backend, dynamic=True, options=options or None)


def near(a: Any, b: Any) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() <= 1e-5 * max(float(b.abs().max()), 1.0))


def tokens(batch: int, length: int) -> tuple[Any, Any]:
    return torch.randn(batch, length, 32), torch.zeros(batch, length)


@pytest.mark.parametrize("freeze", [False, True])
def test_a_block_is_compiled_once_for_ten_shapes(graphs: list[Any], freeze: bool) -> None:
    block = Block().eval()
    fast = compiled(block, strict=True, freeze=freeze)
    for shape in SHAPES:
        x = tokens(*shape)
        assert near(fast(*x), block(*x))
    (graph,) = graphs
    (program,) = graph.programs
    assert set(program.symbols) and ("float32[96, 32]" in program.inputs.values()) != freeze


def test_images_of_any_size(graphs: list[Any]) -> None:
    images = Images().eval()
    fast = compiled(images, strict=True)
    for b, n in SHAPES:
        x = torch.randn(b, 3, n + 8, n + 11)
        assert near(fast(x), images(x))
    assert [len(g.programs) for g in graphs] == [1]


def test_changed_parameters_are_seen() -> None:
    linear = nn.Linear(8, 4)
    fast, x = compiled(linear, strict=True), torch.randn(3, 8)
    before = fast(x)
    linear.weight.mul_(2.0)
    assert near(fast(x), linear(x)) and not near(fast(x), before)


def test_changed_frozen_parameters_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    linear = nn.Linear(8, 4)
    fast, x = compiled(linear, freeze=True), torch.randn(3, 8)
    fast(x)
    linear.weight.mul_(2.0)
    with caplog.at_level(logging.WARNING, "polydyn.torch"):
        assert near(fast(x), linear(x))
    assert "a frozen parameter was changed" in caplog.text


def test_graph_breaks_leave_two_programs(graphs: list[Any]) -> None:
    def broken(x: Any) -> Any:
        y = torch.relu(x) * 2
        torch._dynamo.graph_break()
        return y.sum(-1).tanh()

    fast, x = compiled(broken, strict=True), torch.randn(5, 7)
    assert near(fast(x), broken(x)) and len(graphs) == 2


def test_a_program_comes_from_the_cache(graphs: list[Any]) -> None:
    block, x = Block().eval(), tokens(3, 11)
    compiled(block, strict=True)(*x)
    torch._dynamo.reset()
    compiled(block, strict=True)(*x)
    assert [g.programs[0].compilations for g in graphs][1:] == [0]


def test_tensors_pass_without_copies(graphs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    fast, x = compiled(torch.tanh, strict=True), torch.randn(5, 7)
    fast(x)
    program, seen = graphs[0].programs[0], []
    run = program.run
    monkeypatch.setattr(program, "run", lambda feeds: seen.append((feeds, run(feeds))) or seen[-1][1])
    y = fast(x)
    ((feeds, results),) = seen
    assert [a.ctypes.data for a in feeds.values()] == [x.data_ptr()]
    assert [a.ctypes.data for a in results.values()] == [y.data_ptr()]


def test_what_comes_in_and_goes_out_as_it_is() -> None:
    def some(x: Any, y: Any) -> Any:
        return x, x + y, None, [y * 2]

    x, y = torch.randn(3, 4), torch.randn(3, 4)
    a, b, c, (d,) = compiled(some, strict=True)(x, y)
    assert a is x and c is None and near(b, x + y) and near(d, y * 2)


def refused(function: Any, *arguments: Any, **options: Any) -> tuple[Any, str]:
    """Return the result, and the text of the log."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda r: records.append(r.getMessage())  # type: ignore[method-assign]
    under_test.log.addHandler(handler)
    try:
        return compiled(function, **options)(*arguments), "\n".join(records)
    finally:
        under_test.log.removeHandler(handler)


def test_what_is_refused_runs_as_torch_has_it() -> None:
    x = torch.randn(6)
    result, said = refused(lambda x: torch.linalg.svdvals(x.reshape(2, 3)) + 1, x)
    assert near(result, torch.linalg.svdvals(x.reshape(2, 3)) + 1) and "a graph runs as torch has it" in said


def test_writing_into_an_input_is_left_to_torch() -> None:
    def writes(x: Any) -> Any:
        x.add_(1)
        return x * 2

    x = torch.zeros(4)
    result, said = refused(writes, x)
    assert x.tolist() == [1] * 4 and result.tolist() == [2] * 4 and "writes into its inputs" in said


def test_a_view_of_an_input_is_one_in_the_result() -> None:
    x = torch.zeros(4, 3)
    view, more = compiled(lambda x: (x[1:], x + 1))(x)
    view.add_(5)
    assert x[1:].eq(5).all() and more.eq(1).all()


def test_gradients_are_left_to_torch() -> None:
    linear = nn.Linear(4, 2)
    with torch.enable_grad():
        result, said = refused(linear, torch.randn(3, 4))
        result.sum().backward()
    assert linear.weight.grad is not None and "gradients are not built" in said


def test_strict_raises_what_is_refused() -> None:
    with pytest.raises(Exception, match="writes into its inputs") as e:
        compiled(lambda x: x.add_(1) * 2, strict=True)(torch.zeros(4))
    assert isinstance(e.value, UnsupportedError) or isinstance(e.value.__cause__, UnsupportedError)


def test_unknown_options_are_refused() -> None:
    with pytest.raises(Exception, match="no option 'speed'"):
        compiled(torch.tanh, speed=1)(torch.zeros(4))
    with pytest.raises(InputError, match="no option 'speed'"):
        under_test.Settings.of({"speed": 1})
    assert under_test.Settings.of({"start": "quick"}).start == "quick"


WRONG: dict[str, Any] = {
    "threads": 0, "dims": {"B": (1, 4)}, "tf32": 3, "target": "cpu:avx9", "records": "missing.db", "precision": "x",
    "without": ["nope"], "strategy": "none", "winograd": 9, "strict": "yes",
    "start": "slow",
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_values_of_options_are_not_a_reason_to_run_in_torch(name: str) -> None:
    with pytest.raises(PolydynError) as e:
        under_test.Settings.of({name: WRONG[name]}).for_graph({"ids": {0: "s1"}})
    assert e.value.remedy


def test_sizes_are_named_by_argument_and_axis() -> None:
    """``s1`` is torch's name. A graph without the argument, after a graph break, ignores its sizes."""
    settings = under_test.Settings.of({"dims": {"ids[1]": (1, 8), "gone[0]": (1, 2)}})
    assert settings.for_graph({"ids": {0: "s0", 1: "s1"}}).arguments.dims == {"s1": (1, 8)}


@pytest.mark.parametrize(("norm_first", "mask_type"), [(False, 1), (True, 0)])
def test_the_operator_of_encoder_layers_is_translated(norm_first: bool, mask_type: int) -> None:
    """In inference mode torch calls one operator for the whole layer, for which it has no decomposition."""
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
    attention, one, two = layer.self_attn, layer.norm1, layer.norm2
    hidden = torch.arange(5) >= torch.tensor([[4], [3]]) if mask_type else torch.ones(5, 5).triu(1).bool()
    arguments = [
        torch.randn(2, 5, 16), 16, 4, attention.in_proj_weight, attention.in_proj_bias, attention.out_proj.weight,
        attention.out_proj.bias, norm_first, norm_first, one.eps, one.weight, one.bias, two.weight, two.bias,
        layer.linear1.weight, layer.linear1.bias, layer.linear2.weight, layer.linear2.bias, hidden, mask_type,
    ]  # fmt: skip
    operator = torch.ops.aten._transformer_encoder_layer_fwd.default
    assert near(table()[operator](*arguments), operator(*arguments))


def test_torchs_reason_is_one_whole_line() -> None:
    text = "Failed at aten.x:\n \x1b[96mno rule\x1b[0m.\n\x1b[96mThis is step 3/3\x1b[0m of it. Next steps:\n- no"
    assert _sentence(text) == "Failed at aten.x: no rule"


def test_torch_finds_the_backend_by_its_name(tmp_path: Path) -> None:
    declared = configparser.ConfigParser()
    declared.read(ROOT / "setup.cfg")
    group = "torch_dynamo_backends"
    folder = tmp_path / "polydyn_declared-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: polydyn-declared\nVersion: 0\n")
    (folder / "entry_points.txt").write_text(f"[{group}]\n{declared['options.entry_points'][group].strip()}\n")
    code = "import torch; f = torch.compile(torch.relu, backend='polydyn', dynamic=True, options={'strict': True}); " \
           "print(f(torch.tensor([-1.0, 2.0])).tolist())"  # fmt: skip
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "[0.0, 2.0]", done.stderr


def test_products_may_round_their_operands() -> None:
    assert under_test.Settings.of({"precision": "bf16"}).arguments.options == polydyn.Options(precision="bf16")


@pytest.mark.parametrize("limit", [pytest.param(8, marks=pytest.mark.slow), 1])
def test_sizes_for_which_torch_exports_another_rule_get_another_program(
    graphs: list[Any], limit: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(running, "MAX_PROGRAMS", limit)
    pool = nn.AdaptiveMaxPool3d((1, 2, 3))  # torch writes a pool of windows that divide the example's sides
    fast = compiled(pool)
    with caplog.at_level(logging.WARNING, "polydyn.torch"):
        for sides in [(3, 4, 9), (3, 8, 12), (3, 4, 9)]:
            x = torch.randn(2, 5, *sides)
            assert near(fast(x), pool(x))
    assert [len(g.programs) for g in graphs] == [min(limit, 2)]
    assert ("needs one more for these sizes" in caplog.text) == (limit == 1)
