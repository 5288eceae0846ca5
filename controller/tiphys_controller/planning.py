"""Plans a run that lies in storage: observe, decide, read what the decision asks for, decide again."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from tiphys.errors import UsageError
from tiphys.protocol.pipeline import CompiledPipeline, Manifest
from tiphys.store import Store, Submission
from tiphys_controller.again import renewed
from tiphys_controller.draft import Action
from tiphys_controller.observe import RunState, observe, with_ends
from tiphys_controller.plan import Plan, plan


class Planned(NamedTuple):
    """A final plan and what it was made of."""

    pipeline: CompiledPipeline
    state: RunState
    plan: Plan
    seconds: float
    """How long it took, storage included."""
    again: tuple[str, ...] = ()
    """Steps that were asked to run again, by whoever asks now or by a claim that nobody has carried out yet."""
    fresh: tuple[str, ...] = ()
    """Those, and all that hang on them: results from before do not count for them."""

    @property
    def last(self) -> Submission | None:
        """The last submission of the run; None before the first."""
        return self.state.submissions[-1] if self.state.submissions else None


def planned(store: Store, run: str, again: Sequence[str] = (), workflow: Manifest | None = None) -> Planned:
    """Plan a run.

    Args:
        store: Where the run is kept.
        run: Its name.
        again: Steps that shall run again, with all behind them, although they are done.
        workflow: What to go on with; None: what its last submission was made of.

    Raises:
        NotFoundError: there is no such run.
        UsageError: Tiphys did not compile its Workflow, or it has no such step.
        IntegrityError: a record is damaged.
    """
    begin = time.monotonic()
    state = observe(store, run)
    try:
        pipeline = CompiledPipeline.from_manifest(workflow or state.workflow)
        roots = again or _not_carried_out(state)
        fresh = renewed(pipeline, roots)
        state, decided = _decided(store, pipeline, replace(state, renewed=fresh))
        _check(decided, roots)
    except UsageError as error:
        raise UsageError(f"run {run} cannot be planned: {error}") from error
    return Planned(pipeline, state, decided, time.monotonic() - begin, tuple(roots), tuple(fresh))


def _not_carried_out(state: RunState) -> Sequence[str]:
    """What a claim asked for whose Workflow nobody has bound: whoever goes on with it does what it says."""
    last = state.submissions[-1] if state.submissions else None
    return last.claim.again if last and last.bound is None else ()


def _check(decided: Plan, roots: Sequence[str]) -> None:
    for task in decided.tasks:
        if task.name in roots and task.action is Action.SKIP:
            raise UsageError(f"{task.name} is to run again and would not: {task.reason}")


def _decided(store: Store, pipeline: CompiledPipeline, state: RunState) -> tuple[RunState, Plan]:
    decided = plan(pipeline, state)
    while decided.unread:
        state = with_ends(store, state, decided.unread)
        decided = plan(pipeline, state)
    return state, decided
