"""A new run that goes on from another one: with the results that still stand, and from its checkpoints.

The fork is a whole Workflow. Its admit takes over, by step key, what the parent
or a run before it has finished, so that nothing has to be decided here about
code or parameters that have changed.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tiphys.protocol.compiled_workflow import CompiledPipeline
from tiphys.records import digest
from tiphys.store import Store
from tiphys_controller.plan.drift import Difference, gate
from tiphys_controller.plan.prune import anonymous
from tiphys_controller.submit.idempotency import Asked, begin_once, find_begun
from tiphys_controller.submit.plan_report import PlanReport, report_of
from tiphys_controller.submit.planner import Change, Planned, check_intact, planned
from tiphys_controller.submit.start import Origin, Started, begin, random_suffix
from tiphys_controller.submit.submitter import Submitter


class Forked(NamedTuple):
    """A new run. ``started`` is None after a dry run.

    ``plan`` is that of the parent with what was asked: what it skips is taken
    over, and of what it runs everything whose step key is the same.
    """

    plan: PlanReport
    drift: tuple[Difference, ...]
    started: Started | None = None


def fork(
    store: Store,
    submitter: Submitter,
    parent: str,
    run: str | None = None,
    namespace: str = "",
    again: Sequence[str] = (),
    change: Change | None = None,
    dry_run: bool = False,
    suffix: Callable[[], str] = random_suffix,
    key: str = "",
) -> Forked:
    """Begin a run that takes over what ``parent`` has finished, and trains on from its checkpoints.

    Args:
        store: Where both runs are kept.
        submitter: Where the Workflow goes.
        parent: The run to go on from; it may be running, and is left alone.
        run: Name of the new run; None: as `tiphys_controller.start` makes one.
        namespace: Namespace of the Workflow; empty: that of the parent.
        again: Steps that take over nothing, and with them all that hang on them.
        change: Another Workflow, with other code or parameters; None: what the
            last submission of the parent was made of.
        dry_run: Plan, and write nothing.
        suffix: Gives the random part of a name.
        key: Idempotency key: calls under one key begin one fork, and all answer it.

    Raises:
        NotFoundError: there is no such run.
        UsageError: there is no such step, the Workflow is of another pipeline, or the key is not valid.
        ConflictError: the new name is taken, something has changed that may not, or
            the key was used for something else.
        IntegrityError: a record is damaged.
    """
    found = planned(store, parent, again, change, forking=True)
    report = report_of(found, store.url)
    if dry_run:
        return Forked(report, found.drift)
    check_intact(found.state.record)
    recorded = (found.state.record.workflow.get("metadata") or {}).get("namespace") or "default"
    wanted = _Wanted(run, namespace or recorded, tuple(again), change)
    return Forked(report, found.drift, _begun(store, submitter, found, wanted, key, suffix))


class _Wanted(NamedTuple):
    """What is asked for of a parent."""

    run: str | None
    namespace: str
    again: tuple[str, ...]
    change: Change | None

    def of(self, parent: str) -> Asked:
        """The same under a key. What the parent has become since then makes no other fork of it."""
        content = {
            "parent": parent,
            "again": list(self.again),
            "workflow": self.change.workflow if self.change else None,
            "run": self.run or "",
            "namespace": self.namespace,
        }
        return Asked(digest(content), f"{self.run or 'a run'} as a fork of run {parent}")


def _begun(
    store: Store, submitter: Submitter, found: Planned, wanted: _Wanted, key: str, suffix: Callable[[], str]
) -> Started:
    parent = found.state.record.run
    asked = wanted.of(parent)
    if not (key and find_begun(store, key, asked)):
        gate(found.drift, parent, forking=True)
    pipeline = CompiledPipeline.from_manifest(anonymous(found.pipeline.manifest))
    fresh = tuple(name for name in found.fresh if name in found.pipeline.steps)
    origin = Origin(parent=parent, fresh=fresh)
    if key:
        return begin_once(store, submitter, pipeline, key, asked, wanted.run, wanted.namespace, suffix, origin)
    return begin(store, submitter, pipeline, wanted.run, wanted.namespace, suffix, origin)
