"""``tiphys fork``: starts a new run from the results of another run, with changed code or parameters if given."""

from dataclasses import replace
from itertools import islice
from typing import Annotated

import typer
from tiphys_controller import (
    ForkResult,
    PlanReport,
    Submitter,
    add_start_checkpoints,
    find_finished_trainings,
    fork_run,
)

from hera_pipelines.cli.progress.local import ALREADY_STARTED_MESSAGE
from hera_pipelines.cli.repair.code_changes import RunEdits, show_drift
from hera_pipelines.cli.repair.resume import show_plan
from hera_pipelines.cli.screen import Format, Screen
from hera_pipelines.cli.shared_options import (
    ParameterOption,
    complete_run,
    existing_store,
    store_arguments,
    with_option_groups,
)
from hera_pipelines.cli.start.run import show_started
from hera_pipelines.cli.start.submission import (
    DryRunOption,
    LocalOption,
    RunNameOption,
    SubmissionOptions,
    SubmissionTarget,
    choose_target,
)
from hera_pipelines.cli.target import tenant_submitter
from hera_pipelines.local.live_workflows import LocalWorkflows
from tiphys.lineage.run_history import RunHistory
from tiphys.store import Store, read_run

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


@with_option_groups
def fork(
    command: typer.Context,
    run: Annotated[str, typer.Argument(help="Name of the run to fork.", autocompletion=complete_run)],
    edits: RunEdits,
    *,
    parameter: ParameterOption = None,
    name: RunNameOption = None,
    dry_run: DryRunOption = False,
    local: LocalOption = False,
    options: SubmissionOptions,
) -> None:
    """Start a new run from the results of another run.

    The other run is not changed, and it may still be running. Steps with the same
    program, parameters and inputs reuse its results. Other training steps start
    from its newest checkpoint, or from the beginning if --from names them or a
    step that they depend on. Prints the name of the new run on stdout.
    """
    screen: Screen = command.obj
    edits = replace(edits, parameters=parameter or ())
    store = existing_store(screen, options.store, edits.store)
    read_run(store, run)
    last = RunHistory(store, run).last_submission
    on_cluster = choose_target(command, options, run, last, local)
    change = edits.build_change(store, run, runs_locally=not on_cluster, note=screen.note)

    def submit(submitter: Submitter, namespace: str) -> tuple[str, int] | None:
        key = options.idempotency_key
        forked = fork_run(store, submitter, run, name, namespace, edits.rerun, change, dry_run=dry_run, key=key)
        _show_fork(screen, store, run, forked, options.output)
        started = forked.started
        return (started.run, started.submission) if started is not None and started.created else None

    if dry_run:
        submit(LocalWorkflows(options.engine.state), "")
        return
    target = SubmissionTarget(screen, options, store, store_arguments(store, options.store, edits.store))
    if on_cluster:
        submitter, namespace = tenant_submitter(options.cluster, last, run, screen.note)
        target.submit_to_cluster(submit, submitter, namespace)
    else:
        target.submit_locally(submit, edits.code_folder(store, run))


def _show_fork(screen: Screen, store: Store, parent: str, forked: ForkResult, output: Format) -> None:
    """Print the differences, and the new run's name or, after a dry run, the plan."""
    show_drift(screen, forked.drift)
    plan, started = forked.plan, forked.started
    if started is None or started.created:
        plan = add_start_checkpoints(store, plan)
        _warn_of_finished_trainings(screen, plan)
    if started is None:
        show_plan(screen, plan, output)
    else:
        if started.created:
            screen.note(f"fork of run {plan.run}; steps with the same step key reuse its results")
        show_started(screen, started, output, parent)
        if not started.created:
            screen.note(ALREADY_STARTED_MESSAGE)
    screen.out.file.flush()


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
