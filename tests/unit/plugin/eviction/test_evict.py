"""The handshake: marked, asked, given its grace period, ended as a preemption that is charged to nobody, and told of.

| what happens                                     | what must hold                                             |
|--------------------------------------------------|------------------------------------------------------------|
| a service looks                                  | pods are told to end; their GPUs stay held                 |
| it looks again, or several look                  | nobody more is asked                                       |
| it dies between the mark and the deletion        | the next look asks                                         |
| the pods are gone                                | the GPUs go to whom they were wanted for                   |
| the program saved; saved before; never saved     | the end says what is left, and what is lost                |
| it crashes while it saves                        | a crash, charged as one                                    |
| the budget of preemptions is spent               | it is tried again all the same                             |
| the book has changed since the choice            | nobody is marked                                           |
"""

import contextlib
from datetime import timedelta

import pytest
from support.builders.ledger import ask, ledger_api, queues
from support.builders.lineage import START_TIMES
from support.fakes.counting_store import CountingStore
from support.processes.failpoints import dying_at
from support.processes.polling import until
from support.stories.plugin import Flow, World, commit, fit, gpus, outputs, phase, records, said, world
from tiphys_plugin import DirectoryCluster, Queues
from tiphys_plugin.cluster.pod_status import pod_status
from tiphys_plugin.eviction import cost
from tiphys_plugin.eviction.loop import PreemptionLoop
from tiphys_plugin.quota.lease import Lease
from tiphys_plugin.quota.ledger.kubernetes_ledger import KubernetesLedger
from tiphys_plugin.runtime.context import SingleStore

from tiphys.errors import StoreError
from tiphys.lineage.run_history import RunHistory
from tiphys.lineage.select import read_newest_commit
from tiphys.lineage.timeline import read_timeline
from tiphys.protocol.step_spec import RetryPolicy
from tiphys.records import CheckpointManifest, CrashRecord, Preemption, Shard
from tiphys.store import DirectoryStore, LineageLayout, claim_record

RULES = Queues.model_validate({"queues": [{"name": "research", "gpus": {"A100": 8}, "preempts_lower_priority": True}]})
GRACE_SECONDS = 120.0


@pytest.fixture
def here(tmp_path) -> World:
    return world(tmp_path, RULES)


def begin(here: World, name: str = "low", **changes) -> Flow:
    """A training of priority 0 on all GPUs, whose pod runs."""
    flow = here.submit(fit(**{"gpu": gpus(8), **changes}), name=name, uid=f"uid-{name}")
    assert outputs(flow.admit("fit", 0))["run"] == "true"
    flow.pod("fit", 1, grace_seconds=GRACE_SECONDS)
    return flow


def want(here: World, name: str = "high", count: int = 8) -> Flow:
    flow = here.submit(fit(gpu=gpus(count, priority=5)), name=name, uid=f"uid-{name}")
    assert phase(flow.admit("fit", 0)) == "Pending"
    return flow


def job(here: World) -> PreemptionLoop:
    return PreemptionLoop(here.ledger, here.cluster, SingleStore(here.store), clock=here.clock)


def only_lease(here: World) -> Lease:
    [lease] = here.ledger.snapshot().leases
    return lease


def asked(here: World, **changes) -> tuple[Flow, Flow]:
    """After one look, ten minutes after the start."""
    low = begin(here, **changes)
    here.clock.advance(600)
    high = want(here)
    job(here).run_once()
    return low, high


def end_pod(flow: Flow, exit_code: int = 75) -> None:
    flow.pod("fit", 1, phase="Failed", exit_code=exit_code, reason="Deleted")


def saved(here: World, flow: Flow, at_seconds: float, step: int = 7) -> None:
    """A checkpoint of the first attempt, so many seconds after its start."""
    layout = LineageLayout(f"{flow.name}/fit")
    key = f"{layout.shards(1, step)}state.safetensors"
    here.store.create(key, b"weights")
    [granted_at] = [one.granted_at for one in here.ledger.snapshot().leases if one.request.run == flow.name]
    manifest = CheckpointManifest(
        lineage=f"{flow.name}/fit",
        run=flow.name,
        step="fit",
        attempt=1,
        global_step=step,
        shards=(Shard(key=key, size=7, sha256="0" * 64),),
        began=START_TIMES,
        written_at=granted_at + timedelta(seconds=at_seconds),
    )
    claim_record(here.store, layout.manifest(1, step), manifest.with_seal())


def ended(here: World, run: str = "low") -> dict:
    [end] = [one for one in records(here.store, f"control/runs/{run}/attempts/fit/") if "outcome" in one]
    return end


