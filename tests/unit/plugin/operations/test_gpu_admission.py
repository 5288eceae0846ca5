"""GPUs of a training step: asked for by admit, held by the attempt, given back when its pods are gone.

| event                                    | GPUs                                    |
|------------------------------------------|-----------------------------------------|
| admit, free                              | held by the attempt                     |
| admit, not free                          | Pending with the reason; nothing held   |
| admit, never possible                    | the step fails, nothing is tried again  |
| conclude, pod still there                | held                                    |
| conclude, pod gone                       | free                                    |
| conclude, outputs still to be verified   | free                                    |
| workflow stopped, deleted or terminated  | free once no pod of the attempt lives   |
"""

import json

import pytest
from support.builders.irregular_samples import Irregular
from support.builders.ledger import cohort, queues
from support.fakes.counting_store import CountingStore
from support.processes.failpoints import dying_at
from support.stories.plugin import (
    World,
    artifacts,
    commit,
    fit,
    gpus,
    outputs,
    phase,
    prep,
    records,
    said,
    workflow,
    world,
)
from tiphys_plugin import PluginCore, SqliteLedger
from tiphys_plugin.operations import end_attempt
from tiphys_plugin.runtime.background import HashingProgress

from tiphys.faults import InjectedFaultError
from tiphys.protocol.step_spec import RetryPolicy
from tiphys.records import AttemptEnd, AttemptEndOutcome
from tiphys.store import claim_record

EIGHT = queues(research={"A100": 8})


@pytest.fixture
def here(tmp_path) -> World:
    return world(tmp_path, EIGHT)


def held(here: World) -> list[tuple[str, int]]:
    return [(lease.request.run, lease.request.gpus) for lease in here.ledger.snapshot().leases]


def other(here: World, count: int = 4):
    return here.submit(fit(gpu=gpus(count)), name="other-abc12", uid="uid-2")


def end_workflow(here: World, phase: str = "Failed", **spec) -> None:
    document = workflow([fit(gpu=gpus(8))])
    document["status"]["phase"] = phase
    document["spec"] |= spec
    here.cluster.write_workflow(document)


def test_attempt_holds_its_gpus_and_a_repeated_call_the_same(here):
    flow = here.submit(fit(gpu=gpus(8)))
    first = flow.admit("fit", 0)
    assert flow.admit("fit", 0) == first
    assert held(here) == [("digits-abc12", 8)]
    claim = records(here.store, "control/runs/digits-abc12/attempts/fit/")[0]
    assert claim["lease"] == here.ledger.snapshot().leases[0].id


def test_step_waits_with_a_reason_and_goes_on_when_gpus_are_free(here):
    flow = here.submit(fit(gpu=gpus(8)))
    flow.admit("fit", 0)
    late = other(here)
    waiting = late.admit("fit", 0)
    assert phase(waiting) == "Pending"
    assert said(waiting) == ("Deferred: WaitingForQuota: queue research holds 8 of 8 A100; 4 A100 asked; position 1")
    assert waiting.requeue is not None
    assert records(here.store, "control/runs/other-abc12/attempts/") == []
    flow.end_try("fit", 0, exit_code="1")
    assert outputs(late.admit("fit", 0))["run"] == "true"
    assert held(here) == [("other-abc12", 4)]


def test_same_wait_has_the_same_message_and_the_same_requeue(here):
    here.submit(fit(gpu=gpus(8))).admit("fit", 0)
    late = other(here)
    assert late.admit("fit", 0) == late.admit("fit", 0)


def test_conclude_keeps_the_gpus_until_the_pod_is_gone(here):
    flow = here.submit(fit(gpu=gpus(8)))
    flow.admit("fit", 0)
    flow.pod("fit", 1, phase="Running")
    flow.end_try("fit", 0, status="Failed", exit_code="75")
    assert held(here) == [("digits-abc12", 8)]
    flow.pod("fit", 1, phase="Failed", exit_code=75)
    flow.end_try("fit", 0, status="Failed", exit_code="75")
    assert held(here) == []


