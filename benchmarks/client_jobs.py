"""Jobs of packages that ship their models, on generated inputs: ``python -m benchmarks.client_jobs NAME RUNTIME FILE``.

RUNTIME is ``onnxruntime``, ``polydyn`` or ``provider``. For ``polydyn``, its classes replace ONNX Runtime's before the
package is imported (docs/switching.md). ``provider``: ONNX Runtime's own sessions, whose execution provider is polydyn
(docs/onnxruntime.md). FILE receives the job's results as JSON, with the seconds to open and to run.
``benchmarks.clients`` runs every job with both and compares. Inputs are drawn from a seed: vowels made of harmonics,
pages of rendered text, a PDF with a table, source texts.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

RATE = 16000
TEXTS = ("Polyhedral compilers 2026", "Total: 1,234.50 EUR", "shapes unknown", "A B C 7 8 9", "invoice no. 42")
Found = list[Any]
Job = Callable[[], Callable[[], Found]]
"""Opens a package's models and returns a function that does the job."""
JOBS: dict[str, Job] = {}


def job(module: str) -> Callable[[Job], Job]:
    """Register the job of a package under the module that it imports."""

    def register(open_models: Job) -> Job:
        JOBS[module] = open_models
        return open_models

    return register


def voice(seconds: float = 4.0) -> np.ndarray:
    """Return vowels with pauses: float32 samples at ``RATE``, harmonics under two formants and some noise."""
    numbers, t = np.random.default_rng(0), np.arange(int(seconds * RATE)) / RATE
    pitch = 120 + 25 * np.sin(2 * np.pi * 0.7 * t)
    phase = 2 * np.pi * np.cumsum(pitch) / RATE
    loud = np.zeros_like(t)
    for first, second in ((700, 1200), (300, 2300), (400, 800)):
        for k in range(1, 30):
            peaks = np.exp(-(((120 * k - np.array([first, second])) / (150, 250)) ** 2)) @ (1, 0.5)
            loud += np.sin(k * phase) * peaks
    speaks = (np.floor(t * 2) % 3 != 2) * (0.5 - 0.5 * np.cos(2 * np.pi * 4 * t))
    sound = loud * speaks / np.abs(loud).max() * 0.6 + numbers.standard_normal(t.size) * 0.003
    result: np.ndarray = sound.astype(np.float32)
    return result