def test_pods_are_asked_to_end_and_their_gpus_stay_held(here):
    low, high = asked(here)
    leaving = only_lease(here).preemption
    assert leaving is not None
    assert (leaving.uid, leaving.step) == (high.uid, "fit")
    assert leaving.deadline - leaving.asked_at == timedelta(seconds=GRACE_SECONDS)
    [pod] = here.cluster.workflow_pods(low.uid)
    assert (pod.ending, pod.finished) == (True, False)
    assert said(high.admit("fit", 0)).startswith(
        "Deferred: WaitingForPreemptedCheckpoint: low/fit was asked to save and go at 00:10:00, by 00:12:00 at the"
    )


def test_a_victim_is_evicted_once_however_often_the_job_runs(here, monkeypatch):
    asked(here)
    notice = only_lease(here).preemption
    monkeypatch.setattr(DirectoryCluster, "delete_pod", lambda *_: pytest.fail("told again"))
    for _ in range(3):
        here.clock.advance(5)
        job(here).run_once()
    assert only_lease(here).preemption == notice


def test_a_service_that_dies_between_mark_and_deletion_leaves_it_to_the_next(here):
    low = begin(here)
    want(here)
    with dying_at("preemption.after_mark"):
        job(here).run_once()
    assert only_lease(here).preemption is not None
    assert not here.cluster.workflow_pods(low.uid)[0].ending
    job(here).run_once()
    assert here.cluster.workflow_pods(low.uid)[0].ending


@pytest.mark.parametrize("fault", ["lost", "refused", "conflict"])
def test_a_mark_that_meets_a_fault_is_made_once_all_the_same(here, fault):
    """Over the ledger object of a cluster, with two services: an answer gets lost, a write is refused, or beaten."""
    api = ledger_api(RULES)
    ledgers = [KubernetesLedger(api, "tiphys", clock=here.clock, pause=lambda _: None) for _ in range(2)]
    held = ledgers[0].request(ask(8, "low", namespace="ml", run="low", instance="low.fit"))
    ledgers[0].request(ask(8, "high", priority=5))
    low = Flow(here, "low", "low")
    low.pod("fit", 1, grace_seconds=GRACE_SECONDS)
    faults = [fault]
    api.meanwhile = lambda: faults.pop() if faults else ""
    for ledger in (*ledgers, *ledgers):
        with contextlib.suppress(StoreError):
            PreemptionLoop(ledger, here.cluster, SingleStore(here.store), clock=here.clock).run_once()
        here.clock.advance(1)
    [lease] = ledgers[1].snapshot().leases
    assert (lease.id, lease.preemption and lease.preemption.uid) == (held.lease, "high")
    assert here.cluster.workflow_pods("low")[0].ending


def test_a_pod_that_comes_after_the_mark_is_asked_to_end_too(here):
    low = here.submit(fit(gpu=gpus(8)), name="low", uid="uid-low")
    low.admit("fit", 0)
    want(here)
    job(here).run_once()
    leaving = only_lease(here).preemption
    assert leaving is not None
    assert leaving.deadline - leaving.asked_at == timedelta(seconds=30)
    low.pod("fit", 1)
    job(here).run_once()
    assert here.cluster.workflow_pods(low.uid)[0].ending


def test_gpus_of_a_victim_go_to_its_preemptor(here):
    low, high = asked(here)
    assert phase(low.end_try("fit", 0, exit_code="75")) == "Pending"
    assert phase(high.admit("fit", 0)) == "Pending"
    end_pod(low)
    assert phase(low.end_try("fit", 0, exit_code="75")) == "Error", "it is tried again"
    assert phase(low.admit("fit", 1)) == "Pending"
    assert outputs(high.admit("fit", 0))["run"] == "true"
    job(here).run_once()
    assert (only_lease(here).request.run, only_lease(here).preemption) == ("high", None)


def test_the_end_of_one_that_saved_when_it_was_asked_says_that_nothing_is_lost(here):
    low, _ = asked(here)
    here.clock.advance(20)
    saved(here, low, at_seconds=610)
    end_pod(low)
    message = said(low.end_try("fit", 0, exit_code="75"))
    assert message == (
        "Attempt 1 ended by preemption, it was asked at 00:10:00 to save and go for high/fit; checkpoint 7 of attempt "
        "1 is committed; attempt 2 resumes from step 7"
    )
    preempted = ended(here)["preempted"]
    assert (preempted["for_run"], preempted["for_step"], preempted["for_step_name"]) == ("high", "fit", "fit")
    assert preempted["gpus"] == 8
    assert (preempted["committed"]["global_step"], preempted["seconds_lost"]) == (7, 0.0)
    assert preempted["gone_at"] > preempted["asked_at"]
    [event] = [event for event in read_timeline(RunHistory(here.store, "low")) if event.name == "attempt.ended"]
    assert "to save and go for high/fit" in event.message
    assert (event.data["preempted"]["for_run"], event.data["preempted"]["gpu_seconds_lost"]) == ("high", 0.0)


