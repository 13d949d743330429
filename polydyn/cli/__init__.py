"""The command line: the words of the Python interface, as commands."""

from polydyn.cli.main import main

__all__ = ["main"]