def page(width: int = 640, height: int = 360, lines: int = 5) -> np.ndarray:
    """Return a white page with black text: uint8 [height, width, 3]."""
    from PIL import Image, ImageDraw, ImageFont  # type: ignore[import-not-found, unused-ignore]

    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    for k in range(lines):
        place = (20 + 11 * k, 20 + k * (height - 40) // lines)
        draw.text(place, TEXTS[k % len(TEXTS)], fill="black", font=ImageFont.load_default(28))
    return np.asarray(image)


def picture(size: int) -> np.ndarray:
    """Return soft coloured blobs: uint8 [size, size, 3]."""
    numbers = np.random.default_rng(1)
    y, x = np.mgrid[:size, :size] / size
    image = np.zeros((size, size, 3))
    for _ in range(12):
        a, b, r = numbers.random(3)
        image += np.exp(-((x - a) ** 2 + (y - b) ** 2) / (0.02 + r / 20))[..., None] * numbers.random(3)
    result: np.ndarray = (image / image.max() * 255).astype(np.uint8)
    return result


@job("silero_vad")
def silero() -> Callable[[], Found]:
    """Detect speech segments at 16 and at 8 kHz, and return the probability of every chunk."""
    import torch
    from silero_vad import get_speech_timestamps, load_silero_vad  # type: ignore[import-not-found]

    model = load_silero_vad(onnx=True)

    def run() -> Found:
        found: Found = []
        for rate in (16000, 8000):
            sound = torch.from_numpy(voice()[:: 16000 // rate].copy())
            found.append(get_speech_timestamps(sound, model, sampling_rate=rate, threshold=0.3))
            model.reset_states()
            chunk = 512 if rate == 16000 else 256
            found.append([float(model(sound[k : k + chunk], rate)) for k in range(0, 20 * chunk, chunk)])
            model.reset_states()
        return found

    return run


@job("faster_whisper")
def faster_whisper() -> Callable[[], Found]:
    """Detect speech segments with the package's own detector."""
    from faster_whisper.vad import VadOptions, get_speech_timestamps  # type: ignore[import-not-found]

    return lambda: [get_speech_timestamps(voice(), VadOptions(threshold=0.3)), get_speech_timestamps(voice(1.5))]


@job("openwakeword")
def openwakeword() -> Callable[[], Found]:
    """Score every wake word for each 80 ms."""
    from openwakeword.model import Model  # type: ignore[import-not-found]

    model = Model(vad_threshold=0.1)
    sound = (voice() * 32767).astype(np.int16)
    return lambda: [
        {k: float(v) for k, v in model.predict(sound[a : a + 1280]).items()} for a in range(0, 40 * 1280, 1280)
    ]


@job("rapidocr")
def rapidocr() -> Callable[[], Found]:
    """Recognise texts, scores and boxes of three pages."""
    from rapidocr import RapidOCR  # type: ignore[import-not-found]

    engine = RapidOCR()

    def run() -> Found:
        found: Found = []
        for image in (page(), page(500, 200, 2), page(333, 421, 4)):
            said = engine(image)
            boxes = [] if said.boxes is None else np.asarray(said.boxes).tolist()
            found.append([list(said.txts or ()), [float(s) for s in said.scores or ()], boxes])
        return found

    return run


@job("rapidocr_onnxruntime")
def rapidocr_onnxruntime() -> Callable[[], Found]:
    """Recognise texts, scores and boxes of two pages, by the package's own sessions."""
    from rapidocr_onnxruntime import RapidOCR  # type: ignore[import-not-found]

    engine = RapidOCR()

    def run() -> Found:
        found: Found = []
        for image in (page(500, 200, 2), page(333, 421, 4)):
            said, _ = engine(image)
            found.append([[np.asarray(box).tolist(), text, float(score)] for box, text, score in said or ()])
        return found

    return run


@job("ddddocr")
def ddddocr() -> Callable[[], Found]:
    """Read the text of two small pictures."""
    import io

    from ddddocr import DdddOcr  # type: ignore[import-not-found]
    from PIL import Image

    reader = DdddOcr(show_ad=False)

    def run() -> Found:
        found: Found = []
        for image in (page(160, 60, 1), page(200, 64, 1)):
            data = io.BytesIO()
            Image.fromarray(image).save(data, "PNG")
            found.append(reader.classification(data.getvalue()))
        return found

    return run


@job("nudenet")
def nudenet() -> Callable[[], Found]:
    """Detect objects in two pictures, one by one and as a batch."""
    import cv2  # type: ignore[import-not-found, unused-ignore]
    from nudenet import NudeDetector  # type: ignore[import-not-found]

    detector = NudeDetector()

    def run() -> Found:
        with tempfile.TemporaryDirectory() as folder:
            files = [str(Path(folder) / f"{n}.png") for n in (320, 451)]
            for f, n in zip(files, (320, 451), strict=True):
                cv2.imwrite(f, picture(n))
            return [*(detector.detect(f) for f in files), *detector.detect_batch(files)]

    return run


@job("magika")
def magika() -> Callable[[], Found]:
    """Classify files by content."""
    from magika import Magika  # type: ignore[import-not-found]

    tool = Magika()
    texts = [
        Path(__file__).read_bytes(), b'{"a": [1, 2, 3]}\n' * 20, b"<html><body><p>hello</p></body></html>" * 5,
        b"#include <stdio.h>\nint main(void) { puts(\"x\"); return 0; }\n" * 3, b"SELECT a FROM b WHERE c = 1;\n" * 9,
        bytes(range(256)) * 12, b"name,age\nann,3\nbob,4\n" * 30,
    ]  # fmt: skip

    def run() -> Found:
        said = [tool.identify_bytes(t) for t in texts]
        return [[str(r.output.label), float(r.score)] for r in said]

    return run


@job("piper")
def piper() -> Callable[[], Found]:
    """Add diacritics to an Arabic and a Hebrew text."""
    from piper.hebrew import NakdimonDiacritizer  # type: ignore[import-not-found]
    from piper.tashkeel import TashkeelDiacritizer  # type: ignore[import-not-found]

    arabic, hebrew = TashkeelDiacritizer(), NakdimonDiacritizer()
    return lambda: [arabic.diacritize("السلام عليكم ورحمة الله"), hebrew.diacritize("שלום עולם, מה שלומך היום"),
                    arabic.diacritize("كتاب"), hebrew.diacritize("ספר")]  # fmt: skip


@job("pymupdf.layout")
def layout() -> Callable[[], Found]:
    """Find boxes and their classes on a page with a heading, paragraphs and a table."""
    import pymupdf  # type: ignore[import-not-found]
    import pymupdf.layout  # type: ignore[import-not-found]

    def run() -> Found:
        found: Found = []
        document = pymupdf.open()
        for k in range(2):
            sheet = document.new_page()
            sheet.insert_text((72, 72), "A report about shapes", fontsize=20)
            sheet.insert_textbox(
                (72, 100, 500, 260), "Sizes are unknown until a call comes. " * (20 + 9 * k), fontsize=10
            )
            for row in range(5 + k):
                for column in range(4):
                    x, y = 72 + 100 * column, 300 + 24 * row
                    sheet.draw_rect((x, y, x + 100, y + 24))
                    sheet.insert_text((x + 6, y + 16), f"{row * column}.5", fontsize=10)
        for sheet in pymupdf.open(stream=document.tobytes()):
            sheet.get_layout()
            found.append(
                [[str(x) if isinstance(x, str) else float(x) for x in box[:5]] for box in sheet.layout_information]
            )
        return found

    return run


def main() -> None:
    """Run one job twice and write its results."""
    name, runtime, file = sys.argv[1:]
    import onnxruntime

    if runtime == "polydyn":
        import polydyn.session

        for n in polydyn.session.__all__:
            setattr(onnxruntime, n, getattr(polydyn.session, n))
    elif runtime == "provider":
        import polydyn.ort

        polydyn.ort.install()
    start = time.perf_counter()
    run = JOBS[name]()
    opened = time.perf_counter()
    run()
    warm = time.perf_counter()
    found = run()
    end = time.perf_counter()
    seconds = {"open": opened - start, "first": warm - opened, "run": end - warm}
    Path(file).write_text(json.dumps({"found": found, "seconds": seconds}))


if __name__ == "__main__":
    main()
