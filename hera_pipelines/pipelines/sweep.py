"""validate → preprocess → a sweep of train → best → register: the ready-made pipeline with a parameter search.

The programs are those of `train_pipeline`, so a pipeline with fixed parameters can
become a sweep: train takes the parameters as inputs, ``{{inputs.parameters.lr}}``,
and register gets the model of the best trial.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from hera.workflows import Parameter

from hera_pipelines.authoring.best_trial import best
from hera_pipelines.authoring.pipeline import Pipeline
from hera_pipelines.authoring.policies import Checkpoints
from hera_pipelines.authoring.registration import RegisterModel
from hera_pipelines.pipelines.programs import (
    Program,
    Training,
    call_register,
    preprocess_step,
    train_step,
    validate_step,
)
from hera_pipelines.sweeps import SweepSpec


def sweep_pipeline(
    name: str,
    *,
    store: str,
    source: str,
    sweep: SweepSpec,
    metric: str,
    mode: Literal["min", "max"] = "min",
    parallel: int | None = None,
    validate: Program,
    preprocess: Program,
    train: Program,
    register: Program | RegisterModel,
    training: Training | None = None,
    parameters: Mapping[str, str] | None = None,
    run_name: str = "",
    **workflow: Any,
) -> Pipeline:
    """Build a pipeline from raw data to the registered model of the best trial.

    Args:
        name: Name of the pipeline.
        store: URL of the run store.
        source: As in `train_pipeline`.
        sweep: The trials; its parameters are inputs of train.
        metric: Metric to compare trials by, as train passes it to `session.step`.
        mode: Whether the lowest or the highest value is the best.
        parallel: Most steps of the pipeline that run at once; None: as many trials as the queue has GPUs for.
        validate: As in `train_pipeline`.
        preprocess: As in `train_pipeline`.
        train: Trains one trial. Its image needs Python and ``tiphys``, because best runs in it, too.
        register: As in `train_pipeline`, with the model of the best trial.
        training: GPUs, queue, checkpoints and budgets of each trial. Unless it sets ``keep_best``, retention keeps
            the best checkpoint by ``metric``.
        parameters: More workflow parameters and their defaults.
        run_name: As in `Pipeline`.
        **workflow: Any other argument of Hera's `Workflow`.

    Raises:
        UsageError: a value is not valid; the message names it.
    """
    defaults = {"source": source, **(parameters or {})}
    arguments = [Parameter(name=key, value=value) for key, value in defaults.items()]
    training = training or Training()
    training = replace(training, checkpoints=_keep_best_checkpoint(training.checkpoints, metric, mode))
    with Pipeline(name, store=store, run_name=run_name, arguments=arguments, **workflow) as pipeline:
        raw = pipeline.get_parameter("source")
        fingerprint = validate_step(validate)(source=raw)
        data = preprocess_step(preprocess)(source=raw, fingerprint=fingerprint)
        trials = train_step(train, training, sweep.parameters)(data=data, sweep=sweep, parallel=parallel)
        winner = best(trials, metric, mode)
        call_register(register, winner)
    return pipeline


def _keep_best_checkpoint(checkpoints: Checkpoints, metric: str, mode: str) -> Checkpoints:
    """Keep the best checkpoint of each trial, because best compares trials by it."""
    if checkpoints.keep_best is not None or checkpoints.keep_last is None:
        return checkpoints
    return replace(checkpoints, keep_best=f"{metric}:{mode}")
