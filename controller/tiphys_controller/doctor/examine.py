"""Runs all checks, in the order in which a person should read their findings."""

from tiphys_controller.doctor import checks_argo, checks_install, checks_kueue
from tiphys_controller.doctor.artifact_repository import check_artifact_repository
from tiphys_controller.doctor.checks_namespace import check_namespace
from tiphys_controller.doctor.finding import DoctorFinding, failed_finding, ok_finding, unknown_finding
from tiphys_controller.doctor.observed import ClusterObservation, UnknownValue, find_plugin_mode

_CHECKS = (
    # Slow settings cost time at every step and have no other symptom, so they come first.
    checks_argo.check_requeue_time,
    checks_argo.check_agent_patch_rate,
    checks_argo.check_task_set_rights,
    checks_install.check_api_server,
    checks_argo.check_argo_kinds,
    checks_argo.check_argo_version,
    checks_argo.check_informer_write_back,
    checks_argo.check_executor_plugins,
    checks_argo.check_agent_pods,
    checks_install.check_tiphys_kinds,
    checks_install.check_components,
    checks_install.check_ledger,
    checks_kueue.check_kueue,
    checks_install.check_release_namespace,
)
_LAST = (checks_argo.check_exit_codes, checks_install.check_clocks)
_MOST_OBSTACLES = 10
"""Most obstacles that are shown."""


def _check_obstacles(observed: ClusterObservation) -> list[DoctorFinding]:
    if isinstance(observed.obstacles, UnknownValue):
        return [unknown_finding("workflows", observed.obstacles.reason)]
    if not observed.obstacles:
        return [ok_finding("workflows", "nothing keeps a Workflow from going on")]
    first = observed.obstacles[:_MOST_OBSTACLES]
    shown = [failed_finding("workflows", str(obstacle), obstacle.remedy) for obstacle in first]
    if left := len(observed.obstacles) - len(shown):
        shown.append(failed_finding("workflows", f"and {left} more", "tiphys why RUN shows those of one run"))
    return shown


def run_checks(observed: ClusterObservation) -> list[DoctorFinding]:
    """All findings about a cluster."""
    mode = find_plugin_mode(observed.tiphys.found)
    return [
        *(finding for check in _CHECKS for finding in check(observed)),
        *(
            finding
            for namespace in observed.namespaces
            for finding in (
                *check_namespace(namespace, mode),
                *check_artifact_repository(namespace, observed.argo_settings),
            )
        ),
        *_check_obstacles(observed),
        *(finding for check in _LAST for finding in check(observed)),
    ]
