"""`grid` and `random_search`: choose the trials of a sweep before anything runs.

``sweep=`` and ``parallel=`` of a call turn the trials into Argo's own fan-out.
So compile, plugin and controller know only fan-outs: each item is a step of its
own, named by its values.
"""

import math
from collections.abc import Mapping, Sized
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import Any

from hera_pipelines.sweeps.distributions import Distribution, SweepValue, validate_values, value_identity
from tiphys.errors import UsageError, unknown_name_message
from tiphys.protocol.fan_out import SWEEP_ANNOTATION

MAX_TRIALS = 500
"""Most trials of one Workflow. Argo keeps the state of all its nodes in at most 1 MiB, compressed: a trial with three
parameters and two outputs takes 1.0 kB of that, and 0.5 kB more for each attempt after the first."""

TrialParameters = dict[str, SweepValue]
"""Value of each parameter, by name."""

_DRAWS_PER_TRIAL = 100


@dataclass(frozen=True)
class SweepSpec:
    """Value of ``sweep=`` in the call of a step; made by `grid` and `random_search`."""

    trials: tuple[TrialParameters, ...]
    description: str
    """How the trials were chosen, with the seed; an annotation of the Workflow keeps it."""

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters that differ between trials."""
        return tuple(self.trials[0])


def grid(space: Mapping[str, Any] | None = None, /, **more: Any) -> SweepSpec:
    """Every combination of the values of each parameter: ``grid(lr=[0.1, 0.01], width=[64, 128])``.

    Args:
        space: Values by parameter, for names that cannot be Python keywords.
        **more: Values by parameter, as keywords.

    Raises:
        UsageError: there are no trials, one occurs twice, or there are more than `MAX_TRIALS`.
    """
    declared = _merge_space("grid", space, more)
    # Counted first, so that a list of a million values is refused without validation of each.
    _check_count("grid", math.prod(len(axis) for axis in declared.values() if isinstance(axis, Sized)))
    values = {name: validate_values(axis, f"grid: {name}") for name, axis in declared.items()}
    _check_count("grid", math.prod(len(axis) for axis in values.values()))
    trials = tuple(dict(zip(values, row, strict=True)) for row in product(*values.values()))
    axes = ", ".join(f"{name}={list(axis)!r}" for name, axis in values.items())
    return SweepSpec(trials, f"grid of {len(trials)}: {axes}")


def random_search(
    trials: int, space: Mapping[str, Distribution] | None = None, /, *, seed: int, **more: Any
) -> SweepSpec:
    """Trials drawn at random: ``random_search(20, seed=7, lr=log_uniform(1e-4, 1e-1), width=choice(64, 128))``.

    The same seed gives the same trials. A larger number of trials continues a
    smaller one, and a further parameter does not change the values of the others.

    Args:
        trials: Number of trials, all of them different.
        space: Distributions by parameter, for names that cannot be Python keywords, and for ``seed``.
        seed: Seed of the random numbers.
        **more: Distributions by parameter, as keywords.

    Raises:
        UsageError: there are no trials, fewer different ones, or more than `MAX_TRIALS`.
    """
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise UsageError(f"random_search: seed must be a whole number, not {seed!r}")
    if not isinstance(trials, int) or isinstance(trials, bool) or trials < 1:
        raise UsageError(f"random_search: {trials!r} is not a number of trials; give at least 1")
    _check_count("random_search", trials)
    distributions = _merge_space("random_search", space, more)
    for name, distribution in distributions.items():
        if not hasattr(distribution, "at"):
            raise UsageError(
                f"random_search: {name} is {distribution!r}, which is not a distribution; "
                "give choice(…), integers(…), uniform(…) or log_uniform(…)"
            )
    drawn_trials = _draw_trials(trials, distributions, seed)
    axes = ", ".join(f"{name}={distribution}" for name, distribution in distributions.items())
    return SweepSpec(tuple(drawn_trials), f"random search of {trials}, seed {seed}: {axes}")


def _draw_trials(trials: int, space: Mapping[str, Distribution], seed: int) -> list[TrialParameters]:
    # One stream per parameter: its values do not depend on the other parameters or their order.
    streams = {name: Random(f"{seed}/{name}") for name in space}  # noqa: S311  not for secrets
    drawn: dict[str, TrialParameters] = {}
    for _ in range(trials * _DRAWS_PER_TRIAL):
        trial = {name: distribution.at(streams[name].random()) for name, distribution in space.items()}
        drawn.setdefault(value_identity(trial), trial)
        if len(drawn) == trials:
            return list(drawn.values())
    size = math.prod(distribution.size for distribution in space.values())
    available = f"only {size:.0f} different trials" if math.isfinite(size) else "too few different trials"
    raise UsageError(f"random_search: there are {available} for trials={trials}; give a smaller number, or use grid(…)")


def _merge_space(function_name: str, space: Mapping[str, Any] | None, more: Mapping[str, Any]) -> dict[str, Any]:
    if duplicates := sorted((space or {}).keys() & more.keys()):
        raise UsageError(f"{function_name}: {duplicates[0]} is given twice")
    merged = {**(space or {}), **more}
    if not merged:
        raise UsageError(
            f"{function_name} has no parameters, so there would be no trials; give at least one, such as lr=…"
        )
    return merged


def _check_count(function_name: str, count: int) -> None:
    if count > MAX_TRIALS:
        raise UsageError(
            f"{function_name} has {count} trials, and one Workflow holds {MAX_TRIALS}, because Argo keeps the state of "
            "every node in it; search coarsely first, or make several runs"
        )


_FAN_OUTS = ("with_items", "with_param", "with_sequence")


def build_sweep_items(
    step: str, sweep: Any, options: Mapping[str, Any], inputs: Mapping[str, tuple[str, bool]]
) -> list[Any]:
    """Build the items of ``with_items`` from a sweep.

    ``options`` are Hera's keywords of the call. ``inputs`` has Argo's name of each input, and whether it is an
    artifact, by the input's names in Python and Argo.

    Raises:
        UsageError: ``sweep`` is not a `SweepSpec`, or does not fit the inputs of the step.
    """
    if not isinstance(sweep, SweepSpec):
        raise UsageError(f"step {step!r}: sweep={sweep!r} is not a sweep; give grid(…) or random_search(…)")
    for option in _FAN_OUTS:
        if options.get(option) is not None:
            raise UsageError(f"step {step!r} has both sweep and {option}; keep one")
    names = {name: _swept_parameter(step, name, inputs) for name in sweep.parameters}
    if len(set(names.values())) < len(names):
        raise UsageError(f"step {step!r}: two names in the sweep mean the same parameter; drop one of {sorted(names)}")
    return [{names[name]: value for name, value in trial.items()} for trial in sweep.trials]


def limit_parallel_tasks(dag: Any, step: str, parallel: Any, options: Mapping[str, Any]) -> None:
    """Limit how many tasks of ``dag`` run at once; Argo counts all tasks of the DAG.

    ``options`` are Hera's keywords of the call.

    Raises:
        UsageError: the step is not fanned out, ``parallel`` is not a number, or the DAG has another limit.
    """
    if not any(options.get(option) is not None for option in _FAN_OUTS):
        raise UsageError(f"step {step!r} runs once, so parallel={parallel!r} has no effect; add sweep=…, or drop it")
    if not isinstance(parallel, int) or isinstance(parallel, bool) or parallel < 1:
        raise UsageError(f"step {step!r}: parallel={parallel!r} is not a number of trials; give at least 1")
    if dag.parallelism not in (None, parallel):
        raise UsageError(
            f"step {step!r}: parallel={parallel}, and its DAG already has parallelism {dag.parallelism}, which counts "
            "all of its tasks; give one number"
        )
    dag.parallelism = parallel


def record_sweep(workflow: Any, task: str, sweep: SweepSpec) -> None:
    """Annotate ``workflow`` with the description of the sweep of ``task``."""
    workflow.annotations = {**(workflow.annotations or {}), f"{SWEEP_ANNOTATION}{task}": sweep.description}


def _swept_parameter(step: str, name: str, inputs: Mapping[str, tuple[str, bool]]) -> str:
    if name not in inputs:
        names = sorted({argo_name for argo_name, artifact in inputs.values() if not artifact})
        raise UsageError(unknown_name_message(f"step {step!r}", "parameter", name, names))
    argo_name, artifact = inputs[name]
    if artifact:
        raise UsageError(f"step {step!r}: {name!r} is an artifact; only parameters can differ between trials")
    return argo_name