def test_the_end_names_the_item_for_which_it_went(here):
    preempted = Preemption(
        for_run="high",
        for_step="fit.0123456789ab.0",
        for_step_name="fit[2]",
        asked_at=here.clock(),
        gone_at=here.clock(),
        gpus=4,
    )
    assert "to save and go for high/fit[2]; " in cost.format_preemption(preempted)


@pytest.mark.parametrize(
    ("saved_at", "says", "lost"),
    [
        (450.0, "checkpoint 7 of attempt 1 is committed, 2m 30s (1200 GPU-seconds) of training lost since", 1200.0),
        (None, "it had committed no checkpoint: 10m (4800 GPU-seconds) of training lost", 4800.0),
    ],
)
def test_the_end_of_one_that_did_not_save_says_what_is_lost(here, saved_at, says, lost):
    low, _ = asked(here)
    if saved_at is not None:
        saved(here, low, saved_at)
    end_pod(low, exit_code=137)
    assert says in said(low.end_try("fit", 0, exit_code="137"))
    metrics = here.core.metrics.render().decode()
    kept = "with" if saved_at is not None else "without"
    assert f'tiphys_preemptions_total{{checkpoint="{kept}"}} 1.0' in metrics
    assert f"tiphys_preemption_lost_gpu_seconds_total {lost}" in metrics
    assert "tiphys_preemption_seconds_count 1.0" in metrics


def test_a_victim_without_a_waiting_request_names_another_training(here):
    low, high = asked(here)
    here.ledger.withdraw(high.uid)
    end_pod(low)
    assert "to save and go for another training" in said(low.end_try("fit", 0, exit_code="75"))


def test_a_crash_while_it_saves_is_a_crash(here):
    low, _ = asked(here)
    crash = CrashRecord(run="low", step="fit", attempt=1, error="OSError: no space left")
    claim_record(here.store, "data/runs/low/incarnations/fit/000000001/000000001.crash.json", crash)
    end_pod(low, exit_code=1)
    verdict = low.end_try("fit", 0, exit_code="1")
    assert phase(verdict) == "Failed", "it is not tried again"
    assert said(verdict).startswith(
        "fit failed in attempt 1 by user error: the program exited with 1 (OSError: no space left); it was asked at "
        "00:10:00"
    )
    assert (ended(here)["cause"], ended(here)["preempted"]["for_run"]) == ("user_error", "high")


def test_a_program_that_ends_well_although_it_was_asked_is_done(here):
    low, high = asked(here)
    low.write_output(low.admit("fit", 0), "artifacts/model", b"weights")
    low.pod("fit", 1, phase="Succeeded", exit_code=0)
    assert phase(low.conclude("fit", 0)) == "Succeeded"
    assert outputs(high.admit("fit", 0))["run"] == "true"


def test_no_budget_is_charged_for_going(here):
    low, high = asked(here, retry=RetryPolicy(preemption=0))
    end_pod(low)
    assert phase(low.end_try("fit", 0, exit_code="75")) == "Error", "it is tried again"
    high.admit("fit", 0)
    assert phase(low.admit("fit", 1)) == "Pending"


def test_a_preemption_by_others_is_charged_as_before(here):
    low = begin(here, retry=RetryPolicy(preemption=0))
    end_pod(low)
    assert phase(low.end_try("fit", 0, exit_code="75")) == "Failed", "it is not tried again"


def test_the_victim_with_the_least_loss_since_its_checkpoint_is_chosen(here):
    first, second = (begin(here, name, gpu=gpus(4)) for name in ("first", "second"))
    here.clock.advance(600)
    saved(here, first, 100)
    saved(here, second, 500)
    want(here, count=4)
    job(here).run_once()
    assert [one.request.run for one in here.ledger.snapshot().leases if one.preemption] == ["second"]


def test_a_loss_is_cached_and_counts_as_the_whole_attempt_where_storage_fails(here, monkeypatch):
    begin(here)
    counting = CountingStore(here.store)
    losses = cost.CheckpointLossEstimator(SingleStore(counting), here.clock)
    here.clock.advance(100)
    lease = only_lease(here)
    assert losses([lease]) == {lease.id: 800.0}
    here.clock.advance(5)
    assert losses([lease]) == {lease.id: 840.0}
    assert counting.requests["list"] == 1
    here.clock.advance(10)

    def fails(*_):
        raise StoreError("out of reach")

    monkeypatch.setattr(CountingStore, "list", fails)
    assert losses([lease]) == {lease.id: 920.0}


