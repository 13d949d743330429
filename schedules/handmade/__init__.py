"""Schedules that people write: named steps over the proven transformations, and the files that hold them."""
