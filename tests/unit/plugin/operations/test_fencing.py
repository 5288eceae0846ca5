"""Races, takeovers and repeated calls: one live attempt per step, whoever asks and however often."""

import json

import pytest
from support.ledger import queues
from support.world import World, fit, gpus, keys, outputs, phase, prep, records, said, world
from tiphys_plugin.operations import admit, end_attempt, start_checkpoint

from tiphys.errors import IntegrityError, StoreError
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
        node="digits-abc12.fit.attempts(9).admit",
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
    assert "was just opened by digits-abc12.fit.attempts(9).admit" in said(waiting)
    assert here.ledger.snapshot().leases == ()
    assert keys(here.store, ATTEMPTS) == [f"{ATTEMPTS}/000000001.json"]


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
            flow.settle("fit", 0)
    assert len(here.ledger.snapshot().leases) == 1
    flow.settle("fit", 0)
    assert here.ledger.snapshot().leases == ()


def test_admit_of_an_ended_try_is_never_answered_with_its_attempt_again(here):
    flow = here.submit(fit())
    flow.admit("fit", 0)
    flow.settle("fit", 0, exit_code="75")
    again = flow.admit("fit", 0)
    assert phase(again) == "Failed"
    assert "the next try opens a new one" in said(again)
    assert outputs(flow.admit("fit", 1))["attempt"] == "2"


def test_fenced_try_stops_and_its_step_fails(here):
    flow = here.submit(fit())
    flow.admit("fit", 0)
    fence(here)
    assert outputs(flow.admit("fit", 0))["run"] == "false"
    settled = flow.settle("fit", 0, exit_code="76")
    assert phase(settled) == "Succeeded"
    assert "was fenced: submission 2 took over" in said(settled)
    verdict = flow.conclude("fit", 0)
    assert phase(verdict) == "Failed"
    assert "was fenced: submission 2 took over" in said(verdict)
    assert [r["outcome"] for r in records(here.store, f"{ATTEMPTS}/000000001.end")] == ["fenced"]


def test_settle_asked_again_after_the_verdict_repeats_the_recorded_answer(here):
    flow = here.submit(fit())
    flow.write_output(flow.admit("fit", 0), "artifacts/model", b"m")
    flow.settle("fit", 0, "Succeeded", "0")
    flow.conclude("fit", 0)
    before = keys(here.store)
    again = flow.settle("fit", 0, "Failed", "1")
    assert (phase(again), said(again)) == ("Succeeded", "Attempt 1 is done")
    assert keys(here.store) == before


def test_settle_of_an_early_try_is_repeated_as_it_was_whatever_came_later(here):
    flow = here.submit(fit())
    flow.admit("fit", 0)
    first = flow.settle("fit", 0, exit_code="75")
    flow.admit("fit", 1)
    flow.settle("fit", 1, exit_code="1")
    assert flow.settle("fit", 0, exit_code="75") == first


def test_attempt_in_another_cluster_is_not_ended_unseen(here):
    flow = here.submit(fit())
    flow.admit("fit", 0)
    key = "control/runs/digits-abc12/submissions/000000001.bound.json"
    bound = json.loads(here.store.read(key)) | {"cluster": "east"}
    here.store.delete(key)
    here.store.create(key, json.dumps(bound).encode())
    refused = flow.admit("fit", 1)
    assert outputs(refused)["run"] == "false"
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
    flow.settle("fit", 0, exit_code="75")
    flow.admit("fit", 1, artifacts=artifact)
    after = records(here.store, f"{ATTEMPTS}/000000002")[0]["step_key"]
    assert before != after


def test_scrape_survives_a_ledger_that_does_not_answer(here, monkeypatch):
    here.submit(fit(gpu=gpus(8))).admit("fit", 0)
    assert b"tiphys_gpus_held{" in here.core.metrics.render()
    here.ledger.close()
    assert b"tiphys_gpus_held{" not in here.core.metrics.render()
