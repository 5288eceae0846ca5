"""A `Train` step through admit and conclude, once for each try of Argo.

| how the attempt ended           | conclude answers                                 |
|---------------------------------|--------------------------------------------------|
| Succeeded                       | Succeeded, with its outputs                      |
| exit 75, budget left            | Error: the next attempt resumes from step n      |
| exit 1, no budget               | Failed, with the cause                           |
| Succeeded, an output is missing | Failed; Error if the budget allows another try   |
| not started by Argo             | Failed                                           |
| pods still there                | Pending                                          |
| ended before, asked again       | the same answer                                  |
"""

import json
from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from support.stories.plugin import QUICK, World, artifacts, commit, fit, outputs, phase, records, resumed, said, world
from tiphys_plugin import PluginSettings

from tiphys.protocol.operations import ADMIT_OUTPUTS
from tiphys.protocol.step_spec import CheckpointPolicy, GpuRequest, RetryPolicy
from tiphys.records import AttemptEnd, utc_now
from tiphys.store import LineageLayout, RunLayout, read_record

WITH_BACK_OFF = replace(QUICK, speed=1.0)
OVER_AT = "2026-03-01T12:00:00.250Z"


def ends(here: World) -> list[dict]:
    return [r for r in records(here.store, "control/runs/digits-abc12/attempts/fit/") if "outcome" in r]


def test_first_attempt_starts_from_the_beginning(here):
    reply = here.submit(fit(grace_seconds=119.5)).admit("fit", 0)
    answer = outputs(reply)
    assert tuple(answer) == ADMIT_OUTPUTS
    assert answer["run"] == "true"
    assert answer["run-id"] == "digits-abc12"
    assert answer["step"] == "fit"
    assert answer["attempt"] == "1"
    assert answer["lineage"] == "digits-abc12/fit"
    assert answer["resume-from"] == ""
    assert answer["checkpoint-uri"] == f"{here.store.url}/data/lineages/digits-abc12/fit/"
    assert answer["outputs"] == here.store.artifact_key("data/runs/digits-abc12/outputs/fit/000000001")
    assert json.loads(answer["pod-patch"]) == {"terminationGracePeriodSeconds": 120}
    assert said(reply) == "Attempt 1 starts from the beginning"


def test_preempted_attempt_is_followed_by_one_that_resumes_from_its_checkpoint(here):
    flow = here.submit(fit())
    flow.admit("fit", 0)
    commit(here.store, "digits-abc12/fit", attempt=1, step=1180)
    commit(here.store, "digits-abc12/fit", attempt=1, step=1190)
    flow.pod("fit", 1, phase="Failed", exit_code=75)
    verdict = flow.end_try("fit", 0, exit_code="75")
    assert phase(verdict) == "Error"
    assert said(verdict) == (
        "Attempt 1 ended by preemption, exit code 75: it was asked to stop, and requests another attempt; "
        "attempt 2 resumes from step 1190"
    )
    assert [(e["cause"], e["progress"], e["exit_code"]) for e in ends(here)] == [("preemption", True, 75)]

    again = flow.admit("fit", 1)
    assert said(again) == "Attempt 2 resumes from step 1190 (checkpoint of attempt 1, to be verified)"
    assert outputs(again)["resume-from"] == "1-1190"
    assert outputs(again)["checkpoint-uri"].endswith("/fit/shards/000000001-000000000001190/")


def test_damaged_checkpoint_is_passed_over_and_named(here):
    flow = here.submit(fit())
    flow.admit("fit", 0)
    commit(here.store, "digits-abc12/fit", attempt=1, step=1180)
    here.store.delete(commit(here.store, "digits-abc12/fit", attempt=1, step=1190))
    flow.end_try("fit", 0, exit_code="75")
    again = flow.admit("fit", 1)
    assert said(again).startswith(
        "Attempt 2 resumes from step 1180 (checkpoint of attempt 1, to be verified); 1190 of attempt 1 was"
    )
    assert outputs(again)["resume-from"] == "1-1180"
    claim = records(here.store, "control/runs/digits-abc12/attempts/fit/000000002")[0]
    assert claim["skipped"][0]["checkpoint"]["global_step"] == 1190


