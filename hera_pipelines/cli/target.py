"""Decides whether a command works on this machine or on a cluster, and which cluster.

Refuses options that have no meaning there, and opens the cluster through its API
server or through an argo-server.
"""

import os
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from tiphys_controller import ADDRESS_PREFIX, TenantSubmitter, is_stable_cluster_name, locate_workflow

from hera_pipelines.cli.shared_options import ClusterOptions
from hera_pipelines.local.live_workflows import LocalWorkflows
from tiphys.errors import NotFoundError, TiphysError, UsageError
from tiphys.lineage.run_history import RunHistory
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.records.names import LOCAL_CLUSTER_PREFIX
from tiphys.store import Store, Submission, read_run

if TYPE_CHECKING:
    from tiphys_controller import ClusterSubmitter


_CLUSTER_PREFIXES = ("kubernetes:", ADDRESS_PREFIX)
"""Prefixes of recorded cluster names: a Kubernetes cluster, or one that is known only by its argo-server."""

ENGINE_OPTIONS = ("state", "queues", "plugin_port", "speed", "code")
CLUSTER_OPTIONS = ("context", "namespace", "kubeconfig", "argo_server")

OnClusterOption = Annotated[
    bool, typer.Option("--cluster", help="Run on the cluster of the kubeconfig instead of on this machine.")
]


def refuse_options(command: typer.Context, parameters: Collection[str], why: str) -> None:
    """Refuse the options of ``parameters`` if the command line contains one of them.

    Raises:
        UsageError: the command line contains one; ``why`` is the reason in the message.
    """
    refused = [
        (option.secondary_opts or option.opts)[-1]
        for option in command.command.params
        if option.name in parameters and _is_given(command, option.name)
    ]
    if refused:
        raise UsageError(f"{', '.join(refused)}: {why}")


def required_submission(store: Store, run: str, verb: str) -> Submission:
    """The newest submission of a run, for a command that can only ``verb`` one.

    Raises:
        NotFoundError: the store has no such run, or it was never submitted.
    """
    read_run(store, run)
    if (last := RunHistory(store, run).last_submission) is None:
        raise NotFoundError(f"run {run} was never submitted, so there is nothing to {verb}")
    return last


def is_on_cluster(last: Submission | None) -> bool:
    """Whether a submission went to a Kubernetes cluster, not to a local engine."""
    return cluster_of_submission(last).startswith(_CLUSTER_PREFIXES)


def cluster_of_submission(last: Submission | None) -> str:
    """Name of the cluster that a submission went to; empty if it was not recorded."""
    if last is None:
        return ""
    return last.binding.cluster if last.binding else last.claim.cluster


def find_workflows(
    command: typer.Context, last: Submission, run: str, cluster_options: ClusterOptions, note: Callable[[str], object]
) -> "LocalWorkflows | ClusterSubmitter":
    """The Workflows of the cluster, or of the state folder on this machine, that a submission went to.

    Raises:
        UsageError: the options lead to another cluster, or the run is on a machine, where they mean nothing, or on
            another machine.
    """
    if is_on_cluster(last):
        submitter, _ = cluster_submitter(replace(cluster_options, namespace=last.claim.namespace), note)
        require_same_cluster(last, submitter.cluster, run)
        return submitter
    refuse_options(command, CLUSTER_OPTIONS, f"this is for a cluster, and run {run} runs on this machine")
    return find_local_workflows(last, run)


def find_local_workflows(last: Submission, run: str) -> LocalWorkflows:
    """The state folder that holds the Workflow of a submission to a local engine.

    Raises:
        UsageError: the engine ran on another machine, or is not recorded.
    """
    host, _, folder = cluster_of_submission(last).removeprefix(LOCAL_CLUSTER_PREFIX).partition(":")
    workflows = LocalWorkflows(Path(folder).parent)
    if not folder or workflows.cluster != cluster_of_submission(last):
        raise UsageError(f"run {run} was started on machine {host or '(not recorded)'}; use this command there")
    return workflows


