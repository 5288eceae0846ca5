"""Which run does a workflow belong to?

| tiphys-run | submission | storage                       | run                             |
|------------|------------|-------------------------------|---------------------------------|
| empty      | –          | free                          | the workflow's name             |
| empty      | –          | name bound to another uid     | name-<uid[:5]>                  |
| given      | empty      | free                          | the given name, submission 1    |
| given      | 1          | bound to another uid          | refused, `tiphys resume`        |
| given      | 2          | claimed for this workflow     | submission 2                    |
| given      | 2          | not claimed                   | refused                         |
| given      | 2          | claimed for another workflow  | refused                         |
"""

import pytest
from support.builders.irregular_samples import Irregular, WorkflowPlace
from support.stories.plugin import Flow, fit, keys, outputs, phase, prep, records, said, workflow

from tiphys.errors import StoreError
from tiphys.recording.run_binding import bind_workflow, submitted_manifest
from tiphys.records import SubmissionClaim, SubmissionKind, json_digest
from tiphys.store import RunLayout, claim_record, read_run, read_submissions


def given(flow: Flow, run: str, submission: str = "") -> Flow:
    flow.run, flow.submission = run, submission
    return flow


def test_bare_submit_becomes_a_run_named_after_its_workflow(here):
    reply = here.submit(prep()).admit("prep")
    assert outputs(reply)["run-id"] == "digits-abc12"
    record = read_run(here.store, "digits-abc12")
    assert (record.pipeline, record.parameters) == ("digits", {"lr": "0.1"})
    assert record.digest == json_digest(record.workflow)
    (only,) = read_submissions(here.store, "digits-abc12")
    assert (only.claim.kind, only.claim.workflow_name, only.claim.namespace) == ("original", "digits-abc12", "ml")
    assert only.binding is not None
    assert (only.binding.uid, only.binding.cluster) == ("uid-1", here.cluster.name)


def test_stored_workflow_is_as_it_was_submitted(here):
    here.submit(prep()).admit("prep")
    stored = read_run(here.store, "digits-abc12").workflow
    assert "status" not in stored
    assert stored["metadata"].keys() == {"name", "namespace", "labels", "annotations"}
    assert stored["metadata"]["labels"] == {"team": "vision"}
    assert stored["spec"] == workflow([prep()])["spec"]


def test_workflow_of_a_template_is_stored_with_the_templates_it_ran():
    live = workflow([prep()])
    merged = live["spec"]
    live["spec"] = {"workflowTemplateRef": {"name": "digits"}, "arguments": {"parameters": []}}
    live["status"]["storedWorkflowTemplateSpec"] = {**merged, "workflowTemplateRef": {"name": "digits"}}
    assert submitted_manifest(live)["spec"] == merged


def test_workflow_of_a_template_is_asked_again_until_argo_has_put_its_templates_into_it(here):
    flow = here.submit(prep())
    complete = here.cluster.workflow("ml", flow.name)
    bare = {**complete, "spec": {"workflowTemplateRef": {"name": "digits"}}}
    bare["metadata"] = {key: value for key, value in complete["metadata"].items() if key != "annotations"}
    here.cluster.write_workflow(bare)
    with pytest.raises(StoreError, match="WorkflowTemplate of ml/digits-abc12 into the Workflow yet"):
        flow.admit("prep")

    merged = {**complete["spec"], "workflowTemplateRef": {"name": "digits"}}
    here.cluster.write_workflow({**complete, "spec": bare["spec"], "status": {"storedWorkflowTemplateSpec": merged}})
    assert outputs(flow.admit("prep"))["run"] == "true"


def test_name_used_by_another_workflow_gets_part_of_the_uid(here):
    here.submit(prep()).admit("prep")
    again = here.submit(prep(), uid="Fedcba98")
    assert outputs(again.admit("prep"))["run-id"] == "digits-abc12-fedcb"
    assert outputs(again.admit("prep"))["run-id"] == "digits-abc12-fedcb"


def test_workflow_of_the_same_name_in_another_namespace_is_another_run(here):
    held = SubmissionClaim(
        run="digits-abc12",
        submission=1,
        kind=SubmissionKind.ORIGINAL,
        workflow_name="digits-abc12",
        namespace="elsewhere",
    )
    claim_record(here.store, RunLayout("digits-abc12").submission(1), held)
    assert outputs(here.submit(prep()).admit("prep"))["run-id"] == "digits-abc12-uid-1"


def test_third_workflow_of_a_name_and_uid_prefix_is_refused(here):
    for uid in ("uid-1", "uid-2x1"):
        here.submit(prep(), uid=uid).admit("prep")
    assert "are both taken" in said(here.submit(prep(), uid="uid-2x2").admit("prep"))


def test_given_name_is_the_run(here):
    flow = given(here.submit(prep()), "Digits LR=0.1")
    assert outputs(flow.admit("prep"))["run-id"] == "digits-lr-0.1"


def test_second_workflow_under_a_given_name_is_refused_with_the_way_on(here):
    given(here.submit(prep()), "digits").admit("prep")
    other = given(here.submit(prep(), name="digits-zzz", uid="uid-2"), "digits")
    reply = other.admit("prep")
    assert phase(reply) == "Failed"
    assert "tiphys resume digits" in said(reply)
    assert "uid-1" in said(reply)


