"""Checks whether a cluster is fit for Tiphys, and names the remedy for each problem.

One module reads the cluster; every check is a pure function of that observation.
"""

from tiphys_controller.doctor.examine import run_checks
from tiphys_controller.doctor.finding import CheckStatus, DoctorFinding, is_cluster_usable
from tiphys_controller.doctor.observe import observe_cluster
from tiphys_controller.doctor.obstacles import Obstacle, distinct_obstacles, observe_obstacles

__all__ = [
    "CheckStatus",
    "DoctorFinding",
    "Obstacle",
    "distinct_obstacles",
    "is_cluster_usable",
    "observe_cluster",
    "observe_obstacles",
    "run_checks",
]
