"""A gang that goes on when it loses members: how many it starts with, what it gives back, what its end means.

| what is free | it starts with |
|---|---|
| all that it would take | all |
| less | as many as fit, in groups that fit |
| less than the fewest | none: it waits as the fewest, and is promised no more |

| somebody of higher priority waits | who goes |
|---|---|
| and can do with members that can be spared | so many of them, the last, after a save; not the first |
| and needs more | the whole training |

| what is seen of its end | cause |
|---|---|
| one more member has failed than can be spared | that of this one, and of none that was lost before |
| the same, and deleted members left fewer to spare | that of the first that could not be spared |
| the host failed before: the first member, or the one that has taken its place | that of the host |
| all pods were taken away | preemption |
| the host is gone, the others failed after it | infrastructure |
| the same, and the program has left word of a crash | that of the others |
| the same, and one of them was called wrongly, or its log names no connection | that of this one |
"""

from dataclasses import replace
from pathlib import Path

import pytest
from support.stories.plugin import Flow, World, commit, fit, gpus, outputs, phase, records, said
from support.stories.plugin_with_gangs import JOB, gang_world, objects, pod, put
from tiphys_plugin import PodStatus, Queues
from tiphys_plugin.attempts import gangs
from tiphys_plugin.eviction.evict import longest_grace_seconds, select_pods_on_nodes, select_pods_to_evict
from tiphys_plugin.eviction.loop import PreemptionLoop
from tiphys_plugin.quota.lease import Lease
from tiphys_plugin.runtime.background import HashingProgress
from tiphys_plugin.runtime.context import SingleStore

from tiphys.failures.classify import classify_failure
from tiphys.protocol.execute_api import ExecuteReply
from tiphys.protocol.gang import GANG_LABEL, GangPhase, GangSpec
from tiphys.protocol.operations import ADMIT_OUTPUTS, gang_outputs
from tiphys.protocol.step_spec import ATTEMPT_LABEL, RUN_LABEL, STEP_LABEL, RetryPolicy, StepSpec
from tiphys.records import Cause, EvictionRecord, GangRestartDecision
from tiphys.store import RunLayout, claim_record
from tiphys.store.incarnations import find_gang_host, gang_decision_key, incarnation_key

GANG = GangSpec(members=4, min_members=2)
TAKEN = {"reason": "Deleted", "exit_code": 143}


@pytest.fixture
def here(tmp_path: Path) -> World:
    return gang_world(tmp_path, Queues.model_validate({"queues": [{"name": "research", "gpus": {"A100": 8}}]}))


def spec(**changes: object) -> StepSpec:
    return fit(**{"artifacts": (), "gang": GANG, "gpu": gpus(8, members=4, min_members=2), **changes})


def member(here: World, rank: int, phase: str = "Running", **fields: object) -> PodStatus:
    """As `put`, with the mark of a member."""
    labels = {RUN_LABEL: "digits-abc12", STEP_LABEL: "fit", ATTEMPT_LABEL: "1", GANG_LABEL: "job"}
    made = pod(rank, phase, None, labels=labels, **fields)
    here.cluster.write_pod(made)
    return made


def started(here: World, flow: Flow) -> str:
    """The first attempt with all of its pods running; the name of what made them."""
    answer = outputs(flow.admit("fit", 0))
    assert answer["run"] == "true"
    objects(here).objects[answer["gang"]] = replace(JOB, name=answer["gang"], stage=GangPhase.ACTIVE, remaining=4)
    for rank in range(int(answer["members"])):
        member(here, rank)
    return answer["gang"]


def lease(here: World) -> Lease:
    [found] = here.ledger.snapshot().leases
    return found


def look(here: World) -> None:
    PreemptionLoop(here.ledger, here.cluster, SingleStore(here.store), clock=here.clock).run_once()


