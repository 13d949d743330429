"""Code of libraries that take an ONNX Runtime session, unchanged, on polydyn's: ``python -m benchmarks.clients``.

piper-tts (``pip install piper-tts``) speaks a text with a voice that takes any session. The voice here is a model of
one embedding and two convolutions with random weights: every sample is compared, not how it sounds.

optimum (``pip install optimum-onnx``, with torch) opens the session itself: the classes of ``polydyn.session`` replace
``onnxruntime``'s before it is imported. Its pipeline makes embeddings of texts with the stored tiny BERT and a
tokenizer of sixteen words, with io binding and without.

Ten packages that ship their models do their own work (``benchmarks/client_jobs.py``), in a process with ONNX Runtime
and in one with polydyn: silero-vad, faster-whisper, openwakeword, rapidocr, rapidocr-onnxruntime, ddddocr, nudenet,
magika, piper-tts and pymupdf-layout. Texts, labels and numbers of boxes must be equal, numbers within ``CLOSE``. NAME
runs some jobs only. A client that is not installed is named and left out. ``--provider``: sessions are ONNX Runtime's
own, and polydyn is their execution provider (docs/onnxruntime.md).

``--examples FOLDER`` runs ONNX Runtime's own examples, which are not stored here: its docs/python/examples/*.py and the
blocks of docs/python/api_summary.rst, unchanged and with ``polydyn.session`` instead of ``onnxruntime``
(``polydyn.backend`` instead of its backend). Without a GPU, 'cuda' becomes 'cpu' in both. Examples that ONNX Runtime
itself does not run are not counted. docs/switching.md has the result.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.client_jobs import JOBS

CLOSE = 2e-3
"""Maximum difference of a number: scores are in [0, 1], boxes in pixels."""
SYMBOLS, CHANNELS, HOP = 64, 16, 8


def voice_model(path: Path) -> None:
    """Write a model with the inputs and outputs of a Piper voice: phoneme ids [1, L] to audio [1, 1, 8*L]."""
    rng = np.random.default_rng(0)

    def weight(name: str, *shape: int) -> onnx.TensorProto:
        return numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32) / 4, name)

    nodes = [
        helper.make_node("Gather", ["table", "input"], ["embedded"]),
        helper.make_node("Transpose", ["embedded"], ["rows"], perm=[0, 2, 1]),
        helper.make_node("Conv", ["rows", "w1"], ["hidden"], pads=[2, 2]),
        helper.make_node("Relu", ["hidden"], ["active"]),
        helper.make_node("Conv", ["active", "w2"], ["samples"]),
        helper.make_node("ReduceMean", ["scales"], ["mean"], keepdims=0),
        helper.make_node("Mul", ["samples", "mean"], ["scaled"]),
        helper.make_node("Tanh", ["scaled"], ["wave"]),
        helper.make_node("Transpose", ["wave"], ["by_time"], perm=[0, 2, 1]),
        helper.make_node("Reshape", ["by_time", "shape"], ["audio"]),
    ]
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "voice",
        [
            info("input", TensorProto.INT64, [1, "L"]),
            info("input_lengths", TensorProto.INT64, [1]),
            info("scales", TensorProto.FLOAT, [3]),
        ],
        [info("audio", TensorProto.FLOAT, [1, 1, None])],
        [
            weight("table", SYMBOLS, CHANNELS), weight("w1", CHANNELS, CHANNELS, 5), weight("w2", HOP, CHANNELS, 1),
            numpy_helper.from_array(np.array([1, 1, -1]), "shape"),
        ],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), str(path))


def speak(session: Any, text: str) -> np.ndarray:
    """Return the samples of a text, by Piper's own code."""
    from piper.config import PhonemeType, PiperConfig  # type: ignore[import-not-found]
    from piper.voice import PiperVoice  # type: ignore[import-not-found]

    ids = {c: [4 + k % (SYMBOLS - 4)] for k, c in enumerate("abcdefghijklmnopqrstuvwxyz .,'!?-")}
    config = PiperConfig(SYMBOLS, 1, 16000, "en", ids | {"_": [0], "^": [1], "$": [2]}, PhonemeType.TEXT)
    chunks = PiperVoice(session=session, config=config).synthesize(text)
    return np.concatenate([c.audio_float_array for c in chunks])


