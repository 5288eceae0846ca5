"""The programs of the ready pipelines and the steps that they become: what one reads, the other has written."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hera.workflows import Artifact, Parameter
from hera.workflows.models import ValueFrom

from hera_pipelines.authoring.containers import Step, Train
from hera_pipelines.authoring.policies import Checkpoints, Duration, Retries
from hera_pipelines.compile.settings import Spot

_PATHS = "/tmp/tiphys"  # noqa: S108  a path in the container; programs are told by variable
# Kubernetes makes the folder around an input as root, and a program that is not root puts its outputs elsewhere.
_INPUTS = "/tmp/tiphys-inputs"  # noqa: S108


@dataclass(frozen=True)
class Program:
    """What one step runs.

    Attributes:
        image: Image, best by digest.
        command: Command and arguments. ``{{workflow.parameters.lr}}`` stands
            for a parameter of the pipeline, and ``{{inputs.parameters.source}}``
            for an input of the step.
        options: Any other argument of Hera's `Container`, such as ``env``,
            ``env_from``, ``resources`` or ``service_account_name``.
    """

    image: str
    command: Sequence[str]
    options: Mapping[str, Any] = field(default_factory=dict)

    def container(self) -> dict[str, Any]:
        """The arguments of Hera's `Container`."""
        return {"image": self.image, "command": list(self.command), **self.options}


@dataclass(frozen=True)
class Training:
    """What one attempt of the training step needs; the fields are those of `hera_pipelines.train`."""

    gpus: int = 0
    gpu_type: str | None = None
    min_gpu_memory_mb: int | None = None
    queue: str = "default"
    priority: int = 0
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    retries: Retries | None = None
    grace: Duration | None = None
    deadline: Duration | None = None
    spot: bool | Spot = False
    nodes: int = 1


def validate_step(program: Program) -> Step:
    """Looks at the raw data, each time."""
    return Step(
        name="validate",
        inputs=Parameter(name="source"),
        outputs=Parameter(name="fingerprint", value_from=ValueFrom(path=f"{_PATHS}/fingerprint")),
        cache=False,
        **program.container(),
    )


def preprocess_step(program: Program) -> Step:
    """Makes the training data, while their fingerprint is a new one."""
    return Step(
        name="preprocess",
        inputs=[Parameter(name="source"), Parameter(name="fingerprint")],
        outputs=_artifact("data"),
        **program.container(),
    )


def train_step(program: Program, training: Training, parameters: Sequence[str] = ()) -> Train:
    """Trains; ``parameters`` are inputs beside the data."""
    return Train(
        name="train",
        inputs=[_input("data"), *(Parameter(name=name) for name in parameters)],
        outputs=[_artifact("model"), _artifact("metrics")],
        **vars(training),
        **program.container(),
    )


def register_step(program: Program) -> Step:
    """Makes the model known."""
    return Step(
        name="register",
        inputs=[_input("model"), _input("metrics")],
        outputs=Parameter(name="version", value_from=ValueFrom(path=f"{_PATHS}/version")),
        **program.container(),
    )


def _artifact(name: str) -> Artifact:
    return Artifact(name=name, path=f"{_PATHS}/{name}")


def _input(name: str) -> Artifact:
    return Artifact(name=name, path=f"{_INPUTS}/{name}")
