"""Hyper-parameter search: many trials of one training step, each with its own attempts, checkpoints and lineage.

A sweep is a plain fan-out whose items are fixed when the pipeline is compiled.
So every resume, and every Workflow of one template, has the same trials.
"""

from hera_pipelines.sweeps.distributions import choice, integers, log_uniform, uniform
from hera_pipelines.sweeps.search import SweepSpec, grid, random_search

__all__ = ["SweepSpec", "choice", "grid", "integers", "log_uniform", "random_search", "uniform"]
