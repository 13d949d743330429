"""Passes over the symbolic graph, each with a switch and its reasons."""
