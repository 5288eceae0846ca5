"""What a program said of its own end decides where pods tell only an exit code, and is kept with the end.

| what the session left | exit code | cause | by default |
|---|---|---|---|
| CUDA out of memory | 1 | GPU out of memory | not tried again, as any user error |
| the same, with a budget | 1 | GPU out of memory | tried again |
| no step for too long | 79 | hang | tried again |
| something unreadable | 1 | user error | not tried again |
| a crash, and then nothing | 0 | that of the crash | as its cause |
| a crash, and then later steps or all outputs | 0 | none: it is done | |
"""

import pytest
from support.builders.ledger import queues
from support.stories.plugin import Flow, World, commit, fit, gpus, outputs, phase, said, world

from tiphys.protocol.step_spec import RetryPolicy
from tiphys.records import AttemptEnd, Cause, CrashRecord, EvictionRecord, FailureEvidence, TrainingProgress
from tiphys.store import LineageLayout, RunLayout, claim_record, read_step_attempts
from tiphys.store.incarnations import crash_key

RUN = "digits-abc12"
FULL = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
STUCK = "it completed no step in 912 s, and the longest of those before took 31 s"


def dies(flow: Flow, error: str, code: int, **left) -> str:
    """Attempt 1 leaves ``error`` and exits with ``code``; what conclude says."""
    record = CrashRecord(run=RUN, step="fit", attempt=1, error=error, **left)
    flow.world.store.create(crash_key(RunLayout(RUN), "fit", 1), record.to_bytes())
    return ends_with(flow, code)


def ends_with(flow: Flow, code: int) -> str:
    flow.pod("fit", 1, phase="Failed", exit_code=code, host="node-3")
    reply = flow.end_try("fit", 0, exit_code=str(code))
    return f"{phase(reply)}: {said(reply)}"


def end(here: World) -> AttemptEnd:
    found = read_step_attempts(here.store, RUN, "fit")[0].end
    assert found is not None
    return found


def test_a_full_gpu_is_distinguished_from_other_failures_and_not_tried_again_unasked(here):
    flow = here.submit(fit())
    flow.admit("fit", 0)
    assert dies(flow, FULL, 1) == (
        f"Failed: fit failed in attempt 1 by GPU out of memory: its GPU had no memory left ({FULL}); "
        "GPU out of memory is not retried. When the cause is gone: `tiphys resume digits-abc12`, or `tiphys resume "
        "digits-abc12 FILE` with a changed pipeline file"
    )
    assert end(here).cause is Cause.GPU_OUT_OF_MEMORY
    assert end(here).evidence == FailureEvidence(rule="gpu-out-of-memory", matched_text=FULL, node="node-3")


def test_long_evidence_is_cut(here):
    flow = here.submit(fit())
    flow.admit("fit", 0)
    dies(flow, FULL + "x" * 1000, 1)
    found = end(here).evidence
    assert found is not None
    assert (found.matched_text[: len(FULL)], len(found.matched_text)) == (FULL, 300)


def test_a_full_gpu_may_have_a_budget_of_its_own(here):
    flow = here.submit(fit(retry=RetryPolicy(gpu_out_of_memory=2)))
    flow.admit("fit", 0)
    assert dies(flow, FULL, 1).startswith("Error: Attempt 1 ended by GPU out of memory")


def test_a_training_that_was_stuck_is_tried_again(here):
    flow = here.submit(fit())
    flow.admit("fit", 0)
    assert dies(flow, STUCK, 79, stuck_seconds=912.0).startswith(f"Error: Attempt 1 ended by hang, {STUCK}")
    assert end(here).evidence == FailureEvidence(rule="no-step", matched_text="no step in 912 s", node="node-3")


def test_an_account_that_cannot_be_read_decides_nothing(here):
    flow = here.submit(fit())
    flow.admit("fit", 0)
    here.store.create(crash_key(RunLayout(RUN), "fit", 1), b"{")
    assert ends_with(flow, 1).startswith("Failed: fit failed in attempt 1 by user error: ")
    assert end(here).evidence == FailureEvidence(rule="program-failed", node="node-3")