def test_succeeded_attempt_gives_its_gpus_back_before_its_outputs_are_hashed(here, monkeypatch):
    flow = here.submit(fit(gpu=gpus(8)))
    flow.write_output(flow.admit("fit", 0), "artifacts/model", b"m")
    flow.pod("fit", 1, phase="Succeeded", exit_code=0)
    with monkeypatch.context() as patched:
        patched.setattr(here.core._context.hasher, "hash_objects", lambda *_: HashingProgress(0, 1))
        waiting = flow.conclude("fit", 0)
    assert (phase(waiting), said(waiting)) == ("Pending", "Verifying outputs: 0 of 1 objects")
    assert held(here) == []
    assert phase(flow.conclude("fit", 0)) == "Succeeded"


def test_repeated_conclude_gives_back_what_a_crash_left_held(here):
    flow = here.submit(fit(gpu=gpus(8)))
    flow.admit("fit", 0)
    with dying_at("end.after_record"):
        flow.end_try("fit", 0, exit_code="75")
    assert held(here) == [("digits-abc12", 8)]
    assert phase(flow.end_try("fit", 0, exit_code="75")) == "Error"
    assert held(here) == []


def test_end_that_a_replica_recorded_before_it_died_gives_the_gpus_back_and_is_counted_once(here, monkeypatch):
    flow, other_replica, claim = here.submit(fit(gpu=gpus(8))), here.restart(), end_attempt.claim_record
    flow.admit("fit", 0)

    def claim_late(*record):
        monkeypatch.setattr(end_attempt, "claim_record", claim)
        with dying_at("end.after_record"):
            body = flow.body("conclude", "fit", 0, status="Failed", exit_code="75")
            other_replica.execute_document(flow.document(body))
        return claim(*record)

    monkeypatch.setattr(end_attempt, "claim_record", claim_late)
    assert phase(flow.end_try("fit", 0, exit_code="75")) == "Error"
    assert held(here) == []
    assert "tiphys_attempts_ended_total{" not in here.core.metrics.render().decode()


@pytest.mark.parametrize("point", ["conclude.before_end", "conclude.after_end"])
def test_crash_of_the_service_beside_the_end_of_a_success_takes_no_gpus_from_the_next_holder(here, point):
    flow = here.submit(fit(gpu=gpus(8)))
    key = flow.write_output(flow.admit("fit", 0), "artifacts/model", b"m")
    with dying_at(point):
        flow.conclude("fit", 0)
    here.core = here.restart()
    assert outputs(other(here, 8).admit("fit", 0))["run"] == "true"
    verdict = flow.conclude("fit", 0)
    assert (phase(verdict), artifacts(verdict)) == ("Succeeded", {"model": key})
    assert held(here) == [("other-abc12", 8)]


def test_lease_that_a_crash_left_to_an_ended_attempt_is_given_back(here):
    flow = here.submit(fit(gpu=gpus(8)))
    flow.admit("fit", 0)
    request = here.ledger.snapshot().leases[0].request
    flow.end_try("fit", 0, exit_code="75")
    here.ledger.request(request)
    assert len(held(here)) == 1
    # The lease of the crash is another one; the sweep finds that its attempt has ended.
    assert outputs(other(here, 8).admit("fit", 0))["run"] == "true"


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (gpus(9), "ExceedsMaxQuota"),
        (gpus(1, queue="secret"), "QueueUnknown"),
        (gpus(1, gpu_type="H100"), "NoMatchingGpuType"),
    ],
)
def test_request_that_can_never_be_met_fails_the_step_at_once(here, request_, reason):
    flow = here.submit(fit(gpu=request_))
    admitted = flow.admit("fit", 0)
    assert phase(admitted) == "Failed", "Error would have Argo try it again"
    assert said(admitted).startswith(f"Rejected: {reason}: ")
    verdict = flow.conclude("fit", 0)
    assert phase(verdict) == "Failed"
    assert reason in said(verdict)
    assert held(here) == []


def test_repeated_request_that_can_never_be_met_gets_the_same_answer_whatever_the_budgets_are(here):
    flow = here.submit(fit(gpu=gpus(9), retry=RetryPolicy(user_error=3)))
    first = flow.admit("fit", 0)
    here.restart()
    assert flow.admit("fit", 0) == first
    assert phase(first) == "Failed"


