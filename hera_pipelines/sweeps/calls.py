"""``sweep=`` and ``parallel=`` of a call: how a step becomes the trials of a sweep.

What comes out is Argo's own fan-out, so that nothing behind compile knows of
sweeps: each item is a step of its own, named by its values.
"""

from collections.abc import Mapping
from typing import Any

from hera_pipelines.sweeps.search import Sweep
from tiphys.errors import UsageError
from tiphys.protocol.fan_out import SWEEP_ANNOTATION

_FAN_OUTS = ("with_items", "with_param", "with_sequence")


def items_of(step: str, sweep: Any, options: Mapping[str, Any], inputs: Mapping[str, tuple[str, bool]]) -> list[Any]:
    """The items of ``with_items``.

    Args:
        step: Name of the step.
        sweep: What the author gave.
        options: Hera's keywords of the call.
        inputs: Argo's name of each input of the step and whether it is an artifact, by all names that it has.

    Raises:
        UsageError: ``sweep`` is none, or does not fit the step.
    """
    if not isinstance(sweep, Sweep):
        raise UsageError(f"step {step!r}: sweep={sweep!r} is no sweep; give grid(…) or random_search(…)")
    for option in _FAN_OUTS:
        if options.get(option) is not None:
            raise UsageError(f"step {step!r} has both sweep and {option}; keep one")
    names = {name: _parameter(step, name, inputs) for name in sweep.parameters}
    if len(set(names.values())) < len(names):
        raise UsageError(f"step {step!r}: two names in the sweep mean the same parameter; drop one of {sorted(names)}")
    return [{names[name]: value for name, value in trial.items()} for trial in sweep.trials]


def limit(dag: Any, step: str, parallel: Any, options: Mapping[str, Any]) -> None:
    """Let at most ``parallel`` tasks of ``dag`` run at once: Argo counts those of a DAG together.

    Raises:
        UsageError: the step is not fanned out, ``parallel`` is no number, or the DAG has another limit.
    """
    if not any(options.get(option) is not None for option in _FAN_OUTS):
        raise UsageError(f"step {step!r} runs once, so parallel={parallel!r} says nothing; add sweep=…, or drop it")
    if not isinstance(parallel, int) or isinstance(parallel, bool) or parallel < 1:
        raise UsageError(f"step {step!r}: parallel={parallel!r} is no number of trials; give at least 1")
    if dag.parallelism not in (None, parallel):
        raise UsageError(
            f"step {step!r}: parallel={parallel}, and its DAG has parallelism {dag.parallelism} already, which counts "
            "all of its tasks; give one number"
        )
    dag.parallelism = parallel


def describe(workflow: Any, task: str, sweep: Sweep) -> None:
    """Keep with the Workflow how the trials of ``task`` came about."""
    workflow.annotations = {**(workflow.annotations or {}), f"{SWEEP_ANNOTATION}{task}": sweep.description}


def _parameter(step: str, name: str, inputs: Mapping[str, tuple[str, bool]]) -> str:
    parameters = sorted({own for own, artifact in inputs.values() if not artifact})
    if name not in inputs:
        known = ", ".join(parameters) or "none"
        raise UsageError(f"step {step!r} has no parameter {name!r} to sweep; its parameters are: {known}")
    own, artifact = inputs[name]
    if artifact:
        raise UsageError(f"step {step!r}: {name!r} is an artifact; only parameters can differ between trials")
    return own
