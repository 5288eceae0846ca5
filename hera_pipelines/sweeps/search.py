"""`grid` and `random_search`: the trials of a sweep, decided before anything runs.

``sweep=`` and ``parallel=`` of a call: how a step becomes the trials of a sweep.

What comes out is Argo's own fan-out, so that nothing behind compile knows of
sweeps: each item is a step of its own, named by its values.
"""

import math
from collections.abc import Mapping, Sized
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import Any

from hera_pipelines.sweeps.distributions import Distribution, Value, checked_list, identity
from tiphys.errors import UsageError
from tiphys.protocol.fan_out import SWEEP_ANNOTATION

MOST_TRIALS = 500
"""What one Workflow holds. Argo keeps the state of all nodes in it, packed into at most 1 MiB: a trial with three
parameters and two outputs takes 1.0 kB of that, and 0.5 kB more for each attempt after the first."""

Trial = dict[str, Value]
"""Value of each parameter, by name."""

_DRAWS_PER_TRIAL = 100


@dataclass(frozen=True)
class Sweep:
    """What ``sweep=`` of a step takes; made by `grid` and `random_search`."""

    trials: tuple[Trial, ...]
    description: str
    """How the trials came about, seed included; it is kept with the Workflow."""

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters that differ between trials."""
        return tuple(self.trials[0])


def grid(space: Mapping[str, Any] | None = None, /, **more: Any) -> Sweep:
    """Every combination of the values of each parameter: ``grid(lr=[0.1, 0.01], width=[64, 128])``.

    Args:
        space: Values by name of the parameter, for names that Python has no keyword for.
        **more: The same as keywords.

    Raises:
        UsageError: there are no trials, the same one twice, or more than a Workflow holds.
    """
    given = _merged("grid", space, more)
    # Before any of a million values is looked at.
    _check_count("grid", math.prod(len(found) for found in given.values() if isinstance(found, Sized)))
    values = {name: checked_list(found, f"grid: {name}") for name, found in given.items()}
    _check_count("grid", math.prod(len(found) for found in values.values()))
    trials = tuple(dict(zip(values, row, strict=True)) for row in product(*values.values()))
    axes = ", ".join(f"{name}={list(found)!r}" for name, found in values.items())
    return Sweep(trials, f"grid of {len(trials)}: {axes}")


def random_search(trials: int, space: Mapping[str, Distribution] | None = None, /, *, seed: int, **more: Any) -> Sweep:
    """Trials drawn at random: ``random_search(20, seed=7, lr=log_uniform(1e-4, 1e-1), width=choice(64, 128))``.

    The same seed gives the same trials. A larger number goes on where a smaller
    one ended, and a further parameter changes nothing of the others.

    Args:
        trials: How many, all of them different.
        space: Distributions by name of the parameter, for names that are no keyword or are ``seed``.
        seed: What the draws begin from.
        **more: The same as ``space``, as keywords.

    Raises:
        UsageError: there are no trials, fewer different ones, or more than a Workflow holds.
    """
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise UsageError(f"random_search: seed is a whole number, and not {seed!r}")
    if not isinstance(trials, int) or isinstance(trials, bool) or trials < 1:
        raise UsageError(f"random_search: {trials!r} is no number of trials; give at least 1")
    _check_count("random_search", trials)
    given = _merged("random_search", space, more)
    for name, distribution in given.items():
        if not hasattr(distribution, "at"):
            raise UsageError(
                f"random_search: {name} is {distribution!r}, which nothing can be drawn from; "
                "give choice(…), integers(…), uniform(…) or log_uniform(…)"
            )
    drawn = _drawn(trials, given, seed)
    axes = ", ".join(f"{name}={distribution}" for name, distribution in given.items())
    return Sweep(tuple(drawn), f"random search of {trials}, seed {seed}: {axes}")


def _drawn(trials: int, space: Mapping[str, Distribution], seed: int) -> list[Trial]:
    # A stream for each parameter, so that none depends on which others there are, nor on their order.
    streams = {name: Random(f"{seed}/{name}") for name in space}  # noqa: S311  nothing secret hangs on it
    found: dict[str, Trial] = {}
    for _ in range(trials * _DRAWS_PER_TRIAL):
        trial = {name: distribution.at(streams[name].random()) for name, distribution in space.items()}
        found.setdefault(identity(trial), trial)
        if len(found) == trials:
            return list(found.values())
    size = math.prod(distribution.size for distribution in space.values())
    there = f"only {size:.0f} different trials" if math.isfinite(size) else "too few different trials"
    raise UsageError(f"random_search: there are {there}, and {trials} are asked for; ask for fewer, or use grid(…)")


def _merged(what: str, space: Mapping[str, Any] | None, more: Mapping[str, Any]) -> dict[str, Any]:
    if twice := sorted((space or {}).keys() & more.keys()):
        raise UsageError(f"{what}: {twice[0]} is given twice")
    found = {**(space or {}), **more}
    if not found:
        raise UsageError(f"{what} has no parameters, so there would be no trials; give at least one, such as lr=…")
    return found


def _check_count(what: str, count: int) -> None:
    if count > MOST_TRIALS:
        raise UsageError(
            f"{what} has {count} trials, and one Workflow holds {MOST_TRIALS}: Argo keeps the state of every node in "
            "it; search coarsely first, or make several runs"
        )


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