def voices(folder: Path) -> float:
    """Return the largest difference between the samples that Piper makes of texts with the two sessions."""
    import onnxruntime

    import polydyn

    path = folder / "voice.onnx"
    voice_model(path)
    theirs, ours = onnxruntime.InferenceSession(str(path)), polydyn.InferenceSession(path)
    worst = 0.0
    for text in ("a", "one import changed", "a longer sentence, with a pause. and another one!" * 5):
        a, b = speak(theirs, text), speak(ours, text)
        worst = max(worst, float(np.abs(a - b).max()) if a.shape == b.shape else np.inf)
    return worst


EMBEDDING_SCRIPT = """
import sys
import numpy as np
import onnxruntime
if sys.argv[1] == "polydyn":
    import polydyn.session
    for name in polydyn.session.__all__:
        setattr(onnxruntime, name, getattr(polydyn.session, name))
from optimum.onnxruntime import ORTModelForFeatureExtraction
from transformers import AutoTokenizer, pipeline
model = ORTModelForFeatureExtraction.from_pretrained(".")
assert type(model.session).__module__.startswith(sys.argv[1]), type(model.session)
vectors = []
for model.use_io_binding in (False, True):
    embed = pipeline("feature-extraction", model=model, tokenizer=AutoTokenizer.from_pretrained("."))
    vectors += embed(["a compiler", "every length of text , with one program !", "polyhedral " * 20])
np.savez(sys.argv[1], *(np.asarray(v) for v in vectors))
"""
WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] a polyhedral compiler serves every length of text with one program , !"


def embeddings(folder: Path) -> float:
    """Return the largest difference between optimum's embeddings, with each runtime in its own process."""
    from transformers import BertConfig, BertTokenizerFast  # type: ignore[import-untyped]

    shutil.copy(Path(__file__).parent.parent / "tests" / "data" / "bert_tiny.onnx", folder / "model.onnx")
    (folder / "vocab.txt").write_text("\n".join(WORDS.split()))
    BertConfig(vocab_size=120, hidden_size=32).save_pretrained(folder)
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    (folder / "embed.py").write_text(EMBEDDING_SCRIPT)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    results = []
    for runtime in ("onnxruntime", "polydyn"):
        subprocess.run([sys.executable, "embed.py", runtime], cwd=folder, env=environment, check=True)
        with np.load(folder / f"{runtime}.npz") as arrays:
            results.append([arrays[n] for n in arrays])
    return max(float(np.abs(a - b).max()) if a.shape == b.shape else np.inf for a, b in zip(*results, strict=True))


IMPORTS = {
    r"^import onnxruntime as (\w+)": r"import polydyn.session as \1",
    r"^import onnxruntime.backend as (\w+)": r"import polydyn.backend as \1",
    r"^import onnxruntime$": "import polydyn.session as onnxruntime",
}
BEFORE = """import numpy as np
import onnxruntime
import onnx, onnx.parser
onnx.save(onnx.parser.parse_model('<ir_version: 10, opset_import: ["" : 18]> '
    'm (float[N, 2] input) => (float[N, 2] output) { output = Relu (input) }'), "model.onnx")
X = np.ones((3, 2), np.float32)
"""
"""Definitions that the blocks of the summary rely on."""


def examples(folder: Path, device: bool) -> Iterator[tuple[str, str]]:
    """Yield names and texts of the examples."""
    for path in sorted(folder.glob("*.py")):
        if "onnxruntime" in (text := path.read_text()):
            yield path.name, text
    for path in sorted(folder.glob("*.rst")):
        blocks = re.findall(r"code-block:: python\n\n((?:\t.*\n|\n)+)", path.read_text())
        for k, block in enumerate(blocks):
            text = BEFORE + re.sub(r"^\t", "", block, flags=re.MULTILINE)
            yield f"{path.name}, block {k + 1}", text if device else text.replace("'cuda'", "'cpu'")


