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

from collections.abc import Mapping
from typing import Any

from hera.workflows import Parameter

from hera_pipelines.authoring.pipeline import Pipeline
from hera_pipelines.pipelines.programs import (
    Program,
    Training,
    preprocess_step,
    register_step,
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
        fingerprint = validate_step(validate)(source=raw)
        data = preprocess_step(preprocess)(source=raw, fingerprint=fingerprint)
        model = train_step(train, training or Training())(data=data)
        register_step(register)(model=model, metrics=model)
    return pipeline