def test_storage_out_of_reach_has_the_budget_of_infrastructure_unless_it_has_its_own():
    assert RetryPolicy(infrastructure=4).budget(Cause.STORAGE) == 4
    assert RetryPolicy(infrastructure=4, storage=1).budget(Cause.STORAGE) == 1
    assert RetryPolicy(user_error=None).budget(Cause.GPU_OUT_OF_MEMORY) is None


def test_a_checkpoint_that_cannot_be_read_leaves_open_whether_the_attempt_got_ahead(here):
    flow = here.submit(fit(retry=RetryPolicy(infrastructure=1)))
    flow.admit("fit", 0)
    layout = LineageLayout(f"{RUN}/fit")
    here.store.create(layout.manifest(1, 20), b"{}")
    assert ends_with(flow, 137).startswith("Error: Attempt 1 ended by infrastructure")
    assert (end(here).progress, end(here).progress_unknown) == (False, True)


def test_an_attempt_that_the_service_moved_away_from_a_node_names_the_evidence(tmp_path):
    here = world(tmp_path, queues(research={"A100": 8}))
    flow = here.submit(fit(gpu=gpus(8)))
    flow.admit("fit", 0)
    moved = EvictionRecord(run="digits-abc12", step="fit", attempt=1, reason="Tiphys moved it away (n1: taint spot)")
    claim_record(here.store, RunLayout("digits-abc12").eviction("fit", 1), moved)
    flow.pod("fit", 1, phase="Failed", exit_code=75, reason="Deleted")

    assert "preemption, Tiphys moved it away (n1: taint spot); its pod was taken away (Deleted)" in said(
        flow.end_try("fit", 0, exit_code="75")
    )
    assert end(here).preempted is None  # a record of a version that named no nodes


@pytest.mark.parametrize("saved", [True, False])
def test_an_evacuated_attempt_has_its_cost_and_is_charged_to_its_budget(tmp_path, saved):
    here = world(tmp_path, queues(research={"A100": 8}))
    flow = here.submit(fit(gpu=gpus(8), retry=RetryPolicy(preemption=1)))
    flow.admit("fit", 0)
    if saved:
        commit(here.store, "digits-abc12/fit", 1, 400)
    reason = "Tiphys moved it away from its node (n1: taint spot)"
    evicted = EvictionRecord(run=RUN, step="fit", attempt=1, reason=reason, nodes=("n1",))
    claim_record(here.store, RunLayout(RUN).eviction("fit", 1), evicted)
    flow.pod("fit", 1, phase="Failed", exit_code=75, reason="Deleted")

    reply = flow.end_try("fit", 0, exit_code="75")

    found = end(here)
    assert found.cause is Cause.PREEMPTION
    assert found.preempted is not None
    assert (found.preempted.nodes, found.preempted.gpus) == (("n1",), 8)
    assert (found.preempted.committed is not None) == saved
    assert found.preempted.seconds_lost is not None
    assert f"{reason}; " in found.message
    assert ("checkpoint 400 of attempt 1 is committed" if saved else "it had committed no checkpoint") in found.message
    assert not found.lost_gpus_to_queue
    assert phase(reply) == "Error"


REFUSED = 'Pod "fit" is invalid: spec.nodeSelector: Invalid value: "nvidia.com/gpu"'


@pytest.mark.parametrize(("node", "expected"), [("(0).run", True), ("(1).run", False)])
def test_a_pod_that_was_never_created_leaves_the_message_of_argo(tmp_path, node, expected):
    here = world(tmp_path, queues(research={"A100": 8}))
    flow = here.submit(fit(gpu=gpus(8)))
    flow.admit("fit", 0)
    document = here.cluster.workflow("ml", flow.name)
    document["status"]["nodes"] = {"1": {"name": f"{flow.name}.fit{node}", "phase": "Error", "message": REFUSED}}
    here.cluster.write_workflow(document)

    assert (f"Argo: {REFUSED}" in said(flow.end_try("fit", 0, status="Error", exit_code="-1"))) == expected


