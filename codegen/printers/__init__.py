"""Printers: loop IR to C."""
