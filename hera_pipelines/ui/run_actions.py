"""What a visitor can do with a run: resume, fork and stop it. Each shows its plan first.

The effect itself is that of the command of the same name. What is added here is
that a plan is carried out only as it was shown, once, and that an event says who
asked for it.
"""

import shlex
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from tiphys_controller.run_phase import RunPhase
from tiphys_controller.runs import AttemptDetail, RunDetail, describe_run
from tiphys_controller.submit.idempotency import digest_idempotency_key
from tiphys_controller.submit.plan_report import PlanReport
from tiphys_controller.submit.resume import plan_run
from tiphys_controller.submit.start_checkpoints import add_start_checkpoints
from tiphys_controller.submit.submitter import Submitter

from tiphys.errors import ConflictError, UsageError, unknown_name_message
from tiphys.lineage.run_history import RunHistory
from tiphys.records import Event
from tiphys.store import Store, Submission, append_events, read_events, read_submissions

_MAX_ATTEMPTS = 200
"""Most attempts that are read for a form: the newest of each step."""


class RunAction(StrEnum):
    """What can be done with a run; the values are the commands of ``tiphys``."""

    RESUME = "resume"
    FORK = "fork"
    STOP = "stop"


@dataclass(frozen=True)
class ActionRequest:
    """What a visitor has confirmed.

    ``after`` is the number of the newest submission that the plan was made for; 0 without one.
    """

    action: RunAction
    run: str
    after: int
    by: str
    nonce: str = ""
    """Tells two forks of a run apart; empty for other actions."""
    name: str = ""
    """Name of the fork; empty: a generated one."""
    parameters: Mapping[str, str] = field(default_factory=dict)
    """Parameters of the fork whose values differ from those of the run."""

    @property
    def key(self) -> str:
        """Idempotency key: equal for all forms that show the same plan, so that several of them have one effect."""
        return f"page:{self.action}:{self.run}:{self.nonce or self.after}"


class RunActionBackend(Protocol):
    """Carries actions out."""

    def find_obstacle(self, run: str, last: Submission | None) -> str:
        """Why this process can do nothing with the run, of which ``last`` is the newest submission; empty if it can."""

    def plan_fork(self, run: str, parameters: Mapping[str, str]) -> PlanReport:
        """What a fork with these parameters would take over and run. Raises `TiphysError`."""

    def perform(self, request: ActionRequest) -> str:
        """Do it, at most once for each key; answers the name of the run to look at. Raises `TiphysError`."""


def list_offered_actions(detail: RunDetail) -> tuple[RunAction, ...]:
    """The actions that make sense for a run, the most helpful first."""
    match detail.summary.phase:
        case RunPhase.RUNNING:
            return RunAction.STOP, RunAction.FORK
        case RunPhase.FAILED | RunPhase.STOPPED | RunPhase.INTERRUPTED:
            return RunAction.RESUME, RunAction.FORK
    return (RunAction.FORK,)


@dataclass(frozen=True)
class ActionView:
    """The page that shows what an action would do."""

    action: RunAction
    detail: RunDetail
    after: int
    nonce: str
    plan: PlanReport | None
    """None for a stop."""
    ending: tuple[AttemptDetail, ...]
    """Attempts that a stop would end."""
    name: str
    parameters: Mapping[str, str]
    """Values of all parameters of the fork."""
    changed: Mapping[str, str]
    """Those that differ from the values of the run."""
    obstacle: str
    """Why the action cannot be confirmed; empty if it can."""

    @property
    def command(self) -> str:
        """The command that does the same."""
        options = ["--run", self.name] if self.name else []
        options += [word for name, value in self.changed.items() for word in ("-p", f"{name}={value}")]
        return shlex.join(["tiphys", self.action, self.detail.summary.run, *options, "--store", self.detail.store])


