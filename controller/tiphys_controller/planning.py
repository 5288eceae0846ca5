"""Plans a run that lies in storage: observe, decide, read what the decision asks for, decide again."""

import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from tiphys.errors import UsageError
from tiphys.protocol.pipeline import CompiledPipeline
from tiphys.store import Store, Submission
from tiphys_controller.again import renewed
from tiphys_controller.change import Change
from tiphys_controller.draft import Action
from tiphys_controller.drifting import Difference
from tiphys_controller.graph import Graph
from tiphys_controller.observe import RunState, looked_again, observe, with_ends
from tiphys_controller.plan import Plan, plan
from tiphys_controller.versions import version_drift


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
    drift: tuple[Difference, ...] = ()
    """What differs between the Workflow of the last submission and what shall go on."""

    @property
    def last(self) -> Submission | None:
        """The last submission of the run; None before the first."""
        return self.state.submissions[-1] if self.state.submissions else None


def planned(
    store: Store, run: str, again: Sequence[str] = (), change: Change | None = None, forking: bool = False
) -> Planned:
    """Plan a run.

    Args:
        store: Where the run is kept.
        run: Its name.
        again: Steps that shall run again, with all behind them, although they are done.
        change: Another Workflow to go on with; None: what its last submission was made of.
        forking: What is asked is asked of another run that begins with this one.

    Raises:
        NotFoundError: there is no such run.
        UsageError: Tiphys did not compile its Workflow, it has no such step, or the other Workflow is not for it.
        IntegrityError: a record is damaged.
    """
    begin = time.monotonic()
    state = observe(store, run)
    try:
        before = CompiledPipeline.from_manifest(state.workflow)
        after, drift, outdated = (before, (), {}) if change is None else change.compare(before, run, forking)
        roots = again or (() if forking else _not_carried_out(state))
        fresh = renewed(after, roots)
        state, decided = _decided(store, after, replace(state, renewed={**outdated, **fresh}))
        _check(decided, roots)
        if change is not None and change.installed is not None:
            going_on = _trainings(after, state, decided, fresh)
            drift += tuple(version_drift(store, run, going_on, change.installed, change.policy(before)))
    except UsageError as error:
        raise UsageError(f"run {run} cannot be planned: {error}") from error
    return Planned(after, state, decided, time.monotonic() - begin, tuple(roots), tuple(fresh), drift)


def _trainings(pipeline: CompiledPipeline, state: RunState, decided: Plan, fresh: Collection[str]) -> list[str]:
    """Trainings that go on from a checkpoint of theirs which can be read from here."""
    specs = [pipeline.steps[name] for name in decided.running if name in pipeline.steps and name not in fresh]
    return [one.name for one in specs if one.checkpoints and not pipeline.volume(one.name) and one.name in state.steps]


def _not_carried_out(state: RunState) -> Sequence[str]:
    """What a claim asked for whose Workflow nobody has bound: whoever goes on with it does what it says."""
    last = state.submissions[-1] if state.submissions else None
    return last.claim.again if last and last.bound is None else ()


def _check(decided: Plan, roots: Sequence[str]) -> None:
    for task in decided.tasks:
        if task.name in roots and task.action is Action.SKIP:
            raise UsageError(f"{task.name} is to run again and would not: {task.reason}")


def _decided(store: Store, pipeline: CompiledPipeline, state: RunState) -> tuple[RunState, Plan]:
    graph = Graph.of(pipeline)
    state = looked_again(store, with_ends(store, state, state.in_doubt))
    decided = plan(pipeline, state, graph)
    while decided.unread:
        state = with_ends(store, state, decided.unread)
        decided = plan(pipeline, state, graph)
    return state, decided