def test_step_with_very_many_damaged_manifests_is_admitted_and_its_claim_is_small(here):
    flow = here.submit(fit())
    flow.admit("fit", 0)
    commit(here.store, "digits-abc12/fit", attempt=1, step=5)
    for step in range(100, 1100):
        here.store.create(LineageLayout("digits-abc12/fit").manifest(1, step), b"{")
    flow.end_try("fit", 0, exit_code="75")
    again = flow.admit("fit", 1)
    assert said(again).startswith(
        "Attempt 2 resumes from step 5 (checkpoint of attempt 1, to be verified); 1099 of attempt 1 was"
    )
    assert said(again).count("so are 980 older ones") == 1
    claim = here.store.read(RunLayout("digits-abc12").attempt("fit", 2))
    assert len(claim) < 32 << 10


def test_broken_program_stops_the_trying_and_fails_the_step(here):
    flow = here.submit(fit())
    flow.admit("fit", 0)
    flow.pod("fit", 1, phase="Failed", exit_code=1)
    verdict = flow.end_try("fit", 0, exit_code="1")
    assert phase(verdict) == "Failed"
    assert said(verdict).startswith("fit failed in attempt 1 by user error: ")
    assert "; user error is not retried. " in said(verdict)
    assert "tiphys resume digits-abc12" in said(verdict)


def test_budget_of_a_cause_is_charged_over_attempts(here):
    flow = here.submit(fit(retry=RetryPolicy(user_error=1)))
    answers = []
    for retry in range(2):
        flow.admit("fit", retry)
        answers.append(phase(flow.end_try("fit", retry, exit_code="3")))
    assert answers == ["Error", "Failed"]


def admit_after(here, flow, retry, seconds):
    """The answers of admit just before and just after the end of a back-off of ``seconds``."""
    ended_at = datetime.fromisoformat(ends(here)[-1]["written_at"])
    answers = []
    for waited in (seconds - 1, seconds + 1):
        here.clock.now = ended_at + timedelta(seconds=waited)
        answers.append(flow.admit("fit", retry))
    return answers


def test_admit_waits_for_the_back_off_before_it_asks_for_anything(tmp_path):
    here = world(tmp_path, settings=WITH_BACK_OFF)
    flow = here.submit(fit(retry=RetryPolicy(user_error=9, backoff_seconds=100)))
    flow.admit("fit", 0)
    flow.end_try("fit", 0, exit_code="3")
    for retry, seconds in ((1, 100), (2, 200), (3, 300)):
        waiting, admitted = admit_after(here, flow, retry, seconds)
        assert phase(waiting) == "Pending"
        assert said(waiting).startswith(f"Attempt {retry + 1} begins in ")
        assert said(waiting).endswith(f", the back-off after attempt {retry}, which ended by user error")
        assert outputs(admitted)["attempt"] == str(retry + 1)
        flow.end_try("fit", retry, exit_code="3")
    assert len(ends(here)) == 4


def test_admit_opens_the_first_attempt_after_a_lost_pod_at_once_and_waits_before_the_second(tmp_path):
    here = world(tmp_path, settings=WITH_BACK_OFF)
    flow = here.submit(fit(retry=RetryPolicy(backoff_seconds=100)))
    here.clock.now = utc_now()
    flow.admit("fit", 0)
    assert phase(flow.end_try("fit", 0, exit_code="143", status="Error")) == "Error"
    assert ends(here)[-1]["cause"] in ("infrastructure", "preemption")
    assert outputs(flow.admit("fit", 1))["attempt"] == "2"
    key = RunLayout("digits-abc12").attempt_end("fit", 1)
    first = read_record(here.store, key, AttemptEnd)
    here.store.delete(key)
    here.store.create(key, first.model_copy(update={"written_at": utc_now() - timedelta(hours=1)}).to_bytes())
    flow.end_try("fit", 1, exit_code="143", status="Error")
    waiting, admitted = admit_after(here, flow, 2, 100)
    assert phase(waiting) == "Pending"
    assert outputs(admitted)["attempt"] == "3"


def test_resume_does_not_wait_for_the_back_off_of_the_submission_before_it(tmp_path):
    here = world(tmp_path, settings=WITH_BACK_OFF)
    flow = here.submit(fit(retry=RetryPolicy(user_error=1, backoff_seconds=100)))
    here.clock.now = utc_now()
    flow.admit("fit", 0)
    flow.end_try("fit", 0, exit_code="3")
    again = resumed(here, *flow.specs)
    again.admit("fit", 0)
    again.end_try("fit", 0, exit_code="143", status="Error")
    assert outputs(again.admit("fit", 1))["attempt"] == "3"


