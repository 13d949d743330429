"""Measurements against rivals, and the models they are made on. Not part of the installed package."""
