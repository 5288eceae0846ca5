"""Races, takeovers and repeated calls: one live attempt per step, whoever asks and however often."""

import json

import pytest
from support.builders.ledger import queues
from support.processes.failpoints import dying_at
from support.stories.plugin import (
    Flow,
    World,
    artifacts,
    fit,
    gpus,
    keys,
    outputs,
    phase,
    prep,
    records,
    resumed,
    said,
    world,
)
from tiphys_plugin.operations import admit, end_attempt, start_checkpoint

from tiphys.checkpoint.save.commit import check_fence
from tiphys.errors import FencedError, IntegrityError, StoreError
from tiphys.protocol.step_spec import RetryPolicy
from tiphys.records import AttemptClaim, AttemptEnd, AttemptEndOutcome

ATTEMPTS = "control/runs/digits-abc12/attempts/fit"


@pytest.fixture
def here(tmp_path) -> World:
    return world(tmp_path, queues(research={"A100": 8}))


def fence(here: World, attempt: int = 1) -> None:
    """What a resume does to an attempt that has no end."""
    end = AttemptEnd(
        run="digits-abc12",
        step="fit",
        attempt=attempt,
        submission=1,
        outcome=AttemptEndOutcome.FENCED,
        message="submission 2 took over",
    )
    here.store.create(f"{ATTEMPTS}/{attempt:09d}.end.json", end.to_bytes())


@pytest.mark.parametrize("count", [8, 1000], ids=["granted", "rejected"])
def test_caller_that_loses_the_race_for_an_attempt_keeps_no_gpus_and_ends_nothing(here, monkeypatch, count):
    flow = here.submit(fit(gpu=gpus(count)))
    rival = AttemptClaim(
        run="digits-abc12",
        step="fit",
        attempt=1,
        submission=1,
        uid="uid-1",
        node="digits-abc12.fit(9).admit",
        instance="digits-abc12.fit",
        step_key="k",
    )

    def rival_claims(point: str) -> None:
        if point == "admit.before_claim":
            here.store.create(f"{ATTEMPTS}/000000001.json", rival.to_bytes())

    with monkeypatch.context() as patched:
        patched.setattr(admit, "failpoint", rival_claims)
        waiting = flow.admit("fit", 0)
    assert phase(waiting) == "Pending"
    assert "was just opened by digits-abc12.fit(9).admit" in said(waiting)
    assert here.ledger.snapshot().leases == ()
    assert keys(here.store, ATTEMPTS) == [f"{ATTEMPTS}/000000001.json"]


def test_attempt_claimed_while_a_resume_took_over_is_fenced_and_keeps_its_gpus_until_its_pod_has_ended(
    here, monkeypatch
):
    """The service stalls between its look at the newest submission and the claim, and Argo starts the pod late."""
    flow = here.submit(fit(gpu=gpus(8)))
    with monkeypatch.context() as patched:
        patched.setattr(admit, "failpoint", lambda point: point == "admit.before_claim" and resumed(here, *flow.specs))
        assert outputs(flow.admit("fit", 0))["attempt"] == "1"
    second = Flow(here, "digits-abc12-2", "uid-2", "digits-abc12", "2")

    def holders() -> list[str]:
        here.clock.advance(31)
        reply = second.admit("fit", 0)
        assert phase(reply) == "Succeeded" or "holds 8 of 8 A100" in said(reply)
        return [lease.request.uid for lease in here.ledger.snapshot().leases]

    assert holders() == ["uid-1"], "its pod may come"
    with pytest.raises(FencedError):
        check_fence(here.store, "digits-abc12", "fit", 1)
    flow.pod("fit", 1)
    assert holders() == ["uid-1"]
    flow.pod("fit", 1, phase="Failed", exit_code=76)
    assert holders() == ["uid-2"]
    assert "was fenced: submission 2 has taken over run digits-abc12" in said(flow.end_try("fit", 0, exit_code="76"))
    assert outputs(second.admit("fit", 0))["attempt"] == "2"


def test_attempt_of_a_workflow_that_was_taken_over_counts_if_its_program_has_ended(here):
    flow = here.submit(fit(gpu=gpus(8)))
    flow.write_output(flow.admit("fit", 0), "artifacts/model", b"m")
    flow.pod("fit", 1, phase="Succeeded", exit_code=0)
    assert outputs(resumed(here, *flow.specs).admit("fit", 0))["run"] == "false"
    assert [record["outcome"] for record in records(here.store, f"{ATTEMPTS}/000000001.end")] == ["done"]


