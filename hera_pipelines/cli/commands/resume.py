"""``tiphys resume``: go on with a run from storage alone, where its last submission ran.

``tiphys plan``: what would run, and why.
"""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import typer
from rich.text import Text
from tiphys_controller import Change, PlanReport, Resumed, Submitter, plan_run
from tiphys_controller import resume as resume_run

from hera_pipelines.cli.code_changes import DriftOption, Edits, FileArgument, FromOption, show_drift
from hera_pipelines.cli.progress.cluster import follow, newest_job
from hera_pipelines.cli.progress.local import (
    CodeOption,
    EngineOptions,
    Job,
    PortOption,
    QueuesOption,
    SpeedOption,
    StateOption,
    carry_out,
    local_engine,
    remembered_code,
)
from hera_pipelines.cli.screen import Format, Screen
from hera_pipelines.cli.shared_options import (
    DEFAULT_STATE,
    ArgoServerOption,
    ContextOption,
    KubeconfigOption,
    NamespaceOption,
    PipelineOption,
    StoreOption,
    Where,
    existing_store,
    must_be_named,
)
from hera_pipelines.cli.target import (
    CLUSTER_OPTIONS,
    ENGINE_OPTIONS,
    ToClusterOption,
    cluster_submitter,
    last_submission,
    must_be_the_cluster_of,
    ran_on,
    refuse,
    runs_on_cluster,
    words,
)
from hera_pipelines.local.run_session import LocalSession
from tiphys.store import Store, Submission, current_workflow

PLAN_EXAMPLES = """\b
Examples:
  tiphys plan digits-7xk2p
  tiphys plan digits-7xk2p --from fit
  tiphys plan digits-7xk2p -o json | jq '.steps[] | select(.decision == "run")'
"""

_STYLES = {"skip": "dim", "run": "bold cyan"}


def plan(
    context: typer.Context,
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    again: FromOption = None,
    store: StoreOption = None,
    output: Annotated[Format, typer.Option("-o", "--format", help="Form of the plan.")] = Format.TABLE,
) -> None:
    """Show what a resume would run and what it would skip, and why. Reads storage and writes nothing."""
    screen: Screen = context.obj
    report = plan_run(existing_store(screen, store), run, again or ())
    show_plan(screen, report, output)
    if report.running:
        words = [word for step in again or () for word in ("--from", step)]
        screen.note(f"next: {shlex.join(['tiphys', 'resume', run, *words])}")


def show_plan(screen: Screen, report: PlanReport, output: Format) -> None:
    """Print the plan to stdout, and what it took to make it to stderr."""
    if output == Format.TABLE:
        screen.table(("STEP", "KIND", "DECISION", "REASON"), _rows(report))
    else:
        screen.document(report.model_dump(mode="json", by_alias=True), output)
    screen.note(
        f"{len(report.running)} of {len(report.steps)} steps would run; "
        f"{report.requests} requests to storage, {report.seconds:.2f} s"
    )


def _rows(report: PlanReport) -> Iterator[tuple[str | Text, ...]]:
    for step in report.steps:
        yield step.name, step.kind, Text(step.decision, style=_STYLES[step.decision]), step.reason
        for item in step.items:
            yield f"  {item.step}", "item", "done" if item.done else "run", item.reason


EXAMPLES = """\b
Examples:
  tiphys resume digits-7xk2p --dry-run
  tiphys resume digits-7xk2p
  tiphys resume digits-7xk2p --from fit
  tiphys resume digits-7xk2p digits.py --drift parameters=warn
  tiphys resume digits-7xk2p --store s3://ml/tiphys --context east
"""


