"""Measurements against baselines, and the models that they use. Not part of the installed package."""
