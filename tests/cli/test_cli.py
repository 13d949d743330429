"""The command line, called like a user."""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result

import polydyn
from polydyn.cli import main
from polydyn.cli.doctor import EXTRAS, REQUIRED_PACKAGES
from polydyn.cli.group import COMMANDS, was_interrupted
from polydyn.errors import BuildError
from polydyn.measure import TRIALS
from polydyn.runtime.explain import text_table
from polydyn.verification import TOLERANCE
from tests.support.paths import ROOT
from tests.support.stored import path_of
from tests.support.tiny import model, node


def call(*args: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in args])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "bert.polydyn"
    done = call("compile", path_of("bert_tiny"), "-o", path, "--dim", "B=1:8", "--dim", "L=0:", "--threads", 1)
    assert done.exit_code == 0, done.output
    assert "17 launches" in done.output and "peak memory" in done.output and path.exists()
    return path


def test_inspect_says_what_a_call_must_meet(saved: Path) -> None:
    text = call("inspect", saved).output
    for part in (
        "input_ids: int64[B, L]", "last_hidden_state: float32[B, L, 32]", "B: axis 0 of input 'input_ids'",
        "compiled for 1 <= B <= 8", "L <= 160", "an index in 'input_ids' lies outside its axis of size 120",
        "host operators", "launches (", "merged into one contraction",
    ):  # fmt: skip
        assert part in text, part


def test_run_with_made_up_inputs_and_with_files(saved: Path, tmp_path: Path) -> None:
    done = call("run", saved, "--shape", "B=2,L=5", "--output-dir", tmp_path / "out")
    assert done.exit_code == 0 and "2x5x32" in done.output
    assert np.load(tmp_path / "out" / "last_hidden_state.npy").shape == (2, 5, 32)
    ids = np.array([[5, 6, 7]])
    np.save(tmp_path / "ids.npy", ids)
    done = call("run", saved, "--input", f"input_ids={tmp_path / 'ids.npy'}", "--output-dir", tmp_path)
    assert done.exit_code == 0, done.output
    want = polydyn.load(saved).run({"input_ids": ids, "attention_mask": np.ones_like(ids)})["last_hidden_state"]
    assert np.load(tmp_path / "last_hidden_state.npy").shape == want.shape


def test_help_and_completion_import_no_command() -> None:
    """They cost little more than Python itself: neither numpy nor rich nor onnx is imported. The options of the most
    frequent commands are completed without them too."""
    code = "import sys; from polydyn.cli import main; main(['--help'], standalone_mode=False); " \
           "import polydyn.cli.programs, polydyn.cli.tune, polydyn.cli.compare, polydyn.cli.batch; " \
           "print(*{'numpy', 'rich', 'onnx', 'polydyn.runtime.program'} & {*sys.modules})"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[-1] == "" and not any(line.endswith("...") or len(line) > 80 for line in lines[1:])
    assert all(any(line.startswith(f"  {name} ") for line in lines) for name in COMMANDS)
    items = main.shell_complete(click.Context(main), "com")
    assert [i.value for i in items] == ["compare", "compile", "completion"]


def test_defaults_of_commands_are_those_of_the_interface() -> None:
    """They are written out in the options, because the modules that define them load slowly."""
    defaults = {(c, p.name): p.default for c in ("tune", "verify") for p in main.get_command(None, c).params}  # type: ignore
    assert defaults["tune", "trials"] == TRIALS and defaults["verify", "tolerance"] == TOLERANCE


def test_every_module_of_commands_is_listed() -> None:
    for name, (module, _) in COMMANDS.items():
        command = main.get_command(click.Context(main), name)
        assert command is not None and f"polydyn.cli.{module}" in sys.modules and call(name, "-h").exit_code == 0
    assert set(main.commands) == set(COMMANDS)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), AssertionError("Status.init")])