def refuse(*_):
    raise IntegrityError("the quarantine of digits-abc12/fit is damaged")


def fail(*_):
    raise StoreError("storage did not answer")


@pytest.mark.parametrize(("fault", "held"), [(refuse, 0), (fail, 1)])
def test_refused_attempt_gives_its_gpus_back_and_one_that_storage_failed_finds_them_again(
    here, monkeypatch, fault, held
):
    flow = here.submit(fit(gpu=gpus(8)))
    with monkeypatch.context() as patched:
        patched.setattr(start_checkpoint, "pin_start_checkpoint", fault)
        if fault is fail:
            with pytest.raises(StoreError):
                flow.admit("fit", 0)
        else:
            assert "quarantine of digits-abc12/fit is damaged" in said(flow.admit("fit", 0))
    assert len(here.ledger.snapshot().leases) == held
    assert outputs(flow.admit("fit", 0))["run"] == "true"
    assert len(here.ledger.snapshot().leases) == 1


def test_an_attempt_holds_its_gpus_until_its_end_is_stored(here, monkeypatch):
    flow = here.submit(fit(gpu=gpus(8)))
    flow.admit("fit", 0)
    with monkeypatch.context() as patched:
        patched.setattr(end_attempt, "claim_record", fail)
        with pytest.raises(StoreError):
            flow.end_try("fit", 0)
    assert len(here.ledger.snapshot().leases) == 1
    flow.end_try("fit", 0)
    assert here.ledger.snapshot().leases == ()


def test_admit_of_an_ended_try_is_never_answered_with_its_attempt_again(here):
    flow = here.submit(fit())
    flow.admit("fit", 0)
    flow.end_try("fit", 0, exit_code="75")
    again = flow.admit("fit", 0)
    assert phase(again) == "Error", "Failed would end the training"
    assert "the next try opens a new one" in said(again)
    assert outputs(flow.admit("fit", 1))["attempt"] == "2"


def test_admit_of_a_try_that_has_failed_for_good_is_refused_as_any_after_it(here):
    flow = here.submit(fit())
    flow.admit("fit", 0)
    flow.end_try("fit", 0, exit_code="1")
    for retry in (0, 1):
        refused = flow.admit("fit", retry)
        assert (phase(refused), "was the last of this workflow" in said(refused)) == ("Failed", True)
    assert [record["attempt"] for record in records(here.store, f"{ATTEMPTS}/") if "outcome" in record] == [1]


def test_admit_of_a_finished_try_runs_nothing_and_its_conclude_has_the_outputs(here):
    flow = here.submit(fit())
    key = flow.write_output(flow.admit("fit", 0), "artifacts/model", b"m")
    flow.conclude("fit", 0)
    assert outputs(flow.admit("fit", 0))["run"] == "false"
    verdict = flow.conclude("fit", 0, status="Skipped", exit_code="-1")
    assert (phase(verdict), artifacts(verdict)) == ("Succeeded", {"model": key})
    assert said(verdict) == "Attempt 1 is done: 1 object verified"


def test_fenced_try_stops_and_its_step_fails(here):
    flow = here.submit(fit())
    flow.admit("fit", 0)
    fence(here)
    for answer in (flow.admit("fit", 0), flow.end_try("fit", 0, exit_code="76"), flow.conclude("fit", 0)):
        assert phase(answer) == "Failed", "no other try follows"
        assert "was fenced: submission 2 took over" in said(answer)
    assert [r["outcome"] for r in records(here.store, f"{ATTEMPTS}/000000001.end")] == ["fenced"]


