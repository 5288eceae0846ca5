"""GPUs from a queue, with more asking than there are.

The pods that exist are counted from outside, those that only wait for a node
included: what the ledger believes is not evidence.
"""

from datetime import datetime

from support.stories.interrupted_training.pipelines import Place, story
from support.stories.interrupted_training.scenarios import ended

from tiphys.kube import Object
from tiphys.kube.resources import PODS
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.records import AttemptEndOutcome

from .world import FINISHED, Workflow, World

MANY = 20
OWNER = "workflows.argoproj.io/workflow"
LONG = 400
"""Steps of a training that goes on until it is stopped."""


def asking(place: Place, queue: str, gpus: int, *, steps: int = 6, pause: float = 0.3) -> Manifest:
    training = {"gpus": gpus, "queue": queue}
    return story(place, name="gpus", steps=steps, pause=pause, training=training).compile()


def held(pods: list[Object]) -> int:
    """GPUs that belong to pods which have not finished."""
    alive = [pod for pod in pods if pod["status"].get("phase") not in ("Succeeded", "Failed")]
    return sum(int(limit) for pod in alive for limit in _limits(pod))


def _limits(pod: Object) -> list[str]:
    limits = [(container.get("resources") or {}).get("limits") or {} for container in pod["spec"]["containers"]]
    return [limit["nvidia.com/gpu"] for limit in limits if "nvidia.com/gpu" in limit]


def test_a_full_queue_says_so_and_goes_on_when_the_other_ends(world_in_each_mode: World) -> None:
    world = world_in_each_mode
    queue, quota = world.queue()
    first = world.submit(asking(world.place, queue, quota, steps=LONG, pause=0.5))
    first.trains()
    second = world.submit(asking(world.place, queue, quota))
    [reason] = second.wait_for("the second waits for GPUs", lambda: waiting(second))
    assert f"queue {queue}" in reason

    world.argo("stop", first.name)
    second.wait()
    [pod], [admitted] = first.pods(step="train"), second.attempts("train")
    assert program_ended_at(pod) <= admitted.claim.written_at


def test_many_at_once_never_hold_more_than_the_quota(world_in_each_mode: World) -> None:
    world = world_in_each_mode
    queue, quota = world.queue()
    workflows = [world.submit(asking(world.place, queue, gpus=1)) for _ in range(MANY)]
    names = {workflow.name for workflow in workflows}
    most = 0

    def all_ended() -> bool:
        nonlocal most
        found = world.api.list(PODS, world.settings.namespace, labels="tiphys.dev/attempt").items
        most = max(most, held([pod for pod in found if pod["metadata"]["labels"].get(OWNER) in names]))
        return all(workflow.phase in FINISHED for workflow in workflows)

    world.until("all workflows end", all_ended, lambda: "\n".join(w.describe() for w in workflows), patience=4)
    assert {workflow.phase for workflow in workflows} == {"Succeeded"}
    assert 0 < most <= quota
    for workflow in workflows:
        assert [ended(attempt).outcome for attempt in workflow.attempts("train")] == [AttemptEndOutcome.DONE]


def program_ended_at(pod: Object) -> datetime:
    [main] = [one for one in pod["status"]["containerStatuses"] if one["name"] == "main"]
    return datetime.fromisoformat(main["state"]["terminated"]["finishedAt"])


def waiting(workflow: Workflow) -> list[str]:
    """What admit says while it waits for GPUs."""
    return [n.message for n in workflow.nodes() if n.template == "train-admit" and n.phase == "Pending" and n.message]
