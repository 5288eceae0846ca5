"""The pipelines of the story, made with what a person would use."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

from hera.workflows import Artifact

from hera_pipelines import Checkpoints, Pipeline, Retries, Step, Train
from hera_pipelines.pipelines import Program, Training, train_pipeline
from support.stories.interrupted_training import programs

SOURCE = "raw-data"
SAVED_EVERY = 2


@dataclass(frozen=True)
class Place:
    """What a place to run in gives to the pods: its image, its store, and options of every container."""

    image: str
    store: str
    options: Mapping[str, Any] = field(default_factory=dict)
    workflow: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of Hera's `Workflow`."""


def expected_version(steps: int) -> str:
    """What register answers if every step of the training counted once, in its order."""
    return f"model-{reduce(programs.advance, range(1, steps + 1), len(SOURCE))}"


def story(
    place: Place,
    *,
    steps: int = 12,
    pause: float = 0.1,
    fate: str = "",
    name: str = "story",
    training: Mapping[str, Any] | None = None,
    train_options: Mapping[str, Any] | None = None,
    run_name: str = "",
) -> Pipeline:
    """validate → preprocess → train → register.

    Args:
        place: Where it runs.
        steps: Steps of the training.
        pause: Seconds after each of them.
        fate: What the first attempt meets, as in `programs`.
        name: Name of the pipeline.
        training: More arguments of `Training`, such as ``gpus``.
        train_options: More arguments of the training container, such as ``resources``.
        run_name: As in `Pipeline`.
    """
    source = "{{inputs.parameters.source}}"
    asked: dict[str, Any] = {
        "checkpoints": Checkpoints(every=f"{SAVED_EVERY} steps", keep_last=None),
        "grace": "20s",
        "retries": Retries(backoff="1s"),
        **(training or {}),
    }
    return train_pipeline(
        name,
        store=place.store,
        source=SOURCE,
        validate=_program(place, "validate", source),
        preprocess=_program(place, "preprocess", source, "{{inputs.parameters.fingerprint}}"),
        train=_program(place, "train", str(steps), str(pause), fate, **(train_options or {})),
        register=_program(place, "register"),
        training=Training(**asked),
        run_name=run_name,
        **place.workflow,
    )


def pair(place: Place, *, steps: int, pause: float) -> Pipeline:
    """preprocess → train: a step whose result stands, before one that takes long."""
    with Pipeline("pair", store=place.store, **place.workflow) as pipeline:
        prepare = Step(
            name="preprocess",
            outputs=Artifact(name="data", path="/tmp/tiphys/data"),
            **_program(place, "preprocess", SOURCE, "none").container(),
        )
        fit = Train(
            name="train",
            inputs=Artifact(name="data", path="/tmp/tiphys-inputs/data"),
            outputs=[Artifact(name=name, path=f"/tmp/tiphys/{name}") for name in ("model", "metrics")],
            checkpoints=Checkpoints(every=f"{SAVED_EVERY} steps", keep_last=None),
            grace="20s",
            **_program(place, "train", str(steps), str(pause)).container(),
        )
        fit(data=prepare())
    return pipeline


def _program(place: Place, name: str, *arguments: str, **options: Any) -> Program:
    text = Path(programs.__file__).read_text()
    return Program(place.image, ["python", "-c", text, name, *arguments], {**place.options, **options})