def failure(text: str) -> str:
    """Return the last line of a failing script's error message, or an empty string if it succeeds."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "example.py").write_text(text)
        done = subprocess.run([sys.executable, "example.py"], cwd=folder, capture_output=True, text=True)
    lines = [line for line in done.stderr.splitlines() if line and not line.startswith(" ")]
    return lines[-1] if done.returncode else ""


def run_examples(folder: Path) -> int:
    """Print which examples run with one import changed, and why others do not; return 0 if all that run at all do."""
    import onnxruntime

    missed = 0
    for name, text in examples(folder, "CUDAExecutionProvider" in onnxruntime.get_available_providers()):
        changed = text
        for old, new in IMPORTS.items():
            changed = re.sub(old, new, changed, flags=re.MULTILINE)
        if theirs := failure(text):
            print(f"{name}: not run by ONNX Runtime itself ({theirs})", flush=True)
            continue
        ours = failure(changed)
        missed += bool(ours)
        print(f"{name}: {ours or 'runs'}", flush=True)
    return int(missed > 0)


def distance(a: Any, b: Any) -> float:
    """Return the largest difference of numbers in two results of a job, or infinity if anything else differs."""
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b)
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return max((distance(a[k], b[k]) for k in a), default=0.0)
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return max((distance(x, y) for x, y in zip(a, b, strict=True)), default=0.0)
    return 0.0 if type(a) is type(b) and a == b else float("inf")


def run_jobs(names: Sequence[str], folder: Path, own: str = "polydyn") -> bool:
    """Print how each job differs between ONNX Runtime and ``own``, and the seconds of both; return whether all are
    close.
    """
    good, root = True, str(Path(__file__).parent.parent)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, *(p for p in sys.path if p)])}
    for name in names:
        if importlib.util.find_spec(name.split(".")[0]) is None:
            print(f"{name} is not installed: left out")
            continue
        done = []
        for runtime in ("onnxruntime", own):
            command = [sys.executable, "-m", "benchmarks.client_jobs", name, runtime, str(folder / runtime)]
            result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
            if result.returncode:
                print(f"{name} fails with {runtime}: {result.stderr.strip()[-600:]}", flush=True)
                break
            done.append(json.loads((folder / runtime).read_text()))
        worst = distance(*(d["found"] for d in done)) if len(done) == 2 else float("inf")
        good &= worst <= CLOSE
        if len(done) == 2:
            both = zip(*(d["seconds"].items() for d in done), strict=True)
            seconds = ", ".join(f"{k} {a:.2f} -> {b:.2f} s" for (k, a), (_, b) in both)
            print(f"{name}: largest difference {worst:.2g}; {seconds}", flush=True)
    return good


def main() -> int:
    """Print the largest difference of the samples; return 1 if it is not small."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"run only these jobs, of {', '.join(JOBS)}")
    parser.add_argument("--examples", type=Path)
    parser.add_argument("--provider", action="store_true", help="polydyn as an execution provider of ONNX Runtime")
    said = parser.parse_args()
    if said.examples:
        return run_examples(said.examples)
    with tempfile.TemporaryDirectory() as folder:
        good = run_jobs(said.names or list(JOBS), Path(folder), "provider" if said.provider else "polydyn")
    if said.names or said.provider:
        return int(not good)
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for name, client in {"piper": voices, "optimum": embeddings}.items():
            if importlib.util.find_spec(name) is None:
                print(f"{name} is not installed: left out")
                continue
            difference = client(Path(folder))
            worst = max(worst, difference)
            print(f"{name}: largest difference {difference:.2g}", flush=True)
    return int(worst > 1e-5 or not good)


if __name__ == "__main__":
    sys.exit(main())
