"""The command line: the words of the Python interface, as commands."""

from polydyn.cli.main import main
from polydyn.cli.tune import tune

__all__ = ["main", "tune"]