@pytest.mark.parametrize(
    ("code", "cause"), [("75", Cause.PREEMPTION), ("1", Cause.USER_ERROR), ("-1", Cause.UNKNOWN), (None, Cause.UNKNOWN)]
)
def test_an_end_that_no_conclude_saw_is_known_by_the_exit_code_that_argo_keeps(here, code, cause):
    """The service was away, so conclude failed; the pod is gone, and Argo has begun the next try."""
    flow = here.submit(fit())
    flow.admit("fit", 0)
    document = here.cluster.workflow("ml", flow.name)
    left = {"outputs": {"exitCode": code}} if code else {}
    document["status"]["nodes"] = {"1": {"name": f"{flow.name}.fit(0).run", "phase": "Failed", **left}}
    here.cluster.write_workflow(document)

    flow.admit("fit", 1)

    assert end(here).cause is cause


def crashes(flow: Flow, step: int | None, error: str = "ValueError: Verlust ist NaN", **left) -> None:
    """Attempt 1 reports a crash after ``step``, and its pod ends with 0, as below ``| tee``."""
    record = CrashRecord(run=RUN, step="fit", attempt=1, error=error, global_step=step, **left)
    flow.world.store.create(crash_key(RunLayout(RUN), "fit", 1), record.to_bytes())
    flow.pod("fit", 1, phase="Succeeded", exit_code=0)


@pytest.mark.parametrize(
    ("error", "left", "cause", "is_retried"),
    [
        ("ValueError: Verlust ist NaN", {}, Cause.USER_ERROR, False),
        (FULL, {}, Cause.GPU_OUT_OF_MEMORY, False),
        (STUCK, {"stuck_seconds": 912.0}, Cause.HANG, True),
    ],
)
@pytest.mark.parametrize("artifacts", [("model",), ()], ids=["output missing", "no outputs"])
def test_crash_that_an_exit_code_of_0_hides_fails_the_attempt(here, artifacts, error, left, cause, is_retried):
    flow = here.submit(fit(artifacts=artifacts))
    flow.admit("fit", 0)
    commit(here.store, f"{RUN}/fit", attempt=1, step=50)
    crashes(flow, 57, error, **left)
    verdict = flow.conclude("fit", 0)
    assert phase(verdict) == ("Error" if is_retried else "Failed")
    assert f"{error}; the exit code 0 hides it" in said(verdict)
    assert (end(here).cause, end(here).exit_code) == (cause, 0)
    assert flow.conclude("fit", 0) == verdict


def test_crash_before_the_first_step_that_an_exit_code_of_0_hides_fails_the_attempt(here):
    flow = here.submit(fit(artifacts=()))
    flow.admit("fit", 0)
    crashes(flow, None)
    verdict = flow.conclude("fit", 0)
    assert (phase(verdict), "the exit code 0 hides it" in said(verdict)) == ("Failed", True)
    assert end(here).cause is Cause.USER_ERROR


def test_next_try_judges_a_hidden_crash_that_no_conclude_saw(here):
    flow = here.submit(fit(artifacts=(), retry=RetryPolicy(user_error=1)))
    flow.admit("fit", 0)
    crashes(flow, None)
    assert outputs(flow.admit("fit", 1))["attempt"] == "2"
    assert (end(here).cause, "the exit code 0 hides it" in end(here).message) == (Cause.USER_ERROR, True)


def test_crash_that_a_program_handled_before_it_wrote_its_outputs_is_a_line_only(here):
    flow = here.submit(fit())
    flow.admit("fit", 0)
    crashes(flow, 57, "optuna.TrialPruned")
    here.store.create(f"{RunLayout(RUN).outputs('fit', 1)}artifacts/model", b"weights")
    assert phase(flow.conclude("fit", 0)) == "Succeeded"
    assert end(here).message == "its program reported optuna.TrialPruned, ended with 0 and wrote all its outputs"


@pytest.mark.parametrize("proof", ["commit", "report"])
def test_crash_of_an_earlier_process_does_not_fail_an_attempt_that_trained_on(here, proof):
    flow = here.submit(fit(artifacts=()))
    flow.admit("fit", 0)
    crashes(flow, 57)
    if proof == "commit":
        commit(here.store, f"{RUN}/fit", attempt=1, step=58)
    else:
        report = TrainingProgress(global_step=60, total_steps=60)
        here.store.create(LineageLayout(f"{RUN}/fit").training_progress_report(1, 1), report.to_bytes())
    assert phase(flow.conclude("fit", 0)) == "Succeeded"
    assert end(here).message == ""
