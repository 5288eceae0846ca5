"""`best`: the step after a sweep that outputs what the best trial has output."""

from typing import Any, Literal

from hera.workflows import Artifact, Parameter, SecretEnvFrom, Task
from hera.workflows.models import Template, ValueFrom
from hera.workflows.protocol import Templatable

from hera_pipelines.authoring.containers import Step
from hera_pipelines.compile.authored_step import list_declared, program_container, settings_annotation
from tiphys.errors import UsageError
from tiphys.lineage.best import TRIAL_OUTPUT
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.step_spec import STORE_SECRET

_OUTPUT_FOLDER = "/tmp/tiphys/best"  # noqa: S108  a path in the container; variables name it to the program
_MODES = ("min", "max")


def best(
    sweep: Task, metric: str, mode: Literal["min", "max"] = "min", *, name: str = "best", image: str = "", **step: Any
) -> Any:
    """Create the Task that chooses the best trial of ``sweep``, once all trials have ended and one has succeeded.

    Its output parameter ``trial`` holds the parameters of that trial as JSON;
    its other outputs are those of the trial, under the same names.

    Args:
        sweep: The Task that the call of the swept step returned.
        metric: An output parameter of the sweep's step. Otherwise a metric that the trials passed to
            `session.step`; its values come from the checkpoints that retention has left.
        mode: Whether the lowest or the highest value is the best.
        name: Name of the step.
        image: Image with Python and ``tiphys``; empty: the image of the sweep's step.
        **step: Any other argument of `Step`.

    Raises:
        UsageError: ``sweep`` is not the task of a sweep, or another argument is not valid.
    """
    if not isinstance(sweep, Task) or not (sweep.with_items or sweep.with_param or sweep.with_sequence):
        raise UsageError(f"best(…) takes the task of a sweep, such as fit(sweep=grid(lr=[0.1, 0.01])), not {sweep!r}")
    if mode not in _MODES:
        raise UsageError(f"best(…): mode {mode!r} is neither 'min' nor 'max'")
    if not metric:
        raise UsageError("best(…) needs the name of a metric, such as 'loss'")
    program = _sweep_template(sweep)
    if settings_annotation(program) is None:
        raise UsageError(
            f"best(…): {program['name']!r} is plain, so its trials have no record to choose among; make it a @step or "
            "a @train"
        )
    parameters = [
        Parameter(name=output, value_from=ValueFrom(path=f"{_OUTPUT_FOLDER}/{output}"))
        for output in _output_parameters(program)
    ]
    artifacts = [
        Artifact(name=output["name"], path=f"{_OUTPUT_FOLDER}/{output['name']}")
        for output in list_declared(program, "outputs", "artifacts")
    ]
    chooser = Step(
        name=name,
        image=image or program_container(program)["image"],
        command=["python", "-m", "tiphys.lineage.best"],
        args=[sweep.name, "--metric", metric, "--mode", mode],
        outputs=[*parameters, *artifacts],
        # The step reads its inputs from storage, so no step key covers them; admit names run and store.
        **{"cache": False, "env_from": SecretEnvFrom(name=STORE_SECRET, optional=True), **step, "gate": True},
    )
    return chooser(depends=f"{sweep.name}.AnySucceeded")


def _sweep_template(sweep: Task) -> Manifest:
    template = sweep.template
    if isinstance(template, Templatable):
        template = template._build_template()
    if not isinstance(template, Template):
        raise UsageError(
            f"best(…): task {sweep.name!r} has no template of its own, so its outputs are unknown; use a step of Tiphys"
        )
    manifest: Manifest = template.model_dump(mode="json", exclude_none=True, by_alias=True)
    return manifest


def _output_parameters(program: Manifest) -> list[str]:
    declared = [output["name"] for output in list_declared(program, "outputs", "parameters")]
    if TRIAL_OUTPUT in declared:
        raise UsageError(
            f"best(…): step {program['name']!r} has an output parameter {TRIAL_OUTPUT!r}, which is the name of best's "
            "own output; rename it"
        )
    return [TRIAL_OUTPUT, *declared]
