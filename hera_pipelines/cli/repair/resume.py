"""``tiphys resume`` submits the missing steps of a run; ``tiphys plan`` shows what a resume would do.

Both need only the store: the Workflow, the cluster and the engine's folder may be
gone.
"""

import shlex
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.text import Text
from tiphys_controller import (
    PlanReport,
    ResumeResult,
    StartCheckpoint,
    Submitter,
    add_start_checkpoints,
    plan_run,
    resume_run,
)

from hera_pipelines.cli.look.unrecorded_workflow import adopt_workflow, find_unrecorded
from hera_pipelines.cli.repair.code_changes import RunEdits, show_drift
from hera_pipelines.cli.screen import Format, Screen
from hera_pipelines.cli.shared_options import (
    FormatOption,
    PipelineStoreOption,
    RunArgument,
    command_arguments,
    existing_store,
    store_arguments,
    with_option_groups,
)
from hera_pipelines.cli.start.submission import (
    DryRunOption,
    LocalOption,
    SubmissionOptions,
    SubmissionTarget,
    choose_target,
)
from hera_pipelines.cli.target import cluster_of_submission, is_on_cluster, require_same_cluster, tenant_submitter
from tiphys.lineage.run_history import RunHistory
from tiphys.lineage.training_progress import format_age
from tiphys.protocol.fan_out import format_item
from tiphys.protocol.quantities import format_duration
from tiphys.records import utc_now
from tiphys.store import Store

PLAN_EXAMPLES = """\b
Examples:
  tiphys plan digits-7xk2p
  tiphys plan digits-7xk2p --from fit
  tiphys plan digits-7xk2p digits.py
  tiphys plan digits-7xk2p -o json | jq '.steps[] | select(.decision == "run")'
"""

_DECISION_STYLES = {"skip": "dim", "run": "bold cyan"}


