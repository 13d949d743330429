"""Continuous integration runs make targets only, so that every job also runs on a contributor's machine."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.paths import ROOT

GITHUB = ROOT / ".github"
WORKFLOWS = sorted(GITHUB.glob("workflows/*.yml"))
FORMS = sorted(GITHUB.glob("ISSUE_TEMPLATE/*.yml"))
ACTIONS = {"actions/checkout", "actions/setup-python", "actions/upload-artifact"}
VARIABLE = re.compile(r"[A-Z]+=\S+")
COMMAND = re.compile(r"`polydyn ([a-z]+)([^`\n]*)`")


def targets() -> set[str]:
    """The names before a colon in the Makefile."""
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def steps(path: Path) -> Iterator[dict[str, Any]]:
    """The steps of all jobs of a workflow."""
    for job in yaml.safe_load(path.read_text())["jobs"].values():
        yield from job["steps"]


def requested_targets(command: str) -> list[str]:
    """The targets of a ``make`` command; AssertionError if it is another command.

    Expressions of the forge, ``${{ ... }}``, count as one word.
    """
    first, *words = re.sub(r"\$\{\{.*?\}\}", "value", command).split()
    assert first == "make" and not set(command) & set(";&|\n"), command
    return [w for w in words if not VARIABLE.fullmatch(w)]


def test_a_workflow_exists_for_every_event() -> None:
    assert {p.stem for p in WORKFLOWS} == {"push", "pull_request", "nightly", "tag"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.stem)
def test_workflows_run_make_targets_only(path: Path) -> None:
    known = targets()
    commands = 0
    for step in steps(path):
        assert ("run" in step) != ("uses" in step), step
        if "uses" in step:
            assert step["uses"].partition("@")[0] in ACTIONS, step
            continue
        commands += 1
        requested = requested_targets(step["run"].strip())
        assert requested and set(requested) <= known, f"{path.name}: {step['run']}"
    assert commands


def test_other_commands_are_rejected() -> None:
    assert requested_targets("make sdist wheel SEEDS=2 FIRST=${{ github.run_number }}000") == ["sdist", "wheel"]
    for command in ("pip install x", "make lint && rm -rf x", "make lint; true", "make lint\nls"):
        with pytest.raises(AssertionError):
            requested_targets(command)


def test_pushes_use_the_oldest_python_of_setup_cfg() -> None:
    (oldest,) = re.findall(r"python_requires = >=([\d.]+)", (ROOT / "setup.cfg").read_text())
    job = yaml.safe_load((GITHUB / "workflows" / "push.yml").read_text())["jobs"]["check"]
    assert job["strategy"]["matrix"]["python"] == [oldest, "3.x"]


@pytest.mark.parametrize("path", FORMS, ids=lambda p: p.stem)
def test_issue_forms_are_complete(path: Path) -> None:
    """A form has a name, a description and fields with labels; ids and labels are unique."""
    form = yaml.safe_load(path.read_text())
    if path.stem == "config":
        assert form == {"blank_issues_enabled": True}
        return
    assert form["name"] and form["description"]
    fields = [x for x in form["body"] if x["type"] != "markdown"]
    assert all(x["type"] in {"input", "textarea", "dropdown", "checkboxes"} for x in fields)
    labels, ids = [x["attributes"]["label"] for x in fields], [x["id"] for x in fields]
    assert len(set(labels)) == len(labels) and len(set(ids)) == len(ids)
    assert {"doctor", "model"} <= set(ids)


def test_commands_of_the_forms_exist() -> None:
    """Every ``polydyn`` command that a form or a template names has that command and these options."""
    import click

    from polydyn.cli import main

    pages = [*FORMS, GITHUB / "PULL_REQUEST_TEMPLATE.md", ROOT / "SECURITY.md"]
    named = [x for p in pages for x in COMMAND.findall(p.read_text().replace("polydyn --debug ", "polydyn "))]
    assert {name for name, _ in named} >= {"doctor", "minimise", "profile"}
    for name, rest in named:
        command = main.get_command(click.Context(main), name)
        assert command is not None, name
        known = {o for p in command.params for o in p.opts}
        unknown = set(re.findall(r"(?<=\s)--?[a-z][\w-]*", rest)) - known
        assert not unknown, f"polydyn {name}: no option {unknown}"


def test_pre_commit_hooks_are_local() -> None:
    """Hooks download nothing: each runs a make target."""
    repos = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [r["repo"] for r in repos] == ["local"]
    hooks = {h["id"]: h for h in repos[0]["hooks"]}
    assert set(hooks) == {"ruff", "mypy", "layout"}
    for hook in hooks.values():
        assert hook["language"] == "system" and set(requested_targets(hook["entry"])) <= targets()
