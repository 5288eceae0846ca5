"""``tiphys stop``: stops a run on this machine or on its cluster. Programs may save, and finished steps are kept."""

from typing import TYPE_CHECKING, Annotated

import typer
from tiphys_controller import LiveWorkflow, ShutdownStrategy, is_stable_cluster_name

from hera_pipelines.cli.screen import Screen
from hera_pipelines.cli.shared_options import (
    ArgoServerOption,
    ClusterOptions,
    ContextOption,
    KubeconfigOption,
    StoreOption,
    existing_store,
    needs_store_option,
)
from hera_pipelines.cli.target import (
    CLUSTER_OPTIONS,
    cluster_of_submission,
    cluster_submitter,
    command_arguments,
    find_local_workflows,
    is_on_cluster,
    last_submission,
    refuse_options,
    require_same_cluster,
)
from hera_pipelines.local.live_workflows import LocalWorkflows
from tiphys.errors import NotFoundError
from tiphys.store import Submission, read_run

if TYPE_CHECKING:
    from tiphys_controller import ClusterSubmitter

EXAMPLES = """\b
Examples:
  tiphys stop digits-7xk2p
  tiphys stop digits-7xk2p --terminate
"""


def stop(
    command: typer.Context,
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    terminate: Annotated[
        bool, typer.Option("--terminate", help="Stop at once: no exit handler runs, so no end is recorded.")
    ] = False,
    store: StoreOption = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
    argo_server: ArgoServerOption = None,
) -> None:
    """Stop a run on this machine or on its cluster.

    Programs receive SIGTERM and may save. `tiphys resume` continues the run later.
    On this machine it does what Ctrl-C does in the terminal of the run.
    """
    screen: Screen = command.obj
    run_store = existing_store(screen, store)
    read_run(run_store, run)
    last = last_submission(run_store, run)
    if last is None:
        raise NotFoundError(f"run {run} was never submitted, so there is nothing to stop")
    claim = last.claim
    submitter: ClusterSubmitter | LocalWorkflows
    if is_on_cluster(last):
        submitter, _ = cluster_submitter(ClusterOptions(kubeconfig, context, claim.namespace, argo_server), screen.note)
        require_same_cluster(last, submitter.cluster, run)
    else:
        refuse_options(command, CLUSTER_OPTIONS, f"this is for a cluster, and run {run} runs on this machine")
        submitter = find_local_workflows(last, run)
    store_options = command_arguments([("--store", run_store.url if needs_store_option(store) else "")])
    resume = f"`{' '.join(['tiphys', 'resume', run, *store_options])}`"
    live = _require_live_workflow(last, submitter.find(claim.namespace, claim.workflow_name), submitter.cluster, resume)
    if not live.running:
        screen.note(
            f"run {run} is not running: its Workflow {live.namespace}/{live.name} is {live.phase}; see {resume}"
        )
        return
    submitter.stop(live, ShutdownStrategy.TERMINATE if terminate else ShutdownStrategy.STOP)
    action = "ends at once" if terminate else "is being stopped: programs may save first"
    screen.note(f"Workflow {live.namespace}/{live.name} {action}; once it has ended, {resume} continues the run")


def _require_live_workflow(last: Submission, live: LiveWorkflow | None, cluster: str, resume: str) -> LiveWorkflow:
    name = f"{last.claim.namespace}/{last.claim.workflow_name}"
    if live and (last.binding is None or live.uid == last.binding.uid):
        return live
    if not (is_stable_cluster_name(cluster) and is_stable_cluster_name(cluster_of_submission(last))):
        raise NotFoundError(
            f"{cluster} has no Workflow {name} of this run, and it is unknown whether the run went to the same cluster "
            f"({cluster_of_submission(last)}); give the argo-server that the run was submitted through, or a "
            "kubeconfig of its cluster"
        )
    raise NotFoundError(f"Workflow {name} was deleted, so nothing runs; run the missing steps with {resume}")
