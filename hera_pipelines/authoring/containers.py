"""`Step` and `Train`: the same steps for programs that are a container with a command.

They take what Hera's `Container` takes, and what `step` and `train` take.
"""

from dataclasses import dataclass
from typing import Any

from hera.workflows import Container

from hera_pipelines.authoring.calls import invoke, template_slots
from hera_pipelines.authoring.policies import Asked, Checkpoints, Duration, Retries
from hera_pipelines.compile.settings import Spot
from tiphys.errors import UsageError
from tiphys.protocol.gang import Backend
from tiphys.protocol.step_spec import STEP_ANNOTATION, Kind


@dataclass(kw_only=True)
class _GatedContainer(Container):
    cache: bool = True
    share: bool = False
    retries: Retries | None = None
    grace: Duration | None = None
    deadline: Duration | None = None
    spot: bool | Spot = False

    def __post_init__(self) -> None:
        if not self.name:
            raise UsageError(f"{type(self).__name__}(…) needs name=…; its results are stored under it")
        self.annotations = {
            **(self.annotations or {}),
            STEP_ANNOTATION: self._asked().settings(self.name).model_dump_json(),
        }
        super().__post_init__()  # type: ignore[no-untyped-call]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A Task of this step in the DAG that is open; arguments go to the declared inputs."""
        return invoke(self, template_slots(self), super().__call__, args, kwargs)

    def _asked(self) -> Asked:
        """What the author asked for. Abstract in fact: Hera builds its classes as dataclasses without `abc`."""
        raise NotImplementedError


@dataclass(kw_only=True)
class Step(_GatedContainer):
    """A container whose result is worth keeping; see `hera_pipelines.step`."""

    def _asked(self) -> Asked:
        return Asked(Kind.STEP, self.cache, self.share, self.retries, self.grace, self.deadline, self.spot)


@dataclass(kw_only=True)
class Train(_GatedContainer):
    """A container that trains; see `hera_pipelines.train`."""

    gpus: int = 0
    gpu_type: str | None = None
    min_gpu_memory_mb: int | None = None
    queue: str = "default"
    priority: int = 0
    checkpoints: Checkpoints | None = None
    nodes: int | str = 1
    backend: Backend | str = Backend.JOB

    def _asked(self) -> Asked:
        return Asked(
            Kind.TRAIN,
            self.cache,
            self.share,
            self.retries,
            self.grace,
            self.deadline,
            self.spot,
            self.gpus,
            self.gpu_type,
            self.min_gpu_memory_mb,
            self.queue,
            self.priority,
            self.checkpoints,
            self.nodes,
            self.backend,
        )
