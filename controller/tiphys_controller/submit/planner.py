"""Plans a run that lies in storage: observe, decide, read what the decision asks for, decide again.

Another Workflow that a run shall go on with, because somebody changed its code.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from tiphys.errors import IntegrityError, UsageError
from tiphys.protocol.compiled_workflow import CompiledPipeline, Manifest
from tiphys.protocol.drift_policy import DriftPolicy, drift_policy_of, overridden
from tiphys.records import RunRecord, WorkflowRecord, digest
from tiphys.store import Store, Submission
from tiphys_controller.plan.dag import Graph
from tiphys_controller.plan.decide import Action, Plan, plan, renewed
from tiphys_controller.plan.drift import Difference, Installed, changed, differences, version_drift
from tiphys_controller.plan.observe import RunState, looked_again, observe, with_ends
from tiphys_controller.plan.prune import Identity, identified, workflow_name
from tiphys_controller.submit.start import authored_name, code_version, own_parameters


class Change(NamedTuple):
    """``workflow`` is compiled, with its parameters; None: what the last submission was made of.

    ``drift`` are actions in place of the run's own, by class; ``installed`` tells
    versions where the programs will run, None where nobody knows them.
    """

    workflow: Manifest | None = None
    drift: Mapping[str, str] = {}
    installed: Installed | None = None

    def policy(self, before: CompiledPipeline) -> DriftPolicy:
        """What may change.

        Raises:
            UsageError: one of the actions is none.
        """
        return overridden(drift_policy_of(before.manifest), self.drift)

    def compare(
        self, before: CompiledPipeline, run: str, forking: bool = False
    ) -> tuple[CompiledPipeline, tuple[Difference, ...], Mapping[str, str]]:
        """The new pipeline, what differs, and the steps whose results may not stand any more, each with the reason.

        Raises:
            UsageError: it is another pipeline, for another store, or would be a run of another name.
        """
        policy = self.policy(before)
        if self.workflow is None:
            return before, (), {}
        after = CompiledPipeline.from_manifest(self.workflow)
        for what, old, new in (("pipeline", before.name, after.name), ("store", before.store, after.store)):
            if old.rstrip("/") != new.rstrip("/"):
                raise UsageError(f"run {run} is of the {what} {old}, and this Workflow of {new}; choose the right one")
        if not forking:
            authored_name(after, run)
        found = differences(before, after, policy)
        return after, found, changed(before, after, found)


def check_intact(record: RunRecord) -> None:
    """Refuse to go on with a Workflow that is not the one that was recorded.

    Raises:
        IntegrityError: it was changed.
    """
    if digest(record.workflow) != record.digest:
        raise IntegrityError(
            f"the Workflow in run.json of run {record.run} was changed after it was written, its digest does not "
            "match; restore the object, or begin a new run"
        )


def workflow_record(record: RunRecord, manifest: Manifest) -> WorkflowRecord:
    """``manifest`` as it is kept with the run of ``record``."""
    namespace = (record.workflow.get("metadata") or {}).get("namespace") or "default"
    workflow = identified(manifest, Identity(record.run, 1, workflow_name(record.run, 1), namespace))
    return WorkflowRecord(
        run=record.run,
        workflow=workflow,
        digest=digest(workflow),
        parameters=own_parameters(workflow),
        code_version=code_version(workflow),
    )


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
