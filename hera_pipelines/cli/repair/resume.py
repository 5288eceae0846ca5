"""``tiphys resume`` submits the missing steps of a run; ``tiphys plan`` shows what a resume would do.

Both need only the store: the Workflow, the cluster and the engine's folder may be
gone.
"""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import typer
from rich.text import Text
from tiphys_controller import (
    PlanReport,
    ResumeResult,
    StartCheckpoint,
    Submitter,
    WorkflowChange,
    add_start_checkpoints,
    plan_run,
    resume_run,
)

from hera_pipelines.cli.look.unrecorded_workflow import adopt_workflow, find_unrecorded
from hera_pipelines.cli.progress.cluster import find_cluster_submission, follow_submission
from hera_pipelines.cli.progress.local import (
    CodeOption,
    EngineOptions,
    LocalDetachOption,
    LocalSubmission,
    PortOption,
    QueuesOption,
    SpeedOption,
    StateOption,
    open_local_session,
    read_code_folder,
    run_to_end,
)
from hera_pipelines.cli.repair.code_changes import DriftOption, FileArgument, FromOption, RunEdits, show_drift
from hera_pipelines.cli.screen import Format, Screen
from hera_pipelines.cli.shared_options import (
    DEFAULT_STATE,
    ArgoServerOption,
    ClusterOptions,
    ContextOption,
    FormatOption,
    KubeconfigOption,
    NamespaceOption,
    PipelineOption,
    PipelineStoreOption,
    RunArgument,
    command_arguments,
    existing_store,
    store_arguments,
)
from hera_pipelines.cli.start.detach import detach
from hera_pipelines.cli.target import (
    CLUSTER_OPTIONS,
    ENGINE_OPTIONS,
    OnClusterOption,
    cluster_of_submission,
    is_on_cluster,
    refuse_options,
    require_same_cluster,
    runs_on_cluster,
    tenant_submitter,
)
from tiphys.lineage.training_progress import format_age
from tiphys.protocol.fan_out import format_item
from tiphys.protocol.quantities import format_duration
from tiphys.records import utc_now
from tiphys.store import Store, Submission, last_submission, read_current_workflow

PLAN_EXAMPLES = """\b
Examples:
  tiphys plan digits-7xk2p
  tiphys plan digits-7xk2p --from fit
  tiphys plan digits-7xk2p digits.py
  tiphys plan digits-7xk2p -o json | jq '.steps[] | select(.decision == "run")'
"""

_DECISION_STYLES = {"skip": "dim", "run": "bold cyan"}


