"""The handshake of a preemption with a hole in it is caught, and without one it is not.

`tests/property/test_preemption.py` plants bugs into who is chosen and marked.
"""

from collections.abc import Callable

import pytest
from support.stories.plugin import World, fit, gpus, outputs, phase, world
from tiphys_plugin import DirectoryCluster, Queues
from tiphys_plugin.eviction import loop
from tiphys_plugin.eviction.loop import PreemptionLoop
from tiphys_plugin.operations import end_attempt
from tiphys_plugin.quota.preemption import victims as choice
from tiphys_plugin.runtime.context import SingleStore

Plant = Callable[..., None]
HANDSHAKE_RULES = Queues.model_validate(
    {"queues": [{"name": "research", "gpus": {"A100": 8}, "preempts_lower_priority": True}]}
)


def handshake(here: World) -> None:
    """Two attempts and one look after another; what the ledger holds must always have a pod, or the pod its GPUs."""
    low = here.submit(fit(gpu=gpus(8)), name="low", uid="uid-low")
    high = here.submit(fit(gpu=gpus(8, priority=5)), name="high", uid="uid-high")
    assert outputs(low.admit("fit", 0))["run"] == "true"
    low.pod("fit", 1, grace_seconds=60.0)
    assert phase(high.admit("fit", 0)) == "Pending"
    jobs = [PreemptionLoop(here.ledger, here.cluster, SingleStore(here.store), clock=here.clock) for _ in range(2)]
    for one in (*jobs, *jobs):
        one.run_once()
        here.clock.advance(1)
    [pod] = here.cluster.workflow_pods(low.uid)
    assert pod.ending, "it was marked and not asked"
    assert phase(low.end_try("fit", 0, exit_code="75")) == "Pending"
    assert phase(high.admit("fit", 0)) == "Pending", "its GPUs were given away while its pod is there"
    low.pod("fit", 1, phase="Failed", exit_code=75, reason="Deleted")
    assert phase(low.end_try("fit", 0, exit_code="75")) == "Error"
    assert outputs(high.admit("fit", 0)).get("run") == "true", "they did not come back"
    [end] = [
        attempt for attempt in here.store.list("control/runs/low/attempts/fit/") if attempt.key.endswith(".end.json")
    ]
    assert b'"preempted"' in here.store.read(end.key), "its end does not say that it was asked"


def test_the_handshake_keeps_every_law(tmp_path):
    handshake(world(tmp_path, HANDSHAKE_RULES))


def it_is_marked_and_not_asked(plant: Plant) -> None:
    plant(loop, "evict_lease", lambda cluster, lease: 0)


def its_gpus_come_back_when_it_is_asked(plant: Plant) -> None:
    end = DirectoryCluster.delete_pod

    def at_once(self, pod):
        end(self, pod)
        self.write_pod(pod.model_copy(update={"phase": "Failed"}))

    plant(DirectoryCluster, "delete_pod", at_once)


def conclude_does_not_wait_for_the_pods(plant: Plant) -> None:
    plant(end_attempt, "await_pods", lambda call, attempt, found: None)


def the_mark_is_not_kept(plant: Plant) -> None:
    plant(loop, "select_victims", lambda *_: choice.NoVictims(""))


def its_end_is_as_any_other(plant: Plant) -> None:
    plant(end_attempt, "build_preemption_record", lambda call, attempt: None)


HANDSHAKE = [
    it_is_marked_and_not_asked,
    its_gpus_come_back_when_it_is_asked,
    conclude_does_not_wait_for_the_pods,
    the_mark_is_not_kept,
    its_end_is_as_any_other,
]


@pytest.mark.parametrize("bug", HANDSHAKE, ids=lambda bug: bug.__name__)
def test_a_planted_bug_of_the_handshake_is_caught(bug, monkeypatch, tmp_path):
    bug(monkeypatch.setattr)
    with pytest.raises(AssertionError):
        handshake(world(tmp_path, HANDSHAKE_RULES))