def test_an_attempt_asks_for_gpus_anew(here):
    flow = here.submit(fit(gpu=gpus(8)))
    flow.admit("fit", 0)
    flow.end_try("fit", 0, exit_code="75")
    other(here).admit("fit", 0)
    waiting = flow.admit("fit", 1)
    assert phase(waiting) == "Pending"
    assert held(here) == [("other-abc12", 4)]


@pytest.mark.parametrize("phase_", ["Succeeded", "Failed", "Error"])
def test_gpus_of_a_workflow_that_is_over_come_back_without_any_hook(here, phase_):
    here.submit(fit(gpu=gpus(8))).admit("fit", 0)
    end_workflow(here, phase_)
    assert outputs(other(here).admit("fit", 0))["run"] == "true"


def test_gpus_of_a_workflow_that_is_over_stay_with_a_pod_that_lives_on(here):
    flow = here.submit(fit(gpu=gpus(8)))
    flow.admit("fit", 0)
    flow.pod("fit", 1, phase="Running")
    end_workflow(here)
    assert phase(other(here).admit("fit", 0)) == "Pending"


def test_gpus_whose_pod_has_not_been_made_yet_are_kept(here):
    here.submit(fit(gpu=gpus(8))).admit("fit", 0)
    assert phase(other(here).admit("fit", 0)) == "Pending"


def test_finalize_gives_back_what_the_workflow_holds(here):
    flow = here.submit(fit(gpu=gpus(8)))
    flow.admit("fit", 0)
    end_workflow(here)
    flow.finalize("Failed")
    assert held(here) == []


def test_finalize_leaves_gpus_to_a_pod_that_is_still_ending(here):
    flow = here.submit(fit(gpu=gpus(8)))
    flow.admit("fit", 0)
    flow.pod("fit", 1, phase="Running")
    flow.finalize("Failed")
    assert held(here) == [("digits-abc12", 8)]


def test_stopping_workflow_gets_no_gpus_and_leaves_the_line(here):
    other(here, 8).admit("fit", 0)
    flow = here.submit(fit(gpu=gpus(8)))
    flow.admit("fit", 0)
    assert len(here.ledger.snapshot().pending) == 1
    end_workflow(here, "Running", shutdown="Stop")
    answer = flow.admit("fit", 0)
    assert phase(answer) == "Failed"
    assert "is stopping" in said(answer)
    assert here.ledger.snapshot().pending == ()


def test_type_that_the_ledger_chose_is_where_the_pod_must_land(tmp_path):
    here = world(tmp_path, queues(research={"A100": 8, "T4": 2}))
    answer = outputs(here.submit(fit(gpu=gpus(2, gpu_type=None))).admit("fit", 0))
    assert json.loads(answer["pod-patch"])["nodeSelector"] == {"nvidia.com/gpu.product": "T4"}


def test_type_that_the_author_named_needs_no_patch(here):
    answer = outputs(here.submit(fit(gpu=gpus(2))).admit("fit", 0))
    assert "nodeSelector" not in json.loads(answer["pod-patch"])


def test_training_without_checkpoints_has_no_lineage_and_starts_over(here):
    flow = here.submit(fit(gpu=gpus(2), checkpoints=None))
    assert outputs(flow.admit("fit", 0))["lineage"] == ""
    commit(here.store, "digits-abc12/fit", 1, 10)
    flow.end_try("fit", 0, exit_code="75")
    answer = flow.admit("fit", 1)
    assert outputs(answer)["resume-from"] == ""
    assert said(answer) == "Attempt 2 holds 2 A100 of queue research and runs, and keeps no checkpoints"


def test_a_single_gpu_is_written_in_the_singular(tmp_path):
    here = world(tmp_path, queues({"A100": {"count": 1}}, research={"*": 1}))
    wanted = fit(gpu=gpus(1, gpu_type=None), checkpoints=None)
    admitted = here.submit(wanted).admit("fit", 0)
    assert said(admitted) == "Attempt 1 holds 1 GPU of queue research and runs, and keeps no checkpoints"
    waiting = here.submit(wanted, name="other-abc12", uid="uid-2").admit("fit", 0)
    assert said(waiting) == "Deferred: WaitingForQuota: queue research holds 1 of 1 GPU; 1 GPU asked; position 1"


