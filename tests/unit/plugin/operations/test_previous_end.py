"""Ends of steps without a conclude: by the admit of the next step, and by finalize.

| the step | the call | result |
|---|---|---|
| succeeded, outputs intact | next admit, finalize | recorded as done; the call goes on |
| succeeded, an output is missing | next admit | recorded as failed; the next step is refused |
| succeeded, an output is missing | finalize | recorded as failed; finalize fails the workflow |
| its pod still ends | next admit, finalize | waits |
| reused an earlier result | next admit, finalize | nothing to record |
| failed | finalize of the failed workflow | recorded as failed, with the exit code |
| succeeded just before a stop | finalize of the stopped workflow | recorded as done |
| running when the stop came | finalize of the stopped workflow | stays open |
"""

import json
from pathlib import Path

import pytest
from support.world import Flow, artifacts, fit, outputs, phase, prep, resumed, said, world

from tiphys.records import AttemptEnd, AttemptEndOutcome, Cause
from tiphys.store import read_step_attempts

NEXT = prep(name="next", template="t-next")


def started(root: Path, **fields: object) -> Flow:
    """A workflow of `prep` and `next` whose `prep` runs, with its outputs already in storage."""
    flow = world(root).submit(prep(), NEXT, fit(), **fields)  # type: ignore[arg-type]
    reply = flow.admit("prep")
    flow.write_output(reply, "0/parameters/rows", b"7\n")
    flow.write_output(reply, "0/artifacts/data", b"data")
    return flow


def end_of(flow: Flow, step: str = "prep", attempt: int = 1) -> AttemptEnd | None:
    attempts = read_step_attempts(flow.world.store, flow.run or flow.name, step)
    return attempts[attempt - 1].end


def failures(*nodes: tuple[str, str, str]) -> str:
    """Argo's ``workflow.failures`` with (display name, template, message) of each node."""
    names = ("displayName", "templateName", "message")
    listed = [{**dict(zip(names, node, strict=True)), "phase": "Failed", "podName": "p"} for node in nodes]
    return json.dumps(json.dumps(listed))


def test_the_next_admit_records_the_end(tmp_path: Path) -> None:
    flow = started(tmp_path)
    flow.pod("prep", 1, None, "Succeeded")

    assert outputs(flow.admit("next", after="prep"))["run"] == "true"

    end = end_of(flow)
    assert end is not None
    assert (end.outcome, [output.value for output in end.outputs]) == (AttemptEndOutcome.DONE, ["7", None])


def test_an_end_that_is_recorded_stays(tmp_path: Path) -> None:
    flow = started(tmp_path)
    flow.conclude("prep")
    before = end_of(flow)

    assert outputs(flow.admit("next", after="prep"))["run"] == "true"
    assert outputs(flow.admit("next", after="prep"))["run"] == "true", "asked again"
    assert end_of(flow) == before


def test_a_step_without_its_outputs_stops_the_next_one(tmp_path: Path) -> None:
    flow = world(tmp_path).submit(prep(), NEXT)
    flow.admit("prep")
    flow.pod("prep", 1, None, "Succeeded")

    reply = flow.admit("next", after="prep")

    assert phase(reply) == "Failed"
    assert "prep failed in attempt 1 by output missing: declared output" in said(reply)
    end = end_of(flow)
    assert end is not None
    assert end.cause is Cause.OUTPUT_MISSING
    assert read_step_attempts(flow.world.store, flow.name, "next") == []


def test_a_training_after_such_a_step_does_not_retry_for_ever(tmp_path: Path) -> None:
    flow = world(tmp_path).submit(prep(), fit())
    flow.admit("prep")
    flow.pod("prep", 1, None, "Succeeded")

    reply = flow.admit("fit", 0, after="prep")

    assert (phase(reply), outputs(reply)["run"]) == ("Succeeded", "false")
    assert phase(flow.settle("fit", 0, status="Skipped")) == "Succeeded"
    assert phase(flow.conclude("fit", 0, status="Succeeded")) == "Failed"


def test_the_next_admit_waits_for_the_pod(tmp_path: Path) -> None:
    flow = started(tmp_path)
    flow.pod("prep", 1, None, "Running")

    assert phase(flow.admit("next", after="prep")) == "Pending"
    assert end_of(flow) is None
    flow.pod("prep", 1, None, "Succeeded")
    assert phase(flow.admit("next", after="prep")) == "Succeeded"
    assert end_of(flow) is not None


def test_a_step_that_never_started_has_no_end(tmp_path: Path) -> None:
    flow = world(tmp_path).submit(prep(), NEXT)

    assert outputs(flow.admit("next", after="prep"))["run"] == "true"


