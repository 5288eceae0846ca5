"""A cluster in a folder whose gangs are made by objects in memory, and pods that are their members."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from tiphys_plugin import DirectoryCluster, PluginCore, PodStatus, Queues
from tiphys_plugin.cluster.interface import GangStatus

from support.stories.plugin import World, world
from tiphys.protocol.gang import GangBackend, GangPhase
from tiphys.protocol.step_spec import ATTEMPT_LABEL, RUN_LABEL, STEP_LABEL

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
JOB = GangStatus(GangBackend.JOB, "ml", "job", "uid-of-job", GangPhase.FINISHED)


class WithGangs(DirectoryCluster):
    """A folder of pods, and in memory what would make them."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.objects: dict[str, GangStatus] = {}
        self.ended: list[str] = []

    def gang(self, backend: GangBackend, namespace: str, name: str, workflow_uid: str) -> GangStatus | None:
        return self.objects.get(name)

    def delete_gang(self, gang: GangStatus) -> None:
        self.ended.append(gang.name)
        del self.objects[gang.name]

    def lose(self, pod: PodStatus) -> None:
        """A pod is gone, and nothing of it is left."""
        (self._path / "pods" / f"{pod.name}.json").unlink()


def gang_world(folder: Path, queues: Queues) -> World:
    """A world whose cluster is `WithGangs`."""
    made = world(folder, queues)
    made.cluster = WithGangs(folder / "cluster")
    made.core = PluginCore(
        made.store, made.cluster, made.ledger, clock=made.clock, settings=made.core._context.settings
    )
    return made


def objects(here: World) -> WithGangs:
    """What makes the pods."""
    assert isinstance(here.cluster, WithGangs)
    return here.cluster


def put(here: World, rank: int, phase: str = "Running", after: float | None = None, **fields: object) -> PodStatus:
    """Write a member of the first attempt of ``fit``."""
    labels = {RUN_LABEL: "digits-abc12", STEP_LABEL: "fit", ATTEMPT_LABEL: "1"}
    made = pod(rank, phase, after, labels=labels, **fields)
    here.cluster.write_pod(made)
    return made


def pod(number: int, phase: str = "Failed", after: float | None = None, **fields: object) -> PodStatus:
    """A member whose end began so many seconds after it had begun."""
    gpus = fields.pop("gpus", 0)
    given = {
        "name": f"job-{number}",
        "namespace": "ml",
        "workflow_uid": "uid-1",
        "node": "digits-abc12.fit(0).run",
        "phase": phase,
        "rank": number,
        "resources": {"nvidia.com/gpu": gpus} if gpus else {},
        "trouble_at": None if after is None else BEGAN + timedelta(seconds=after),
        **fields,
    }
    return PodStatus.model_validate(given)