def cluster_submitter(
    cluster_options: ClusterOptions, note: Callable[[str], object] = lambda _: None
) -> tuple["ClusterSubmitter", str]:
    """Return a submitter for the cluster that the options name, and its namespace (empty if nothing names one).

    ``note`` is called with a sentence about what is unknown when only an argo-server answers.

    Raises:
        UsageError: the cluster does not exist.
        NotFoundError: the namespace does not exist.
    """
    # Imported here, because only commands that talk to a cluster need the Kubernetes client.
    from tiphys_controller.kubernetes import KubernetesSubmitter

    from tiphys.kube import identify_cluster

    if cluster_options.argo_server:
        return _through_argo_server(cluster_options, cluster_options.argo_server, note)
    api = cluster_options.connect()
    return KubernetesSubmitter(api, identify_cluster(api)), api.namespace


def _through_argo_server(
    cluster_options: ClusterOptions, argo_server: str, note: Callable[[str], object]
) -> tuple["ClusterSubmitter", str]:
    from tiphys_controller import argo_server as argo

    from tiphys.kube import identify_cluster
    from tiphys.kube.resources import WORKFLOWS

    api, cluster = None, None
    try:
        api = cluster_options.connect()
        api.get(WORKFLOWS, api.namespace, "tiphys")  # fails if this account may not read Workflows
        cluster = identify_cluster(api)
    except TiphysError as error:
        if cluster_options.kubeconfig or cluster_options.context:
            raise
        note(
            f"the cluster behind argo-server {argo_server} cannot be identified without an API server: {error}; "
            "a submission that the argo-server does not show counts as running, unless --force is given"
        )
    server = argo.connect_argo_server(argo_server, os.environ, api.authorization if api else lambda: "")
    namespace = cluster_options.namespace or os.environ.get("ARGO_NAMESPACE") or (api.namespace if api else "")
    return argo.ArgoServerSubmitter(server, cluster, api if cluster else None), namespace


def tenant_submitter(
    cluster_options: ClusterOptions, last: Submission | None, run: str, note: Callable[[str], object]
) -> tuple["TenantSubmitter", str]:
    """A submitter for the one namespace in which a run may continue, and that namespace.

    A run that went to a cluster stays in its namespace. A run of the local engine, and one that was never submitted,
    goes where the options say. Each Workflow is announced by ``note`` right before it is created, with its namespace
    and service account: they come from records.

    Raises:
        UsageError: the options name another namespace than the records, or no namespace is given.
    """
    submitter, default_namespace = cluster_submitter(cluster_options, note)
    recorded = locate_workflow(last)[0] if last is not None and is_on_cluster(last) else ""
    given = cluster_options.namespace
    if given and recorded and given != recorded:
        raise UsageError(
            f"-n {given}: the records of run {run} name namespace {recorded}, and a run stays in its namespace; "
            "leave -n out if you trust this store, or give the store of the namespace that you mean"
        )
    namespace = recorded or given or default_namespace
    if not namespace:
        raise UsageError("no namespace is given for the Workflow; give one with -n")

    def announce(manifest: Manifest) -> None:
        metadata, account = manifest["metadata"], manifest["spec"].get("serviceAccountName") or "default"
        note(f"creating Workflow {metadata['name']} in namespace {namespace}, under service account {account}")

    return TenantSubmitter(submitter, namespace, announce), namespace


def require_same_cluster(last: Submission, cluster: str, run: str) -> None:
    """Refuse a cluster other than the one that the last submission ran in, if both clusters have a stable name.

    Raises:
        UsageError: the clusters differ.
    """
    last_cluster = cluster_of_submission(last)
    if last_cluster != cluster and is_stable_cluster_name(last_cluster) and is_stable_cluster_name(cluster):
        raise UsageError(
            f"the last submission of run {run} went to cluster {last_cluster}, and this kubeconfig leads to {cluster}; "
            "choose the right cluster with --context or --kubeconfig, or resume in this one with --cluster"
        )


def _is_given(command: typer.Context, parameter: str) -> bool:
    source = command.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"
