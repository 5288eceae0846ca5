"""An image that cannot be pulled ends its attempt, and the GPUs come back.

| the pod                                       | its attempt                           |
|-----------------------------------------------|---------------------------------------|
| has an image name that is not valid           | ends at once, as an image error       |
| fails to pull for less than the limit         | waits                                 |
| fails to pull for the limit                   | ends, with the answer of the registry |
| runs meanwhile                                | waits anew when it fails again        |
| is of a gang                                  | ends as a whole                       |
| is of an elastic gang that can spare it       | goes on without this member           |
| is of another namespace                       | waits                                 |
"""

import pytest
from support.builders.ledger import queues
from support.stories.plugin import Flow, World, fit, gpus, outputs, phase, records, said, world
from support.stories.plugin_with_gangs import gang_world, objects, pod
from tiphys_plugin.cluster.interface import GangStatus
from tiphys_plugin.eviction.image_pulls import ImagePullSweep
from tiphys_plugin.runtime.context import SingleStore

from tiphys.protocol.gang import GANG_LABEL, GangBackend, GangPhase, GangSpec
from tiphys.protocol.step_spec import ATTEMPT_LABEL, RUN_LABEL, STEP_LABEL

REFUSED = 'rpc error: failed to pull "train:typo": not found'
BACK_OFF = 'Back-off pulling image "train:typo"'


@pytest.fixture
def here(tmp_path) -> World:
    return world(tmp_path, queues(research={"A100": 8}))


@pytest.fixture
def flow(here) -> Flow:
    started = here.submit(fit(gpu=gpus(8)))
    assert outputs(started.admit("fit", 0))["run"] == "true"
    return started


def sweep(here: World) -> ImagePullSweep:
    return ImagePullSweep(here.ledger, here.cluster, SingleStore(here.store), timeout_seconds=300, clock=here.clock)


def waits(flow: Flow, reason: str, message: str = "") -> None:
    flow.pod("fit", 1, phase="Pending", reason=reason, message=message, uid="pod-1")


def ends(here: World) -> list[dict]:
    return [one for one in records(here.store, "control/runs/digits-abc12/attempts/fit/") if "outcome" in one]


def test_an_invalid_name_ends_the_attempt_at_once_and_the_gpus_come_back(here, flow):
    waits(flow, "InvalidImageName", "couldn't parse image name")
    sweep(here).run_once()

    [end] = ends(here)
    assert (end["outcome"], end["evidence"]["rule"]) == ("failed", "image-refused")
    assert "couldn't parse image name" in end["message"]
    [pod] = here.cluster.workflow_pods(flow.uid)
    assert pod.ending
    flow.pod("fit", 1, phase="Failed", reason="Deleted")
    assert "couldn't parse image name" in said(flow.end_try("fit", 0, status="Error", exit_code="-1"))
    assert here.ledger.snapshot().leases == ()


def test_the_next_attempt_waits_for_the_pods_of_the_one_that_was_ended(here, flow):
    waits(flow, "InvalidImageName", "couldn't parse image name")
    sweep(here).run_once()
    waiting = flow.end_try("fit", 0, status="Error", exit_code="-1")
    assert (phase(waiting), len(here.ledger.snapshot().leases)) == ("Pending", 1)
    assert "still ending" in said(waiting)
    flow.pod("fit", 1, phase="Failed", reason="Deleted")
    assert phase(flow.end_try("fit", 0, status="Error", exit_code="-1")) == "Error", "it is tried again"
    assert here.ledger.snapshot().leases == ()


def test_a_pull_that_fails_ends_the_attempt_after_the_limit_with_the_answer_of_the_registry(here, flow):
    rounds = sweep(here)
    waits(flow, "ErrImagePull", REFUSED)
    rounds.run_once()
    here.clock.advance(299)
    waits(flow, "ImagePullBackOff", BACK_OFF)
    rounds.run_once()
    assert ends(here) == []

    here.clock.advance(1)
    rounds.run_once()

    [end] = ends(here)
    assert REFUSED in end["message"]