def test_adopted_step_asks_for_no_gpus(here):
    flow = here.submit(fit(gpu=gpus(8)))
    flow.write_output(flow.admit("fit", 0), "artifacts/model", b"m")
    flow.conclude("fit", 0)
    other(here, 8).admit("fit", 0)
    assert outputs(flow.admit("fit", 1))["run"] == "false"


def test_held_and_waiting_show_in_the_metrics(here):
    here.submit(fit(gpu=gpus(8)), prep()).admit("fit", 0)
    other(here).admit("fit", 0)
    text = here.core.metrics.render().decode()
    assert 'tiphys_gpus_held{queue="research"} 8.0' in text
    assert 'tiphys_gpu_requests_waiting{queue="research"} 1.0' in text
    assert 'tiphys_gpu_requests_oldest_seconds{queue="research"}' in text
    assert 'tiphys_gpu_quota{queue="research"} 8.0' in text
    assert 'tiphys_gpus_borrowed{queue="research"} 0.0' in text
    assert 'tiphys_gpu_requests_total{answer="Admitted"} 1.0' in text
    assert 'tiphys_gpu_requests_total{answer="WaitingForQuota"}' in text
    assert "tiphys_gpu_decision_seconds_count" in text


def test_metrics_of_a_queue_sum_its_leases_and_its_quotas_and_none_of_another_queue(tmp_path):
    borrower, lender = Irregular().step_names(2)
    members = {borrower: {"gpus": {"A100": 2, "H100": 4}}, lender: {"gpus": {"A100": 8, "H100": 16}}}
    here = world(tmp_path, cohort(**members))
    asked = [(borrower, "A100", 3), (borrower, "H100", 6), (lender, "A100", 1), (borrower, "A100", 2)]
    for number, (queue, gpu_type, count) in enumerate(asked):
        step = fit(gpu=gpus(count, gpu_type=gpu_type, queue=queue))
        flow = here.submit(step, name=f"digits-{number}", uid=f"uid-{number}")
        assert outputs(flow.admit("fit", 0))["run"] == "true"

    registry = here.core.metrics.registry

    def by_queue(metric: str) -> list[float | None]:
        return [registry.get_sample_value(metric, {"queue": queue}) for queue in (borrower, lender)]

    assert by_queue("tiphys_gpus_held") == [3 + 6 + 2, 1]
    assert by_queue("tiphys_gpu_quota") == [2 + 4, 8 + 16]
    assert by_queue("tiphys_gpus_borrowed") == [3 + 2, 0]


def test_a_request_behind_a_training_with_a_deadline_has_an_expected_start(here):
    here.submit(fit(gpu=gpus(8, seconds=3600)), prep()).admit("fit", 0)
    assert "position 1, expected to start by " in said(other(here, 8).admit("fit", 0))


def test_gpus_of_a_fenced_attempt_are_held_until_its_workflow_has_run_its_program(here):
    """Argo may have the reply of its admit, and start its pod at any time."""
    here.submit(fit(gpu=gpus(8))).admit("fit", 0)
    end = AttemptEnd(run="digits-abc12", step="fit", attempt=1, submission=1, outcome=AttemptEndOutcome.FENCED)
    fence(here, end.to_bytes())
    for number, node in enumerate(({}, {"phase": "Running"}, {"phase": "Failed"})):
        document = workflow([fit(gpu=gpus(8))])
        document["status"]["nodes"] = {"n": {"name": "digits-abc12.fit(0).run", **node}}
        here.cluster.write_workflow(document)
        here.clock.advance(31)
        assert phase(other(here).admit("fit", 0)) == ("Succeeded" if number == 2 else "Pending")