def test_ctrl_c_ends_a_command_with_130(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that is interrupted may raise an error of its own, as Dask does while its workers start."""
    error.__context__ = KeyboardInterrupt()

    def interrupted() -> None:
        raise error

    main.get_command(click.Context(main), "cache")  # its module is imported once
    monkeypatch.setitem(main.commands, "cache", click.Command("cache", callback=interrupted))
    done = call("cache")
    assert done.exit_code == 130 and done.output == "interrupted\n"


def test_errors_that_are_each_others_origins_are_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that is raised again gets the context of its new place, and may be the cause of that context."""
    first, second = BuildError("first"), BuildError("second")
    first.__context__, second.__cause__ = second, first
    monkeypatch.setitem(main.commands, "cache", click.Command("cache", callback=lambda: _raise(second)))
    done = call("cache")
    assert done.exit_code == 1 and "error (BuildError): second" in done.output


def _raise(error: BaseException) -> None:
    raise error


def test_a_name_of_a_pass_may_be_misspelt(relu: Path) -> None:
    done = call("compile", relu, "-o", relu.with_name("a"), "--without", "stich")
    assert done.exit_code == 2 and "unknown pass 'stich'; did you mean stitch?" in done.output


def test_outputs_that_cannot_be_written(relu: Path) -> None:
    done = call("run", relu, "--shape", "N=2", "--output-dir", "/proc/nowhere")
    assert done.exit_code == 1 and "cannot write /proc/nowhere" in done.output and "remedy" in done.output


def test_only_sizes_that_do_not_follow_are_requested(saved: Path) -> None:
    assert "as in B=8,L=8\n" in call("run", saved).output
    assert "as in L=8\n" in call("run", saved, "--shape", "attention_mask_0=2").output


def test_a_model_is_not_a_damaged_program(relu: Path) -> None:
    done = call("extract", relu, "-o", relu.with_name("out"))
    assert done.exit_code == 1 and "compile it first: polydyn compile" in done.output
    assert call("verify", relu, "--shape", "N=2", "--tolerance", -1).exit_code == 2


def test_tables_fit_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    row = ("a" * 70, "b" * 70, "1234567")
    monkeypatch.delenv("COLUMNS", raising=False)
    assert max(map(len, text_table(("kernel", "label", "us"), [row]).splitlines())) > 120
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, text_table(("kernel", "label", "us"), [row]).splitlines())) == 79


@pytest.fixture
def relu(tmp_path: Path) -> Path:
    """Write a model of [N, 3] into a folder for further files."""
    path = tmp_path / "relu.onnx"
    onnx.save(model([node("Relu", "x", "y")], {"x": ("float32", ["N", 3])}, ["y"]), str(path))
    return path


def test_a_model_runs_without_an_artifact(relu: Path) -> None:
    done = call("run", relu, "--shape", "N=2")
    assert done.exit_code == 0 and "2x3" in done.output


@pytest.mark.parametrize("option", [("--dim", "B=1:4"), ("--without", "stitch"), ("--target", "cuda:sm_80")])
def test_an_artifact_takes_no_options_of_compiling(saved: Path, option: tuple[str, str]) -> None:
    done = call("run", saved, "--shape", "B=1,L=2", *option)
    assert done.exit_code == 1 and "is already compiled, for cpu" in done.output


