"""``python -m polydyn`` is the command ``polydyn``."""

from polydyn.cli import main

main()