def test_conclude_of_a_fenced_attempt_gives_its_gpus_back_before_any_other_asks(here):
    flow = here.submit(fit(gpu=gpus(8)))
    flow.admit("fit", 0)
    end = AttemptEnd(run="digits-abc12", step="fit", attempt=1, submission=1, outcome=AttemptEndOutcome.FENCED)
    fence(here, end.to_bytes())
    assert phase(flow.end_try("fit", 0, exit_code="76")) == "Failed"
    assert held(here) == []


def test_damaged_record_of_a_holder_keeps_its_gpus_and_refuses_no_other(here):
    here.submit(fit(gpu=gpus(8))).admit("fit", 0)
    fence(here, b"garbage")
    assert phase(other(here).admit("fit", 0)) == "Pending"


def test_holder_found_alive_is_not_looked_at_again_at_once(here):
    here.submit(fit(gpu=gpus(8))).admit("fit", 0)
    late = other(here)
    late.admit("fit", 0)
    end_workflow(here)
    assert phase(late.admit("fit", 0)) == "Pending"
    here.clock.advance(31)
    assert outputs(late.admit("fit", 0))["run"] == "true"


def fence(here: World, record: bytes) -> None:
    here.store.create("control/runs/digits-abc12/attempts/fit/000000001.end.json", record)


def test_gpus_that_a_dead_admit_node_got_go_to_the_next_try(here, monkeypatch):
    flow = here.submit(fit(gpu=gpus(8)))
    monkeypatch.setenv("TIPHYS_FAILPOINTS", "admit.after_lease=raise@1")
    with pytest.raises(InjectedFaultError):
        flow.admit("fit", 0)
    assert held(here) == [("digits-abc12", 8)]
    assert outputs(flow.admit("fit", 1))["attempt"] == "1"
    assert held(here) == [("digits-abc12", 8)]
    flow.end_try("fit", 1, exit_code="1")
    assert held(here) == []


def test_gpus_of_an_attempt_are_not_released_by_a_call_that_came_too_late_to_open_it(here, monkeypatch):
    flow = here.submit(fit(gpu=gpus(8)))
    opened = []

    def racing(*claimed):
        if not opened:
            opened.append(True)
            here.restart().execute_document(flow.document(flow.body("admit", "fit", 1)))
        return claim_record(*claimed)

    monkeypatch.setattr("tiphys_plugin.operations.admit.claim_record", racing)
    late = flow.admit("fit", 0)
    assert phase(late) == "Pending"
    assert "just opened by" in said(late)
    assert held(here) == [("digits-abc12", 8)]


def test_service_with_another_queue_file_does_not_end_what_was_admitted(here, monkeypatch):
    flow = here.submit(fit(gpu=gpus(8)))
    stricter = SqliteLedger(here.root / "other.db", queues(research={"A100": 4}), clock=here.clock)
    other_service = PluginCore(here.store, here.cluster, stricter, clock=here.clock)
    admitted = []

    def racing(*claimed):
        if not admitted:
            admitted.append(True)
            flow.admit("fit", 0)
        return claim_record(*claimed)

    monkeypatch.setattr("tiphys_plugin.operations.admit.claim_record", racing)
    answer = other_service.execute_document(flow.document(flow.body("admit", "fit", 0)))
    assert outputs(answer)["run"] == "true"
    assert len(records(here.store, "control/runs/digits-abc12/attempts/fit/")) == 1
    stricter.close()


def test_step_that_waits_reads_each_attempt_once_a_call(here):
    flow = here.submit(fit(gpu=gpus(8), retry=RetryPolicy(preemption=None, backoff_seconds=1)))
    for retry in range(3):
        flow.admit("fit", retry)
        flow.end_try("fit", retry, exit_code="75")
    other(here, 8).admit("fit", 0)
    counting = CountingStore(here.store)
    here.core = PluginCore(counting, here.cluster, here.ledger, clock=here.clock)
    flow.admit("fit", 3)
    before = counting.requests["read"]
    assert phase(flow.admit("fit", 3)) == "Pending"
    claims_and_ends = 2 * 3
    adopted, newer_submission = 1, 1
    assert counting.requests["read"] - before == claims_and_ends + adopted + newer_submission
