"""``tiphys logs``: prints the output of the programs of a run."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from hera_pipelines.cli.screen import Format, Screen
from hera_pipelines.cli.shared_options import (
    LogOptions,
    RunStepArgument,
    StoreOption,
    choose_format,
    existing_store,
    parse_run_step,
    with_option_groups,
)
from hera_pipelines.cli.target import CLUSTER_OPTIONS, is_on_cluster, refuse_options
from tiphys.errors import NotFoundError, TiphysError, UsageError
from tiphys.lineage.run_history import RunHistory
from tiphys.protocol.workflow_nodes import without_try
from tiphys.records import utc_now
from tiphys.store import Attempt, Store, Submission

if TYPE_CHECKING:
    from tiphys_controller.doctor import Obstacle

    from hera_pipelines.cli.look.pod_logs import PodLog
    from tiphys.kube import KubeApi

EXAMPLES = """\b
Examples:
  tiphys logs digits-7xk2p/fit
  tiphys logs digits-7xk2p/fit -f
  tiphys logs digits-7xk2p/fit --attempt 1 --tail 50
  tiphys logs digits-7xk2p --tail 5
  tiphys logs digits-7xk2p -o json | jq -r 'select(.step == "fit").line'
"""


@with_option_groups
def logs(
    command: typer.Context,
    where: RunStepArgument,
    number: Annotated[
        int | None,
        typer.Option(
            "--attempt", metavar="K", min=1, help="Attempt of the step. Default: its newest.", show_default=False
        ),
    ] = None,
    tail: Annotated[
        int | None,
        typer.Option("--tail", metavar="N", min=0, help="Print only the last N lines of each pod.", show_default=False),
    ] = None,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Go on until the attempt ends; RUN/STEP must name one step.")
    ] = False,
    *,
    store: StoreOption = None,
    cluster: LogOptions,
    output: Annotated[
        Format,
        typer.Option("-o", "--format", callback=choose_format, help="Output format; json prints a document per line."),
    ] = Format.TABLE,
) -> None:
    """Print the output of the programs of a run.

    Without a step it prints the newest attempt of every step. The output comes from
    the pods or, once these are gone, from Argo's archive in the store (archiveLogs
    in Argo's configuration); for runs on this machine from the files of the engine.
    Without these, or without the cluster, it is the copy that trainings with
    checkpoints store themselves. A note on stderr says which. If there is none, the
    recorded reason of the attempt's end is printed.
    """
    screen: Screen = command.obj
    run_store = existing_store(screen, store)
    history, step = parse_run_step(run_store, where)
    attempts = _choose_attempts(history, step, number)
    if follow and len(attempts) != 1:
        raise UsageError(f"-f follows one step, and {where} has {len(attempts)}: name one as {history.run}/STEP")
    submissions = {entry.claim.submission: entry for entry in history.submissions}
    printed = False
    for attempt in attempts:
        submission = submissions[attempt.claim.submission]
        shown = _ShownAttempt(
            history.run, history.names.name(attempt.claim.step), attempt.claim.attempt, output, follow
        )
        printed |= _print_attempt(
            command, run_store, attempt, submission, shown, tail, partial(cluster.connect, command)
        )
    if not printed:
        raise NotFoundError(f"no output of {where} is left")


def _choose_attempts(history: RunHistory, step: str, number: int | None) -> list[Attempt]:
    """The attempt of that number of each selected step, or its newest.

    Raises:
        NotFoundError: no selected step has one.
    """
    run = history.run
    chosen = [
        attempt
        for found in history.read_attempts(step=step).values()
        for attempt in (found[-1:] if number is None else found)
        if number in (None, attempt.claim.attempt)
    ]
    if not chosen:
        what = "attempt" if number is None else f"attempt {number}"
        raise NotFoundError(f"{run}{'/' + step if step else ''} has no {what} yet; `tiphys get {run}` shows its steps")
    return sorted(chosen, key=lambda attempt: attempt.claim.written_at)


class _ShownAttempt(NamedTuple):
    """An attempt by its name for people, and how its output is printed."""

    run: str
    step: str
    attempt: int
    output: Format
    follow: bool

    def __str__(self) -> str:
        return f"{self.run}/{self.step} attempt {self.attempt}"

    def print_log(self, screen: Screen, log: "PodLog") -> None:
        """Print the lines of one pod; in JSON and YAML each is a document that names where it is from."""
        screen.note(f"── {self}, {log.source}")
        for line in log.lines:
            if self.output is Format.TABLE:
                screen.write(line)
            else:
                if self.output is Format.YAML:
                    screen.write("---")
                origin = {"run": self.run, "step": self.step, "attempt": self.attempt, "pod": log.pod}
                screen.document({**origin, "source": log.source, "line": line.rstrip("\n")}, self.output, indent=None)
            if self.follow:
                screen.out.file.flush()


def _print_attempt(
    command: typer.Context,
    store: Store,
    attempt: Attempt,
    submission: Submission,
    shown: _ShownAttempt,
    tail: int | None,
    connect: "Callable[[], KubeApi]",
) -> bool:
    """Print the output of an attempt; False if none is left."""
    from hera_pipelines.cli.look.pod_logs import StoredLogs, choose_pod_logs

    screen: Screen = command.obj
    printed = False
    try:
        if not is_on_cluster(submission):
            refuse_options(command, CLUSTER_OPTIONS, f"this is for a cluster, and run {shown.run} runs on this machine")
        for log in choose_pod_logs(store, submission, connect).find(attempt.claim, tail, shown.follow):
            printed = True
            shown.print_log(screen, log)
    except TiphysError as error:
        screen.note(f"── {shown}: its pods are out of reach ({error})")
    if not printed:
        for log in StoredLogs(store).find(attempt.claim, tail):
            printed = True
            shown.print_log(screen, log)
    if not printed:
        if attempt.end is None and (obstacles := _find_obstacles(attempt, submission, connect)):
            for obstacle in obstacles:
                screen.note(f"── {shown} has not started: {obstacle.sentence}; {obstacle.remedy}")
            return True
        end = f"; it ended: {attempt.end.message}" if attempt.end and attempt.end.message else ""
        screen.note(f"── {shown}: its pods are gone, and no archive has their output{end}")
    return printed


def _find_obstacles(attempt: Attempt, submission: Submission, connect: "Callable[[], KubeApi]") -> "list[Obstacle]":
    """What keeps the pods of an attempt from starting; empty if that cannot be known."""
    from tiphys_controller.doctor import observe_obstacles

    if not is_on_cluster(submission):
        return []
    with suppress(TiphysError):
        bound = submission.binding
        found = observe_obstacles(connect(), bound.namespace, utc_now(), {bound.workflow_name}) if bound else []
        prefix = attempt.claim.instance.partition(".")[2]
        return [row for row in found if without_try(row.step) in ("", prefix) or row.step.startswith(f"{prefix}.")]
    return []