def test_argo_retry_of_a_step_that_was_given_up_opens_no_attempt(here):
    flow = here.submit(fit(gpu=GpuRequest(gpus=1)))
    flow.admit("fit", 0)
    flow.end_try("fit", 0, exit_code="1")

    again = flow.admit("fit", 1)

    assert phase(again) == "Failed"
    assert "tiphys resume digits-abc12" in said(again)
    assert "user error" in said(flow.conclude("fit", 0))
    assert phase(flow.conclude("fit", 1, status="Skipped", exit_code="-1")) == "Failed"
    assert [end["attempt"] for end in ends(here)] == [1]
    assert list(here.store.list("control/runs/digits-abc12/attempts/fit/000000002")) == []


WAIT_FAILED = {"phase": "Failed", "exit_code": 0, "message": "wait: Error (exit code 64)"}
"""A pod whose program has ended with 0, and whose end Argo's container could not report."""


def finished_program(here: World, data: str = "artifacts/model", **pod):
    flow = here.submit(fit(artifacts=("model",), gpu=GpuRequest(gpus=1)))
    key = flow.write_output(flow.admit("fit", 0), data, b"weights")
    flow.pod("fit", 1, **{**WAIT_FAILED, **pod})
    return flow, key


def test_finished_program_is_not_run_again_where_argo_could_not_report_its_end(here):
    flow, key = finished_program(here)
    verdict = flow.end_try("fit", 0, status="Error", exit_code="64")
    assert phase(verdict) == "Succeeded"
    assert said(verdict) == "Attempt 1 is done, although Argo reports Error: 1 object verified"
    assert not here.ledger.snapshot().leases
    assert artifacts(verdict) == {"model": key}
    assert [end["outcome"] for end in ends(here)] == ["done"]


def test_finished_program_is_adopted_where_its_conclude_never_ran(here):
    flow, key = finished_program(here)
    again = flow.admit("fit", 1)
    assert outputs(again)["run"] == "false"
    assert not here.ledger.snapshot().leases
    assert artifacts(flow.conclude("fit", 1, status="Skipped", exit_code="-1")) == {"model": key}


@pytest.mark.parametrize(
    ("data", "pod", "doubt"),
    [
        ("artifacts/other", {}, "output 'model' is not stored"),
        ("artifacts/model/part-1", {}, "output 'model' is a folder, of which files may be missing"),
        ("artifacts/model", {"reason": "Evicted"}, ""),
        ("artifacts/model", {"ending": True}, ""),
        ("artifacts/model", {"exit_code": 75}, ""),
        ("artifacts/model", {"exit_code": None}, ""),
    ],
    ids=["no output", "a folder, maybe in part", "evicted", "deleted", "preempted", "no exit code"],
)
def test_program_is_run_again_where_nothing_shows_that_it_finished(here, data, pod, doubt):
    flow, _ = finished_program(here, data, **pod)
    verdict = flow.end_try("fit", 0, status="Error", exit_code="64")
    assert phase(verdict) == "Error"
    assert [end["outcome"] for end in ends(here)] == ["failed"]
    assert (f"its program exited with 0, but {doubt}" in said(verdict)) is bool(doubt)


def test_conclude_asks_for_an_ending_pod_after_one_second_and_later_less_often(tmp_path):
    here = world(tmp_path, settings=PluginSettings())
    flow = here.submit(fit())
    flow.admit("fit", 0)
    flow.pod("fit", 1, phase="Running")
    pauses = []
    for _ in range(10):
        pauses.append(float(str(flow.end_try("fit", 0, status="Error", exit_code="-1").requeue).removesuffix("s")))
        here.clock.advance(pauses[-1])
    assert pauses[:3] == [1.0, 1.0, 1.0]
    assert pauses == sorted(pauses)
    assert PluginSettings().requeue_min_seconds <= pauses[-1] < 2 * PluginSettings().requeue_min_seconds
    flow.pod("fit", 1, phase="Failed", exit_code=75)
    assert phase(flow.end_try("fit", 0, exit_code="75")) == "Error"