def test_a_reused_result_is_answered_by_admit(tmp_path: Path) -> None:
    flow = started(tmp_path)
    flow.conclude("prep")
    key = artifacts(flow.conclude("prep"))["data"]
    second = resumed(flow.world, prep(), NEXT)

    reply = second.admit("prep")

    assert (outputs(reply)["run"], outputs(reply)["output-rows"]) == ("false", "7")
    assert artifacts(reply) == {"data": key}
    assert outputs(second.admit("prep")) == outputs(reply), "asked again"
    assert outputs(second.admit("next", after="prep"))["run"] == "true"


def test_a_reused_result_that_is_gone_fails_admit(tmp_path: Path) -> None:
    flow = started(tmp_path)
    flow.conclude("prep")
    second = resumed(flow.world, prep())
    second.admit("prep")
    flow.world.store.delete(f"control/runs/{flow.name}/attempts/prep/000000001.end.json")

    assert (phase(second.admit("prep")), "has been removed since" in said(second.admit("prep"))) == ("Failed", True)


def test_an_answer_holds_only_what_its_template_declares(tmp_path: Path) -> None:
    flow = world(tmp_path).submit(prep())
    document = flow.document(flow.body("admit", "prep"))
    document["template"]["outputs"] = {"parameters": [{"name": "run"}, {"name": "attempt"}]}

    assert outputs(flow.world.core.execute_document(document)) == {"run": "true", "attempt": "1"}


def test_admit_answers_where_an_artifact_will_be(tmp_path: Path) -> None:
    """Argo leaves out an artifact that the program did not write, and a DAG whose output has no value hangs."""
    flow = started(tmp_path)

    assert artifacts(flow.admit("prep")) == {"data": f"{outputs(flow.admit('prep'))['outputs']}/0/artifacts/data"}


def test_finalize_records_the_last_end(tmp_path: Path) -> None:
    flow = started(tmp_path)
    flow.pod("prep", 1, None, "Succeeded")

    assert said(flow.finalize(after="prep")) == "Run digits-abc12, submission 1: Succeeded"

    end = end_of(flow)
    assert end is not None
    assert end.outcome is AttemptEndOutcome.DONE


def test_finalize_fails_the_workflow_whose_last_step_lacks_an_output(tmp_path: Path) -> None:
    flow = world(tmp_path).submit(prep())
    flow.admit("prep")
    flow.pod("prep", 1, None, "Succeeded")

    reply = flow.finalize(after="prep")

    assert (phase(reply), "output missing" in said(reply)) == ("Failed", True)
    assert phase(flow.finalize(after="prep")) == "Failed", "asked again, as by `argo retry`"


def test_finalize_records_an_end_that_no_other_call_recorded(tmp_path: Path) -> None:
    """The step behind it may be missing, because a resume takes over its result."""
    flow = started(tmp_path)
    flow.pod("prep", 1, None, "Succeeded")

    assert phase(flow.finalize()) == "Succeeded"

    end = end_of(flow)
    assert end is not None
    assert end.outcome is AttemptEndOutcome.DONE


def test_a_failure_that_the_author_tolerates_stays_tolerated(tmp_path: Path) -> None:
    flow = started(tmp_path)
    flow.pod("prep", 1, None, "Failed", exit_code=3)

    reply = flow.finalize("Succeeded", failures(("run", "prep-run", "Error (exit code 3)")))

    assert (phase(reply), flow.sealed()["status"]) == ("Succeeded", "Succeeded")
    assert said(reply) == "Run digits-abc12, submission 1: Succeeded"
    end = end_of(flow)
    assert end is not None
    assert end.cause is Cause.USER_ERROR


def test_a_verdict_is_the_same_when_finalize_is_repeated(tmp_path: Path) -> None:
    flow = started(tmp_path)
    flow.admit("next")
    flow.pod("prep", 1, None, "Failed", exit_code=3)
    flow.pod("next", 1, None, "Running")
    failed = failures(("run", "prep-run", "exit 3"), ("run", "next-run", "Error: pod deleted"))

    assert phase(flow.finalize("Failed", failed)) == "Pending", "the pod of next still ends"
    assert end_of(flow) is not None, "the other end does not wait"
    flow.pod("next", 1, None, "Failed", exit_code=4)
    flow.finalize("Failed", failed)

    assert "prep failed in attempt 1 by user error" in flow.sealed()["message"]
    assert "next failed in attempt 1 by user error" in flow.sealed()["message"]


@pytest.mark.parametrize("after", ["prep", "unknown"])
def test_an_end_that_cannot_be_recorded_does_not_keep_the_submission_open(tmp_path: Path, after: str) -> None:
    flow = started(tmp_path)
    key = f"control/runs/{flow.name}/attempts/prep/000000001.json"
    flow.world.store.delete(key)
    flow.world.store.create(key, b"{")

    reply = flow.finalize(after=after)

    assert phase(reply) == ("Failed" if after == "prep" else "Succeeded")
    assert flow.sealed()["status"] == ("Failed" if after == "prep" else "Succeeded")


