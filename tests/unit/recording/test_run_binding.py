"""A Workflow that is bound is known again from storage, and an item of a fan-out by its value.

How a Workflow finds its run is in ``tests/unit/plugin/attempts/test_run_identity.py``.
"""

import pytest
from support.fakes.argo_workflow import RUN, ArgoWorkflow, Reader, bare, claim_submission
from support.fakes.counting_store import CountingStore
from support.fakes.memory_store import MemoryStore
from support.processes.failpoints import dying_at

from tiphys.errors import NotFoundError, StoreError
from tiphys.protocol.execute_api import WorkflowMetadata
from tiphys.recording.run_binding import bind_workflow, read_binding, resolve_step_id
from tiphys.records import SubmissionBinding, item_step_id
from tiphys.store import RunLayout, read_record, read_submissions

SWEEP = bare("sweep", fan_out=True)


@pytest.fixture
def flow() -> ArgoWorkflow:
    return ArgoWorkflow(MemoryStore(), [bare(), SWEEP])


@pytest.mark.parametrize("submission", [1, 2])
def test_binding_that_is_read_is_the_one_that_was_made(flow, submission):
    made = flow.bind()
    if submission == 2:
        again = flow.resumed()
        again.specs = flow.specs
        made = again.bind()
    stored = read_record(flow.store, RunLayout(RUN).submission_binding(submission), SubmissionBinding)
    assert read_binding(flow.store, stored) == made
    assert (made.run, made.submission, made.uid, made.namespace) == (RUN, submission, f"uid-{submission}", "ml")


def test_binding_of_a_run_that_is_gone_is_not_found(flow):
    flow.bind()
    stored = read_record(flow.store, RunLayout(RUN).submission_binding(1), SubmissionBinding)
    flow.store.delete(RunLayout(RUN).run_record)
    with pytest.raises(NotFoundError):
        read_binding(flow.store, stored)


def test_second_recorder_of_a_workflow_reads_two_records_and_writes_none(flow):
    flow.bind()
    counting = CountingStore(flow.store)
    flow.bind(counting)
    assert dict(counting.requests) == {"read": 2}


@pytest.mark.parametrize("point", ["admit.after_submission_claim", "admit.after_bind", "admit.after_run_record"])
def test_binding_that_was_cut_off_is_completed_by_the_next_call(flow, point):
    with dying_at(point):
        flow.bind()
    binding = flow.bind()
    (only,) = read_submissions(flow.store, RUN)
    assert only.binding is not None
    assert (binding.uid, only.binding.uid) == ("uid-1", "uid-1")
    assert set(binding.pipeline.steps) == {"prep", "sweep"}


def test_storage_that_does_not_answer_binds_nothing(flow):
    flow.store.refuses = lambda operation, key: operation == "create"
    with pytest.raises(StoreError):
        flow.bind()
    assert flow.store.objects == {}


def test_workflow_reads_the_one_of_its_uid_alone(flow):
    other = {**flow.manifest, "metadata": {**flow.manifest["metadata"], "uid": "uid-9"}}
    metadata = WorkflowMetadata(name=flow.name, namespace="ml", uid=flow.uid)
    with pytest.raises(NotFoundError, match="with uid uid-1 is not in cluster west"):
        bind_workflow(flow.store, Reader(other), metadata, RUN, "")


def test_step_without_a_fan_out_is_known_by_its_name_and_costs_no_request(flow):
    binding = flow.bind()
    counting = CountingStore(flow.store)
    assert resolve_step_id(counting, binding, bare(), "digits-abc.prep", "any") == "prep"
    assert not counting.requests


def test_item_keeps_its_id_for_its_submission(flow):
    binding = flow.bind()

    def resolve(index: int, item: str) -> str:
        return resolve_step_id(flow.store, binding, SWEEP, f"digits-abc.sweep({index}:x)", item)

    first, second, third = (item_step_id("sweep", "x", ordinal) for ordinal in range(3))
    assert [resolve(index, "x") for index in (4, 0, 2)] == [first, second, third]
    assert [resolve(index, "x") for index in (2, 4, 0)] == [third, first, second]
    assert resolve(7, "y") == item_step_id("sweep", "y", 0)


def test_items_of_the_next_submission_are_counted_anew(flow):
    binding = flow.bind()
    resolve_step_id(flow.store, binding, SWEEP, "digits-abc.sweep(0:x)", "x")
    claim_submission(flow.store, 2)
    later = binding._replace(submission=2, workflow="digits-2", uid="uid-2")
    assert resolve_step_id(flow.store, later, SWEEP, "digits-2.sweep(5:x)", "x") == item_step_id("sweep", "x", 0)
