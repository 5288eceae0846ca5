"""Programs of the ready-made pipelines, and the steps that run them.

The outputs of each step have the names of the next step's inputs, so programs of
any language fit together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hera.workflows import Artifact, Parameter
from hera.workflows.models import ValueFrom

from hera_pipelines.authoring.containers import Step, Train
from hera_pipelines.authoring.policies import Checkpoints, Duration, Retries
from hera_pipelines.authoring.registration import RegisterModel
from hera_pipelines.authoring.tracking import Mlflow, Wandb
from hera_pipelines.compile.settings import Spot
from tiphys.protocol.step_spec import GPU_RESOURCE

_OUTPUT_FOLDER = "/tmp/tiphys"  # noqa: S108  a path in the container; variables name it to the programs
# Kubernetes creates the folder of an input as root, so a program that is not root could not write outputs there.
_INPUT_FOLDER = "/tmp/tiphys-inputs"  # noqa: S108


@dataclass(frozen=True)
class Program:
    """The program of one step.

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
    """Options of the training step; the fields are those of `hera_pipelines.train`."""

    gpus: int = 0
    gpu_resource: str = GPU_RESOURCE
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
    tracking: Mlflow | Wandb | None = None


def validate_step(program: Program) -> Step:
    """Build the step that checks the raw data; it runs in every submission."""
    return Step(
        name="validate",
        inputs=Parameter(name="source"),
        outputs=Parameter(name="fingerprint", value_from=ValueFrom(path=f"{_OUTPUT_FOLDER}/fingerprint")),
        cache=False,
        **program.container(),
    )


def preprocess_step(program: Program) -> Step:
    """Build the step that makes the training data; it runs again only for a new fingerprint.

    Its gate looks for a recorded result once validate has told the fingerprint.
    """
    return Step(
        name="preprocess",
        gate=True,
        inputs=[Parameter(name="source"), Parameter(name="fingerprint")],
        outputs=_output_artifact("data"),
        **program.container(),
    )


def train_step(program: Program, training: Training, parameters: Sequence[str] = ()) -> Train:
    """Build the training step; ``parameters`` names its inputs beside the data."""
    return Train(
        name="train",
        inputs=[_input_artifact("data"), *(Parameter(name=name) for name in parameters)],
        outputs=[_output_artifact("model"), _output_artifact("metrics")],
        **vars(training),
        **program.container(),
    )


def call_register(program: Program | RegisterModel, model: Any) -> None:
    """Call the step that registers ``model``, the task of the step that made it."""
    if isinstance(program, RegisterModel):
        program(model=model)
    else:
        _register_step(program)(model=model, metrics=model)


def _register_step(program: Program) -> Step:
    return Step(
        name="register",
        inputs=[_input_artifact("model"), _input_artifact("metrics")],
        outputs=Parameter(name="version", value_from=ValueFrom(path=f"{_OUTPUT_FOLDER}/version")),
        **program.container(),
    )


def _output_artifact(name: str) -> Artifact:
    return Artifact(name=name, path=f"{_OUTPUT_FOLDER}/{name}")


def _input_artifact(name: str) -> Artifact:
    return Artifact(name=name, path=f"{_INPUT_FOLDER}/{name}")
