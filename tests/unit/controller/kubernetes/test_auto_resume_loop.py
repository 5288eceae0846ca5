"""The loop against an API server and a store: what makes it look at a run, and what it says.

| what is seen | what follows |
|---|---|
| the Workflow of a run that asks for it fails | the next one, and an Event that says why |
| it is deleted, while watched or while nobody watched | the same after a while |
| it succeeds, is stopped, or its author did not ask | nothing |
| half of all runs fail at once | nothing for a minute |
| API server and store time out for an hour | nothing |
"""

import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from support.builders.argo_objects import posted_events
from support.builders.compiled_workflows import History, gated, pipeline_of
from support.fakes.counting_store import CountingStore
from support.servers.kube_server import KubeServer
from support.stories.auto_resume_loop import RUN, Bench, hour_of_time_outs
from tiphys_controller import resume_run, start_run
from tiphys_controller.auto_resume import decide
from tiphys_controller.auto_resume.observation_health import ObservationHealthTracker
from tiphys_controller.auto_resume.state import AutomationMode, AutoResumeLimits
from tiphys_controller.kubernetes import KubernetesSubmitter, auto_resume_loop

from tiphys.kube import KubeApi, Object, identify_cluster
from tiphys.protocol.auto_resume_policy import AUTO_RESUME_ANNOTATION, AutoResumePolicy
from tiphys.protocol.step_spec import PIPELINE_ANNOTATION, STEP_ANNOTATION, GpuRequest, StepSpec
from tiphys.records import AttemptClaim, AttemptEnd, AttemptEndOutcome, Cause, SubmissionEnd
from tiphys.store import RunLayout, Store, end_submission, list_open_submissions, read_record


@pytest.fixture
def bench(server: KubeServer, api: KubeApi, store: Store) -> Iterator[Bench]:
    made = Bench(server, api, store)
    yield made
    made.pool.shutdown()


def test_a_run_that_fails_goes_on_in_the_round_in_which_that_is_seen(bench: Bench) -> None:
    history = bench.started()
    bench.round(times=2)
    history.failed("fit", cause=Cause.PREEMPTION)
    bench.fail()

    bench.round()

    assert bench.names() == [RUN, f"{RUN}-2"]
    [(reason, message)] = posted_events(bench.server)
    assert reason == "AutoResumed"
    assert message == "resumed automatically as submission 2: step fit failed by preemption"
    assert bench.count("resumes_total", cause="preemption") == 1
    assert bench.count("planned_steps_total", decision="skip") == 1
    bench.round(400, times=3)
    assert bench.names() == [RUN, f"{RUN}-2"]
    assert bench.metrics.render()


def test_the_cost_of_a_failure_is_counted_when_its_run_resumes(bench: Bench) -> None:
    manifest = pipeline_of(gated("fit"))
    manifest["metadata"]["labels"] = {PIPELINE_ANNOTATION: "digits"}
    manifest["metadata"]["annotations"][AUTO_RESUME_ANNOTATION] = AutoResumePolicy().model_dump_json()
    annotations = next(one for one in manifest["spec"]["templates"] if one["name"] == "fit")["metadata"]["annotations"]
    spec = StepSpec.model_validate_json(annotations[STEP_ANNOTATION])
    annotations[STEP_ANNOTATION] = spec.model_copy(update={"gpu": GpuRequest(gpus=8)}).to_bytes().decode()
    start_run(bench.store, KubernetesSubmitter(bench.api, identify_cluster(bench.api)), manifest, RUN, namespace="ml")
    bench.round(times=2)
    history = History(bench.store, RUN)
    history.opened("fit")
    claimed = read_record(bench.store, RunLayout(RUN).attempt("fit", 1), AttemptClaim)
    end = AttemptEnd(
        run=RUN,
        step="fit",
        attempt=1,
        submission=1,
        outcome=AttemptEndOutcome.FAILED,
        cause=Cause.PREEMPTION,
        written_at=claimed.written_at + timedelta(seconds=100),
    )
    bench.store.create(RunLayout(RUN).attempt_end("fit", 1), end.to_bytes())
    bench.fail()
    bench.round()
    assert bench.names() == [RUN, f"{RUN}-2"]
    assert bench.count("lost_gpu_seconds_total", cause="preemption") == 800


def test_a_workflow_that_is_deleted_while_it_runs_is_replaced_after_a_while(bench: Bench) -> None:
    bench.started()
    bench.round(times=2)
    bench.delete()
    bench.round(times=3)
    assert bench.names() == []
    bench.round(60)
    assert bench.names() == [f"{RUN}-2"]
    assert bench.count("resumes_total", cause="gone") == 1


