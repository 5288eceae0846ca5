"""``tiphys runs``, ``get`` and ``events``: the runs of a store, one run in detail, and its events."""

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text
from tiphys_controller import RunDetail, RunPhase, Submitter, describe_run
from tiphys_controller.plan.drift import format_change
from tiphys_controller.run_comparison import compare_runs
from tiphys_controller.run_deletion import RunDeletion, delete_runs, plan_deletions
from tiphys_controller.run_search import RunFilter, RunOrder, search_runs, sort_runs
from tiphys_controller.runs import RunSummary
from tiphys_controller.submit.submitter import find_obstacles

from hera_pipelines.cli.look.unrecorded_workflow import find_unrecorded
from hera_pipelines.cli.screen import Format, Screen, format_local_time
from hera_pipelines.cli.shared_options import (
    DEFAULT_STATE,
    ClusterOptions,
    FormatOption,
    RunStepArgument,
    StoreOption,
    WorkflowOptions,
    choose_format,
    complete_run,
    existing_store,
    parse_run_step,
    with_option_groups,
)
from hera_pipelines.cli.target import CLUSTER_OPTIONS, cluster_submitter, refuse_options
from hera_pipelines.local.live_workflows import LocalWorkflows
from tiphys.errors import ConflictError, NotFoundError, StoreError
from tiphys.lineage.run_history import RunHistory
from tiphys.lineage.step_names import StepNames, selects_step
from tiphys.lineage.timeline import read_timeline
from tiphys.lineage.training_progress import describe_training_progress
from tiphys.protocol.quantities import format_bytes, parse_duration_seconds
from tiphys.records import Event, utc_now

if TYPE_CHECKING:
    from tiphys_controller.doctor import Obstacle

RUNS_EXAMPLES = """\b
Examples:
  tiphys runs
  tiphys runs --state failed --state interrupted --since 3d
  tiphys runs --pipeline digits --limit 10
  tiphys runs --store s3://ml-runs/tiphys --cluster
  tiphys runs --store s3://ml-runs/tiphys -o json | jq -r '.runs[] | select(.phase == "Failed") | .run'
"""
GET_EXAMPLES = """\b
Examples:
  tiphys get digits-7xk2p
  tiphys get 'digits-7xk2p/fit[2]'
  tiphys get digits-7xk2p -o yaml
"""

AskClusterOption = Annotated[
    bool, typer.Option("--cluster", help="Also read from the cluster of the kubeconfig which runs are active.")
]

_PHASE_STYLES = {
    RunPhase.SUCCEEDED: "green",
    RunPhase.FAILED: "red",
    RunPhase.RUNNING: "cyan",
    RunPhase.STOPPED: "yellow",
    RunPhase.UNKNOWN: "yellow",
}


@with_option_groups
def runs(
    command: typer.Context,
    *,
    store: StoreOption = None,
    cluster: AskClusterOption = False,
    options: WorkflowOptions,
    pipeline: Annotated[str, typer.Option("--pipeline", metavar="NAME", help="Only runs of this pipeline.")] = "",
    state: Annotated[
        list[RunPhase] | None,
        typer.Option("--state", case_sensitive=False, help="Only runs in this phase; may be repeated."),
    ] = None,
    since: Annotated[
        str, typer.Option("--since", metavar="DURATION", help="Only runs with activity since then, such as 2h or 3d.")
    ] = "",
    limit: Annotated[
        int | None, typer.Option("--limit", metavar="N", min=1, help="Only the N runs with the newest activity.")
    ] = None,
    sort: Annotated[
        RunOrder, typer.Option("--sort", help="Order of the list; activity puts the newest first.")
    ] = RunOrder.ACTIVITY,
    output: FormatOption = Format.TABLE,
) -> None:
    """List the runs of a store, with phase and finished steps; compare two of them, or delete runs."""
    if command.invoked_subcommand:
        return
    screen: Screen = command.obj
    run_store = existing_store(screen, store)
    submitter = choose_submitter(command, cluster, options, screen.note)
    begin = utc_now() - timedelta(seconds=parse_duration_seconds(since)) if since else None
    search = search_runs(run_store, RunFilter(pipeline, state or (), begin), submitter, limit)
    summaries = sort_runs(sort_runs(search.summaries, RunOrder.ACTIVITY)[:limit], sort)
    obstacles = _find_obstacles(screen, submitter, summaries)
    if output is not Format.TABLE:
        rows = [run.model_dump(mode="json") | _obstacle_fields(obstacles[run.workflow]) for run in summaries]
        screen.typed_document("RunList", output, store=run_store.url, runs=rows)
        return
    if search.is_complete and not search.looked_at:
        screen.note("the store has no runs yet; start one with `tiphys run FILE`")
        return
    if not search.is_complete:
        screen.note(f"{len(summaries)} runs shown; the {search.looked_at} newest were read")
    elif len(summaries) < search.looked_at:
        screen.note(f"{len(summaries)} of {search.looked_at} runs shown")
    screen.table(
        ("RUN", "PIPELINE", "PHASE", "STEPS", "SUBMISSIONS", "ATTEMPTS", "LAST ACTIVITY", "REASON"),
        [
            (
                summary.run,
                summary.pipeline,
                _phase_text(summary.phase),
                f"{summary.steps_done}/{summary.steps_total}",
                str(summary.submissions),
                str(summary.attempts),
                format_local_time(summary.last_activity) if summary.last_activity else "",
                next((obstacle.reason for obstacle in obstacles[summary.workflow]), summary.reason),
            )
            for summary in summaries
        ],
        hide=("SUBMISSIONS", "PIPELINE", "LAST ACTIVITY", "ATTEMPTS"),
    )


