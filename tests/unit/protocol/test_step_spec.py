"""A step's policy travels in an annotation and arrives as it was sent."""

import json

import pytest
from pydantic import ValidationError

from tiphys.protocol.environment import EX_FENCED, EX_TEMPFAIL, input_path_variable, output_path_variable
from tiphys.protocol.step_spec import CheckpointPolicy, GpuRequest, RetryPolicy, StepKind, StepSpec
from tiphys.records import Cause

SPEC = StepSpec(
    name="fit",
    kind=StepKind.TRAIN,
    template="digest",
    artifacts=("model",),
    retry=RetryPolicy(infrastructure=None, user_error=2),
    gpu=GpuRequest(gpus=4, gpu_type="A100", queue="research"),
    checkpoints=CheckpointPolicy(every=100, every_unit="steps", keep_last=None),
)


def test_a_policy_arrives_as_it_was_sent() -> None:
    assert StepSpec.model_validate_json(SPEC.model_dump_json()) == SPEC


def test_no_limit_is_not_mistaken_for_the_default() -> None:
    arrived = StepSpec.model_validate_json(SPEC.model_dump_json())

    assert arrived.retry.infrastructure is None
    assert arrived.checkpoints is not None
    assert arrived.checkpoints.keep_last is None


def test_a_policy_of_a_later_version_is_read_as_far_as_it_is_known() -> None:
    document = json.loads(SPEC.model_dump_json()) | {"later": True}

    assert StepSpec.model_validate(document) == SPEC


@pytest.mark.parametrize("cause", list(Cause))
def test_every_cause_has_a_budget(cause: Cause) -> None:
    assert RetryPolicy.model_validate({cause.value: 7}).budget(cause) == 7


def test_a_preemption_costs_nothing_and_a_user_error_everything() -> None:
    assert RetryPolicy().budget(Cause.PREEMPTION) is None
    assert RetryPolicy().budget(Cause.USER_ERROR) == 0


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (RetryPolicy, {"unknown": -1}),
        (RetryPolicy, {"backoff_seconds": 0}),
        (GpuRequest, {"gpus": 0}),
        (GpuRequest, {"gpus": 1, "min_gpu_memory_mb": 0}),
        (CheckpointPolicy, {"every": 0}),
        (CheckpointPolicy, {"every_unit": "epochs"}),
        (CheckpointPolicy, {"keep_last": 0}),
        (StepSpec, {"name": "fit", "kind": "job", "template": "t"}),
        (StepSpec, {"name": "fit", "kind": "train", "template": "t", "grace_seconds": -1}),
    ],
)
def test_invalid_step_settings_are_refused(model: type[StepSpec], fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        model.model_validate(fields)


def test_the_path_of_an_output_is_found_by_its_name() -> None:
    assert output_path_variable("val-loss") == "TIPHYS_OUTPUT_VAL_LOSS"
    assert input_path_variable("raw-data") == "TIPHYS_INPUT_RAW_DATA"


def test_a_program_says_try_again_with_the_code_of_sysexits() -> None:
    assert EX_TEMPFAIL == 75
    assert EX_FENCED != EX_TEMPFAIL