def test_an_elastic_gang_starts_with_all_members_where_enough_gpus_are_free(here: World) -> None:
    flow = here.submit(spec())
    reply = flow.admit("fit", 0)
    answer = outputs(reply)
    assert tuple(answer) == (*ADMIT_OUTPUTS, *gang_outputs(GANG))
    assert (answer["members"], answer["spare"]) == ("4", "2")
    assert said(reply).startswith("Attempt 1, 4 pods, holds 8 A100 of queue research")
    assert (lease(here).request.gpus, lease(here).request.members) == (8, 4)
    assert outputs(flow.admit("fit", 0)) == answer, "asked again, it answers the same"


def test_an_elastic_gang_starts_with_fewer_members_where_fewer_fit(here: World) -> None:
    flow = here.submit(spec())
    other = here.submit(fit(gpu=gpus(5)), name="other-abc12", uid="uid-2")
    assert outputs(other.admit("fit", 0))["run"] == "true"
    waits = flow.admit("fit", 0)
    assert phase(waits) == "Pending"
    assert "4 A100 asked" in said(waits), "it can do with two nodes"
    [held] = here.ledger.snapshot().leases
    here.ledger.release(held.id)
    third = here.submit(fit(gpu=gpus(2)), name="third-abc12", uid="uid-3")
    assert outputs(third.admit("fit", 0))["run"] == "true"
    reply = flow.admit("fit", 0)
    answer = outputs(reply)
    assert (answer["members"], answer["spare"]) == ("3", "1")
    assert said(reply).startswith("Attempt 1, 3 of 4 pods, holds 6 A100")


def test_the_cost_of_an_evacuation_is_that_of_the_members_that_started(here: World) -> None:
    other = here.submit(fit(gpu=gpus(2)), name="other-abc12", uid="uid-2")
    assert outputs(other.admit("fit", 0))["run"] == "true"
    flow = here.submit(spec())
    name = started(here, flow)
    evicted = EvictionRecord(run="digits-abc12", step="fit", attempt=1, reason="its node goes", nodes=("n1",))
    claim_record(here.store, RunLayout("digits-abc12").eviction("fit", 1), evicted)
    objects(here).objects[name] = replace(objects(here).objects[name], stage=GangPhase.ENDING, remaining=0)
    for rank in range(3):
        member(here, rank, "Failed", **TAKEN)
    flow.end_try("fit", 0, exit_code="143")
    [end] = [record for record in records(here.store, "control/runs/digits-abc12/attempts/fit/") if "outcome" in record]
    assert (end["cause"], end["preempted"]["gpus"]) == ("preemption", 6)


def test_gpus_of_a_lost_member_are_released_once_its_pod_is_gone(here: World) -> None:
    flow = here.submit(spec())
    name = started(here, flow)
    look(here)
    assert lease(here).request.gpus == 8
    member(here, 2, ending=True)
    look(here)
    assert lease(here).request.gpus == 8, "it lives until it is gone"
    objects(here).lose(pod(2))
    look(here)
    assert lease(here).request.gpus == 8, "another might have taken its place"
    objects(here).objects[name] = replace(objects(here).objects[name], remaining=3)
    look(here)
    assert (lease(here).request.gpus, lease(here).request.members) == (6, 3)
    objects(here).objects[name] = replace(objects(here).objects[name], stage=GangPhase.ENDING, remaining=3)
    for rank in (0, 1, 3):
        member(here, rank, "Succeeded")
    verdict = flow.conclude("fit", 0)
    assert said(verdict) == "Attempt 1 is done: no outputs to be verified; 3 of its 4 nodes were left in the end"
    assert flow.conclude("fit", 0) == verdict
    assert not here.ledger.snapshot().leases


def test_without_gpus_what_made_its_pods_says_how_many_are_left(here: World) -> None:
    flow = here.submit(fit(artifacts=(), gang=GANG, gpu=None))
    name = started(here, flow)
    for rank in (0, 1, 2):
        member(here, rank, "Succeeded")
    objects(here).lose(pod(3))
    objects(here).objects[name] = replace(objects(here).objects[name], stage=GangPhase.FINISHED, remaining=3)
    assert said(flow.conclude("fit", 0)).endswith("; 3 of its 4 nodes were left in the end")


