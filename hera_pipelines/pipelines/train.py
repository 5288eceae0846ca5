"""validate → preprocess → train → register: most training runs are this, so nobody need write it again.

The programs are containers of any language. They find paths in variables:

| step | reads | writes |
|---|---|---|
| validate | argument ``source`` | ``TIPHYS_OUTPUT_FINGERPRINT``: a text that changes when the data do |
| preprocess | ``source``, ``fingerprint`` | ``TIPHYS_OUTPUT_DATA``: file or folder |
| train | ``TIPHYS_INPUT_DATA`` | ``TIPHYS_OUTPUT_MODEL``, ``TIPHYS_OUTPUT_METRICS`` |
| register | ``TIPHYS_INPUT_MODEL``, ``TIPHYS_INPUT_METRICS`` | ``TIPHYS_OUTPUT_VERSION``: name of what was registered |

validate runs each time, since it is the one that looks at the outside world;
the rest is not repeated while its fingerprint stays the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hera.workflows import Artifact, Parameter
from hera.workflows.models import ValueFrom

from hera_pipelines.compile.settings import Spot
from hera_pipelines.containers import Step, Train
from hera_pipelines.pipeline import Pipeline
from hera_pipelines.policies import Checkpoints, Duration, Retries

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


def train_pipeline(
    name: str,
    *,
    store: str,
    source: str,
    validate: Program,
    preprocess: Program,
    train: Program,
    register: Program,
    training: Training | None = None,
    parameters: Mapping[str, str] | None = None,
    run_name: str = "",
    **workflow: Any,
) -> Pipeline:
    """A pipeline from raw data to a registered model.

    Args:
        name: Name of the pipeline.
        store: URL of the run store.
        source: Where the raw data are, as validate and preprocess understand it;
            default of the workflow parameter ``source``.
        validate: Looks whether the data can be trained on; fails otherwise.
        preprocess: Makes the training data.
        train: Trains. It reads CHECKPOINT_URI, or uses `tiphys.checkpoint`.
        register: Makes the model known; it must not mind being run twice.
        training: GPUs, queue, checkpoints and budgets of train.
        parameters: More workflow parameters and their defaults.
        run_name: As in `Pipeline`.
        **workflow: Any other argument of Hera's `Workflow`.

    Raises:
        UsageError: a value makes no sense; the message says which.
    """
    given = {"source": source, **(parameters or {})}
    arguments = [Parameter(name=key, value=value) for key, value in given.items()]
    with Pipeline(name, store=store, run_name=run_name, arguments=arguments, **workflow) as pipeline:
        raw = pipeline.get_parameter("source")
        fingerprint = _validate(validate)(source=raw)
        data = _preprocess(preprocess)(source=raw, fingerprint=fingerprint)
        model = _train(train, training or Training())(data=data)
        _register(register)(model=model, metrics=model)
    return pipeline


def _validate(program: Program) -> Step:
    return Step(
        name="validate",
        inputs=Parameter(name="source"),
        outputs=Parameter(name="fingerprint", value_from=ValueFrom(path=f"{_PATHS}/fingerprint")),
        cache=False,
        **program.container(),
    )


def _preprocess(program: Program) -> Step:
    return Step(
        name="preprocess",
        inputs=[Parameter(name="source"), Parameter(name="fingerprint")],
        outputs=_artifact("data"),
        **program.container(),
    )


def _train(program: Program, training: Training) -> Train:
    return Train(
        name="train",
        inputs=_input("data"),
        outputs=[_artifact("model"), _artifact("metrics")],
        **vars(training),
        **program.container(),
    )


def _register(program: Program) -> Step:
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
