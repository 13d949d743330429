"""``polydyn generate``, ``quantize`` and ``to-half``: from a folder to text, and models of fewer bits."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from polydyn.cli import main
from polydyn.cli.generate import find_model, stream_text
from polydyn.errors import MissingModelError
from tests.support.stored import path_of


def tokenizer() -> Tokenizer:
    """Return a tokenizer of 120 tokens, one for each of 120 bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:120]
    made = Tokenizer(models.BPE({x: k for k, x in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(main, [str(a) for a in arguments])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(path_of("llama_tiny"), tmp_path / "model.onnx")
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 119}))
    return tmp_path


def test_one_command_goes_from_a_folder_to_text(folder: Path) -> None:
    done = run("generate", folder, "Hello", "--max-tokens", 6, "--threads", 1)
    assert done.exit_code == 0, done.output
    facts = json.loads(run("generate", folder, "Hello", "--max-tokens", 6, "--threads", 1, "--json").output)
    assert facts["text"] + "\n" == done.output and facts["prompt_tokens"] == 5 and len(facts["ids"]) == 6
    assert tokenizer().decode(facts["ids"]) == facts["text"]
    (folder / "config.json").write_text(json.dumps({"eos_token_id": [facts["ids"][2]]}))
    short = json.loads(run("generate", folder, "Hello", "--max-tokens", 6, "--threads", 1, "--json").output)
    assert len(short["ids"]) <= 3 and facts["text"].startswith(short["text"])


def test_folders_that_lack_a_file_are_named(tmp_path: Path) -> None:
    done = run("generate", tmp_path, "Hello")
    assert done.exit_code == 1 and "tokenizer.json" in done.output
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "is no tokenizer" in run("generate", tmp_path, "Hello").output
    with pytest.raises(MissingModelError, match=r"no \.onnx file"):
        find_model(tmp_path)
    for name in ("a.onnx", "b.onnx"):
        (tmp_path / name).touch()
    with pytest.raises(MissingModelError, match="--model"):
        find_model(tmp_path)


def test_the_extra_is_named_without_its_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    done = run("generate", folder, "Hello")
    assert done.exit_code == 1 and "polydyn[generate]" in done.output


class Letters:
    """A tokenizer whose ids are bytes of UTF-8."""

    def decode(self, ids: list[int]) -> str:
        """Return the text of bytes."""
        return bytes(ids).decode(errors="replace")


def test_text_is_streamed_in_whole_characters_up_to_a_stop() -> None:
    def parts(text: str, *stop: str) -> list[str]:
        return list(stream_text(Letters(), iter(text.encode()), [0], stop))

    assert parts("aé\0b") == ["a", "é", ""]
    assert "".join(parts("one two END three", "END")) == "one two "
    assert "".join(parts("one EN two", "END")) == "one EN two"


def test_quantize_and_to_half_write_models(tmp_path: Path) -> None:
    source, out = path_of("bert_tiny"), tmp_path / "out.onnx"
    done = run("quantize", source, "-o", out, "--bits", 8, "--asymmetric", "--keep", "*query*")
    assert done.exit_code == 0 and "keep names it" in done.output and "written:" in done.output
    operators = {n.op_type for n in onnx.load(out).graph.node}
    assert "MatMulNBits" in operators and "MatMul" in operators
    facts = json.loads(run("quantize", source, "-o", out, "--method", "dynamic", "--json").output)
    assert {x["bits"] for x in facts["layers"]} == {8, 32} and facts["bytes_after"] < facts["bytes_before"]
    facts = json.loads(run("to-half", source, "-o", out, "--json").output)
    assert facts["bytes_after"] < 0.6 * facts["bytes_before"]
    broken = tmp_path / "call.npz"
    broken.write_bytes(b"none")
    done = run("quantize", source, "-o", out, "--calibration", broken)
    assert done.exit_code == 1 and "numpy.savez" in done.output
    np.savez(broken, other=np.zeros(3))
    done = run("quantize", source, "-o", tmp_path / "new.onnx", "--block", 17)
    assert done.exit_code == 1 and "block is 17" in done.output and not (tmp_path / "new.onnx").exists()