DIFF_EXAMPLES = """\b
Examples:
  tiphys runs diff digits-7xk2p digits-9qw4r
  tiphys runs diff digits-7xk2p digits-9qw4r -o json | jq '.differences[] | select(.kind == "metric")'
"""


def diff(
    context: typer.Context,
    before: Annotated[str, typer.Argument(metavar="RUN", help="Name of a run.", autocompletion=complete_run)],
    after: Annotated[
        str, typer.Argument(metavar="OTHER", help="Name of the run to compare it with.", autocompletion=complete_run)
    ],
    store: StoreOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Compare two runs: parameters, program, outcomes, outputs, metrics and versions.

    Items of a fan-out are compared by value. Metrics and versions are those of the
    newest usable checkpoint of each training step.
    """
    screen: Screen = context.obj
    comparison = compare_runs(existing_store(screen, store), before, after)
    if output is not Format.TABLE:
        screen.document(comparison.model_dump(mode="json", by_alias=True), output)
        return
    if not comparison.differences:
        screen.note(f"{before} and {after} do not differ")
        return
    rows = [
        (difference.kind, difference.name, difference.field, *format_change(difference.before, difference.after))
        for difference in comparison.differences
    ]
    screen.table(("WHAT", "STEP", "FIELD", before, after), rows)


REMOVE_EXAMPLES = """\b
Examples:
  tiphys runs rm digits-7xk2p
  tiphys runs rm digits-7xk2p digits-9qw4r --yes
  tiphys runs rm digits-7xk2p --store s3://ml-runs/tiphys --cluster --yes
"""


@with_option_groups
def remove(
    command: typer.Context,
    names: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Names of the runs.", autocompletion=complete_run)
    ],
    yes: Annotated[
        bool, typer.Option("--yes", help="Delete them. Without it, only show what would be deleted.")
    ] = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="Also delete a run whose last submission is not seen to have ended; it may run."),
    ] = False,
    *,
    store: StoreOption = None,
    cluster: AskClusterOption = False,
    options: WorkflowOptions,
    output: FormatOption = Format.TABLE,
) -> None:
    """Delete runs: their records, outputs and checkpoints in the store.

    Nothing is deleted without --yes. A run is kept while it runs, while one of its
    checkpoints is pinned, and while a run that stays is a fork of it or shares one
    of its results. Checkpoints on volumes are not in the store, and stay. A deletion
    that was interrupted is completed by the same command.
    """
    screen: Screen = command.obj
    run_store = existing_store(screen, store)
    submitter = choose_submitter(command, cluster, options, screen.note)
    perform = delete_runs if yes else plan_deletions
    deletions = perform(run_store, submitter, names, force, screen.note)
    if output is Format.TABLE:
        _show_deletions(screen, deletions, yes)
    else:
        rows = [deletion._asdict() for deletion in deletions]
        screen.typed_document("RunDeletion", output, store=run_store.url, dry_run=not yes, runs=rows)
    kept = [deletion for deletion in deletions if deletion.kept_because]
    if yes and kept:
        raise ConflictError(f"run {kept[0].run} was kept: {kept[0].kept_because[0]}")


def _show_deletions(screen: Screen, deletions: Sequence[RunDeletion], done: bool) -> None:
    word = "deleted" if done else "would be deleted"
    rows = [
        (
            deletion.run,
            Text("kept", style="green") if deletion.kept_because else Text(word, style="red"),
            f"{deletion.objects:,}",
            format_bytes(deletion.size_bytes),
            "; ".join(deletion.kept_because),
        )
        for deletion in deletions
    ]
    screen.table(("RUN", "STATE", "OBJECTS", "SIZE", "WHY"), rows, wraps=True)
    if not done and any(not deletion.kept_because for deletion in deletions):
        screen.note("nothing was deleted; add --yes to delete")


app = typer.Typer(invoke_without_command=True)
app.callback(epilog=RUNS_EXAMPLES)(runs)
app.command("diff", epilog=DIFF_EXAMPLES)(diff)
app.command("rm", epilog=REMOVE_EXAMPLES)(remove)


@with_option_groups
def get(
    command: typer.Context,
    where: RunStepArgument,
    *,
    store: StoreOption = None,
    cluster: AskClusterOption = False,
    options: WorkflowOptions,
    output: FormatOption = Format.TABLE,
) -> None:
    """Show one run: submissions, steps, attempts and outputs."""
    screen: Screen = command.obj
    run_store = existing_store(screen, store)
    submitter = choose_submitter(command, cluster, options, screen.note)
    run, _, step = where.partition("/")
    try:
        detail = describe_run(RunHistory.for_display(run_store, run), submitter, step)
    except NotFoundError:
        if (missing := find_unrecorded(run_store, run)) is not None:
            raise missing from None
        raise
    found = _find_obstacles(screen, submitter, [detail.summary])[detail.summary.workflow]
    tasks = {"", *(shown.name for shown in detail.steps)}
    obstacles = [obstacle for obstacle in found if not step or obstacle.task in tasks]
    if output is not Format.TABLE:
        screen.document(detail.model_dump(mode="json", by_alias=True) | _obstacle_fields(obstacles), output)
        return
    _show_summary(screen, detail)
    for obstacle in obstacles:
        screen.show(Text(obstacle.reason, style="yellow"))
    screen.show("")
    has_items = any(attempt.item for step in detail.steps for attempt in step.attempts)
    key_columns = ("STEP", "ITEM") if has_items else ("STEP",)
    columns = (*key_columns, "ATTEMPT", "SUBMISSION", "OUTCOME", "STARTED FROM", "MESSAGE")
    rows = ((*row[: len(key_columns)], *row[2:]) for row in _attempt_rows(detail))
    screen.table(columns, rows, hide=("SUBMISSION", "STARTED FROM"), wraps=True)
    outputs = list(_output_rows(detail))
    if outputs:
        screen.show("")
        rows = ((*row[: len(key_columns)], *row[2:]) for row in outputs)
        screen.table((*key_columns, "OUTPUT", "VALUE"), rows, wraps=True)


def _find_obstacles(
    screen: Screen, submitter: Submitter, summaries: Sequence[RunSummary]
) -> "defaultdict[str, list[Obstacle]]":
    """What running Workflows of a cluster wait for, by Workflow; a note says why that is not known."""
    try:
        return find_obstacles(submitter, (summary.workflow for summary in summaries), utc_now())
    except StoreError as error:
        screen.note(f"what steps wait for is not known: {error}")
        return defaultdict(list)


def _obstacle_fields(obstacles: "Sequence[Obstacle]") -> dict[str, Any]:
    return {"obstacles": [obstacle._asdict() for obstacle in obstacles]} if obstacles else {}


def choose_submitter(
    command: typer.Context, cluster: bool, cluster_options: ClusterOptions, note: Callable[[str], object]
) -> Submitter:
    """Source of a run's liveness: the cluster with ``--cluster``, otherwise the local engine of this folder.

    Raises:
        UsageError: a cluster option is given without ``--cluster``.
    """
    if cluster:
        return cluster_submitter(cluster_options, note)[0]
    refuse_options(command, CLUSTER_OPTIONS, "this is for a cluster; add --cluster")
    return LocalWorkflows(DEFAULT_STATE)


def _show_summary(screen: Screen, detail: RunDetail) -> None:
    summary = detail.summary
    line = Text.assemble((summary.run, "bold"), f" of pipeline {summary.pipeline}: ", _phase_text(summary.phase))
    screen.show(line.append(f", {summary.reason}" if summary.reason else ""))
    submissions = f"{summary.submissions} submission{'' if summary.submissions == 1 else 's'}"
    screen.show(Text(f"{summary.steps_done} of {summary.steps_total} steps done, {submissions}"))
    for damaged in detail.damaged:
        screen.show(Text(f"damaged: {damaged}", style="red"))
    for model in detail.models:
        state = f"version {model.model_version}" if model.model_version else f"pending; `tiphys register {summary.run}`"
        screen.show(Text(f"model {model.model} of step {model.step}: {state}"))
    if detail.parent:
        screen.show(Text(f"fork of run {detail.parent}"))
    if detail.parameters:
        screen.show(Text("parameters: " + ", ".join(f"{name}={value}" for name, value in detail.parameters.items())))


def _attempt_rows(detail: RunDetail) -> Iterator[tuple[str, ...]]:
    for step in detail.steps:
        if not step.attempts:
            yield step.name, "", "", "", "", "", step.reason
        for attempt in step.attempts:
            message = ": ".join(part for part in (attempt.cause.replace("_", " "), attempt.message) if part)
            if attempt.training_progress:
                message = describe_training_progress(attempt.training_progress, utc_now())
            unusable = f"checkpoint {attempt.unusable_start} could not be used" if attempt.unusable_start else ""
            message = "; ".join(part for part in (message, unusable, attempt.unprotected) if part)
            yield (
                attempt.name,
                attempt.item,
                str(attempt.attempt),
                str(attempt.submission),
                attempt.outcome or "open",
                attempt.starts_from,
                message,
            )
        for name, source in step.taken_over.items() if step.attempts else ():
            yield name, "", "", "", "", "", f"taken over from {source}"


def _output_rows(detail: RunDetail) -> Iterator[tuple[str, ...]]:
    for step in detail.steps:
        for attempt in step.attempts:
            for name, value in attempt.outputs.items():
                yield attempt.name, attempt.item, name, value


def _phase_text(phase: RunPhase) -> Text:
    return Text(phase.value, style=_PHASE_STYLES.get(phase, ""))


EVENTS_EXAMPLES = """\b
Examples:
  tiphys events digits-7xk2p
  tiphys events digits-7xk2p --follow -o json | jq .message
"""

_POLL_SECONDS = 1.0


def events(
    context: typer.Context,
    where: RunStepArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new events until the run has ended.")] = False,
    store: StoreOption = None,
    output: Annotated[
        Format,
        typer.Option("-o", "--format", callback=choose_format, help="Output format; json prints one event per line."),
    ] = Format.TABLE,
) -> None:
    """Print the events of a run in order of time.

    Events are submissions, attempts and checkpoints, and steps or checkpoints that
    were skipped, with the reason.
    """
    screen: Screen = context.obj
    history, step = parse_run_step(existing_store(screen, store), where)
    for event in _follow_events(history) if follow else read_timeline(history):
        if selects_step(step, event.step):
            _print_event(screen, event, history.names, output)


def _follow_events(history: RunHistory) -> Iterator[Event]:
    """Yield events as they appear; end when all submissions have ended and all events are yielded."""
    reported: set[str] = set()
    while True:
        sealed = all(submission.end for submission in history.submissions)  # before the rest is read
        for event in read_timeline(history):
            identity = event.model_dump_json()
            if identity not in reported:
                reported.add(identity)
                yield event
        if sealed:
            return
        time.sleep(_POLL_SECONDS)
        history = RunHistory.for_display(history.store, history.run)


def _print_event(screen: Screen, event: Event, names: StepNames, output: Format) -> None:
    if output == Format.JSON:
        document = json.loads(event.model_dump_json(exclude_none=True))
        screen.document({**document, "step_name": names.name(event.step)}, output, indent=None)
    elif output == Format.YAML:
        screen.write("---")
        screen.document(event.model_dump(mode="json", exclude_none=True), output)
    else:
        clock = event.at.astimezone().strftime("%H:%M:%S.%f")[:-3]
        step = names.name(event.step)
        attempt = f"{step}/{event.attempt}" if event.attempt else step
        screen.write(f"{clock}  {event.name:<24}{attempt:<16}{' '.join(names.readable(event.message).split())}")
    screen.out.file.flush()
