"""The command line: the functions of the Python interface as commands."""

from polydyn.cli import batch, cache, compare, dump, extract, minimise, records, tune
from polydyn.cli.main import main

__all__ = ["batch", "cache", "compare", "dump", "extract", "main", "minimise", "records", "tune"]
