"""The run of MLflow that a step continues, and its parent; opened in the step's pod before its program starts.

Creation in MLflow and the record in the store are two writes, so any caller may
die between them, and two may race. A run in MLflow carries the step's
`tracking_id` as a tag. A caller looks for that tag before it creates a run,
names the run in a create-only record, and deletes every other run with the tag.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tiphys.errors import NotFoundError
from tiphys.faults import failpoint
from tiphys.records import RunRecord, TrackingRunRecord
from tiphys.records.tracking import tracking_id
from tiphys.store import Store, claim_record, find_record, read_run
from tiphys.tracking.records import tracking_run_key
from tiphys.tracking.server import PARENT_TAG, MlflowRun, MlflowServer, RunStatus

ID_TAG = "tiphys.id"
RUN_TAG = "tiphys.run"
STEP_TAG = "tiphys.step"
STORE_TAG = "tiphys.store"
FORKED_FROM_TAG = "tiphys.forked_from"
FORKED_FROM_RUN_TAG = "tiphys.forked_from_run_id"


class StepRun(NamedTuple):
    """The run of MLflow of a step, by MLflow's ids."""

    experiment_id: str
    parent_id: str
    run_id: str


def find_step_run(store: Store, run: str, step: str) -> StepRun | None:
    """The run of MLflow that an earlier attempt has opened, from the store alone; None if there is none."""
    parent = find_record(store, tracking_run_key(run, ""), TrackingRunRecord)
    child = find_record(store, tracking_run_key(run, step), TrackingRunRecord)
    return StepRun(child.experiment_id, parent.mlflow_run_id, child.mlflow_run_id) if parent and child else None


def open_step_run(server: MlflowServer, store: Store, run: str, step: str, experiment: str) -> StepRun:
    """Find or create the run of MLflow of a step and its parent, and set both to RUNNING.

    ``experiment`` is the name for a run that has none yet.

    Raises:
        NotFoundError: a person has deleted the run, or the experiment, in MLflow.
        StoreError: MLflow or storage did not answer.
        UsageError: MLflow refuses the request.
    """
    record = read_run(store, run)
    parent_record = find_record(store, tracking_run_key(run, ""), TrackingRunRecord)
    experiment_id = parent_record.experiment_id if parent_record else server.experiment(experiment)
    tags = {RUN_TAG: run, STORE_TAG: store.url}
    parent = _open_run(server, store, record, "", experiment_id, {**tags, **_fork_tags(store, record)})
    experiment_id = parent.experiment_id  # another step, with another experiment, may have been the first
    child = _open_run(
        server, store, record, step, experiment_id, {**tags, STEP_TAG: step, PARENT_TAG: parent.mlflow_run_id}
    )
    server.set_status(parent.mlflow_run_id, "RUNNING")
    server.set_status(child.mlflow_run_id, "RUNNING")
    return StepRun(experiment_id, parent.mlflow_run_id, child.mlflow_run_id)


def close_step_run(server: MlflowServer, step_run: StepRun, status: RunStatus) -> None:
    """Set the status of a step's run, and that of its parent, which has no process of its own, from its steps.

    Raises:
        StoreError: MLflow did not answer.
    """
    server.set_status(step_run.run_id, status)
    failpoint("tracking.after_status")
    steps = server.find_runs(step_run.experiment_id, PARENT_TAG, step_run.parent_id)
    server.set_status(step_run.parent_id, parent_status(steps))


def parent_status(steps: Iterable[MlflowRun]) -> RunStatus:
    """Status of the run whose steps have these: what runs or went wrong in one of them stands for all. Pure."""
    statuses = {step.status for step in steps}
    for status in ("RUNNING", "FAILED", "KILLED"):
        if status in statuses:
            return status
    return "FINISHED"


def _open_run(
    server: MlflowServer, store: Store, record: RunRecord, step: str, experiment_id: str, tags: Mapping[str, str]
) -> TrackingRunRecord:
    identity, key = tracking_id(record, step), tracking_run_key(record.run, step)
    claimed = find_record(store, key, TrackingRunRecord)
    found = [run.id for run in server.find_runs(experiment_id, ID_TAG, identity)]
    if claimed is None:
        if not found:
            failpoint("tracking.before_create")
            found = [server.create_run(experiment_id, step or record.run, {**tags, ID_TAG: identity})]
            failpoint("tracking.after_create")
        draft = TrackingRunRecord(run=record.run, step=step, experiment_id=experiment_id, mlflow_run_id=found[0])
        claimed = claim_record(store, key, draft).record
        failpoint("tracking.after_record")
    for other in found:
        if other != claimed.mlflow_run_id:
            server.delete_run(other)
    if claimed.mlflow_run_id not in found and not server.run_exists(claimed.mlflow_run_id):
        raise NotFoundError(
            f"run {claimed.mlflow_run_id} of {record.run}/{step or 'all steps'} was deleted in MLflow; restore it there"
        )
    return claimed


def _fork_tags(store: Store, record: RunRecord) -> dict[str, str]:
    """Tags that name the run that this one is a fork of, with its run in MLflow if it has one."""
    if not record.parent:
        return {}
    parent = find_record(store, tracking_run_key(record.parent, ""), TrackingRunRecord)
    return {FORKED_FROM_TAG: record.parent} | ({FORKED_FROM_RUN_TAG: parent.mlflow_run_id} if parent else {})
