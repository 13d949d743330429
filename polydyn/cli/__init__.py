"""The command line: the functions of the Python interface as commands."""

import sys

try:
    from polydyn.cli.group import main
except ModuleNotFoundError as e:
    if e.name != "click":
        raise
    sys.exit("error: the commands of polydyn need click\n  remedy: pip install polydyn, with its dependencies")

__all__ = ["main"]
