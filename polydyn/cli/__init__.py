"""The command line: the words of the Python interface, as commands."""

import polydyn.cli.tune  # adds its command
from polydyn.cli.main import main

__all__ = ["main"]