def test_explain_and_profile_name_the_kernels(saved: Path) -> None:
    kernels = {c["kernel"] for x in polydyn.load(saved).manifest["launches"] for c in x["candidates"]}
    explained, profiled = call("explain", saved, "--shape", "B=2,L=7"), call("profile", saved, "--shape", "B=2,L=7")
    for done in (explained, profiled):
        assert done.exit_code == 0, done.output
        assert all(k in done.output for k in kernels)
    assert "GFLOP/s" in profiled.output and "share" in profiled.output
    more = call("explain", saved, "--shape", "B=2,L=7", "--why", "--peak", 100, "--bandwidth", 10)
    assert "epilogue" in more.output and "minimum time at 100 GFLOP/s" in more.output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("inspect", "missing.onnx"), "error (MissingModelError): cannot read missing.onnx"),
        (("run", "SAVED", "--shape", "B=9,L=2"), "compiled for 1 <= B <= 8"),
        (("run", "SAVED", "--shape", "B=2"), "no size is given for L"),
        (("run", "SAVED", "--input", "input_ids=nothing.npy"), "cannot read nothing.npy"),
        (("run", "SAVED", "--input", "input_ids"), "does not name a file"),
        (("explain", "SAVED", "--shape", "B=2,L=161"), "L <= 160, here 161 and 160"),
    ],
)
def test_errors_are_text_and_exit_code_1(saved: Path, args: tuple[str, ...], message: str) -> None:
    done = call(*(saved if a == "SAVED" else a for a in args))
    assert done.exit_code == 1 and message in done.output and "Traceback" not in done.output
    assert "remedy" in done.output or "rule" in done.output


def test_usage_errors_are_clicks() -> None:
    assert call("explain", "x", "--shape", "B").exit_code == 2
    assert call("compile", "x", "-o", "y", "--dim", "B=a:b").exit_code == 2
    assert call("nonsense").exit_code == 2


def test_a_failed_compile_leaves_no_output(tmp_path: Path, relu: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"nothing")
    assert call("compile", tmp_path / "bad.onnx", "-o", tmp_path / "out.polydyn").exit_code == 1
    missing = call("compile", relu, "-o", tmp_path / "no" / "out.polydyn")
    assert missing.exit_code == 1 and "cannot write" in missing.output
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.onnx", "relu.onnx"]


def test_debug_shows_where_an_error_comes_from() -> None:
    done = call("--debug", "inspect", "missing.onnx")
    assert done.exit_code == 1 and type(done.exception).__name__ == "MissingModelError"


def test_doctor_names_compiler_processor_and_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    text = call("doctor").output
    assert all(part in text for part in ("compiler", "processor", "cache", "numpy", "extra [bench]"))
    monkeypatch.setattr(polydyn, "IMPORTED_NS", 0)
    assert "a file of polydyn is dated in the future" in call("doctor").output
    monkeypatch.setenv("CC", "no-such-compiler")
    broken = call("doctor")
    assert broken.exit_code == 1 and "--  compiler: no C compiler found" in broken.output


def test_doctor_looks_for_what_the_package_declares() -> None:
    declared = configparser.ConfigParser()
    declared.read(ROOT / "setup.cfg")

    def names(text: str) -> set[str]:
        return {re.split(r"[>\[]", line)[0] for line in text.split()}

    assert names(declared["options"]["install_requires"]) == set(REQUIRED_PACKAGES)
    extras = declared["options.extras_require"]
    assert {e: names(extras[e]) for e in extras} == {e: set(p) for e, p in EXTRAS.items()}


def test_outputs_whose_names_files_cannot_tell_apart_get_files_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    nodes = [node("Relu", "x", "a/b"), node("Neg", "x", "a:b"), node("Abs", "x", "a_b_1")]
    onnx.save(model(nodes, {"x": ("float32", ["N"])}, ["a/b", "a:b", "a_b_1"]), str(path))
    assert call("run", path, "--shape", "N=5", "--output-dir", tmp_path).exit_code == 0
    a, b, c = (np.load(tmp_path / f"{n}.npy") for n in ("a_b", "a_b_1", "a_b_1_2"))
    assert (np.maximum(-b, 0) == a).all() and (np.abs(b) == c).all() and (b != 0).any()