@with_option_groups
def plan(
    context: typer.Context,
    run: RunArgument,
    edits: RunEdits,
    store: PipelineStoreOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Show which steps a resume would run or skip, and why.

    Reads the store and changes nothing. With a pipeline file, the steps that it
    changes would run again too.
    """
    screen: Screen = context.obj
    run_store = existing_store(screen, store, edits.store)
    if (missing := find_unrecorded(run_store, run)) is not None:
        raise missing
    on_cluster = is_on_cluster(RunHistory(run_store, run).last_submission)
    change = edits.build_change(run_store, run, runs_locally=not on_cluster, note=screen.note)
    report = _show_full_plan(screen, run_store, plan_run(run_store, run, edits.rerun, change), output)
    if report.running:
        files = [str(edits.file)] if edits.file else []
        options = [("--pipeline", edits.pipeline_name), *(("--from", step) for step in edits.rerun)]
        options += [("--drift", action) for action in edits.drift or ()]
        screen.note(f"next: {shlex.join(['tiphys', 'resume', run, *files, *command_arguments(options)])}")


def _show_full_plan(screen: Screen, store: Store, planned: PlanReport, output: Format) -> PlanReport:
    """Print the differences and the plan. Ends the command, with the words and the exit code of the resume, if the
    resume will refuse it.
    """
    report = add_start_checkpoints(store, planned)
    show_drift(screen, report.drift)
    show_plan(screen, report, output)
    if report.refusal is not None:
        screen.error(f"`tiphys resume` will refuse this: {report.refusal.message}")
        raise typer.Exit(report.refusal.exit_code)
    return report


def show_plan(screen: Screen, report: PlanReport, output: Format) -> None:
    """Print the plan on stdout, and its summary on stderr."""
    if output == Format.TABLE:
        screen.table(("STEP", "KIND", "DECISION", "REASON"), _plan_rows(report), hide=("KIND",), wraps=True)
    else:
        screen.document(report.model_dump(mode="json", by_alias=True), output)
    took = format_duration(report.seconds)
    screen.note(f"{len(report.running)} of {len(report.steps)} steps would run; the plan took {took}")


def _plan_rows(report: PlanReport) -> Iterator[tuple[str | Text, ...]]:
    for step in report.steps:
        reason = _with_start(step.reason, step.starts_from)
        yield step.name, step.kind, Text(step.decision, style=_DECISION_STYLES[step.decision]), reason
        for item in step.items:
            reason = _with_start(item.reason, item.starts_from)
            yield f"  {item.name} {format_item(item.item)}", "item", "done" if item.done else "run", reason


def _with_start(reason: str, start: StartCheckpoint | None) -> str:
    if start is None:
        return reason
    if start.committed_at is None:
        return f"{reason}; from the beginning"
    return f"{reason}; from step {start.global_step:,}, saved {format_age(utc_now() - start.committed_at)} ago"


EXAMPLES = """\b
Examples:
  tiphys resume digits-7xk2p --dry-run
  tiphys resume digits-7xk2p
  tiphys resume digits-7xk2p --from fit --detach
  tiphys resume digits-7xk2p --from 'fit[2]'
  tiphys resume digits-7xk2p digits.py --drift parameters=warn
  tiphys resume digits-7xk2p --store s3://ml-runs/tiphys --context east
"""


@with_option_groups
def resume(
    command: typer.Context,
    run: RunArgument,
    edits: RunEdits,
    *,
    dry_run: DryRunOption = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Take over the steps of a submission that may still be running, and run steps again whose end "
            "records are damaged.",
        ),
    ] = False,
    local: LocalOption = False,
    options: SubmissionOptions,
) -> None:
    """Resume a run: submit the steps that are missing.

    The steps run where the last submission ran: on this machine or on its cluster.
    Finished steps are skipped, and training steps start from their newest valid
    checkpoint. With --from, finished steps and the steps that depend on them run
    again, and training among them starts from the beginning. With a pipeline file,
    the steps that it changes run again too.

    A Workflow that an outage kept from being recorded becomes a run first, by its
    name and --cluster.

    Only the store is needed: the Workflow, the cluster and the engine's folder may
    be gone. Prints the plan on stdout and progress on stderr. On a cluster, Ctrl-C
    ends only the progress display.
    """
    screen: Screen = command.obj
    store, cluster = existing_store(screen, options.store, edits.store), options.cluster
    if (missing := find_unrecorded(store, run)) is not None:
        if local or not (options.on_cluster or cluster.context or cluster.kubeconfig or cluster.namespace):
            raise missing
        workflow, run = run, adopt_workflow(store, run, cluster, dry_run=dry_run)
        screen.note(
            f"Workflow {workflow} was never recorded; it is run {run}, and each step without a record runs again"
        )
        if dry_run:
            return
    last = RunHistory(store, run).last_submission
    on_cluster = choose_target(command, options, run, last, local)
    change = edits.build_change(store, run, runs_locally=not on_cluster, note=screen.note)
    if dry_run:
        _show_full_plan(screen, store, plan_run(store, run, edits.rerun, change, force=force), options.output)
        return

    def submit(submitter: Submitter, namespace: str) -> tuple[str, int] | None:
        resumed = resume_run(
            store,
            submitter,
            run,
            force=force,
            namespace=namespace,
            rerun=edits.rerun,
            key=options.idempotency_key,
            change=change,
        )
        submission = _show_resume(screen, store, resumed, options.output)
        return (run, submission) if submission is not None else None

    target = SubmissionTarget(screen, options, store, store_arguments(store, options.store, edits.store))
    if not on_cluster:
        target.submit_locally(submit, edits.code_folder(store, run))
        return
    submitter, namespace = tenant_submitter(cluster, last, run, screen.note)
    if last is not None and cluster_of_submission(last) and not options.on_cluster:
        require_same_cluster(last, submitter.cluster, run)
    target.submit_to_cluster(submit, submitter, namespace)


def _show_resume(screen: Screen, store: Store, resumed: ResumeResult, output: Format) -> int | None:
    """Print the differences, the plan and the submission; return its number if it is new."""
    show_drift(screen, resumed.plan.drift)
    show_plan(screen, add_start_checkpoints(store, resumed.plan), output)
    screen.out.file.flush()
    run = resumed.run
    if resumed.submission is None:
        screen.note(f"nothing is missing of run {run}")
        return None
    if not resumed.created:
        screen.note(f"submission {resumed.submission} of run {run} was created before, under the same idempotency key")
        return None
    screen.note(f"submission {resumed.submission} of run {run}")
    for key in resumed.passed_over:
        screen.note(f"passed over, damaged: {key}")
    return resumed.submission