def test_a_workflow_that_is_deleted_before_its_run_is_known_is_replaced_without_a_search(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.round()  # the search at the start; the next one is five minutes away
    find, answers = auto_resume_loop.find_submission, iter([None])  # nothing is bound at the first look
    monkeypatch.setattr(auto_resume_loop, "find_submission", lambda *given: next(answers, find(*given)))
    bench.started()
    bench.round()
    bench.delete()
    bench.round(6, times=3)
    bench.round(60)
    assert bench.names() == [f"{RUN}-2"]


def test_a_workflow_without_a_run_is_forgotten_once_it_is_gone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.round()
    looks = Counter[str]()
    monkeypatch.setattr(auto_resume_loop, "find_submission", lambda _, found: looks.update([found.name]))
    bench.started()
    bench.round()
    bench.delete()
    bench.round(11, times=20)
    assert looks[RUN] <= 8
    assert bench.names() == []


def test_a_settled_run_is_forgotten_once_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_resume_loop, "_MAX_SETTLED_RUNS", 2)
    tracker = auto_resume_loop.RunTracker(ObservationHealthTracker(str, int, AutoResumeLimits(), time.monotonic))
    for number in range(2):
        tracker.track(("ml", f"ended-{number}")).is_settled = True
    tracker.update([], 0.0)
    assert tracker.find_run(("ml", "ended-0")) is not None

    for name in ("waits", "is-reconciled"):
        tracker.track(("ml", name)).is_busy = name == "is-reconciled"
    tracker.update([], 0.0)

    kept = [name for name in ("ended-0", "ended-1", "waits", "is-reconciled") if tracker.find_run(("ml", name))]
    assert kept == ["waits", "is-reconciled"]


def test_a_run_that_ended_unobserved_is_found_in_storage(bench: Bench) -> None:
    bench.started()
    bench.started("sealed")
    sealed = SubmissionEnd(run="sealed", submission=1, status="Failed")
    bench.store.create(RunLayout("sealed").submission_end(1), sealed.to_bytes())
    bench.delete()
    bench.delete("sealed")
    bench.restart()
    bench.round(20, times=2)
    assert bench.names() == ["sealed-2"], "an end on record is believed at once"
    bench.round(70)
    assert bench.names() == [f"{RUN}-2", "sealed-2"]


@pytest.mark.parametrize(
    ("asks", "change", "events"),
    [
        (True, {"status": {"phase": "Succeeded"}}, []),
        (False, {"status": {"phase": "Failed"}}, []),
        (True, {"spec": {"shutdown": "Terminate"}, "status": {"phase": "Failed"}}, ["AutoResumeEndedByPerson"]),
    ],
    ids=["succeeded", "not asked for", "terminated"],
)
def test_a_run_without_auto_resume_or_cause_is_left_alone(
    bench: Bench, asks: bool, change: Object, events: list[str]
) -> None:
    history = bench.started(asks=asks)
    bench.round(times=2)
    if change["status"]["phase"] == "Succeeded":
        history.done("fit")
    bench.change(RUN, change)
    bench.round(100, times=4)
    bench.delete()
    bench.restart()
    bench.round(400, times=4)
    assert bench.names() == []
    assert bench.reasons() == events


def test_a_broken_program_is_left_to_its_author_with_one_event(bench: Bench) -> None:
    history = bench.started()
    bench.round(times=2)
    history.failed("fit", cause=Cause.USER_ERROR, message="exit code 1")
    bench.fail()
    bench.round(400, times=3)
    assert bench.names() == [RUN]
    [(reason, message)] = posted_events(bench.server)
    assert reason == "AutoResumeNeedsPerson"
    assert f"`tiphys resume {RUN} --store {bench.store.url}`" in message


def test_a_dry_run_only_says_what_it_would_do(server: KubeServer, api: KubeApi, store: Store) -> None:
    bench = Bench(server, api, store, AutomationMode.DRY_RUN)
    bench.started()
    bench.round(times=2)
    bench.fail()
    bench.round(400, times=3)
    assert bench.names() == [RUN]
    assert bench.reasons() == ["WouldResume"]
    assert bench.count("resumes_not_made_total", cause="unknown") >= 1


def _open_breaker(bench: Bench) -> None:
    bench.started()
    bench.round(times=2)
    for name in (RUN, f"{RUN}-2", f"{RUN}-3"):
        bench.fail(name)
        bench.round(30, times=4)
    assert bench.names() == [RUN, f"{RUN}-2", f"{RUN}-3"]
    assert bench.count("breakers_open") == 1
    assert bench.reasons()[-1] == "AutoResumeBreakerOpen"


