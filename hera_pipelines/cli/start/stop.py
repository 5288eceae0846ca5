"""``tiphys stop``: stops a run on this machine or on its cluster. Programs may save, and finished steps are kept."""

import shlex
from typing import Annotated

import typer
from tiphys_controller import LiveWorkflow, ShutdownStrategy, is_stable_cluster_name

from hera_pipelines.cli.screen import Screen
from hera_pipelines.cli.shared_options import (
    RunArgument,
    StoreOption,
    WorkflowOptions,
    existing_store,
    store_arguments,
    with_option_groups,
)
from hera_pipelines.cli.target import cluster_of_submission, find_workflows, required_submission
from tiphys.errors import NotFoundError
from tiphys.store import Submission

EXAMPLES = """\b
Examples:
  tiphys stop digits-7xk2p
  tiphys stop digits-7xk2p --terminate
"""


@with_option_groups
def stop(
    command: typer.Context,
    run: RunArgument,
    *,
    terminate: Annotated[
        bool, typer.Option("--terminate", help="Stop at once: no exit handler runs, so no end is recorded.")
    ] = False,
    store: StoreOption = None,
    cluster: WorkflowOptions,
) -> None:
    """Stop a run on this machine or on its cluster.

    Programs receive SIGTERM and may save. `tiphys resume` continues the run later.
    On this machine it does what Ctrl-C does in the terminal of the run.
    """
    screen: Screen = command.obj
    run_store = existing_store(screen, store)
    last = required_submission(run_store, run, "stop")
    claim = last.claim
    workflows = find_workflows(command, last, run, cluster, screen.note)
    resume = f"`{shlex.join(['tiphys', 'resume', run, *store_arguments(run_store, store)])}`"
    live = _require_live_workflow(last, workflows.find(claim.namespace, claim.workflow_name), workflows.cluster, resume)
    if not live.running:
        screen.note(
            f"run {run} is not running: its Workflow {live.namespace}/{live.name} is {live.phase}; see {resume}"
        )
        return
    workflows.stop(live, ShutdownStrategy.TERMINATE if terminate else ShutdownStrategy.STOP)
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
