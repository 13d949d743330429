"""Offline jobs: many models compiled and tuned on a Dask cluster, resumable, with a ledger and a report."""

from polydyn.jobs.run import Batch, BatchResult
from polydyn.jobs.spec import Job, read_jobs

__all__ = ["Batch", "BatchResult", "Job", "read_jobs"]
