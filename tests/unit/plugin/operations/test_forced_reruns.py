"""A step that was asked to run again: its old results and checkpoints count no more.

| result or checkpoint                                 | counts |
|------------------------------------------------------|--------|
| of a submission before the one that asked            | no     |
| of that submission, or a later one                   | yes    |
| shared by another run                                | no     |
"""

from support.stories.plugin import Flow, World, commit, fit, outputs, phase, prep, said, workflow

from tiphys.records import SubmissionClaim, SubmissionKind, WorkflowRecord, item_step_id, json_digest
from tiphys.store import RunLayout, claim_record

RUN = "digits-abc12"


def resumed(here: World, *specs, submission: int = 2, made_of: str = "", **rerun_since: int) -> Flow:
    """The next submission of the run, as the controller makes it."""
    name = f"{RUN}-{submission}"
    wanted = SubmissionClaim(
        run=RUN,
        submission=submission,
        kind=SubmissionKind.RESUME,
        workflow_name=name,
        namespace="ml",
        rerun_since=rerun_since,
        workflow=made_of,
    )
    claim_record(here.store, RunLayout(RUN).submission(submission), wanted)
    flow = here.submit(*specs, name=name, uid=f"uid-{submission}")
    flow.run, flow.submission = RUN, str(submission)
    return flow


def finish(flow: Flow, step: str, output: str, data: bytes = b"x") -> str:
    """Run a step to its end; which attempt it was."""
    reply = flow.admit(step)
    assert outputs(reply)["run"] == "true", reply
    flow.write_output(reply, output, data)
    assert phase(flow.conclude(step)) == "Succeeded"
    return outputs(reply)["attempt"]


STEP = prep(parameters=())


def test_an_old_result_is_not_taken_over(here):
    finish(here.submit(STEP), "prep", "0/artifacts/data")
    flow = resumed(here, STEP, prep=2)
    assert finish(flow, "prep", "0/artifacts/data", b"new") == "2"


def test_of_a_fan_out_only_the_item_that_is_asked_for_runs_again(here):
    sweep = prep(name="sweep", fan_out=True, parameters=())
    flow = here.submit(sweep)
    for item in ("0:a", "1:b"):
        flow.write_output(flow.admit("sweep", item=item), "0/artifacts/data", item.encode())
        assert phase(flow.conclude("sweep", item=item)) == "Succeeded"
    flow = resumed(here, sweep, **{item_step_id("sweep", "b", 0): 2})
    assert [outputs(flow.admit("sweep", item=item))["run"] for item in ("0:a", "1:b")] == ["false", "true"]
    flow.write_output(flow.admit("sweep", item="1:b"), "0/artifacts/data", b"new")
    assert phase(flow.conclude("sweep", item="1:b")) == "Succeeded"
    flow = resumed(here, sweep, submission=3, **{item_step_id("sweep", "b", 0): 2, "sweep": 3})
    assert outputs(flow.admit("sweep", item="1:b"))["run"] == "true", "the later request was for all items"


def test_a_result_made_since_the_request_is_reused(here):
    finish(here.submit(STEP), "prep", "0/artifacts/data")
    finish(resumed(here, STEP, prep=2), "prep", "0/artifacts/data", b"new")
    assert said(resumed(here, STEP, submission=3, prep=2).admit("prep")) == "Adopted from attempt 2"


def test_other_steps_are_taken_over_as_ever(here):
    finish(here.submit(STEP), "prep", "0/artifacts/data")
    assert said(resumed(here, STEP, fit=2).admit("prep")) == "Adopted from attempt 1"


def test_a_shared_result_is_not_taken_over(here):
    shared = prep(parameters=(), share=True)
    other = here.submit(shared, name="other", uid="uid-o")
    finish(other, "prep", "0/artifacts/data")
    here.submit(shared).admit("prep")
    assert outputs(resumed(here, shared, prep=2).admit("prep"))["run"] == "true"


def test_training_begins_anew_and_goes_on_from_its_own_checkpoints(here):
    first = here.submit(fit())
    first.admit("fit", 0)
    commit(here.store, f"{RUN}/fit", attempt=1, step=900)
    first.pod("fit", 1, phase="Failed", exit_code=1)
    first.end_try("fit", 0, exit_code="1")

    flow = resumed(here, fit(), fit=2)
    assert said(flow.admit("fit", 0)) == "Attempt 2 starts from the beginning"
    flow.pod("fit", 2, phase="Failed", exit_code=75)
    assert "attempt 3 starts from the beginning" in said(flow.end_try("fit", 0, exit_code="75"))
    assert outputs(flow.admit("fit", 1))["resume-from"] == ""
    commit(here.store, f"{RUN}/fit", attempt=3, step=10)
    flow.pod("fit", 3, retry=1, phase="Failed", exit_code=75)
    flow.end_try("fit", 1, exit_code="75")

    later = resumed(here, fit(), submission=3, fit=2)
    assert outputs(later.admit("fit", 0))["resume-from"] == "3-10"


def test_a_step_whose_program_was_changed_is_judged_by_the_workflow_that_the_submission_was_made_of(here):
    finish(here.submit(STEP), "prep", "0/artifacts/data")
    changed = prep(parameters=(), template="t-other")
    document = workflow([changed])
    record = WorkflowRecord(run=RUN, workflow=document, digest=json_digest(document))
    claim_record(here.store, RunLayout(RUN).workflow(record.digest), record)

    assert finish(resumed(here, changed, made_of=record.digest), "prep", "0/artifacts/data") == "2"
    later = resumed(here, STEP, submission=3)
    assert said(later.admit("prep")) == "Adopted from attempt 1"


def test_a_submission_whose_workflow_is_not_on_record_is_refused(here):
    finish(here.submit(STEP), "prep", "0/artifacts/data")
    refused = resumed(here, STEP, made_of="0" * 64).admit("prep")
    assert phase(refused) == "Failed"
    assert "is not the Workflow that submission 2 of run digits-abc12 was made of" in said(refused)
