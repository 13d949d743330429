"""User facts about dims: ranges, multiples, likely sizes; used in proofs, checked on every call, shown again."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from test_shape_facts import EXAMPLES, SIZES, exact, expressions

import polydyn
from polydyn import Sizes
from polydyn.cli import main
from polydyn.cli.parsing import dim_sizes
from polydyn.errors import InputError, ShapeError
from polydyn.graph.expand import import_model
from polydyn.jobs import read_jobs
from polydyn.schedules.index import Index, minimum
from polydyn.shapes.context import ShapeContext
from polydyn.shapes.sizes import sizes_by_name
from tests.support.tiny import model, node

L = Index.of("L")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"low": -1}, "range -1.. holds no size"),
        ({"low": 5, "high": 4}, "range 5..4 holds no size"),
        ({"low": 9, "high": 15, "multiple": 8}, "range 9..15, multiples of 8 holds no size"),
        ({"multiple": 0}, "cannot be multiples of 0"),
        ({"low": 1.5}, "1.5 is not a size"),
        ({"high": True}, "True is not a size"),
        ({"high": 64, "likely": (65,)}, "likely size 65 is not in the range 0..64"),
        ({"multiple": 8, "likely": (8, 12)}, "likely size 12 is not in the range 0.., multiples of 8"),
        ({"likely": (8, 8)}, "given twice"),
        ({"likely": (8, 16), "probabilities": (1.0,)}, "1 probabilities for 2 likely sizes"),
        ({"likely": (8, 16), "probabilities": (0.5, 0.6)}, "add up to 1.1"),
        ({"likely": (8, 16), "probabilities": (-0.5, 1.5)}, "numbers >= 0"),
        ({"probabilities": (1.0,)}, "1 probabilities for 0 likely sizes"),
    ],
)
def test_nonsense_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        Sizes(**fields)


def test_refusals_name_the_dim() -> None:
    m = model([node("Relu", "x", "y")], {"x": ("float32", ["N"])}, ["y"])
    other = "does not describe sizes"
    for given_, wanted in (((3, 2), "holds no size"), (7, other), ((1, 2, 3, 4, 5, 6), other)):
        with pytest.raises(ShapeError, match=rf"(?s){wanted}.*dim: N"):
            import_model(m, {"N": given_})  # type: ignore[dict-item]


def context(**dims: Sizes) -> ShapeContext:
    c = ShapeContext(dims)
    for n in ("A", "B", "C", "L"):
        c.declare(n, "x axis 0")
    return c


def test_multiples_decide_divisions_and_leave_no_other_symbol() -> None:
    c = context(L=Sizes(8, 512, 8))
    for p, q in (
        (L // 4 * 4, L),
        (L // 4, L // 8 * 2),
        ((L + 3) // 8, L // 8),
        (L * "A" // 16 * 2, L * "A" // 16 * 2),
        (L.ceildiv(8) * 8, L),
        (L * 3 // 24 * 24, L * 3),
        (L * "A" // 8 * 8, L * "A"),
        (L % 2, Index.of(0)),
        (minimum(L // 8, 1), Index.of(1)),
    ):
        assert c.canonical(p) == c.canonical(q), p
        assert c.canonical(p).symbols() <= {"L", "A"}, "no symbol is invented"
    assert c.is_multiple(L * "A", 4) and not c.is_multiple(L, 16)
    assert c.equal(L, 2 * Index.of("A") + 1) is False, "an even size is no odd one"
    assert c.nonnegative(L // 8 - 1) and not c.nonnegative(L // 8 - 2)
    said = [(g.relation, str(g.right)) for g in c.guards()]
    assert said == [("%==", "8"), ("<=", "L"), ("<=", "512")], "broken multiples are told first"


def test_multiples_follow_equalities_learned_later() -> None:
    c = context(L=Sizes(multiple=8))
    c.unify("A", "L", "add")  # A represents both
    assert c.canonical(Index.of("A") // 8 * 8) == Index.of("A") and c.is_multiple("L", 4)
    c.unify("C", Index.of("B") * 3, "reshape")
    c.assume_multiple("C", 4, "heads")
    assert c.is_multiple("B", 4), "3 * B is a multiple of 4"
    with pytest.raises(ShapeError, match=r"(?s)A and 12 can never be equal.*because: add.*because: .*multiples of 8"):
        c.unify("L", 12, "late")


@settings(max_examples=EXAMPLES, deadline=None)
@given(expressions)
def test_what_multiples_simplify_keeps_its_value(p: Index) -> None:
    c = ShapeContext({"A": Sizes(multiple=5), "B": Sizes(2, None, 2)})
    for n in "ABC":
        c.declare(n, "x")
    q, proven = c.canonical(p), c.nonnegative(p)
    for a, b, k in itertools.product([0, 5, 10], [2, 10, 128], SIZES):
        env = {"A": a, "B": b, "C": k}
        value = exact(p, env)
        assert value is None or (value == q.evaluate(env) and (value >= 0 or not proven)), (p, q, env)


def rows() -> Any:
    """Build x[N] as rows of 4: N must be a multiple of 4."""
    return model([node("Reshape", "x s", "y")], {"x": ("float32", ["N"])}, ["y"], {"s": np.array([-1, 4])})


@pytest.mark.compiler
def test_a_multiple_makes_a_guard_of_the_model_unnecessary_and_is_checked_itself() -> None:
    assert [g.relation for g in import_model(rows()).guards] == ["%=="]
    program = polydyn.compile(rows(), threads=1, dims={"N": Sizes(8, 64, multiple=8)})
    assert program.outputs == {"y": "float32[2*(N // 8), 4]"}
    assert program.run({"x": np.arange(16, dtype=np.float32)})["y"].shape == (4, 4)
    assert sum("%==" in g for g in program.guards) == 1
    for n, wanted in ((12, r"compiled for multiples of 8\n  rule: N is a multiple of 8, here 12 and 8"),
                      (0, "compiled for 8 <= N <= 64"), (72, "compiled for 8 <= N <= 64")):  # fmt: skip
        with pytest.raises(InputError, match=wanted):
            program.run({"x": np.zeros(n, np.float32)})


LIKELY_SIZES = Sizes(1, 64, likely=(16, 48), probabilities=(0.75, 0.25))


@pytest.mark.compiler
def test_likely_sizes_restrict_nothing_and_are_kept(tmp_path: Path) -> None:
    program = polydyn.compile(rows(), threads=1, dims={"N": LIKELY_SIZES})
    assert program.run({"x": np.zeros(8, np.float32)})["y"].shape == (2, 4)
    program.save(tmp_path / "p.polydyn")
    again = polydyn.load(tmp_path / "p.polydyn")
    assert Sizes(**again.manifest["dims"]["N"]) == LIKELY_SIZES
    assert "N: compiled for 1..64, likely 16 (75 %), 48 (25 %)" in str(again.explain(N=16))
    shown = CliRunner().invoke(main, ["inspect", str(tmp_path / "p.polydyn")]).output
    assert "compiled for\n  N: 1..64, likely 16 (75 %), 48 (25 %)" in shown


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("L=1:512", Sizes(1, 512)),
        ("L=7", Sizes(7, 7)),
        ("L=0:", Sizes()),
        ("L=8:512:8", Sizes(8, 512, 8)),
        ("L=8::8", Sizes(8, None, 8)),
        ("L=1:512@128,384", Sizes(1, 512, 1, (128, 384))),
        ("L=8:512:8@128:0.6,384:0.4", Sizes(8, 512, 8, (128, 384), (0.6, 0.4))),
    ],
)
def test_the_command_line_says_the_same(text: str, sizes: Sizes) -> None:
    assert dim_sizes(text) == ("L", sizes)


@pytest.mark.parametrize("text", ["L", "L=", "L=1:2:3:4", "L=a", "L=1:9@x", "L=1:9@99", "L=4:2", "L=1:9@2:0.5"])
def test_other_forms_are_refused_on_the_command_line(text: str) -> None:
    done = CliRunner().invoke(main, ["compile", "x.onnx", "-o", "y", "--dim", text])
    assert done.exit_code == 2 and text in done.output


@pytest.mark.compiler
def test_batch_jobs_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(rows().SerializeToString())
    job = {"model": "m.onnx", "output": "m.polydyn", "dims": {"N": LIKELY_SIZES.to_json()}}
    (tmp_path / "jobs.json").write_text(json.dumps([job]))
    (found,) = read_jobs(tmp_path / "jobs.json")
    assert found.arguments.dims == {"N": LIKELY_SIZES}
    (tmp_path / "jobs.json").write_text(json.dumps([job | {"dims": {"N": {"low": 9, "high": 1}}}]))
    with pytest.raises(InputError, match="holds no size"):
        read_jobs(tmp_path / "jobs.json")


@pytest.mark.parametrize(("field", "value"), [("likely", 9), ("likely", "9"), ("probabilities", 0.5)])
def test_likely_sizes_are_given_together(field: str, value: Any) -> None:
    with pytest.raises(ShapeError, match=rf"{field} is .*\n  remedy: give a tuple, as in {field}=\("):
        Sizes(0, 8, **{field: value})


def test_a_text_in_place_of_sizes_is_named() -> None:
    with pytest.raises(ShapeError, match=r"(?s)'1:4' does not describe sizes.*Sizes\.parse\('1:4'\)"):
        sizes_by_name({"B": "1:4"})  # type: ignore[dict-item]


@pytest.mark.parametrize("value", [(), (1,), (1, 8, 4), 5, None, {"low": 1, "high": 2}, {1, 2}])
def test_only_a_pair_describes_sizes(value: Any) -> None:
    """``(1,)`` was 1 or more, and ``(1, 8, 4)`` the multiples of 4."""
    with pytest.raises(ShapeError, match=r"(?s)does not describe sizes.*dim: B.*give \(low, high\), where high may"):
        sizes_by_name({"B": value})
