"""``tiphys stop``: stops a run on its cluster. Programs may save first, and finished steps are kept."""

from typing import Annotated

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
    cluster_of_submission,
    cluster_submitter,
    command_arguments,
    is_on_cluster,
    last_submission,
    require_same_cluster,
)
from tiphys.errors import NotFoundError, UsageError
from tiphys.store import Submission, read_run

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
    """Stop a run on its cluster.

    Programs receive SIGTERM and may save. `tiphys resume` continues the run later.
    """
    screen: Screen = command.obj
    run_store = existing_store(screen, store)
    read_run(run_store, run)
    last = _require_cluster_submission(last_submission(run_store, run), run)
    claim = last.claim
    submitter, _ = cluster_submitter(ClusterOptions(kubeconfig, context, claim.namespace, argo_server), screen.note)
    require_same_cluster(last, submitter.cluster, run)
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


def _require_cluster_submission(last: Submission | None, run: str) -> Submission:
    if last is None:
        raise NotFoundError(f"run {run} was never submitted, so there is nothing to stop")
    if not is_on_cluster(last):
        raise UsageError(
            f"run {run} runs on {cluster_of_submission(last) or 'a local engine'}, not on a cluster: press Ctrl-C in "
            "the terminal of its `tiphys run` or `tiphys resume`, and again to end it at once"
        )
    return last


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
