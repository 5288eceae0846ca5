"""validate → preprocess → train → register: the shape of most training runs as a ready-made pipeline.

The programs are containers of any language. Variables name the paths:

| step | reads | writes |
|---|---|---|
| validate | argument ``source`` | ``TIPHYS_OUTPUT_FINGERPRINT``: a text that changes when the data do |
| preprocess | ``source``, ``fingerprint`` | ``TIPHYS_OUTPUT_DATA``: file or folder |
| train | ``TIPHYS_INPUT_DATA`` | ``TIPHYS_OUTPUT_MODEL``, ``TIPHYS_OUTPUT_METRICS`` |
| register | ``TIPHYS_INPUT_MODEL``, ``TIPHYS_INPUT_METRICS`` | ``TIPHYS_OUTPUT_VERSION``: name of the registration |

validate runs in every submission, because the raw data may have changed outside.
A resume does not repeat the other steps while the fingerprint stays the same.
"""

from collections.abc import Mapping
from typing import Any

from hera.workflows import Parameter

from hera_pipelines.authoring.pipeline import Pipeline
from hera_pipelines.authoring.registration import RegisterModel
from hera_pipelines.pipelines.programs import (
    Program,
    Training,
    call_register,
    preprocess_step,
    train_step,
    validate_step,
)


def train_pipeline(
    name: str,
    *,
    store: str,
    source: str,
    validate: Program,
    preprocess: Program,
    train: Program,
    register: Program | RegisterModel,
    training: Training | None = None,
    parameters: Mapping[str, str] | None = None,
    run_name: str = "",
    **workflow: Any,
) -> Pipeline:
    """Build a pipeline from raw data to a registered model.

    Args:
        name: Name of the pipeline.
        store: URL of the run store.
        source: Location of the raw data in a form that validate and preprocess understand;
            default of the workflow parameter ``source``.
        validate: Fails if the data cannot be used for training.
        preprocess: Makes the training data.
        train: Trains. It reads CHECKPOINT_URI, or uses `tiphys.checkpoint`.
        register: Registers the model: a program, which may run twice and must be idempotent, or `RegisterModel`.
        training: GPUs, queue, checkpoints and budgets of train.
        parameters: More workflow parameters and their defaults.
        run_name: As in `Pipeline`.
        **workflow: Any other argument of Hera's `Workflow`.

    Raises:
        UsageError: a value is not valid; the message names it.
    """
    defaults = {"source": source, **(parameters or {})}
    arguments = [Parameter(name=key, value=value) for key, value in defaults.items()]
    with Pipeline(name, store=store, run_name=run_name, arguments=arguments, **workflow) as pipeline:
        raw = pipeline.get_parameter("source")
        fingerprint = validate_step(validate)(source=raw)
        data = preprocess_step(preprocess)(source=raw, fingerprint=fingerprint)
        model = train_step(train, training or Training())(data=data)
        call_register(register, model)
    return pipeline
