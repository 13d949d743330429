"""``polydyn.from_torch`` and ``polydyn.from_pretrained``: modules, exported programs, folders of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

import polydyn
from polydyn.cli import main
from polydyn.cli.machine import CompileSettings
from polydyn.errors import PolydynError
from polydyn.graph.importer import remedy_of
from polydyn.origins import torch_modules
from polydyn.origins.pretrained import folder_model
from tests.support.tiny import model, node

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")


class Scaled(torch.nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 4)

    def forward(self, x: Any, scale: Any) -> Any:
        return torch.relu(self.linear(x)) * scale


MODULE = Scaled().eval()
X, SCALE = torch.randn(3, 5, 8), torch.randn(5, 1)
NAMES = {"x": ("batch", "time", None), "scale": ("time", None)}


def agrees(program: polydyn.Program, module: Any, *tensors: Any) -> None:
    expected = module(*tensors).detach().numpy()
    (got,) = program.run(dict(zip(program.inputs, [t.numpy() for t in tensors], strict=True))).values()
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)


def test_a_module_is_compiled_for_named_sizes() -> None:
    program = polydyn.from_torch(MODULE, (X, SCALE), symbols=NAMES, dims={"batch": (1, 64)}, threads=1)
    assert program.inputs == {"x": "float32[batch, time, 8]", "scale": "float32[time, 1]"}
    agrees(program, MODULE, torch.randn(2, 7, 8), torch.randn(7, 1))
    with pytest.raises(PolydynError, match="batch"):
        program.run({"x": np.zeros((65, 7, 8), "f"), "scale": np.zeros((7, 1), "f")})


@pytest.mark.slow
def test_axes_without_names_are_dynamic_and_named_after_their_input() -> None:
    program = polydyn.from_torch(MODULE, (X,), {"scale": SCALE}, threads=1)
    assert program.inputs["x"] == "float32[x_0, x_1, 8]"
    agrees(program, MODULE, torch.randn(1, 6, 8), torch.randn(6, 1))


@pytest.mark.slow
def test_an_exported_program_keeps_its_dims() -> None:
    shapes = {"x": {0: torch.export.Dim("b")}, "scale": None}
    exported = torch.export.export(MODULE, (X, SCALE), dynamic_shapes=shapes)
    agrees(polydyn.from_torch(exported, threads=1), MODULE, torch.randn(7, 5, 8), SCALE)
    with pytest.raises(PolydynError, match="has its own inputs and dims"):
        polydyn.from_torch(exported, (X, SCALE))
    with pytest.raises(PolydynError, match=r"is not a model\n.*from_torch"):
        polydyn.compile(exported)


@pytest.mark.slow
def test_the_layer_of_a_transformer_is_compiled_in_eval() -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    agrees(polydyn.from_torch(layer, (torch.randn(2, 5, 16),), threads=1), layer, torch.randn(3, 4, 16))
    assert torch.backends.mha.get_fastpath_enabled()


REFUSALS: dict[str, tuple[Callable[[], Any], str]] = {
    "no module": (lambda: polydyn.from_torch(3), "an? int is not a module"),
    "no example": (lambda: polydyn.from_torch(MODULE), "no example call"),
    "wrong example": (lambda: polydyn.from_torch(MODULE, (X,)), r"(?s)does not fit forward\(x, scale\).*scale"),
    "unknown name": (lambda: polydyn.from_torch(MODULE, (X, SCALE), symbols={"y": ()}), "(?s)'y'.*use x, scale"),
    "rank": (lambda: polydyn.from_torch(MODULE, (X, SCALE), symbols={"x": ("b",)}), "x has 3 axes, not 1"),
    "compile": (lambda: polydyn.compile(MODULE), r"(?s)a Scaled is not a model.*polydyn\.from_torch\(module, args\)"),
    "session": (lambda: polydyn.InferenceSession(MODULE), r"(?s)a Scaled is not a model.*polydyn\.from_torch"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_wrong_argument_is_named(case: str) -> None:
    call, message = REFUSALS[case]
    with pytest.raises(PolydynError, match=message):
        call()


@pytest.mark.slow
def test_a_fixed_axis_that_was_named_is_refused() -> None:
    with pytest.raises(PolydynError, match=r"(?s)axis 2 of x is 8.*give None for 'c'"):
        polydyn.from_torch(MODULE, (X, SCALE), symbols={"x": ("b", "t", "c"), "scale": ("t", None)})
    assert "onnx.ModelProto" in remedy_of(3)


def test_a_folder_with_an_onnx_file_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "relu-v1.2"
    (folder / "onnx").mkdir(parents=True)
    onnx.save(model([node("Relu", "x", "y")], {"x": ("float32", ["B"])}, ["y"]), str(folder / "onnx" / "model.onnx"))
    x = np.array([-1, 2], "f")
    assert (polydyn.from_pretrained(folder, threads=1).run({"x": x})["y"] == [0, 2]).all()
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["compile", str(folder), "--threads", "1"])
    assert done.exit_code == 0 and "relu-v1.2.polydyn" in done.output, done.output
    assert (polydyn.load("relu-v1.2.polydyn").run({"x": x})["y"] == [0, 2]).all()
    with pytest.raises(PolydynError, match=r"(?s)is a directory.*from_pretrained\(folder\)"):
        polydyn.compile(folder)


def test_the_output_has_the_name_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx.save(model([node("Neg", "x", "y")], {"x": ("float32", ["B"])}, ["y"]), str(tmp_path / "net.v2.onnx"))
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["compile", "net.v2.onnx", "--threads", "1", "--json"])
    assert json.loads(done.output)["output"] == "net.v2.polydyn" and Path("net.v2.polydyn").is_file()


def test_a_folder_without_a_model_is_refused_by_name(tmp_path: Path) -> None:
    cases = [("is not a folder", tmp_path / "absent"), ("neither config.json nor an ONNX file", tmp_path)]
    for message, folder in cases:
        with pytest.raises(PolydynError, match=message):
            folder_model(folder, {})
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchModel"]}')
    with pytest.raises(PolydynError, match="but no weights"):
        folder_model(tmp_path, {})
    (tmp_path / "model.safetensors").write_bytes(b"")
    pytest.importorskip("transformers")
    with pytest.raises(PolydynError, match="this transformers has no NoSuchModel"):
        folder_model(tmp_path, {})
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"], "model_type": "bert"}')
    with pytest.raises(PolydynError, match="transformers cannot load"):
        folder_model(tmp_path, {})
    for name in ("a.onnx", "b.onnx"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(PolydynError, match=r"several ONNX files: a\.onnx, b\.onnx"):
        folder_model(tmp_path, {})


SMALL = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50,
    "max_position_embeddings": 64,
}  # fmt: skip


def pretrained(folder: Path, kind: str) -> Any:
    hf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    made = {
        "bert": lambda: hf.BertForSequenceClassification(hf.BertConfig(**SMALL)),
        "distilbert": lambda: hf.DistilBertModel(hf.DistilBertConfig(
            dim=32, n_layers=1, n_heads=2, hidden_dim=32, vocab_size=50, max_position_embeddings=64)),
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, num_key_value_heads=1)),
        "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(
            n_embd=32, n_layer=1, n_head=2, vocab_size=50, n_positions=64)),
        "vit": lambda: hf.ViTForImageClassification(hf.ViTConfig(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=16,
            patch_size=8)),
        "t5": lambda: hf.T5EncoderModel(hf.T5Config(
            d_model=32, num_layers=1, num_heads=2, d_ff=32, d_kv=16, vocab_size=50)),
    }[kind]().eval()  # fmt: skip
    made.save_pretrained(folder)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", "distilbert", "t5", "vit"])
def test_folders_of_transformers_are_right_at_other_sizes(kind: str, tmp_path: Path) -> None:
    made = pretrained(tmp_path, kind)
    program = polydyn.from_pretrained(tmp_path, threads=1)
    for batch, length in ((1, 3), (3, 11)):
        given = {"input_ids": torch.randint(0, 50, (batch, length)), "attention_mask": torch.ones(batch, length).long()}
        if kind == "vit":
            given = {"pixel_values": torch.randn(batch, 3, 16, 16)}
        if kind == "bert":
            given["token_type_ids"] = torch.zeros(batch, length).long()
        with torch.no_grad():
            expected = next(iter(made(**given).values())).numpy()
        got = next(iter(program.run({n: t.numpy() for n, t in given.items()}).values()))
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_decoders_continue_from_their_caches(kind: str, tmp_path: Path) -> None:
    made = pretrained(tmp_path, kind)
    program = polydyn.from_pretrained(tmp_path, threads=1)
    assert "past_key_values.0.key" in program.inputs and "present.0.value" in program.outputs
    ids = torch.randint(0, 50, (2, 9))
    with torch.no_grad():
        expected = made(input_ids=ids, attention_mask=torch.ones(2, 9).long()).logits.numpy()
    heads, size = (1, 16) if kind == "llama" else (2, 16)
    past: dict[str, Any] = {f"past_key_values.0.{k}": np.zeros((2, heads, 0, size), "f") for k in ("key", "value")}
    rows, at = [], 0
    for step in (4, 1, 4):
        mask = np.ones((2, at + step), np.int64)
        out = program.run({"input_ids": ids[:, at : at + step].numpy(), "attention_mask": mask, **past})
        past = {f"past_key_values.0.{k}": out[f"present.0.{k}"] for k in ("key", "value")}
        rows, at = [*rows, out["logits"]], at + step
    np.testing.assert_allclose(np.concatenate(rows, 1), expected, rtol=0, atol=1e-4)


class _Choosing(torch.nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, choose: Callable[[Any], Any]) -> None:
        super().__init__()
        self.choose = choose

    def forward(self, x: Any) -> Any:
        return self.choose(x)


@pytest.mark.slow
def test_a_folder_keeps_the_limits_of_its_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch exports only for some sizes is refused at others, from Python and from the command line."""
    pretrained(tmp_path, "bert")
    made = torch_modules.torch_model

    def limited(*args: Any, **more: Any) -> Any:
        return made(*args, **more)[0], {"sequence": polydyn.Sizes(4, 64)}

    monkeypatch.setattr(torch_modules, "torch_model", limited)
    program = polydyn.from_pretrained(tmp_path, dims={"sequence": (0, 32)}, threads=1)
    ids = np.zeros((1, 3), np.int64)
    with pytest.raises(PolydynError, match="4 <= sequence"):
        program.run(dict.fromkeys(program.inputs, ids))
    settings = CompileSettings(dims=(("sequence", polydyn.Sizes(0, 32)),))
    assert settings.read(str(tmp_path))[1]["dims"]["sequence"] == polydyn.Sizes(4, 32)


