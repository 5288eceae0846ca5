"""``tiphys fork``: starts a new run from the results of another run, with changed code or parameters if given."""

from dataclasses import dataclass
from itertools import islice
from typing import Annotated

import typer
from tiphys_controller import (
    ForkResult,
    PlanReport,
    StartResult,
    Submitter,
    WorkflowChange,
    add_start_checkpoints,
    find_finished_trainings,
    fork_run,
)

from hera_pipelines.cli.progress.cluster import find_cluster_submission, follow_submission
from hera_pipelines.cli.progress.local import (
    ALREADY_STARTED_MESSAGE,
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
from hera_pipelines.cli.repair.resume import show_plan
from hera_pipelines.cli.screen import Format, Screen
from hera_pipelines.cli.shared_options import (
    DEFAULT_STATE,
    ArgoServerOption,
    ClusterOptions,
    ContextOption,
    FormatOption,
    KubeconfigOption,
    NamespaceOption,
    ParameterOption,
    PipelineOption,
    PipelineStoreOption,
    complete_run,
    existing_store,
    store_arguments,
)
from hera_pipelines.cli.start.detach import detach
from hera_pipelines.cli.start.run import show_started
from hera_pipelines.cli.target import (
    CLUSTER_OPTIONS,
    ENGINE_OPTIONS,
    OnClusterOption,
    refuse_options,
    runs_on_cluster,
    tenant_submitter,
)
from hera_pipelines.local.live_workflows import LocalWorkflows
from tiphys.store import Store, Submission, last_submission, read_run

_MAX_NAMED = 5
"""Most trainings that a warning names."""

EXAMPLES = """\b
Examples:
  tiphys fork digits-7xk2p -p lr=0.3
  tiphys fork digits-7xk2p digits.py --run digits-repaired
  tiphys fork digits-7xk2p --from fit -p lr=0.3 --dry-run
  tiphys fork digits-7xk2p -p lr=0.3 --dry-run -o json | jq .steps
  tiphys fork digits-7xk2p -p lr=0.3 --idempotency-key sweep-17
"""


def fork(
    command: typer.Context,
    run: Annotated[str, typer.Argument(help="Name of the run to fork.", autocompletion=complete_run)],
    file: FileArgument = None,
    which: PipelineOption = None,
    parameter: ParameterOption = None,
    rerun_steps: FromOption = None,
    drift: DriftOption = None,
    name: Annotated[
        str | None, typer.Option("--run", metavar="NAME", help="Name of the new run. Default: a generated name.")
    ] = None,
    idempotency_key: Annotated[
        str, typer.Option("--idempotency-key", metavar="KEY", help="Fork the run at most once with this key.")
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and submit nothing.")] = False,
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
    in_background: LocalDetachOption = False,
    output: FormatOption = Format.TABLE,
) -> None:
    """Start a new run from the results of another run.

    The other run is not changed, and it may still be running. Steps with the same
    program, parameters and inputs reuse its results. Other training steps start
    from its newest checkpoint, or from the beginning if --from names them or a
    step that they depend on. Prints the name of the new run on stdout.
    """
    screen: Screen = command.obj
    edits = RunEdits(file, which, parameter or (), drift or ())
    run_store = existing_store(screen, store, edits.store)
    read_run(run_store, run)
    last = last_submission(run_store, run)
    on_cluster = runs_on_cluster(last, cluster, local)
    change = edits.build_change(run_store, run, runs_locally=not on_cluster)
    request = _ForkRequest(
        run_store,
        run,
        name,
        tuple(rerun_steps or ()),
        change,
        idempotency_key,
        store_arguments(run_store, store, edits.store),
        output,
    )
    if dry_run:
        _show_fork(screen, request, request.start(LocalWorkflows(state), dry_run=True))
        return
    if on_cluster:
        refuse_options(
            command, ENGINE_OPTIONS, "this is for the local engine, and the fork runs on a cluster; see --local"
        )
        _fork_on_cluster(
            screen, request, ClusterOptions(kubeconfig, context, namespace, argo_server), in_background, last
        )
    else:
        refuse_options(
            command, CLUSTER_OPTIONS, f"this is for a cluster, and run {run} ran on this machine; see --cluster"
        )
        folder = code or (file.parent if file else read_code_folder(run_store, run))
        _fork_locally(screen, request, EngineOptions(state, queues, plugin_port, speed, folder), in_background)


@dataclass(frozen=True)
class _ForkRequest:
    """The fork that the command line describes, for either target."""

    store: Store
    parent: str
    name: str | None
    rerun_steps: tuple[str, ...]
    change: WorkflowChange | None
    idempotency_key: str
    store_arguments: tuple[str, ...]
    output: Format

    def start(self, submitter: Submitter, namespace: str = "", dry_run: bool = False) -> ForkResult:
        """Fork the run."""
        return fork_run(
            self.store,
            submitter,
            self.parent,
            self.name,
            namespace,
            self.rerun_steps,
            self.change,
            dry_run=dry_run,
            key=self.idempotency_key,
        )


def _fork_locally(screen: Screen, request: _ForkRequest, options: EngineOptions, in_background: bool) -> None:
    detachment = detach() if in_background else None
    with open_local_session(request.store, options) as (session, observer):
        started = _show_fork(screen, request, request.start(session, "default"))
        if started is not None and started.created:
            submission = LocalSubmission(
                started.run, started.workflow_name, request.store, options.state, request.store_arguments
            )
            run_to_end(screen, session, observer, submission, detachment)


def _fork_on_cluster(
    screen: Screen, request: _ForkRequest, cluster_options: ClusterOptions, detach: bool, last: Submission | None
) -> None:
    """Fork on a cluster, in the namespace of the parent if that ran on a cluster."""
    submitter, namespace = tenant_submitter(cluster_options, last, request.parent, screen.note)
    started = _show_fork(screen, request, request.start(submitter, namespace))
    if started is None or not started.created:
        return
    submission = find_cluster_submission(
        submitter, request.store, started.run, request.store_arguments, cluster_options.command_arguments
    )
    if not detach:
        follow_submission(screen, submitter, submission, read_run(request.store, started.run).workflow)


def _show_fork(screen: Screen, request: _ForkRequest, fork_result: ForkResult) -> StartResult | None:
    """Print the differences, and the new run's name or, after a dry run, the plan; return None after a dry run."""
    show_drift(screen, fork_result.drift)
    plan, is_new = fork_result.plan, fork_result.started is None or fork_result.started.created
    if is_new:
        plan = add_start_checkpoints(request.store, plan)
        _warn_of_finished_trainings(screen, plan)
    if fork_result.started is None:
        show_plan(screen, plan, request.output)
    elif fork_result.started.created:
        screen.note(f"fork of run {fork_result.plan.run}; steps with the same step key reuse its results")
        show_started(screen, fork_result.started, request.output, request.parent)
    else:
        show_started(screen, fork_result.started, request.output, request.parent)
        screen.note(ALREADY_STARTED_MESSAGE)
    screen.out.file.flush()
    return fork_result.started


def _warn_of_finished_trainings(screen: Screen, plan: PlanReport) -> None:
    finished = find_finished_trainings(plan)
    if not finished:
        return
    names = ", ".join(f"{name} (step {step:,})" for name, step in islice(finished.items(), _MAX_NAMED))
    more = f" and {len(finished) - _MAX_NAMED} more" if len(finished) > _MAX_NAMED else ""
    roots = " ".join(f"--from {name}" for name in dict.fromkeys(name.partition("[")[0] for name in finished))
    screen.note(
        f"fork: finished in run {plan.run}, and continued from the last checkpoint: {names}{more}; nothing is trained "
        f"unless the change asks for more steps; add {roots} to train from the beginning"
    )
