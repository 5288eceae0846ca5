"""Here, or on a cluster? Says where a command works, and refuses options that mean nothing there, by name."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hera_pipelines.cli.cluster_options import connect
from tiphys.errors import UsageError
from tiphys.store import Submission

if TYPE_CHECKING:
    from tiphys_controller.kubernetes import KubernetesSubmitter

KUBERNETES = "kubernetes:"
"""The names of all clusters of Kubernetes begin with it."""

ENGINE_OPTIONS = {
    "state": "--state",
    "queues": "--queues",
    "plugin_port": "--plugin-port",
    "speed": "--speed",
    "code": "--code",
}
CLUSTER_OPTIONS = {"context": "--context", "namespace": "--namespace", "kubeconfig": "--kubeconfig"}

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


def runs_on_cluster(last: Submission | None, cluster: bool, local: bool) -> bool:
    """Whether a run goes on at a cluster: where its last submission went, unless an option says otherwise.

    Raises:
        UsageError: both options are given.
    """
    if cluster and local:
        raise UsageError("--cluster and --local exclude each other; give one of them")
    return cluster or (not local and ran_on(last).startswith(KUBERNETES))


def ran_on(last: Submission | None) -> str:
    """The cluster that a submission went to; empty where nobody wrote it down."""
    if last is None:
        return ""
    return last.bound.cluster if last.bound else last.claim.cluster


def cluster_submitter(
    kubeconfig: Path | None, context: str | None, namespace: str | None
) -> tuple["KubernetesSubmitter", str]:
    """The cluster that the options name, and the namespace in it.

    Raises:
        UsageError: there is no such cluster.
        NotFoundError: there is no such namespace.
    """
    from tiphys_controller.kubernetes import KubernetesSubmitter  # only a command that talks to a cluster needs it

    from tiphys.kube import cluster_name

    api = connect(kubeconfig, context, namespace)
    return KubernetesSubmitter(api, cluster_name(api)), api.namespace


def must_be_the_cluster_of(last: Submission, cluster: str, run: str) -> None:
    """Refuse a cluster other than that in which the last submission ran.

    Raises:
        UsageError: both are named, and what to do.
    """
    held = ran_on(last)
    if held != cluster:
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