def test_slow_verification_keeps_how_many_members_were_left(here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    flow = here.submit(spec(artifacts=("model",)))
    name = started(here, flow)
    flow.write_output(flow.admit("fit", 0), "artifacts/model", b"weights")
    objects(here).lose(pod(2))
    objects(here).objects[name] = replace(objects(here).objects[name], remaining=3)
    look(here)
    objects(here).objects[name] = replace(objects(here).objects[name], stage=GangPhase.FINISHED)
    for rank in (0, 1, 3):
        member(here, rank, "Succeeded")
    with monkeypatch.context() as patched:
        patched.setattr(here.core._context.hasher, "hash_objects", lambda *_: HashingProgress(0, 1))
        assert phase(flow.conclude("fit", 0)) == "Pending"
    verdict = flow.conclude("fit", 0)
    assert said(verdict) == "Attempt 1 is done: 1 object verified; 3 of its 4 nodes were left in the end"
    assert not here.ledger.snapshot().leases


@pytest.mark.parametrize(
    ("first", "others", "verdict"),
    [("Succeeded", "Failed", "Succeeded"), ("Failed", "Succeeded", "Succeeded"), ("Failed", "Failed", "Failed")],
)
def test_member_that_succeeds_decides_for_all(here: World, first: str, others: str, verdict: str) -> None:
    flow = here.submit(spec())
    name = started(here, flow)
    objects(here).objects[name] = replace(objects(here).objects[name], stage=GangPhase.FINISHED)
    for rank in range(4):
        ended = others if rank else first
        member(here, rank, ended, exit_code=int(ended == "Failed"))
    assert phase(flow.conclude("fit", 0, status="Failed")) == verdict


def test_a_member_that_it_could_spare_is_no_cause_of_its_end(here: World) -> None:
    flow = here.submit(spec())
    name = started(here, flow)
    objects(here).objects[name] = replace(objects(here).objects[name], stage=GangPhase.FINISHED)
    put(here, 3, "Failed", after=1, reason="OOMKilled")
    for rank in range(3):
        put(here, rank, "Failed", after=9, exit_code=1)
    assert "the program exited with 1" in said(flow.end_try("fit", 0, status="Failed"))


@pytest.fixture
def busy(tmp_path: Path) -> World:
    """A queue in which higher priority has others go, all of it held by an elastic training."""
    queue = {"name": "research", "gpus": {"A100": 8}, "preempts_lower_priority": True}
    made = gang_world(tmp_path, Queues.model_validate({"queues": [queue]}))
    started(made, made.submit(spec()))
    return made


def wants(here: World, count: int) -> Flow:
    """Another workflow, of higher priority."""
    flow = here.submit(fit(gpu=gpus(count, priority=5)), name="other-abc12", uid="uid-2")
    assert phase(flow.admit("fit", 0)) == "Pending"
    return flow


def told_to_go(here: World) -> list[int | None]:
    return [pod.rank for pod in here.cluster.attempt_pods() if pod.ending]


def test_members_that_can_be_spared_go_before_a_whole_training(busy: World) -> None:
    high = wants(busy, 3)
    look(busy)
    assert told_to_go(busy) == [2, 3]
    leaving = lease(busy).preemption
    assert leaving is not None
    assert (leaving.uid, leaving.keeps) == ("uid-2", 2)
    waits = high.admit("fit", 0)
    assert "digits-abc12/fit was asked to save and go" in said(waits)
    look(busy)
    assert told_to_go(busy) == [2, 3], "to ask twice does no more than to ask once"
    [name] = objects(busy).objects
    for rank in (2, 3):
        objects(busy).lose(pod(rank))
        (busy.root / "cluster" / "pods" / f"job-{rank}.end").unlink()
    objects(busy).objects[name] = replace(objects(busy).objects[name], remaining=2)
    look(busy)
    assert (lease(busy).request.members, lease(busy).preemption) == (2, None)
    assert outputs(high.admit("fit", 0))["run"] == "true"
    look(busy)
    assert told_to_go(busy) == []


def test_no_more_members_go_than_are_needed(busy: World) -> None:
    wants(busy, 1)
    look(busy)
    assert told_to_go(busy) == [3]


def test_the_whole_training_goes_where_its_spare_members_do_not_suffice(busy: World) -> None:
    wants(busy, 6)
    look(busy)
    assert told_to_go(busy) == [0, 1, 2, 3]
    leaving = lease(busy).preemption
    assert leaving is not None
    assert leaving.keeps is None


def test_pod_that_watches_a_gang_is_not_evicted_with_the_members(busy: World) -> None:
    labels = {RUN_LABEL: "digits-abc12", STEP_LABEL: "fit", ATTEMPT_LABEL: "1"}
    watcher = pod(9, "Running", name="watcher", rank=None, labels=labels)
    busy.cluster.write_pod(watcher)
    wants(busy, 6)
    look(busy)
    ending = {one.name: one.ending for one in busy.cluster.attempt_pods()}
    assert ending == {"watcher": False, **{f"job-{rank}": True for rank in range(4)}}


def test_gang_that_has_fewer_members_than_a_preemption_keeps_loses_none(busy: World) -> None:
    wants(busy, 1)
    look(busy)
    leaving = lease(busy)
    assert leaving.preemption is not None and leaving.preemption.keeps == 3
    assert select_pods_to_evict(leaving, [pod(1, "Running"), pod(2, "Running")]) == []


def test_grace_period_of_several_pods_is_the_longest_of_them() -> None:
    living = [pod(rank, "Running", grace_seconds=seconds) for rank, seconds in enumerate((30.0, 90.0, None, 60.0))]
    assert longest_grace_seconds(living) == 90.0


@pytest.mark.parametrize(
    ("hosts", "leave"),
    [
        ({0: "a", 1: "b", 2: "c", 3: "bad"}, [3]),
        ({0: "a", 1: "bad", 2: "bad", 3: "c"}, [1, 2]),
        ({0: "bad", 1: "b", 2: "c", 3: "d"}, [0]),
        ({0: "a", 1: "bad", 2: "bad", 3: "bad"}, [0, 1, 2, 3]),
        ({0: "a", 1: "b", 2: "c"}, []),
        ({0: "", 1: "", 2: "", 3: ""}, [0, 1, 2, 3]),
    ],
    ids=["one", "two", "the first", "too many", "it has left", "nobody knows"],
)
def test_from_a_bad_node_only_its_members_go_if_the_others_can_go_on(
    here: World, hosts: dict[int, str], leave: list[int]
) -> None:
    started(here, here.submit(spec()))
    living = [pod(rank, "Running", host=host) for rank, host in hosts.items()]
    assert [one.rank for one in select_pods_on_nodes(lease(here), living, {"bad"})] == leave


def test_an_elastic_gang_waits_for_its_first_member_to_run_before_it_can_lose_it(here: World) -> None:
    started(here, here.submit(spec()))
    living = [pod(rank, "Running" if rank else "Pending", host="b" if rank else "bad") for rank in range(4)]
    assert [one.rank for one in select_pods_on_nodes(lease(here), living, {"bad"})] == [0, 1, 2, 3]


def test_an_elastic_gang_without_a_watcher_is_ended_although_a_member_has_failed(here: World) -> None:
    flow = here.submit(spec())
    name = started(here, flow)
    put(here, 3, "Failed", after=5, exit_code=1)
    assert phase(flow.end_try("fit", 0, status="Error")) == "Pending"
    assert objects(here).ended == [name], "it would go on for nobody"


@pytest.mark.parametrize(
    ("found", "crashed", "cause", "evidence"),
    [
        (
            [*(pod(rank, after=9, exit_code=1) for rank in (0, 1, 2)), pod(3, after=1, reason="OOMKilled")],
            False,
            Cause.USER_ERROR,
            "of 4: the program exited with 1",
        ),
        (
            [*(pod(rank, after=9 + rank, reason="OOMKilled") for rank in (1, 2, 3)), pod(0, after=20, exit_code=1)],
            False,
            Cause.OUT_OF_MEMORY,
            "rank 3 of 4",
        ),
        (
            [pod(0, after=5, exit_code=137, reason="OOMKilled"), *(pod(rank, after=9, exit_code=1) for rank in (1, 2))],
            False,
            Cause.OUT_OF_MEMORY,
            "rank 0 of 4",
        ),
        (
            [pod(0, after=20, exit_code=1), *(pod(rank, after=4 + rank, reason="OOMKilled") for rank in (1, 2))],
            False,
            Cause.OUT_OF_MEMORY,
            "rank 2 of 4",
        ),
        (
            [pod(0, after=20, exit_code=1), pod(1, after=5, reason="OOMKilled")],
            False,
            Cause.OUT_OF_MEMORY,
            "rank 1 of 4",
        ),
        (
            [pod(0, "Running", after=2, reason="NodeLost"), *(pod(rank, after=9, exit_code=1) for rank in (1, 2, 3))],
            False,
            Cause.INFRASTRUCTURE,
            "rank 0 of 4",
        ),
        ([], False, Cause.PREEMPTION, "rank 0 of 4: its pod was taken away"),
        ([pod(1, after=5, **TAKEN)], False, Cause.PREEMPTION, "rank 0 of 4"),
        ([pod(rank, after=9, exit_code=1) for rank in (1, 2, 3)], False, Cause.INFRASTRUCTURE, "rank 0 of 4"),
        ([pod(rank, after=9, exit_code=1) for rank in (1, 2, 3)], True, Cause.USER_ERROR, "exited with 1"),
        ([pod(rank, after=9, exit_code=2) for rank in (1, 2, 3)], False, Cause.USER_ERROR, "rank 1 of 4: the program"),
        ([pod(rank, after=9, exit_code=64) for rank in (1, 2)], False, Cause.USER_ERROR, "exited with 64"),
        ([pod(rank, after=9, exit_code=64) for rank in range(4)], False, Cause.USER_ERROR, "exited with 64"),
        ([pod(1, after=9, exit_code=141), pod(0, after=9, exit_code=141)], False, Cause.USER_ERROR, "exited with 141"),
        ([pod(rank, after=9, exit_code=75) for rank in (1, 2, 3)], False, Cause.INFRASTRUCTURE, "rank 0 of 4"),
        ([pod(rank, after=9, exit_code=127) for rank in (2, 3)], False, Cause.USER_ERROR, "rank 2 of 4"),
        (
            [pod(1, after=8, exit_code=143), pod(2, after=9, exit_code=1, termination_message="KeyError: 'größe'\n")],
            False,
            Cause.USER_ERROR,
            "rank 2 of 4: the program exited with 1 (KeyError: 'größe')",
        ),
        (
            [pod(2, after=9, exit_code=1, termination_message="RendezvousTimeoutError\n==== Root Cause ====\n")],
            False,
            Cause.INFRASTRUCTURE,
            "rank 0 of 4",
        ),
        ([pod(0, "Running")], False, Cause.INFRASTRUCTURE, "no pod of the gang shows how the attempt ended"),
    ],
)
def test_the_cause_of_an_elastic_end_is_that_of_the_members_it_needed(
    found: list[PodStatus], crashed: bool, cause: Cause, evidence: str
) -> None:
    verdict = classify_failure(gangs.observe_elastic_end(GANG, 2, found, "Failed", crashed=crashed))
    assert verdict.cause is cause
    assert evidence in verdict.evidence


def test_the_cause_of_an_elastic_end_is_no_host_whose_place_another_has_taken() -> None:
    lost_long_ago = pod(0, after=1, exit_code=143, reason="NodeLost")
    others = [pod(rank, after=900, exit_code=1, termination_message="KeyError: 'size'") for rank in (1, 2, 3)]

    def evidence(found: list[PodStatus], host: int) -> tuple[Cause | None, str]:
        verdict = classify_failure(gangs.observe_elastic_end(GANG, 2, found, "Failed", crashed=False, host=host))
        return verdict.cause, verdict.evidence

    assert evidence([lost_long_ago, *others], 0)[0] is Cause.INFRASTRUCTURE
    cause, said = evidence([lost_long_ago, *others], 1)
    assert (cause, "KeyError" in said) == (Cause.USER_ERROR, True)
    assert evidence(others[1:], 1)[1].startswith("rank 2 of 4"), "a word of its own"
    silent = [pod(rank, after=900, exit_code=1) for rank in (2, 3)]
    cause, said = evidence(silent, 1)
    assert (cause, "rank 1 of 4" in said) == (Cause.INFRASTRUCTURE, True)


def test_the_host_of_a_gang_is_the_member_of_its_newest_start(here: World) -> None:
    layout, store = RunLayout("digits-abc12"), here.store
    assert find_gang_host(store, "digits-abc12", "fit", 1) == 0
    for incarnation, host in ((2, 1), (3, 2), (4, 3)):
        decision = GangRestartDecision(run="digits-abc12", step="fit", attempt=1, incarnation=incarnation, host=host)
        claim_record(store, gang_decision_key(layout, "fit", 1, incarnation), decision)
    assert find_gang_host(store, "digits-abc12", "fit", 1) == 0, "no program says that it was started"
    for incarnation in (2, 3):
        store.create(incarnation_key(layout, "fit", 1, incarnation), b"{}")
    assert find_gang_host(store, "digits-abc12", "fit", 1) == 2


def fails_beside_a_deleted_first_member(
    here: World, flow: Flow, number: int, exit_code: int, saved: int
) -> ExecuteReply:
    """The answer of conclude after rank 0 saved a step, and the Job deleted it because the others exited."""
    name = outputs(flow.admit("fit", number - 1))["gang"]
    objects(here).objects[name] = replace(JOB, name=name, stage=GangPhase.FINISHED, remaining=1)
    commit(here.store, "digits-abc12/fit", number, saved)
    labels = {RUN_LABEL: "digits-abc12", STEP_LABEL: "fit", ATTEMPT_LABEL: str(number), GANG_LABEL: "job"}
    for rank in (1, 2, 3):
        here.cluster.write_pod(pod(rank, "Failed", 9.0, labels=labels, exit_code=exit_code))
    return flow.end_try("fit", number - 1, status="Failed")


@pytest.mark.parametrize("exit_code", [2, 64])
def test_usage_error_of_members_ends_the_trying_although_the_first_member_saved(here: World, exit_code: int) -> None:
    flow = here.submit(spec())
    verdict = fails_beside_a_deleted_first_member(here, flow, 1, exit_code, saved=40)
    assert (phase(verdict), "user error" in said(verdict)) == ("Failed", True)
    assert not here.ledger.snapshot().leases


def test_a_save_of_the_first_member_without_a_further_step_refunds_nothing(here: World) -> None:
    flow = here.submit(spec(retry=RetryPolicy(infrastructure=2, backoff_seconds=1)))
    saved = [(1, 40), (2, 40), (3, 41), (4, 41), (5, 41)]
    answers = [phase(fails_beside_a_deleted_first_member(here, flow, number, 1, step)) for number, step in saved]
    assert answers == ["Error"] * 4 + ["Failed"]
    ends = [one for one in records(here.store, "control/runs/digits-abc12/attempts/fit/") if "outcome" in one]
    assert [one["progress"] for one in ends] == [True, False, True, False, False]
