"""``tiphys attach``: shows the progress of a run that another process or a cluster runs."""

from typing import TYPE_CHECKING, Annotated

import typer

from hera_pipelines.cli.error_messages import RunFailedError, RunInterruptedError
from hera_pipelines.cli.progress.cluster import NodeChangeReader, find_cluster_submission, follow_submission
from hera_pipelines.cli.progress.local import LocalSubmission, build_training_lookup, report_end
from hera_pipelines.cli.progress.table import ProgressTable, show_live_progress
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
    cluster_submitter,
    command_arguments,
    find_local_workflows,
    is_on_cluster,
    last_submission,
    refuse_options,
    require_same_cluster,
)
from hera_pipelines.local.nodes import NodePhase
from tiphys.errors import NotFoundError
from tiphys.protocol.compiled_workflow import CompiledPipeline, Manifest
from tiphys.store import read_current_workflow, read_run

if TYPE_CHECKING:
    from hera_pipelines.local.live_workflows import LocalWorkflows

EXAMPLES = """\b
Examples:
  tiphys attach digits-7xk2p
  tiphys run digits.py --run nightly --detach && tiphys attach nightly
"""


def attach(
    command: typer.Context,
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    store: StoreOption = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
    argo_server: ArgoServerOption = None,
) -> None:
    """Follow a run that is detached, or runs in another terminal or on a cluster.

    Shows its progress until it ends, and then its result. Ctrl-C ends only the
    display; `tiphys stop` stops the run.
    """
    screen: Screen = command.obj
    run_store = existing_store(screen, store)
    read_run(run_store, run)
    last = last_submission(run_store, run)
    if last is None:
        raise NotFoundError(f"run {run} was never submitted, so there is nothing to follow")
    manifest, claim = read_current_workflow(run_store, run), last.claim
    is_store_option_needed = needs_store_option(store)
    if not is_on_cluster(last):
        refuse_options(command, CLUSTER_OPTIONS, f"this is for a cluster, and run {run} runs on this machine")
        workflows = find_local_workflows(last, run)
        submission = LocalSubmission(run, claim.workflow_name, run_store, workflows.state, is_store_option_needed)
        _follow_local(screen, workflows, submission, manifest)
        return
    cluster_options = ClusterOptions(kubeconfig, context, claim.namespace, argo_server)
    submitter, _ = cluster_submitter(cluster_options, screen.note)
    require_same_cluster(last, submitter.cluster, run)
    store_options = command_arguments([("--store", run_store.url if is_store_option_needed else "")])
    found = find_cluster_submission(submitter, run_store, run, tuple(store_options), cluster_options.command_arguments)
    follow_submission(screen, submitter, found, manifest)


def _follow_local(screen: Screen, workflows: "LocalWorkflows", submission: LocalSubmission, manifest: Manifest) -> None:
    pipeline = CompiledPipeline.from_manifest(manifest)
    tasks = [task["name"] for task in pipeline.tasks()]
    progress, reader = ProgressTable(tasks), NodeChangeReader(submission.workflow, tasks)
    document: Manifest = {}
    try:
        with show_live_progress(
            screen, progress, build_training_lookup(submission.store, submission.run, pipeline)
        ) as observe:
            for document in workflows.watch(submission.workflow):
                for change in reader.changes(document):
                    observe(change)
    except KeyboardInterrupt:
        raise RunInterruptedError(
            f"run {submission.run} continues; show it with {submission.command('get')}, stop it with "
            f"{submission.command('stop')}"
        ) from None
    phase = NodePhase((document.get("status") or {}).get("phase", "Pending"))
    if not phase.finished:
        raise RunFailedError(
            f"the engine of run {submission.run} has ended without finishing it; continue with "
            f"{submission.command('resume')}"
        )
    report_end(screen, submission, progress, phase)
