"""``tiphys attach``: shows the progress of a run that another process or a cluster runs."""

import typer

from hera_pipelines.cli.error_messages import RunFailedError
from hera_pipelines.cli.progress.cluster import find_cluster_submission, follow_submission, show_watched_workflow
from hera_pipelines.cli.progress.local import LocalSubmission, report_end
from hera_pipelines.cli.screen import Screen
from hera_pipelines.cli.shared_options import (
    RunArgument,
    StoreOption,
    WorkflowOptions,
    existing_store,
    store_arguments,
    with_option_groups,
)
from hera_pipelines.cli.target import find_workflows, required_submission
from hera_pipelines.local.live_workflows import LocalWorkflows
from hera_pipelines.local.nodes import NodePhase
from tiphys.lineage.run_history import RunHistory
from tiphys.protocol.compiled_workflow import Manifest

EXAMPLES = """\b
Examples:
  tiphys attach digits-7xk2p
  tiphys run digits.py --run nightly --detach && tiphys attach nightly
"""


@with_option_groups
def attach(command: typer.Context, run: RunArgument, *, store: StoreOption = None, cluster: WorkflowOptions) -> None:
    """Follow a run that is detached, or runs in another terminal or on a cluster.

    Shows its progress until it ends, and then its result. Ctrl-C ends only the
    display; `tiphys stop` stops the run.
    """
    screen: Screen = command.obj
    run_store = existing_store(screen, store)
    last = required_submission(run_store, run, "follow")
    manifest, claim = RunHistory(run_store, run).workflow, last.claim
    workflows = find_workflows(command, last, run, cluster, screen.note)
    store_option = store_arguments(run_store, store)
    if isinstance(workflows, LocalWorkflows):
        submission = LocalSubmission(run, claim.workflow_name, run_store, store_option, workflows.state)
        _follow_local(screen, workflows, submission, manifest)
    else:
        found = find_cluster_submission(workflows, run_store, claim, store_option, cluster.command_arguments)
        follow_submission(screen, workflows, found, manifest)


def _follow_local(screen: Screen, workflows: LocalWorkflows, submission: LocalSubmission, manifest: Manifest) -> None:
    states = workflows.watch(submission.workflow_name)
    progress, workflow = show_watched_workflow(screen, submission, manifest, states)
    phase = NodePhase((workflow.get("status") or {}).get("phase", "Pending"))
    if not phase.finished:
        raise RunFailedError(
            f"the engine of run {submission.run} has ended without finishing it; continue with "
            f"{submission.command('resume')}"
        )
    report_end(screen, submission, progress, workflow)
