"""validate → preprocess → train, many times → best → register: the ready pipeline, once parameters are looked for.

The programs are those of `train_pipeline`, so that a pipeline that trained with
fixed parameters can sweep them: train takes them as inputs,
``{{inputs.parameters.lr}}``, and register gets the model of the best trial.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from hera.workflows import Parameter

from hera_pipelines.authoring.best_trial import best
from hera_pipelines.authoring.pipeline import Pipeline
from hera_pipelines.authoring.policies import Checkpoints
from hera_pipelines.pipelines.programs import (
    Program,
    Training,
    preprocess_step,
    register_step,
    train_step,
    validate_step,
)
from hera_pipelines.sweeps import Sweep


def sweep_pipeline(
    name: str,
    *,
    store: str,
    source: str,
    sweep: Sweep,
    metric: str,
    mode: Literal["min", "max"] = "min",
    parallel: int | None = None,
    validate: Program,
    preprocess: Program,
    train: Program,
    register: Program,
    training: Training | None = None,
    parameters: Mapping[str, str] | None = None,
    run_name: str = "",
    **workflow: Any,
) -> Pipeline:
    """A pipeline from raw data to the registered model of the best trial.

    Args:
        name: Name of the pipeline.
        store: URL of the run store.
        source: As in `train_pipeline`.
        sweep: The trials; its parameters are inputs of train.
        metric: What trials are compared by, as train gives it to `session.step`.
        mode: Whether the lowest or the highest is the best.
        parallel: How many steps of the pipeline run at once; None: as many trials as the queue has GPUs for.
        validate: As in `train_pipeline`.
        preprocess: As in `train_pipeline`.
        train: Trains one trial. Its image needs Python and ``tiphys``, which chooses the best one.
        register: Makes the model of the best trial known.
        training: GPUs, queue, checkpoints and budgets of each trial. Unless it says what the best checkpoint is,
            that is the best by ``metric``.
        parameters: More workflow parameters and their defaults.
        run_name: As in `Pipeline`.
        **workflow: Any other argument of Hera's `Workflow`.

    Raises:
        UsageError: a value makes no sense; the message says which.
    """
    given = {"source": source, **(parameters or {})}
    arguments = [Parameter(name=key, value=value) for key, value in given.items()]
    needs = training or Training()
    needs = replace(needs, checkpoints=_keeping_best(needs.checkpoints, metric, mode))
    with Pipeline(name, store=store, run_name=run_name, arguments=arguments, **workflow) as pipeline:
        raw = pipeline.get_parameter("source")
        fingerprint = validate_step(validate)(source=raw)
        data = preprocess_step(preprocess)(source=raw, fingerprint=fingerprint)
        trials = train_step(train, needs, sweep.parameters)(data=data, sweep=sweep, parallel=parallel)
        winner = best(trials, metric, mode)
        register_step(register)(model=winner, metrics=winner)
    return pipeline


def _keeping_best(checkpoints: Checkpoints, metric: str, mode: str) -> Checkpoints:
    """A trial is as good as its best checkpoint, so that one has to stay."""
    if checkpoints.keep_best is not None or checkpoints.keep_last is None:
        return checkpoints
    return replace(checkpoints, keep_best=f"{metric}:{mode}")