def test_an_open_breaker_shows_and_closes(bench: Bench) -> None:
    _open_breaker(bench)
    bench.round(6 * 3600)
    assert bench.names()[-1] == f"{RUN}-4"
    bench.round()
    assert bench.count("breakers_open") == 0


def test_an_open_breaker_counts_no_longer_once_a_person_has_resumed_the_run(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decide, "_MAX_RETRIES_AFTER_BREAKER", 0)  # so only a person resumes it
    _open_breaker(bench)
    resume_run(bench.store, KubernetesSubmitter(bench.api, identify_cluster(bench.api)), RUN)
    bench.round(times=2)
    assert bench.count("breakers_open") == 0
    bench.change(f"{RUN}-4", {"status": {"phase": "Succeeded"}})
    bench.round(30, times=2)
    assert bench.count("breakers_open") == 0


def test_an_open_breaker_is_forgotten_with_its_run(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decide, "_MAX_RETRIES_AFTER_BREAKER", 0)
    monkeypatch.setattr(auto_resume_loop, "_MAX_SETTLED_RUNS", 0)
    _open_breaker(bench)
    for name in bench.names():
        bench.delete(name)
    bench.round(1, times=2)
    assert bench.count("breakers_open") == 0


def test_failures_of_half_of_all_runs_at_once_pause_auto_resume_for_a_minute(bench: Bench) -> None:
    runs = [f"digits-{number}" for number in range(8)]
    for run in runs:
        bench.started(run)
    bench.round(times=2)
    for run in runs[:6]:
        bench.fail(run)
    bench.round(15, times=3)
    assert bench.names() == runs
    bench.round(15, times=3)
    assert bench.names() == sorted([*runs, *(f"{run}-2" for run in runs[:6])])


def test_an_api_server_that_lost_its_objects_is_not_a_reason_to_run_all_again(bench: Bench) -> None:
    for number in range(6):
        bench.started(f"digits-{number}")
    bench.round(times=2)
    for number in range(6):
        bench.delete(f"digits-{number}")
    bench.round(60, times=20)
    assert bench.names() == []
    assert bench.count("resumes_declined_total", reason="HealthUnknown") > 0


def test_a_watch_that_is_broken_stops_everything(bench: Bench) -> None:
    bench.started()
    bench.round(times=2)
    bench.fail()
    bench.watches.errors["workflows"] = "the API server does not answer"
    bench.round(100, times=3)
    assert bench.names() == [RUN]
    bench.watches.errors.clear()
    bench.round(30, times=3)
    assert bench.names() == [RUN, f"{RUN}-2"]


def test_an_hour_of_time_outs_makes_no_workflow_for_a_hundred_healthy_runs(
    server: KubeServer, store: Store, tmp_path: Path
) -> None:
    seen = hour_of_time_outs(server, store, tmp_path)
    assert seen.resubmitted == 0
    assert seen.faults > 300, "the faults were really there"


def test_a_search_costs_the_same_however_many_runs_have_ended(bench: Bench) -> None:
    bench.started("goes-on")
    counting = bench.store = CountingStore(bench.store)
    costs = []
    for begin, end in ((0, 3), (3, 20)):
        for run in (f"ended-{number}" for number in range(begin, end)):
            bench.started(run)
            end_submission(bench.store, SubmissionEnd(run=run, submission=1, status="Succeeded"), may_be_resumed=True)
            bench.delete(run)
        bench.restart()
        counting.requests.clear()
        bench.round()
        costs.append(counting.requests.total())
    assert costs[0] == costs[1]


@pytest.mark.parametrize(("cause", "stays_open"), [(Cause.USER_ERROR, False), (Cause.PREEMPTION, True)])
def test_a_failed_run_is_found_again_until_it_is_left_to_people(bench: Bench, cause: Cause, stays_open: bool) -> None:
    history = bench.started()
    history.failed("fit", cause=cause)
    bench.fail()
    end_submission(bench.store, SubmissionEnd(run=RUN, submission=1, status="Failed"), may_be_resumed=True)
    assert [opened.submission for opened in list_open_submissions(bench.store)] == [1]

    bench.delete()
    bench.restart()
    bench.moment += 20
    bench.round(times=3)

    assert bench.names() == ([f"{RUN}-2"] if stays_open else [])
    assert bool(list_open_submissions(bench.store)) is stays_open