def test_conclude_waits_for_the_pod_and_ends_by_force_in_the_end(here):
    flow = here.submit(fit(), fit(name="fit-b"))
    flow.admit("fit-b", 0)
    flow.pod("fit-b", 1, phase="Running")
    flow.admit("fit", 0)
    name = flow.pod("fit", 1, phase="Running")
    waiting = flow.end_try("fit", 0, status="Error", exit_code="-1")
    assert (phase(waiting), name in said(waiting)) == ("Pending", True)
    assert waiting.requeue is not None
    assert ends(here) == []
    for _ in range(4):
        here.clock.advance(12)
        assert phase(flow.end_try("fit", 0, status="Error", exit_code="-1")) == "Pending"
    here.clock.advance(12)
    assert phase(flow.end_try("fit", 0, status="Error", exit_code="-1")) == "Error"
    assert ends(here)[0]["cause"] == "infrastructure"
    assert b"tiphys_attempts_forced_total 1.0" in here.core.metrics.render()
    assert phase(flow.end_try("fit-b", 0, status="Error", exit_code="-1")) == "Pending", "that of another step begins"


@pytest.mark.parametrize("hours", [24, -24])
def test_clock_that_jumps_ends_nothing_by_force(here, hours):
    flow = here.submit(fit())
    flow.admit("fit", 0)
    flow.pod("fit", 1, phase="Running")
    flow.end_try("fit", 0, status="Error", exit_code="-1")
    here.clock.advance(hours * 3600)
    assert phase(flow.end_try("fit", 0, status="Error", exit_code="-1")) == "Pending"
    assert ends(here) == []


def test_conclude_does_not_wait_for_pods_of_other_steps(here):
    flow = here.submit(fit(), fit(name="fit-b"))
    flow.admit("fit", 0)
    flow.pod("fit-b", 1, phase="Running")
    assert phase(flow.end_try("fit", 0, exit_code="75")) == "Error"


def test_outputs_of_a_finished_training_are_answered(here):
    flow = here.submit(fit())
    key = flow.write_output(flow.admit("fit", 0), "artifacts/model", b"weights")
    flow.pod("fit", 1, phase="Succeeded", exit_code=0)
    verdict = flow.conclude("fit", 0)
    assert phase(verdict) == "Succeeded"
    assert artifacts(verdict) == {"model": key}
    assert [e["outcome"] for e in ends(here)] == ["done"]


def test_training_without_a_declared_output_is_tried_again_as_its_budget_allows(here):
    flow = here.submit(fit(gpu=GpuRequest(gpus=1), retry=RetryPolicy(output_missing=1)))
    flow.admit("fit", 0)
    commit(here.store, "digits-abc12/fit", attempt=1, step=30)
    flow.pod("fit", 1, phase="Succeeded", exit_code=0)
    again = flow.conclude("fit", 0)
    assert phase(again) == "Error"
    assert said(again).startswith("Attempt 1 ended by output missing, declared output artifact 'model' is missing: ")
    assert said(again).endswith("; attempt 2 resumes from step 30")
    assert not here.ledger.snapshot().leases
    assert flow.conclude("fit", 0) == again

    assert outputs(flow.admit("fit", 1))["resume-from"] == "1-30"
    flow.pod("fit", 2, retry=1, phase="Succeeded", exit_code=0)
    verdict = flow.conclude("fit", 1)
    assert phase(verdict) == "Failed"
    assert "fit failed in attempt 2 by output missing" in said(verdict)
    assert "the only retry after output missing is used up" in said(verdict)
    assert [end["cause"] for end in ends(here)] == ["output_missing"] * 2


def test_training_without_a_declared_output_fails_by_default(here):
    flow = here.submit(fit())
    flow.admit("fit", 0)
    flow.pod("fit", 1, phase="Succeeded", exit_code=0)
    verdict = flow.conclude("fit", 0)
    assert (phase(verdict), "output missing is not retried" in said(verdict)) == ("Failed", True)


def test_result_counts_although_the_agent_was_lost_after_the_program_ended(here):
    flow = here.submit(fit())
    flow.write_output(flow.admit("fit", 0), "artifacts/model", b"weights")
    flow.pod("fit", 1, phase="Succeeded", exit_code=0)
    assert phase(flow.conclude("fit", 0, status="Error", exit_code="-1")) == "Succeeded"


@pytest.mark.parametrize(("status", "cause"), [("Error", "infrastructure"), ("Failed", "unknown")])
def test_attempt_that_failed_without_a_trace_is_what_argo_reports_or_unknown_not_guessed(here, status, cause):
    flow = here.submit(fit())
    flow.admit("fit", 0)
    assert phase(flow.conclude("fit", 0, status=status, exit_code="-1")) == "Error"
    assert ends(here)[0]["cause"] == cause


