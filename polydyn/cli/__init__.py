"""The command line: the words of the Python interface, as commands."""

from polydyn.cli.batch import batch
from polydyn.cli.cache import cache
from polydyn.cli.main import main
from polydyn.cli.records import records
from polydyn.cli.tune import tune

__all__ = ["batch", "cache", "main", "records", "tune"]
