"""`best`: the step behind a sweep, whose outputs are those of the best trial."""

from typing import Any, Literal

from hera.workflows import Artifact, Parameter, SecretEnvFrom, Task
from hera.workflows.models import Template, ValueFrom
from hera.workflows.protocol import Templatable

from hera_pipelines.authoring.containers import Step
from hera_pipelines.compile.gated_step import listed, program_container
from tiphys.errors import UsageError
from tiphys.lineage.best import TRIAL
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.step_spec import STORE_SECRET

_PATHS = "/tmp/tiphys/best"  # noqa: S108  a path in the container; the program is told by variable
_MODES = ("min", "max")


def best(
    sweep: Task, metric: str, mode: Literal["min", "max"] = "min", *, name: str = "best", image: str = "", **step: Any
) -> Any:
    """The Task that chooses the best trial of ``sweep`` once all have ended, if one of them has succeeded.

    Its output parameter ``trial`` holds the parameters of that trial as JSON;
    its other outputs are those of the trial, under the same names.

    Args:
        sweep: The Task of the sweep, as its step was called.
        metric: An output parameter of the sweep's step; otherwise what it gave to `session.step`, as far as the
            checkpoints that are left hold it.
        mode: Whether the lowest or the highest is the best.
        name: Name of the step.
        image: Image with Python and ``tiphys``; empty: that of the sweep's step.
        **step: Any other argument of `Step`.

    Raises:
        UsageError: ``sweep`` is none, or a value makes no sense.
    """
    if not isinstance(sweep, Task) or not (sweep.with_items or sweep.with_param or sweep.with_sequence):
        raise UsageError(f"best(…) takes the task of a sweep, such as fit(sweep=grid(lr=[0.1, 0.01])), not {sweep!r}")
    if mode not in _MODES:
        raise UsageError(f"best(…): mode {mode!r} is neither 'min' nor 'max'")
    if not metric:
        raise UsageError("best(…) needs the name of a metric, such as 'loss'")
    program = _program(sweep)
    parameters = [Parameter(name=one, value_from=ValueFrom(path=f"{_PATHS}/{one}")) for one in _parameters(program)]
    artifacts = [Artifact(name=one["name"], path=f"{_PATHS}/{one['name']}") for one in _listed(program, "artifacts")]
    chooser = Step(
        name=name,
        image=image or program_container(program)["image"],
        command=["python", "-m", "tiphys.lineage.best"],
        args=[sweep.name, "--metric", metric, "--mode", mode],
        outputs=[*parameters, *artifacts],
        # Its inputs are in storage, where nobody can tell whether they are those of last time.
        **{"cache": False, "env_from": SecretEnvFrom(name=STORE_SECRET, optional=True), **step},
    )
    return chooser(depends=f"{sweep.name}.AnySucceeded")


def _program(sweep: Task) -> Manifest:
    template = sweep.template
    if isinstance(template, Templatable):
        template = template._build_template()
    if not isinstance(template, Template):
        raise UsageError(f"best(…): nothing is known of the outputs of task {sweep.name!r}; it is no step of Tiphys")
    found: Manifest = template.model_dump(mode="json", exclude_none=True, by_alias=True)
    return found


def _parameters(program: Manifest) -> list[str]:
    declared = [one["name"] for one in _listed(program, "parameters")]
    if TRIAL in declared:
        raise UsageError(
            f"best(…): the output parameter {TRIAL!r} of step {program['name']!r} would be hidden by the one that "
            "says which trial it was; rename it"
        )
    return [TRIAL, *declared]


def _listed(program: Manifest, kind: str) -> list[Manifest]:
    return listed(program, "outputs", kind)
