"""Runs all checks of a cluster, in the order in which a person should read their findings."""

from collections.abc import Iterator
from itertools import chain

from tiphys_controller.doctor import checks_argo, checks_install, checks_kueue
from tiphys_controller.doctor.artifact_repository import check_artifact_repository
from tiphys_controller.doctor.check import Finding, check, failed, known, passed
from tiphys_controller.doctor.checks_namespace import check_namespace
from tiphys_controller.doctor.observed import ClusterObservation, find_plugin_mode

_MOST_OBSTACLES = 10
"""Most obstacles that are shown."""


def check_namespaces(observed: ClusterObservation) -> list[Finding]:
    """The checks of each namespace of workflows."""
    mode = find_plugin_mode(observed.tiphys.found)
    return [
        finding._replace(place=namespace.name)
        for namespace in observed.namespaces
        for finding in (
            *check_namespace(namespace, mode),
            *check_artifact_repository(namespace, observed.argo_settings),
        )
    ]


@check("workflows")
def check_obstacles(observed: ClusterObservation) -> Iterator[Finding]:
    """Nothing keeps a Workflow from going on."""
    obstacles = known(observed.obstacles)
    for obstacle in obstacles[:_MOST_OBSTACLES]:
        yield failed(str(obstacle), obstacle.remedy)
    if len(obstacles) > _MOST_OBSTACLES:
        yield failed(f"and {len(obstacles) - _MOST_OBSTACLES} more", "tiphys why RUN shows those of one run")
    if not obstacles:
        yield passed("nothing keeps a Workflow from going on")


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
    checks_install.check_plugin,
    checks_install.check_controller,
    checks_install.check_ledger,
    checks_kueue.check_kueue,
    checks_kueue.check_local_queues,
    checks_install.check_lost_nodes,
    checks_install.check_release_namespace,
    check_namespaces,
    check_obstacles,
    checks_argo.check_exit_codes,
    checks_install.check_clocks,
)


def check_cluster(observed: ClusterObservation) -> list[Finding]:
    """All findings about a cluster."""
    return list(chain.from_iterable(cluster_check(observed) for cluster_check in _CHECKS))