def test_python_m_polydyn_works() -> None:
    run = subprocess.run([sys.executable, "-m", "polydyn", "--version"], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout.strip() == f"polydyn, version {polydyn.__version__}", run.stderr


def test_origins_of_an_error_may_form_a_circle() -> None:
    a, b = ValueError(), OSError()
    a.__context__, b.__cause__ = b, a
    assert not was_interrupted(a) and not was_interrupted(b)
    a.__cause__ = KeyboardInterrupt()
    assert was_interrupted(b)


START = """
import builtins, sys
import polydyn.__main__ as command
real = builtins.__import__
def interrupted(name, *rest):
    if name == 'click':
        raise KeyboardInterrupt
    return real(name, *rest)
if {where!r} == 'callback':  # Python ignores an error in a callback
    import polydyn.cli.cache, time, weakref, click
    class Object: pass
    def wait():
        x = Object()
        reference = weakref.ref(x, lambda _: exec('raise KeyboardInterrupt'))
        del x
        time.sleep(10)
        print('not interrupted')
    polydyn.cli.main.commands['cache'] = click.Command('cache', callback=wait)
elif {where!r} == 'import':
    builtins.__import__ = interrupted
else:
    import click, polydyn.cli.cache
    polydyn.cli.main.commands['cache'] = click.Command('cache', callback=lambda: exec('raise KeyboardInterrupt'))
sys.argv = ['polydyn', 'cache']
command.start()
"""


@pytest.mark.parametrize("where", ["import", "exec", "callback"])
def test_ctrl_c_ends_the_process_with_130(where: str) -> None:
    """In the first imports; where Python itself would end by the signal, because ``exec`` was interrupted; and where
    Python ignores errors."""
    done = subprocess.run([sys.executable, "-c", START.format(where=where)], capture_output=True, text=True)
    assert done.returncode == 130 and done.stderr == "interrupted\n" and done.stdout == ""


@pytest.mark.parametrize("words", [["--help"], ["cache"], ["cache", "--json"]])
def test_standard_output_on_a_full_disk(words: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "polydyn", *words]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == "error (OSError): No space left on device" and "remedy: " in done.stderr
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr


def test_a_narrow_terminal_leaves_out_columns_that_are_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    heading, row = ("kernel", "label", "us", "MB", "MFLOP"), ("k" * 40, "l" * 40, "1" * 10, "2" * 10, "3" * 10)
    monkeypatch.setenv("COLUMNS", "60")
    text = text_table(heading, [row], optional=("MB", "MFLOP", "us"))
    assert max(map(len, text.splitlines())) <= 60 and "MB" not in text.splitlines()[0] and "us" in text.splitlines()[0]
    assert text.splitlines()[-1] == "a wider terminal also shows MB"
    monkeypatch.setenv("COLUMNS", "200")
    assert "a wider" not in text_table(heading, [row], optional=("MB", "MFLOP", "us"))
    monkeypatch.delenv("COLUMNS")
    assert max(map(len, text_table(heading, [row], optional=("MB",)).splitlines())) > 110


def test_a_table_of_outputs_fits_a_narrow_terminal(relu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are not cut: columns are left out."""
    monkeypatch.setenv("COLUMNS", "40")
    lines = call("run", relu, "--shape", "N=20").output.splitlines()
    assert max(map(len, lines)) <= 40 and "..." not in lines[2] and "…" not in lines[2], lines
    assert lines[3] == "a wider terminal also shows dtype" and lines[2].split()[:2] == ["y", "20x3"]


def test_sizes_that_no_memory_holds_are_named(relu: Path) -> None:
    for size in (10**13, 10**20):
        done = call("run", relu, "--shape", f"N={size}")
        assert done.exit_code == 1 and f"no memory for input 'x' of shape [{size}, 3]" in done.output, done.output


def test_a_path_that_does_not_exist_may_have_been_a_program(tmp_path: Path) -> None:
    done = call("inspect", tmp_path / "none.polydyn")
    assert done.exit_code == 1 and "give the path of a saved program" in done.output


def test_a_process_without_standard_output_ends_as_usual(relu: Path) -> None:
    words = [sys.executable, "-m", "polydyn", "run", str(relu), "--shape", "N=2"]
    done = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_one_is_not_many(relu: Path) -> None:
    done = call("compile", relu, "-o", relu.parent / "relu.polydyn", "--no-cache")
    assert done.exit_code == 0 and ": 1 launch, 1 kernel, " in done.output, done.output