@pytest.mark.parametrize(
    ("status", "exit_code", "answer"),
    [
        ("Succeeded", "0", "Succeeded"),
        ("Failed", "75", "Error"),
        ("Failed", "1", "Failed"),
        ("Skipped", "-1", "Failed"),
    ],
    ids=["done", "the next try follows", "no budget", "not started"],
)
def test_conclude_asked_again_after_its_end_was_recorded_answers_the_same(here, status, exit_code, answer):
    flow = here.submit(fit(gpu=gpus(8)))
    flow.write_output(flow.admit("fit", 0), "artifacts/model", b"m")
    first = flow.conclude("fit", 0, status=status, exit_code=exit_code)
    assert phase(first) == answer
    before = keys(here.store)
    for core in (here.core, here.restart()):
        here.core = core
        assert flow.conclude("fit", 0, status=status, exit_code=exit_code) == first
    assert keys(here.store) == before
    assert here.ledger.snapshot().leases == ()


def test_conclude_of_a_finished_try_stays_a_success_whatever_argo_reports_later(here):
    flow = here.submit(fit())
    flow.write_output(flow.admit("fit", 0), "artifacts/model", b"m")
    first = flow.conclude("fit", 0)
    before = keys(here.store)
    again = flow.end_try("fit", 0, "Failed", "1")
    assert (phase(again), artifacts(again)) == ("Succeeded", artifacts(first))
    assert said(again) == "Attempt 1 is done, although Argo reports Failed: 1 object verified"
    assert keys(here.store) == before


@pytest.mark.parametrize("exit_code", ["75", "1"], ids=["preempted", "broken"])
def test_conclude_of_an_early_try_is_repeated_as_it_was_whatever_came_later(here, exit_code):
    flow = here.submit(fit(retry=RetryPolicy(user_error=1)))
    flow.admit("fit", 0)
    first = flow.end_try("fit", 0, exit_code=exit_code)
    assert phase(first) == "Error"
    flow.admit("fit", 1)
    assert flow.end_try("fit", 0, exit_code=exit_code) == first
    assert phase(flow.end_try("fit", 1, exit_code="3")) == ("Error" if exit_code == "75" else "Failed")
    assert flow.end_try("fit", 0, exit_code=exit_code) == first


@pytest.mark.parametrize("point", ["conclude.before_failure", "end.before_record", "end.after_record"])
@pytest.mark.parametrize(("exit_code", "answer"), [("75", "Error"), ("1", "Failed")])
def test_crash_of_the_service_while_it_records_a_failure_changes_no_answer(here, point, exit_code, answer):
    flow = here.submit(fit(gpu=gpus(8)))
    flow.admit("fit", 0)
    with dying_at(point):
        flow.end_try("fit", 0, exit_code=exit_code)
    here.core = here.restart()
    assert phase(flow.end_try("fit", 0, exit_code=exit_code)) == answer
    assert here.ledger.snapshot().leases == ()
    assert len(keys(here.store, ATTEMPTS)) == 2


def test_attempt_in_another_cluster_is_not_ended_unseen(here):
    flow = here.submit(fit())
    flow.admit("fit", 0)
    key = "control/runs/digits-abc12/submissions/000000001.bound.json"
    bound = json.loads(here.store.read(key)) | {"cluster": "east"}
    here.store.delete(key)
    here.store.create(key, json.dumps(bound).encode())
    refused = flow.admit("fit", 1)
    assert phase(refused) == "Failed"
    assert "opened in cluster east" in said(refused)
    assert "tiphys resume digits-abc12 --force" in said(refused)
    assert keys(here.store, ATTEMPTS) == [f"{ATTEMPTS}/000000001.json"]


def test_input_from_an_attempt_that_is_not_done_is_known_by_its_place(here):
    flow = here.submit(prep(parameters=()), fit(checkpoints=None))
    key = flow.write_output(flow.admit("prep"), "0/artifacts/data", b"half")
    artifact = [{"name": "data", "path": "/in", "s3": {"key": key}}]
    flow.admit("fit", 0, artifacts=artifact)
    before = records(here.store, f"{ATTEMPTS}/")[0]["step_key"]
    flow.conclude("prep")
    flow.end_try("fit", 0, exit_code="75")
    flow.admit("fit", 1, artifacts=artifact)
    after = records(here.store, f"{ATTEMPTS}/000000002")[0]["step_key"]
    assert before != after


def test_scrape_survives_a_ledger_that_does_not_answer(here, monkeypatch):
    here.submit(fit(gpu=gpus(8))).admit("fit", 0)
    assert b"tiphys_gpus_held{" in here.core.metrics.render()
    here.ledger.close()
    assert b"tiphys_gpus_held{" not in here.core.metrics.render()