def resume(
    command: typer.Context,
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    file: FileArgument = None,
    which: PipelineOption = None,
    again: FromOption = None,
    drift: DriftOption = None,
    idempotency_key: Annotated[
        str, typer.Option("--idempotency-key", metavar="KEY", help="Under one key a run is resumed once.")
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and submit nothing.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Take the work away from a submission that may still be running.")
    ] = False,
    store: StoreOption = None,
    state: StateOption = DEFAULT_STATE,
    queues: QueuesOption = None,
    plugin_port: PortOption = 0,
    speed: SpeedOption = 1.0,
    code: CodeOption = None,
    cluster: ToClusterOption = False,
    local: Annotated[bool, typer.Option("--local", help="On this machine, in place of the cluster it ran on.")] = False,
    context: ContextOption = None,
    namespace: NamespaceOption = None,
    kubeconfig: KubeconfigOption = None,
    argo_server: ArgoServerOption = None,
    output: Annotated[Format, typer.Option("-o", "--format", help="Form of the plan.")] = Format.TABLE,
) -> None:
    """Run what is still missing of a run, where its last submission ran: here, or on a cluster.

    With --from, steps run again that are done, and what hangs on them; trainings
    among them begin anew. With a file, the steps that it changes run again, too.

    Works with the Workflow, the cluster and the engine's folder gone: the plan
    goes to stdout, progress to stderr. On a cluster Ctrl-C only ends the
    watching.
    """
    screen: Screen = command.obj
    place = existing_store(screen, store)
    last = last_submission(place, run)
    on_cluster = runs_on_cluster(last, cluster, local)
    if on_cluster:
        refuse(command, ENGINE_OPTIONS, "this is for the local engine, and the run goes on at a cluster; see --local")
    else:
        refuse(
            command,
            CLUSTER_OPTIONS,
            f"this is for a cluster, and run {run} goes on here; check its name, or see --cluster",
        )
    change = Edits(file, which, drift=drift or (), here=not on_cluster).of(place, run)
    if dry_run:
        # A session that is not entered starts nothing, and a plan asks no cluster.
        session = LocalSession(place, state)
        planned = resume_run(place, session, run, dry_run=True, again=again or (), change=change)
        show_drift(screen, planned.plan.drift)
        show_plan(screen, planned.plan, output)
        return
    asked = _Asked(tuple(again or ()), idempotency_key, change)
    order = _Order(place, run, last, force, must_be_named(store), output, asked)
    if on_cluster:
        _on_cluster(screen, order, Where(kubeconfig, context, namespace, argo_server), cluster)
    else:
        folder = code or (file.parent if file else remembered_code(place, run))
        _here(screen, order, EngineOptions(state, queues, plugin_port, speed, folder))


class _Asked(NamedTuple):
    """What is asked beyond doing what is missing."""

    again: tuple[str, ...]
    key: str
    change: Change | None


@dataclass(frozen=True)
class _Order:
    """What is asked for, wherever it is carried out."""

    store: Store
    run: str
    last: Submission | None
    force: bool
    store_must_be_named: bool
    output: Format
    asked: _Asked

    def carry_out(self, submitter: Submitter, namespace: str) -> Resumed:
        """Submit it."""
        return resume_run(
            self.store, submitter, self.run, force=self.force, namespace=namespace, **self.asked._asdict()
        )


def _here(screen: Screen, order: _Order, options: EngineOptions) -> None:
    place, run = order.store, order.run
    with local_engine(place, options) as (session, watch):
        resumed = order.carry_out(session, "default")
        if _tell(screen, order, resumed):
            job = Job(run, resumed.workflow_name, place, options.state, order.store_must_be_named)
            carry_out(screen, session, watch, job)


def _on_cluster(screen: Screen, order: _Order, where: Where, forced: bool) -> None:
    """``forced`` takes this cluster even if the run was in another one."""
    submitter, namespace = cluster_submitter(where, screen.note)
    if order.last is not None and ran_on(order.last) and not forced:
        must_be_the_cluster_of(order.last, submitter.cluster, order.run)
    resumed = order.carry_out(submitter, namespace)
    if _tell(screen, order, resumed):
        options = words([("--store", order.store.url if order.store_must_be_named else "")])
        job = newest_job(submitter, order.store, order.run, tuple(options), where.words)
        follow(screen, submitter, job, current_workflow(order.store, order.run))


def _tell(screen: Screen, order: _Order, resumed: Resumed) -> bool:
    """Show the plan and what became of it; whether something was submitted."""
    show_drift(screen, resumed.plan.drift)
    show_plan(screen, resumed.plan, order.output)
    screen.out.file.flush()
    if resumed.submission is None:
        screen.note(f"nothing is missing of run {order.run}")
        return False
    if not resumed.created:
        screen.note(f"submission {resumed.submission} of run {order.run} was made before, under the same key")
        return False
    screen.note(f"submission {resumed.submission} of run {order.run}")
    return True
