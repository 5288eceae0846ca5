"""Checks whether a store or a cluster is fit for Tiphys, and names the remedy for each problem.

One module reads the cluster; every check is a pure function of that observation. A store is tried out.
"""

from tiphys_controller.doctor.check import CheckStatus, Finding, UnknownValue, failed_checks
from tiphys_controller.doctor.examine import check_cluster
from tiphys_controller.doctor.observe import observe_cluster
from tiphys_controller.doctor.obstacles import Obstacle, distinct_obstacles, observe_obstacles

__all__ = [
    "CheckStatus",
    "Finding",
    "Obstacle",
    "UnknownValue",
    "check_cluster",
    "distinct_obstacles",
    "failed_checks",
    "observe_cluster",
    "observe_obstacles",
]
