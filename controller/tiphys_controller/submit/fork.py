"""Forks a run: a new run reuses the results of its parent and trains on from its checkpoints.

The fork takes over by step key what the parent or one of the parent's ancestors has
finished: before its Workflow exists where the inputs of a step are known by then, and
at the admit of a gated step otherwise. So the fork need not decide which results
survive changed code or parameters.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tiphys.protocol.compiled_workflow import CompiledPipeline
from tiphys.records import Event, json_digest, task_name
from tiphys.store import RunLayout, Store, append_events
from tiphys_controller.plan.drift import DriftFinding, check_drift_allowed
from tiphys_controller.plan.prune import clear_identity
from tiphys_controller.submit.idempotency import StartRequest, find_started_run
from tiphys_controller.submit.plan_report import PlanReport, build_plan_report
from tiphys_controller.submit.planner import (
    RunPlan,
    WorkflowChange,
    check_workflow_digest,
    plan_stored_run,
    recorded_namespace,
)
from tiphys_controller.submit.start import NewRun, StartResult, begin_run, random_suffix
from tiphys_controller.submit.submitter import Submitter


class ForkResult(NamedTuple):
    """Outcome of a fork. ``started`` is None after a dry run.

    ``plan`` is the plan of the parent under the requested change. The fork
    reuses the steps that it skips, and of the others those whose step key is the same.
    """

    plan: PlanReport
    drift: tuple[DriftFinding, ...]
    started: StartResult | None = None


def fork_run(
    store: Store,
    submitter: Submitter,
    parent: str,
    run: str | None = None,
    namespace: str = "",
    rerun: Sequence[str] = (),
    change: WorkflowChange | None = None,
    dry_run: bool = False,
    suffix: Callable[[], str] = random_suffix,
    key: str | None = None,
) -> ForkResult:
    """Begin a run that reuses what ``parent`` has finished, and trains on from its checkpoints.

    Args:
        store: Store of both runs.
        submitter: Cluster that gets the Workflow.
        parent: The run to fork; it may be running, and is left alone.
        run: Name of the new run; None: as `tiphys_controller.start_run` chooses one.
        namespace: Namespace of the Workflow; empty: that of the parent.
        rerun: Steps that reuse nothing, with all steps that depend on them.
        change: A Workflow with other code or parameters; None: that of the parent's last submission.
        dry_run: Plan, and write nothing.
        suffix: Returns the random part of a name.
        key: Idempotency key: all calls under one key begin one fork and return it.

    Raises:
        NotFoundError: there is no such run.
        UsageError: there is no such step, the Workflow is of another pipeline, or the key is not valid.
        ConflictError: the new name is taken, the drift policy forbids a change, or
            the key was used for another request.
        IntegrityError: a record is damaged.
    """
    parent_plan = plan_stored_run(store, parent, rerun, change, is_fork=True)
    report = build_plan_report(parent_plan, store.url)
    if dry_run:
        return ForkResult(report, parent_plan.drift)
    check_workflow_digest(parent_plan.state.record)
    pipeline = CompiledPipeline.from_manifest(clear_identity(parent_plan.pipeline.manifest))
    namespace = namespace or recorded_namespace(parent_plan.state.record)
    rerun_steps = tuple(name for name in parent_plan.rerun_steps if task_name(name) in parent_plan.pipeline.steps)
    new = NewRun(pipeline, run, namespace, suffix, parent, rerun_steps)
    # The digest of the request for an idempotency key. Later changes of the parent do not change it.
    content = {
        "parent": parent,
        "again": list(rerun),
        "workflow": change.workflow if change else None,
        "run": run or "",
        "namespace": namespace,
    }
    request = StartRequest(key, json_digest(content), f"{run or 'a run'} as a fork of run {parent}")
    if find_started_run(store, request) is None:
        check_drift_allowed(parent_plan.drift, parent, is_fork=True)
    started = begin_run(store, submitter, new, request)
    if parent_plan.state.damaged_ends and started.created:
        append_events(store, started.run, "controller", [_build_passed_over_event(parent_plan)])
    return ForkResult(report, parent_plan.drift, started)


def _build_passed_over_event(parent_plan: RunPlan) -> Event:
    parent = parent_plan.state.record.run
    keys = [RunLayout(parent).attempt_end(*damaged) for damaged in sorted(parent_plan.state.damaged_ends)]
    message = f"`tiphys fork {parent}` passed over damaged records, whose results it does not reuse: {', '.join(keys)}"
    return Event(name="record.passed_over", message=message, data={"passed_over": keys})
