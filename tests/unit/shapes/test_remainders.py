"""Conditions on the remainders of a size: pyramids are decided exactly, and reported as multiples."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from polydyn.errors import ShapeError
from polydyn.graph.expand import import_model
from polydyn.graph.ir import Graph
from polydyn.schedules.index import Index
from polydyn.shapes.context import ShapeContext
from polydyn.shapes.residues import Condition, Remainders, remainders
from polydyn.shapes.sentences import sentence
from polydyn.shapes.sizes import Sizes

F = TensorProto.FLOAT
ROUNDING = {"floor": 0, "up": 1, "shifted": -1}


def holds(c: ShapeContext, size: int) -> bool:
    """Return whether all guards hold at a size of H."""
    relations = {"==": lambda a, b: a == b, "<=": lambda a, b: a <= b, "%==": lambda a, b: a % b == 0}
    return all(relations[g.relation](g.left.evaluate({"H": size}), g.right.evaluate({"H": size})) for g in c.guards())


@pytest.mark.parametrize("rounding", list(itertools.product(ROUNDING, repeat=3)))
@pytest.mark.parametrize("pairs", [((0, 1), (1, 2), (2, 3)), ((1, 3), (1, 2)), ((2, 3), (0, 2)), ((1, 2),), ((1, 3),)])
def test_guards_of_a_pyramid_hold_exactly_where_its_sizes_agree(
    rounding: tuple[str, ...], pairs: tuple[tuple[int, int], ...]
) -> None:
    c = ShapeContext()
    maps = [c.declare("H", "x")]
    for r in rounding:
        maps.append((maps[-1] + ROUNDING[r]) // 2)
    equations = [(maps[a], maps[b] * 2 ** (b - a)) for a, b in pairs]
    for k, (a, b) in enumerate(equations):
        try:
            c.unify(a, b, f"pair {k}")
        except ShapeError:
            for size in range(64, 128):
                assert any(x.evaluate({"H": size}) != y.evaluate({"H": size}) for x, y in equations[: k + 1]), size
            return
    assert all(c.canonical(a) == c.canonical(b) for a, b in equations)
    assert len(c.guards()) == 1
    for size in range(64):
        same = all(a.evaluate({"H": size}) == b.evaluate({"H": size}) for a, b in equations)
        assert holds(c, size) == same, (size, c.guards())
        for m in maps if same else ():
            assert c.canonical(m).evaluate({"H": size}) == m.evaluate({"H": size}), (m, c.canonical(m), size)


def test_a_later_equality_does_not_answer_the_question_of_a_multiple() -> None:
    """With ``(H + 7) // 16 == 1``, 2 and 3 remain for ``(H + 7) // 8``: its parity is still a guard."""
    c = ShapeContext()
    size = c.declare("H", "x axis 0")
    c.assume_multiple((size + 7) // 8, 2, "the sizes of a sum")
    c.unify(4 * ((size + 7) // 16), 4, "parts")
    assert [n for n in range(40) if holds(c, n)] == list(range(9, 17))
    c = ShapeContext()
    size = c.declare("H", "x axis 0")
    c.assume_multiple(size, 8, "first")
    c.unify(size, 16, "then")
    assert [str(g.left) for g in c.guards()] == ["H"] and holds(c, 16), "a pinned size answers it"


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("more", [0, 1, 2])
def test_rules_that_a_multiple_rewrites_are_solved_again(first: int, more: int) -> None:
    """``q + 1 == (H + 1) // 4`` and ``(H + 1) // 4 == 2 * q`` make q 1. As rules they replace q by ``2 * q - 1``."""
    c = ShapeContext()
    size = c.declare("H", "x axis 2")
    fine, coarse = (size + 1) // 4, (size + 1) // 8
    facts = [lambda: c.unify(coarse + more, fine, "a sum"), lambda: c.assume_multiple(fine, 2, "a pyramid")]
    facts[first]()
    facts[1 - first]()
    assert (c.canonical(coarse), c.canonical(fine)) == (more, 2 * more)
    for n in range(32):
        fourth, eighth = (n + 1) // 4, (n + 1) // 8
        assert holds(c, n) == (eighth + more == fourth and fourth % 2 == 0), (n, c.guards())


def test_a_rule_that_no_size_meets_with_a_multiple_is_a_contradiction() -> None:
    c = ShapeContext()
    size = c.declare("H", "x axis 2")
    fine, coarse = (size + 1) // 4, (size + 1) // 8
    c.unify(2 * coarse + 1, fine, "a sum")
    with pytest.raises(ShapeError):
        c.assume_multiple(fine, 2, "a pyramid")


def test_rules_without_end_keep_the_form_and_are_an_error_when_verifying(monkeypatch: pytest.MonkeyPatch) -> None:
    c = ShapeContext()
    atom = (c.declare("H", "x axis 2") + 1) // 8
    (lead,) = atom.terms
    c._rules._monomials[lead] = (2 * atom - 1, "planted")
    monkeypatch.setenv("POLYDYN_VERIFY", "0")
    assert c.canonical(atom + 3) == atom + 3
    monkeypatch.setenv("POLYDYN_VERIFY", "1")
    with pytest.raises(ShapeError, match="without end"):
        c.canonical(atom + 4)


def test_remainders_are_said_as_multiples() -> None:
    h = Index.of("H")
    for value, said in (
        (h - h // 32 * 32, "H is a multiple of 32"),
        ((h + 7) // 8 - (h + 31) // 32 * 4, "H is a multiple of 32, or up to 7 less"),
        (h // 8 - h // 32 * 4, "H is a multiple of 32, or up to 7 more"),
        (h - 1 - (h - 1) // 2 * 2, "H - 1 is a multiple of 2"),
    ):
        found = remainders(Condition(value, "=="))
        assert found and found[1].words("H") == said
    assert Remainders(8, frozenset((0, 3))).words("H") == "H is a multiple of 8, or H % 8 is 3"
    assert remainders(Condition(h // 2 - 7, "==")) is None, "this does not repeat"


def test_what_users_state_makes_the_guard_unnecessary() -> None:
    c = ShapeContext({"H": Sizes(multiple=32)})
    h = c.declare("H", "x")
    c.unify((h + 7) // 8, (h + 31) // 32 * 4, "Concat")
    assert [g.message for g in c.guards()] == ["dim H of x: the program was compiled for multiples of 32"]
    c = ShapeContext({"H": Sizes(multiple=2)})
    h = c.declare("H", "x")
    c.unify((h + 7) // 8, (h + 31) // 32 * 4, "Concat")
    assert c.guards()[-1].message == "Concat" and c.multiple_of("H") == 32


def pyramid(dims: list[int | str], join: str = "Concat") -> bytes:
    """Build a map and its half, upsampled again."""
    pool = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}
    up = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    nodes = [
        helper.make_node("MaxPool", ["x"], ["a"], **pool), helper.make_node("MaxPool", ["a"], ["b"], **pool),
        helper.make_node("Resize", ["b", "", "s"], ["u"], **up),
        helper.make_node(join, ["a", "u"], ["y"], name="join", **({"axis": 1} if join == "Concat" else {})),
    ]  # fmt: skip
    scales = numpy_helper.from_array(np.array([1, 1, 2, 2], np.float32), "s")
    x, y = helper.make_tensor_value_info("x", F, dims), helper.make_tensor_value_info("y", F, None)
    graph = helper.make_graph(nodes, "g", [x], [y], [scales])
    data: bytes = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString()
    return data


@pytest.mark.parametrize("join", ["Concat", "Add"])
def test_a_skip_connection_has_the_guard_of_a_multiple(join: str) -> None:
    graph = import_model(pyramid([1, 3, "H", "W"], join))
    said = {g.words for g in graph.guards if g.relation == "%=="}
    assert said == {f"{s} is a multiple of 4, or up to 1 less" for s in "HW"}
    assert not any(g.relation == "==" for g in graph.guards)


@pytest.mark.parametrize("name", ["H", "height", "d0"])
def test_a_fixed_export_is_told_the_multiple_that_works(name: str) -> None:
    symbols = {"x": (None, None, name, "W")}
    with pytest.raises(ShapeError, match=f"{name} is a multiple of 4") as e:
        import_model(pyramid([1, 3, 32, 64]), symbols=symbols)
    assert f'dims={{"{name}": Sizes(multiple=4)}}' in str(e.value)
    sizes = {name: Sizes(multiple=4), "W": Sizes(multiple=4)}
    assert import_model(pyramid([1, 3, 32, 64]), sizes, symbols).sources


@pytest.mark.parametrize("name", ["?", "", "-1", "None", "unk__12", "unknown", "unk"])
def test_what_is_no_name_of_a_dim_names_none(name: str) -> None:
    graph = relu(["B", name, name])
    assert len({str(d) for d in graph.tensors["x"].shape}) == 3 and not graph.guards


def test_names_stay_names() -> None:
    assert len(relu(["unkempt", "n", "n"]).guards) == 1


def relu(dims: list[int | str]) -> Graph:
    """Build one node over an input with the given dims."""
    x, y = helper.make_tensor_value_info("x", F, dims), helper.make_tensor_value_info("y", F, None)
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    return import_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]))


def test_a_pinned_size_is_noted() -> None:
    target = numpy_helper.from_array(np.array([1, 4]), "s")
    x, y = helper.make_tensor_value_info("x", F, ["B", 4]), helper.make_tensor_value_info("y", F, None)
    graph = helper.make_graph([helper.make_node("Reshape", ["x", "s"], ["y"])], "g", [x], [y], [target])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    assert any("every call needs B (x axis 0) to be 1" in n for n in import_model(model).notes)
    assert not any("every call" in n for n in import_model(model, {"B": (1, 1)}).notes)


@pytest.mark.parametrize("step", [2, 3])
def test_strided_slices_that_are_joined_have_the_guard_of_a_multiple(step: int) -> None:
    """The first layer of YOLOX, the merging of Swin: every slice has a start below its step."""
    starts = {f"s{k}": np.array([k]) for k in range(step)}
    constants = {**starts, "e": np.array([2**63 - 1]), "a": np.array([1]), "k": np.array([step])}
    nodes = [helper.make_node("Slice", ["x", s, "e", "a", "k"], [f"y{s}"]) for s in starts]
    nodes.append(helper.make_node("Concat", [f"y{s}" for s in starts], ["y"], axis=0))
    x, y = helper.make_tensor_value_info("x", F, ["N", "H"]), helper.make_tensor_value_info("y", F, None)
    graph = helper.make_graph(nodes, "g", [x], [y], [numpy_helper.from_array(a, n) for n, a in constants.items()])
    found = import_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString())
    said = {sentence(g.left, g.relation, g.right, g.words) for g in found.guards}
    assert said == {f"H is a multiple of {step}"}