def test_a_pod_that_starts_after_all_is_left_alone(here, flow):
    rounds = sweep(here)
    waits(flow, "ErrImagePull", "i/o timeout")
    rounds.run_once()
    here.clock.advance(200)
    flow.pod("fit", 1, phase="Running", uid="pod-1")
    rounds.run_once()
    here.clock.advance(200)
    waits(flow, "ErrImagePull", "i/o timeout")
    rounds.run_once()

    assert ends(here) == []


def test_a_gang_ends_as_a_whole(tmp_path):
    here = gang_world(tmp_path, queues(research={"A100": 8}))
    flow = here.submit(fit(artifacts=(), gang=GangSpec(members=2), gpu=gpus(8, members=2)))
    name = outputs(flow.admit("fit", 0))["gang"]
    objects(here).objects[name] = GangStatus(GangBackend.JOB, "ml", name, "uid-of-job", GangPhase.ACTIVE)
    labels = {RUN_LABEL: "digits-abc12", STEP_LABEL: "fit", ATTEMPT_LABEL: "1", GANG_LABEL: name}
    for rank in (0, 1):
        here.cluster.write_pod(pod(rank, "Pending", reason="InvalidImageName", uid=f"pod-{rank}", labels=labels))

    sweep(here).run_once()

    assert [end["evidence"]["rule"] for end in ends(here)] == ["image-refused"]
    assert objects(here).ended == [name]
    assert all(one.ending for one in here.cluster.workflow_pods(flow.uid))


@pytest.mark.parametrize(
    ("failing_ranks", "outcomes", "deleted_ranks"),
    [((2, 3), [], [2, 3]), ((1, 2, 3), ["failed"], [0, 1, 2, 3]), ((0,), ["failed"], [0, 1, 2, 3])],
)
def test_an_elastic_gang_loses_the_members_that_it_can_spare(tmp_path, failing_ranks, outcomes, deleted_ranks):
    here = gang_world(tmp_path, queues(research={"A100": 8}))
    gang = GangSpec(members=4, min_members=2)
    flow = here.submit(fit(artifacts=(), gang=gang, gpu=gpus(8, members=4, min_members=2)))
    name = outputs(flow.admit("fit", 0))["gang"]
    objects(here).objects[name] = GangStatus(GangBackend.JOB, "ml", name, "uid-of-job", GangPhase.ACTIVE, remaining=4)
    labels = {RUN_LABEL: "digits-abc12", STEP_LABEL: "fit", ATTEMPT_LABEL: "1", GANG_LABEL: name}
    for rank in range(4):
        phase, reason = ("Pending", "InvalidImageName") if rank in failing_ranks else ("Running", "")
        here.cluster.write_pod(pod(rank, phase, reason=reason, uid=f"pod-{rank}", labels=labels))

    sweep(here).run_once()

    assert [end["outcome"] for end in ends(here)] == outcomes
    assert [one.rank for one in here.cluster.workflow_pods(flow.uid) if one.ending] == deleted_ranks


def test_a_pod_of_another_namespace_ends_no_attempt_whatever_its_labels_say(here, flow):
    flow.pod("fit", 1, phase="Running", uid="pod-1")
    [own] = here.cluster.workflow_pods(flow.uid)
    here.cluster.write_pod(
        own.model_copy(
            update={
                "name": "forged",
                "namespace": "other",
                "uid": "x",
                "phase": "Pending",
                "reason": "InvalidImageName",
            }
        )
    )

    sweep(here).run_once()

    assert ends(here) == []
    assert not any(one.ending for one in here.cluster.workflow_pods(flow.uid))


def test_without_leases_no_pods_are_listed(here, monkeypatch):
    monkeypatch.setattr(type(here.cluster), "attempt_pods", lambda *_, **__: pytest.fail("listed"))

    sweep(here).run_once()

    assert phase(here.submit(fit(gpu=gpus(8))).admit("fit", 0)) == "Succeeded"