def test_refused_training_does_not_make_argo_try_for_ever(here):
    given(here.submit(fit()), "digits").admit("fit", 0)
    other = given(here.submit(fit(), name="digits-zzz", uid="uid-2"), "digits")
    for answer in (other.admit("fit", 0), other.conclude("fit", 0, status="Skipped", exit_code="-1")):
        assert phase(answer) == "Failed", "Error would have Argo try it again"
        assert said(answer).startswith("Refused: run digits has submission 1 already")


def test_next_submission_must_have_been_claimed(here):
    given(here.submit(prep()), "digits").admit("prep")
    flow = given(here.submit(prep(), name="digits-2", uid="uid-2"), "digits", "2")
    assert "was never claimed" in said(flow.admit("prep"))


def test_next_submission_is_for_the_workflow_it_was_claimed_for(here):
    given(here.submit(prep()), "digits").admit("prep")
    wanted = SubmissionClaim(
        run="digits", submission=2, kind=SubmissionKind.RESUME, workflow_name="digits-2", namespace="ml"
    )
    claim_record(here.store, RunLayout("digits").submission(2), wanted)
    impostor = given(here.submit(prep(), name="digits-x", uid="uid-3"), "digits", "2")
    assert phase(impostor.admit("prep")) == "Failed"
    flow = given(here.submit(prep(), name="digits-2", uid="uid-2"), "digits", "2")
    assert outputs(flow.admit("prep"))["run-id"] == "digits"
    assert records(here.store, "control/runs/digits/submissions/000000002.bound")[0]["uid"] == "uid-2"


@pytest.mark.parametrize("number", ["0", "-1", "two", "1.5"])
def test_submission_that_is_no_number_is_refused(here, number):
    flow = given(here.submit(prep()), "digits", number)
    assert "plugin.tiphys.submission" in said(flow.admit("prep"))


def test_workflow_that_is_not_in_the_cluster_is_refused_and_leaves_nothing(here):
    reply = Flow(here, "ghost", "uid-9").admit("prep")
    assert phase(reply) == "Failed"
    assert "ml/ghost with uid uid-9 is not in cluster local" in said(reply)
    assert keys(here.store) == []


def test_workflow_that_tiphys_did_not_compile_is_refused_and_leaves_nothing(here):
    document = workflow([prep()])
    del document["metadata"]["annotations"]
    here.cluster.write_workflow(document)
    assert "tiphys compile" in said(Flow(here, "digits-abc12", "uid-1").admit("prep"))
    assert keys(here.store) == []


def test_unknown_step_is_refused_with_the_known_ones(here):
    assert "has no step 'evaluate'; it has: fit, prep" in said(here.submit(prep(), fit()).admit("evaluate"))


def test_place_of_a_workflow_is_read_once_however_often_its_steps_ask(here, monkeypatch):
    reads = []
    monkeypatch.setattr("tiphys_plugin.core.bind_workflow", lambda *given: reads.append(given) or bind_workflow(*given))
    flow = here.submit(prep(), prep(name="clean"))
    for _ in range(3):
        flow.admit("prep")
    flow.admit("clean")
    assert len(reads) == 1


def test_binding_of_a_workflow_answers_no_call_that_differs_in_one_part(here, monkeypatch):
    """The namespace, the name, the uid, the run or the submission of another one."""
    reads = []
    monkeypatch.setattr("tiphys_plugin.core.bind_workflow", lambda *given: reads.append(given) or bind_workflow(*given))

    def call(place: WorkflowPlace):
        flow = Flow(here, place.name, place.uid, place.run, str(place.submission), place.namespace)
        return flow.admit("prep")

    first, *others = Irregular().workflows()
    here.cluster.write_workflow(workflow([prep()], first.name, first.uid))
    assert outputs(call(first))["run-id"] == first.run
    for other in others:
        before = len(reads)
        reply = call(other)
        if other.run == first.run:  # the cluster says what there is of such a name and uid
            assert len(reads) == before + 1, other
        else:
            assert "a Workflow has one run" in said(reply)
    before = len(reads)
    call(first)
    assert len(reads) == before, "the first is still known"


def test_place_that_was_refused_is_asked_for_again(here):
    flow = here.submit(prep())
    document = here.cluster.workflow("ml", flow.name)
    (here.root / "cluster" / "workflows" / f"{flow.name}.json").unlink()
    assert "is not in cluster" in said(flow.admit("prep"))
    here.cluster.write_workflow(document)
    assert phase(flow.admit("prep")) == "Succeeded"


def test_argo_resubmit_of_a_run_is_refused_with_what_to_do_instead(here):
    """Argo makes a Workflow of another name and uid, with the parameters of the first."""
    given(here.submit(prep()), "digits-abc12", "1").admit("prep")
    before = keys(here.store)
    refused = given(here.submit(prep(), name="digits-x7k2p", uid="uid-2"), "digits-abc12", "1").admit("prep")
    assert phase(refused) == "Failed"
    assert "as after `argo resubmit`; to continue that run use `tiphys resume digits-abc12`" in said(refused)
    assert "`tiphys fork digits-abc12`" in said(refused)
    assert keys(here.store) == before


def test_argo_resubmit_of_a_workflow_that_names_no_run_is_a_run_of_its_own(here):
    here.submit(prep()).admit("prep")
    second = here.submit(prep(), name="digits-x7k2p", uid="uid-2").admit("prep")
    assert outputs(second)["run-id"] == "digits-x7k2p"
