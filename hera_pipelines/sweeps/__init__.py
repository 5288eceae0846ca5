"""Hyper-parameter search: many trainings of one step, each with its own attempts, checkpoints and lineage.

A sweep is a plain fan-out whose items are written down where the pipeline is
compiled, so every resume, and every Workflow made from one template, has the
same trials.
"""

from hera_pipelines.sweeps.distributions import choice, integers, log_uniform, uniform
from hera_pipelines.sweeps.search import Sweep, grid, random_search

__all__ = ["Sweep", "choice", "grid", "integers", "log_uniform", "random_search", "uniform"]