def test_a_result_whose_end_no_call_recorded_is_not_computed_again(tmp_path: Path) -> None:
    """As after `argo terminate`, which runs no exit handler."""
    flow = started(tmp_path)
    flow.pod("prep", 1, None, "Succeeded")
    second = resumed(flow.world, prep())

    reply = second.admit("prep")

    assert outputs(reply)["run"] == "false"
    assert said(reply) == "Adopted from attempt 1"


def test_only_the_last_try_counts_where_the_pods_are_gone(tmp_path: Path) -> None:
    flow = started(tmp_path)  # the first try left its outputs
    document = flow.world.cluster.workflow("ml", flow.name)
    assert document is not None
    names = [f"{flow.name}.prep.run", f"{flow.name}.prep.run(0)", f"{flow.name}.prep.run(1)"]
    document["status"]["nodes"] = {name: {"name": name, "phase": "Succeeded"} for name in names}
    flow.world.cluster.write_workflow(document)

    assert "output missing" in said(flow.admit("next", after="prep"))


def test_an_end_is_looked_up_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flow = started(tmp_path)
    flow.pod("prep", 1, None, "Succeeded")
    flow.admit("next", after="prep")
    listed: list[str] = []
    list_keys = flow.world.store.list

    def record(prefix: str, **fields: object) -> object:
        listed.append(prefix)
        return list_keys(prefix, **fields)  # type: ignore[arg-type]

    monkeypatch.setattr(flow.world.store, "list", record)

    assert outputs(flow.admit("next", after="prep"))["run"] == "true"
    assert not [prefix for prefix in listed if "/prep/" in prefix]


def test_a_name_that_is_too_long_is_refused(tmp_path: Path) -> None:
    reply = started(tmp_path).admit("next", after="x" * 10_000)

    assert phase(reply) == "Failed"
    assert len(said(reply)) < 500


def test_finalize_waits_for_the_pod(tmp_path: Path) -> None:
    flow = started(tmp_path)
    flow.pod("prep", 1, None, "Running")

    assert phase(flow.finalize(after="prep")) == "Pending"


@pytest.mark.parametrize("pod_is_left", [True, False])
def test_finalize_records_how_a_step_failed(tmp_path: Path, pod_is_left: bool) -> None:
    flow = started(tmp_path)
    if pod_is_left:
        flow.pod("prep", 1, None, "Failed", exit_code=3)
    document = flow.world.cluster.workflow("ml", flow.name)
    assert document is not None
    document["status"]["nodes"] = {"1": {"name": f"{flow.name}.prep.run", "outputs": {"exitCode": "3"}}}
    flow.world.cluster.write_workflow(document)

    reply = flow.finalize("Failed", failures(("run", "prep-run", "Error (exit code 3)"), ("prep", "prep", "")))

    end = end_of(flow)
    assert end is not None
    assert (end.outcome, end.cause, end.exit_code) == (AttemptEndOutcome.FAILED, Cause.USER_ERROR, 3)
    assert said(reply) == f"Run digits-abc12, submission 1: Failed: {flow.sealed()['message']}"
    assert flow.sealed()["message"].startswith("prep failed in attempt 1 by user error")
    assert "Error (exit code 3)" not in flow.sealed()["message"], "the verdict includes it"


def test_a_stop_does_not_lose_a_result(tmp_path: Path) -> None:
    flow = started(tmp_path)
    flow.pod("prep", 1, None, "Succeeded")

    flow.finalize("Failed", failures((flow.name, "main", "Stopped with strategy 'Stop'")))

    end = end_of(flow)
    assert end is not None
    assert end.outcome is AttemptEndOutcome.DONE


@pytest.mark.parametrize("is_started", [True, False])
def test_a_stop_leaves_the_attempt_open_that_it_ended(tmp_path: Path, is_started: bool) -> None:
    flow = started(tmp_path)
    if is_started:
        flow.pod("prep", 1, None, "Failed", exit_code=143)

    flow.finalize("Failed", failures(("run", "prep-run", "workflow shutdown with strategy:  Stop")))

    assert end_of(flow) is None


def test_finalize_leaves_trainings_and_other_workflows_alone(tmp_path: Path) -> None:
    flow = started(tmp_path)
    flow.admit("fit", 0)
    other = resumed(flow.world, prep(), NEXT)
    flow.pod("prep", 1, None, "Succeeded")

    other.finalize("Failed", failures(("run", "prep-run", "Error (exit code 1)"), ("run", "fit-run", "exit 1")))

    assert (end_of(flow), end_of(flow, "fit")) == (None, None)


def test_a_damaged_claim_does_not_keep_the_submission_open(tmp_path: Path) -> None:
    flow = started(tmp_path)
    key = f"control/runs/{flow.name}/attempts/prep/000000001.json"
    flow.world.store.delete(key)
    flow.world.store.create(key, b"{")

    assert said(flow.finalize("Failed")) == "Run digits-abc12, submission 1: Failed"