def read_action_view(
    store: Store,
    backend: RunActionBackend,
    submitter: Submitter | None,
    action: RunAction,
    run: str,
    nonce: str,
    name: str = "",
    parameters: Mapping[str, str] | None = None,
) -> ActionView:
    """Read what an action would do now.

    ``nonce`` tells this form from others, ``name`` is that of the fork (empty: a generated one), and ``parameters``
    are its own; other actions ignore them. Without ``submitter`` the Workflow of the run is not looked up.

    Raises:
        NotFoundError: there is no such run.
        UsageError: Tiphys did not compile its Workflow, or there is no such parameter.
        IntegrityError: a record is damaged.
    """
    history = RunHistory.for_display(store, run)
    detail = describe_run(history, submitter, window=slice(_MAX_ATTEMPTS))
    if unknown := (parameters or {}).keys() - detail.parameters.keys():
        raise UsageError(unknown_name_message(f"run {run}", "parameter", min(unknown), sorted(detail.parameters)))
    values = {**detail.parameters, **(parameters or {})}
    changed = {parameter: value for parameter, value in values.items() if detail.parameters.get(parameter) != value}
    plan = None
    if action is RunAction.RESUME:
        plan = add_start_checkpoints(store, plan_run(store, run))
    elif action is RunAction.FORK:
        plan = backend.plan_fork(run, changed)
    attempts = [attempt for step in detail.steps for attempt in step.attempts]
    obstacle = backend.find_obstacle(run, history.last_submission)
    if not obstacle and plan is not None and plan.refusal is not None:
        obstacle = plan.refusal.message
    if not obstacle and action not in list_offered_actions(detail):
        obstacle = f"the run is {detail.summary.phase.value.lower()}: {detail.summary.reason}"
    return ActionView(
        action=action,
        detail=detail,
        after=max((submission.submission for submission in detail.submissions), default=0),
        nonce=nonce if action is RunAction.FORK else "",
        plan=plan,
        ending=tuple(attempt for attempt in attempts if not attempt.outcome) if action is RunAction.STOP else (),
        name=name if action is RunAction.FORK else "",
        parameters=values,
        changed=changed if action is RunAction.FORK else {},
        obstacle=obstacle,
    )


class ActionDesk:
    """Carries out what visitors confirm, one action at a time, and writes an event about each. Thread-safe."""

    def __init__(self, store: Store, backend: RunActionBackend) -> None:
        self._store = store
        self._backend = backend
        self._lock = threading.Lock()

    def carry_out(self, request: ActionRequest) -> str:
        """Do it unless it was done; answers the name of the run to look at.

        Raises:
            ConflictError: the run has changed since its plan was shown, or the action is refused.
            TiphysError: the action failed.
        """
        with self._lock:
            submissions = read_submissions(self._store, request.run, [])
            last = submissions[-1] if submissions else None
            newest = last.claim.submission if last else 0
            if newest != request.after and request.action is not RunAction.FORK:
                digest = digest_idempotency_key(request.key)
                if any(submission.claim.key == digest for submission in submissions):
                    return request.run
                raise ConflictError(
                    f"run {request.run} has changed since this plan was shown: submission {newest} was made meanwhile; "
                    "look at the plan again"
                )
            if obstacle := self._backend.find_obstacle(request.run, last):
                raise ConflictError(obstacle)
            self._record(request)
            return self._backend.perform(request)

    def _record(self, request: ActionRequest) -> None:
        """Record who asked, before the effect: an effect without a name would be worse than a name without effect."""
        name = f"run.{request.action}_requested"
        if any(
            entry.name == name and entry.data.get("key") == request.key
            for entry in read_events(self._store, request.run, [])
        ):
            return
        details = {"by": request.by, "key": request.key, "after": request.after}
        if request.action is RunAction.FORK:
            details |= {"fork": request.name, "parameters": dict(request.parameters)}
        event = Event(name=name, message=f"{request.action} requested on a web page by {request.by}", data=details)
        append_events(self._store, request.run, "ui", [event])
