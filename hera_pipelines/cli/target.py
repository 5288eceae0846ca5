"""Here, or on a cluster? Says where a command works, and refuses options that mean nothing there, by name."""

import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Annotated

import typer
from tiphys_controller import ADDRESS, is_known

from hera_pipelines.cli.shared_options import Where
from tiphys.errors import TiphysError, UsageError
from tiphys.store import Store, Submission, submissions

if TYPE_CHECKING:
    from tiphys_controller import ClusterSubmitter


_CLUSTERS = ("kubernetes:", ADDRESS)
"""So begin the names of all clusters of Kubernetes, and of one that is known by its argo-server alone."""

ENGINE_OPTIONS = {
    "state": "--state",
    "queues": "--queues",
    "plugin_port": "--plugin-port",
    "speed": "--speed",
    "code": "--code",
}
CLUSTER_OPTIONS = {
    "context": "--context",
    "namespace": "--namespace",
    "kubeconfig": "--kubeconfig",
    "argo_server": "--argo-server",
}

ToClusterOption = Annotated[
    bool, typer.Option("--cluster", help="On the cluster of the kubeconfig, in place of this machine.")
]


def refuse(command: typer.Context, options: Mapping[str, str], why: str) -> None:
    """Refuse those ``options`` (names by parameter) that were given on the command line.

    Raises:
        UsageError: one was.
    """
    if given := [option for parameter, option in options.items() if _is_given(command, parameter)]:
        raise UsageError(f"{', '.join(given)}: {why}")


def last_submission(store: Store, run: str) -> Submission | None:
    """The last submission of a run; None before the first."""
    return next(iter(reversed(submissions(store, run))), None)


def runs_on_cluster(last: Submission | None, cluster: bool, local: bool) -> bool:
    """Whether a run goes on at a cluster: where its last submission went, unless an option says otherwise.

    Raises:
        UsageError: both options are given.
    """
    if cluster and local:
        raise UsageError("--cluster and --local exclude each other; give one of them")
    return cluster or (not local and is_on_cluster(last))


def is_on_cluster(last: Submission | None) -> bool:
    """Whether a submission went to a cluster of Kubernetes, and not to an engine on some machine."""
    return ran_on(last).startswith(_CLUSTERS)


def ran_on(last: Submission | None) -> str:
    """The cluster that a submission went to; empty where nobody wrote it down."""
    if last is None:
        return ""
    return last.bound.cluster if last.bound else last.claim.cluster


def cluster_submitter(where: Where, note: Callable[[str], object] = lambda _: None) -> tuple["ClusterSubmitter", str]:
    """The cluster that the options name, and the namespace in it; empty where nothing names one.

    Args:
        where: The options.
        note: Told what an argo-server alone cannot.

    Raises:
        UsageError: there is no such cluster.
        NotFoundError: there is no such namespace.
    """
    from tiphys_controller.kubernetes import KubernetesSubmitter  # only a command that talks to a cluster needs it

    from tiphys.kube import cluster_name

    if where.argo_server:
        return _through_argo_server(where, where.argo_server, note)
    api = where.connect()
    return KubernetesSubmitter(api, cluster_name(api)), api.namespace


def _through_argo_server(
    where: Where, argo_server: str, note: Callable[[str], object]
) -> tuple["ClusterSubmitter", str]:
    from tiphys_controller import argo_server as argo

    from tiphys.kube import cluster_name
    from tiphys.kube.resources import WORKFLOWS

    api, cluster = None, None
    try:
        api = where.connect()
        api.get(WORKFLOWS, api.namespace, "tiphys")  # may it look at Workflows?
        cluster = cluster_name(api)
    except TiphysError as error:
        if where.kubeconfig or where.context:
            raise
        note(
            f"which cluster is behind argo-server {argo_server} is not known, because no API server tells: {error}; "
            "a submission that it does not show counts as running, until it is passed over with --force"
        )
    server = argo.argo_server(argo_server, os.environ, api.authorization if api else lambda: "")
    namespace = where.namespace or os.environ.get("ARGO_NAMESPACE") or (api.namespace if api else "")
    return argo.ArgoServerSubmitter(server, cluster, api if cluster else None), namespace


def must_be_the_cluster_of(last: Submission, cluster: str, run: str) -> None:
    """Refuse a cluster other than that in which the last submission ran, if both have a name.

    Raises:
        UsageError: both are named, and what to do.
    """
    held = ran_on(last)
    if held != cluster and is_known(held) and is_known(cluster):
        raise UsageError(
            f"the last submission of run {run} went to cluster {held}, and this kubeconfig leads to {cluster}; choose "
            "the right one with --context or --kubeconfig, or go on in this one with --cluster"
        )


def words(options: Iterable[tuple[str, object]]) -> list[str]:
    """``--option value`` of those that have a value, for a command that a person is to type."""
    return [word for option, value in options if value for word in (option, str(value))]


def _is_given(command: typer.Context, parameter: str) -> bool:
    source = command.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"