def test_attempt_without_an_end_is_ended_before_the_next_one_opens(here):
    flow = here.submit(fit())
    flow.admit("fit", 0)
    flow.pod("fit", 1, phase="Running")
    waiting = flow.admit("fit", 1)
    assert (phase(waiting), "Attempt 1's pod" in said(waiting)) == ("Pending", True)
    flow.pod("fit", 1, phase="Failed", exit_code=137, reason="OOMKilled")
    assert outputs(flow.admit("fit", 1))["attempt"] == "2"
    assert [(e["attempt"], e["cause"]) for e in ends(here)] == [(1, "out_of_memory")]


def test_checkpoints_on_a_volume_are_left_to_the_program(here):
    policy = CheckpointPolicy(store="file:///mnt/checkpoints")
    reply = here.submit(fit(checkpoints=policy)).admit("fit", 0)
    assert outputs(reply)["lineage"] == "digits-abc12/fit"
    assert outputs(reply)["resume-from"] == ""
    assert outputs(reply)["checkpoint-uri"] == "file:///mnt/checkpoints/data/lineages/digits-abc12/fit/"
    assert "volume file:///mnt/checkpoints" in said(reply)


@pytest.mark.parametrize("status", ["Skipped", "Omitted"])
def test_attempt_that_argo_never_ran_stops_the_trying(here, status):
    flow = here.submit(fit())
    flow.admit("fit", 0)
    verdict = flow.end_try("fit", 0, status=status, exit_code="-1")
    assert phase(verdict) == "Failed"
    assert f"Argo did not start it ({status})" in said(verdict)
    assert ends(here)[0]["outcome"] == "failed"


VOLUME = CheckpointPolicy(store="file:///mnt/checkpoints")


def preempted(flow, attempts: int, note) -> str:
    """Phase of the last conclude after ``attempts`` tries that were killed with their node."""
    answer = ""
    for number in range(1, attempts + 1):
        flow.admit("fit", number - 1)
        note(number)
        answer = phase(flow.end_try("fit", number - 1, exit_code="137"))
    return answer


def test_progress_on_a_volume_pays_budgets_back_as_elsewhere(here):
    flow = here.submit(fit(checkpoints=VOLUME, retry=RetryPolicy(infrastructure=1, backoff_seconds=1)))
    progress = RunLayout("digits-abc12").progress
    assert preempted(flow, 5, lambda number: here.store.create(progress("fit", number), b"")) == "Error"
    assert [end["progress"] for end in ends(here)] == [True] * 5


def test_no_progress_on_a_volume_uses_budgets_up(here):
    flow = here.submit(fit(checkpoints=VOLUME, retry=RetryPolicy(infrastructure=1, backoff_seconds=1)))
    assert preempted(flow, 2, lambda number: None) == "Failed"
    assert [end["progress"] for end in ends(here)] == [False, False]


def test_a_volume_that_is_the_store_of_the_run_is_no_volume(here):
    flow = here.submit(fit(checkpoints=CheckpointPolicy(store="s3://ml-runs/tiphys")))
    flow.admit("fit", 0)
    commit(here.store, "digits-abc12/fit", 1, 40)
    flow.end_try("fit", 0, exit_code="75")
    assert outputs(flow.admit("fit", 1))["resume-from"] == "1-40"


def test_an_end_keeps_when_the_pod_ended_and_what_was_saved_by_then(here):
    flow = here.submit(fit())
    flow.admit("fit", 0)
    commit(here.store, "digits-abc12/fit", attempt=1, step=1190)
    flow.pod("fit", 1, phase="Failed", exit_code=75, trouble_at=OVER_AT)
    flow.end_try("fit", 0, exit_code="75")
    (end,) = ends(here)
    assert end["terminating_at"] == OVER_AT
    assert end["last_checkpoint"]["checkpoint"] == {"lineage": "digits-abc12/fit", "attempt": 1, "global_step": 1190}
    flow.admit("fit", 1)
    flow.pod("fit", 2, retry=1, phase="Failed", exit_code=75)
    flow.end_try("fit", 1, exit_code="75")
    assert not {"terminating_at", "last_checkpoint"} & ends(here)[1].keys()