def test_a_module_that_chooses_by_sizes_has_limits() -> None:
    def choose(x: Any) -> Any:
        y = x[:, 7:] if x.shape[1] > 7 else x
        return y * 2 if x.shape[0] % 3 == 0 else y

    program = polydyn.from_torch(_Choosing(choose), (torch.randn(6, 9),), dims={"x_1": (0, 50)}, threads=1)
    agrees(program, choose, torch.randn(3, 50))
    for shape, limit in [((3, 7), "8 <= x_1"), ((4, 9), "multiples of 3"), ((3, 51), "x_1 <= 50")]:
        with pytest.raises(PolydynError, match=limit):
            program.run({"x": np.zeros(shape, "f")})


@pytest.mark.parametrize("choose", [
    lambda x: x * 2 if x.shape[0] == 3 * x.shape[1] else x,
    lambda x: x * 2 if (x.shape[0] + 1) // 2 % 3 == 0 else x,
])  # fmt: skip
def test_sizes_without_limits_to_name_are_refused(choose: Callable[[Any], Any]) -> None:
    with pytest.raises(PolydynError, match="only for some sizes"):
        polydyn.from_torch(_Choosing(choose), (torch.randn(6, 2),))


def test_an_equation_may_hold_from_a_size_on() -> None:
    def choose(x: Any) -> Any:
        chunks = -(-x.shape[0] // -(-x.shape[0] // 3))  # 3, except for 1, 2 and 4
        return x * 2 if chunks == 3 else x

    program = polydyn.from_torch(_Choosing(choose), (torch.randn(9, 2),), threads=1)
    agrees(program, choose, torch.randn(5, 2))
    with pytest.raises(PolydynError, match="5 <= x_0"):
        program.run({"x": np.zeros((4, 2), "f")})