def test_a_checkpoint_of_another_attempt_does_not_count(tmp_path):
    store = DirectoryStore(tmp_path)
    commit(store, "low/fit", 1, 50)
    commit(store, "low/fit", 3, 10)
    assert read_newest_commit(store, "low/fit", 2) is None
    found = read_newest_commit(store, "low/fit", 3)
    assert found is not None and found.global_step == 10


def test_a_mark_is_not_made_on_a_changed_state(here):
    begin(here)
    high = want(here)
    lease = only_lease(here)
    graces = {lease.id: 30.0}
    here.ledger.withdraw(high.uid)
    assert here.ledger.mark_preempted((high.uid, "fit"), graces) == ()
    high.admit("fit", 0)
    assert here.ledger.mark_preempted((high.uid, "fit"), {**graces, "unknown": 30.0}) == ()
    here.clock.advance(121)
    assert here.ledger.mark_preempted((high.uid, "fit"), graces) == (), "it has not asked for two minutes"
    high.admit("fit", 0)
    assert len(here.ledger.mark_preempted((high.uid, "fit"), graces)) == 1
    assert here.ledger.mark_preempted((high.uid, "fit"), graces) == ()


def test_a_victim_that_cannot_be_evicted_does_not_hold_up_the_others(here, monkeypatch):
    flows = [begin(here, name, gpu=gpus(4)) for name in ("one", "two")]
    want(here)
    end = DirectoryCluster.delete_pod

    def refuses(self, pod):
        if pod.name.startswith("one"):
            raise StoreError("forbidden")
        end(self, pod)

    monkeypatch.setattr(DirectoryCluster, "delete_pod", refuses)
    job(here).run_once()
    assert [here.cluster.workflow_pods(flow.uid)[0].ending for flow in flows] == [False, True]
    monkeypatch.undo()
    job(here).run_once()
    assert here.cluster.workflow_pods(flows[0].uid)[0].ending


def test_requests_with_victims_under_way_do_not_hold_up_those_behind_them(here):
    for number in range(8):
        begin(here, f"low-{number}", gpu=gpus(1))
    for number in range(7):
        want(here, f"high-{number}", count=1)
        job(here).run_once()
    assert len([one for one in here.ledger.snapshot().leases if one.preemption is not None]) == 7


def test_a_victim_on_a_lost_node_is_replaced_by_another_one(here):
    low = begin(here, "low", gpu=gpus(4))
    other = begin(here, "other", gpu=gpus(4))
    high = want(here, count=4)
    job(here).run_once()
    [first] = [one.request.run for one in here.ledger.snapshot().leases if one.preemption is not None]
    here.clock.advance(GRACE_SECONDS + 121)
    high.admit("fit", 0)
    job(here).run_once()
    assert {one.request.run for one in here.ledger.snapshot().leases if one.preemption is not None} == {"low", "other"}
    assert first in (low.name, other.name)


def test_a_lease_of_a_namespace_that_is_not_served_is_passed_over(here):
    begin(here, "low", gpu=gpus(4))
    stray = ask(4, "stray", namespace="gone")
    here.ledger.request(stray)
    here.ledger.request(ask(4, "high", priority=5))

    class Ours(SingleStore):
        def serves(self, namespace: str) -> bool:
            return namespace == "ml"

    PreemptionLoop(here.ledger, here.cluster, Ours(here.store), clock=here.clock).run_once()
    assert [one.request.run for one in here.ledger.snapshot().leases if one.preemption is not None] == ["low"]


def test_the_job_looks_by_itself_until_it_is_ended(here):
    low = begin(here)
    want(here)
    running = PreemptionLoop(here.ledger, here.cluster, SingleStore(here.store), clock=here.clock, every_seconds=0.01)
    with running:
        until(lambda: here.cluster.workflow_pods(low.uid)[0].ending)
    assert not running._thread.is_alive()


def test_leases_are_not_preempted_where_no_queue_allows_it(tmp_path):
    here = world(tmp_path, queues(research={"A100": 8}))
    begin(here)
    want(here)
    job(here).run_once()
    assert only_lease(here).preemption is None


def test_a_pod_shows_its_grace_period_and_whether_it_was_asked_to_end():
    pod = {"metadata": {"name": "p", "uid": "u"}, "spec": {"terminationGracePeriodSeconds": 90}, "status": {}}
    seen = pod_status(pod)
    assert (seen.uid, seen.grace_seconds, seen.ending) == ("u", 90, False)
    deleted = {**pod, "metadata": {**pod["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}}
    assert pod_status(deleted).ending