def plan(
    context: typer.Context,
    run: RunArgument,
    file: FileArgument = None,
    which: PipelineOption = None,
    again: FromOption = None,
    drift: DriftOption = None,
    store: PipelineStoreOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Show which steps a resume would run or skip, and why.

    Reads the store and changes nothing. With a pipeline file, the steps that it
    changes would run again too.
    """
    screen: Screen = context.obj
    edits = RunEdits(file, which, drift=drift or ())
    run_store = existing_store(screen, store, edits.store)
    if (missing := find_unrecorded(run_store, run)) is not None:
        raise missing
    change = edits.build_change(run_store, run, runs_locally=not is_on_cluster(last_submission(run_store, run)))
    report = _show_full_plan(screen, run_store, plan_run(run_store, run, again or (), change), output)
    if report.running:
        files = [str(file)] if file else []
        options = [("--pipeline", which), *(("--from", step) for step in again or ())]
        options += [("--drift", one) for one in drift or ()]
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
    screen.note(
        f"{len(report.running)} of {len(report.steps)} steps would run; "
        f"the plan took {report.requests} storage requests and {format_duration(report.seconds)}"
    )


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


def resume(
    command: typer.Context,
    run: RunArgument,
    file: FileArgument = None,
    which: PipelineOption = None,
    again: FromOption = None,
    drift: DriftOption = None,
    idempotency_key: Annotated[
        str, typer.Option("--idempotency-key", metavar="KEY", help="Resume the run at most once with this key.")
    ] = "",
    in_background: LocalDetachOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and submit nothing.")] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Take over the steps of a submission that may still be running, and run steps again whose end "
            "records are damaged.",
        ),
    ] = False,
    store: PipelineStoreOption = None,
    state: StateOption = DEFAULT_STATE,
    queues: QueuesOption = None,
    plugin_port: PortOption = 0,
    speed: SpeedOption = 1.0,
    code: CodeOption = None,
    cluster: OnClusterOption = False,
    local: Annotated[bool, typer.Option("--local", help="Run on this machine instead of the run's cluster.")] = False,
    context: ContextOption = None,
    namespace: NamespaceOption = None,
    kubeconfig: KubeconfigOption = None,
    argo_server: ArgoServerOption = None,
    output: FormatOption = Format.TABLE,
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
    edits = RunEdits(file, which, drift=drift or ())
    run_store = existing_store(screen, store, edits.store)
    cluster_options = ClusterOptions(kubeconfig, context, namespace, argo_server)
    if (missing := find_unrecorded(run_store, run)) is not None:
        if local or not (cluster or context or kubeconfig or namespace):
            raise missing
        workflow, run = run, adopt_workflow(run_store, run, cluster_options, dry_run=dry_run)
        screen.note(
            f"Workflow {workflow} was never recorded; it is run {run}, and each step without a record runs again"
        )
        if dry_run:
            return
    last = last_submission(run_store, run)
    on_cluster = runs_on_cluster(last, cluster, local)
    if on_cluster:
        refuse_options(
            command, ENGINE_OPTIONS, "this is for the local engine, and the run continues on a cluster; see --local"
        )
    else:
        refuse_options(
            command,
            CLUSTER_OPTIONS,
            f"this is for a cluster, and run {run} continues on this machine; check its name, or see --cluster",
        )
    change = edits.build_change(run_store, run, runs_locally=not on_cluster)
    if dry_run:
        _show_full_plan(screen, run_store, plan_run(run_store, run, again or (), change, force=force), output)
        return
    request = _ResumeRequest(
        run_store,
        run,
        last,
        force,
        store_arguments(run_store, store, edits.store),
        output,
        _SubmissionOptions(tuple(again or ()), idempotency_key, change),
        in_background,
    )
    if on_cluster:
        _resume_on_cluster(screen, request, cluster_options, cluster)
    else:
        folder = code or (file.parent if file else read_code_folder(run_store, run))
        _resume_locally(screen, request, EngineOptions(state, queues, plugin_port, speed, folder))


class _SubmissionOptions(NamedTuple):
    """Optional parameters of a resume; the field names are those of `resume_run`."""

    rerun: tuple[str, ...]
    key: str
    change: WorkflowChange | None


@dataclass(frozen=True)
class _ResumeRequest:
    """The resume that the command line describes, for either target."""

    store: Store
    run: str
    last: Submission | None
    force: bool
    store_arguments: tuple[str, ...]
    output: Format
    options: _SubmissionOptions
    detach: bool

    def submit(self, submitter: Submitter, namespace: str) -> ResumeResult:
        """Submit the missing steps."""
        return resume_run(
            self.store, submitter, self.run, force=self.force, namespace=namespace, **self.options._asdict()
        )


def _resume_locally(screen: Screen, request: _ResumeRequest, options: EngineOptions) -> None:
    detachment = detach() if request.detach else None
    with open_local_session(request.store, options) as (session, observer):
        resumed = request.submit(session, "default")
        if _show_resume(screen, request, resumed):
            submission = LocalSubmission(
                request.run, resumed.workflow_name, request.store, options.state, request.store_arguments
            )
            run_to_end(screen, session, observer, submission, detachment)


def _resume_on_cluster(
    screen: Screen, request: _ResumeRequest, cluster_options: ClusterOptions, is_cluster_given: bool
) -> None:
    """Resume on a cluster; ``is_cluster_given`` allows a cluster other than that of the last submission."""
    submitter, namespace = tenant_submitter(cluster_options, request.last, request.run, screen.note)
    if request.last is not None and cluster_of_submission(request.last) and not is_cluster_given:
        require_same_cluster(request.last, submitter.cluster, request.run)
    resumed = request.submit(submitter, namespace)
    if _show_resume(screen, request, resumed):
        submission = find_cluster_submission(
            submitter, request.store, request.run, request.store_arguments, cluster_options.command_arguments
        )
        if not request.detach:
            follow_submission(screen, submitter, submission, read_current_workflow(request.store, request.run))


def _show_resume(screen: Screen, request: _ResumeRequest, resumed: ResumeResult) -> bool:
    """Print the differences, the plan and the submission; return whether a new submission was created."""
    show_drift(screen, resumed.plan.drift)
    show_plan(screen, add_start_checkpoints(request.store, resumed.plan), request.output)
    screen.out.file.flush()
    if resumed.submission is None:
        screen.note(f"nothing is missing of run {request.run}")
        return False
    if not resumed.created:
        screen.note(
            f"submission {resumed.submission} of run {request.run} was created before, under the same idempotency key"
        )
        return False
    screen.note(f"submission {resumed.submission} of run {request.run}")
    for key in resumed.passed_over:
        screen.note(f"passed over, damaged: {key}")
    return True
