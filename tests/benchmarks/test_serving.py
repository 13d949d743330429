"""The load test of docs/serving.md: both servers use the page's code, and receive the same requests."""

from __future__ import annotations

import difflib

from benchmarks.serving import MAX_TOKENS, MIN_TOKENS, RIVAL, Load, server_text, table, texts


def test_the_rivals_server_differs_by_one_function() -> None:
    ours, theirs = (server_text(r).splitlines() for r in ("polydyn", "onnxruntime"))
    changed = [x for x in difflib.ndiff(ours, theirs) if x[0] in "+-" and x[2:].strip()]
    assert {x[2:] for x in changed if x[0] == "+"} <= set(RIVAL.splitlines())
    assert [x[2:].strip() for x in changed if x[0] == "-"] == [
        '"""The model as a function of its inputs."""', "program = polydyn.load(path, threads=1)",
        'return lambda feeds: program.run(feeds)["last_hidden_state"]',
    ]  # fmt: skip


def test_texts_are_those_of_the_seed_and_of_all_lengths() -> None:
    lengths = [len(t) for t in texts(400)]
    assert texts(400) == texts(400) and min(lengths) == MIN_TOKENS and MAX_TOKENS - 8 < max(lengths) <= MAX_TOKENS
    assert sum(n < 23 for n in lengths) in range(160, 240), "half of them are below the geometric mean"


def test_a_row_says_milliseconds() -> None:
    assert "| 20 | polydyn | 1.5 | 2.5 | 3.0 | 1.25 | 19.9 |" in table(
        [Load("polydyn", 20, 100, 1.5e-3, 2.5e-3, 3e-3, 1.25, 19.9)]
    )
