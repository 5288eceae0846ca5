"""What a compiled Workflow leaves out of ``tiphys.dev/step`` means what it meant when the Workflow was compiled."""

from tiphys.protocol.step_spec import StepSpec

LEFT_OUT = {
    "parameters": [],
    "artifacts": [],
    "suffixes": {},
    "cache": True,
    "gate": False,
    "share": False,
    "gpu": None,
    "checkpoints": None,
    "grace_seconds": 30.0,
    "fan_out": False,
    "gang": None,
    "spot": [],
    "has_result": False,
    "tracker": "",
    "registration": None,
    "data": [],
}
RETRY = {
    "preemption": None,
    "infrastructure": 10,
    "out_of_memory": 1,
    "deadline": 0,
    "user_error": 0,
    "output_missing": 0,
    "unknown": 2,
    "gpu_out_of_memory": "user_error",
    "hang": 3,
    "image": 2,
    "storage": "infrastructure",
    "memory_ceiling_bytes": None,
    "memory_factor": 1.5,
    "on_demand_after": None,
    "avoid_node_after": 2,
    "in_place": True,
    "spare": None,
    "backoff_seconds": 5.0,
    "backoff_factor": 2.0,
    "backoff_cap_seconds": 300.0,
}
GPU = {
    "gpu_type": None,
    "gpu_types": [],
    "speed": {},
    "min_gpu_memory_mb": None,
    "queue": "default",
    "priority": 0,
    "seconds": None,
    "members": 1,
    "tensor_parallel": 1,
    "within": None,
    "spot": "no",
    "min_members": None,
    "resource": "nvidia.com/gpu",
}
CHECKPOINTS = {
    "every": 600.0,
    "every_unit": "seconds",
    "every_bounds": None,
    "keep_last": 3,
    "keep_every": None,
    "keep_best": None,
    "delete_after_seconds": 600.0,
    "store": "",
    "save_seconds": 0.0,
    "metrics": "",
    "asynchronous": True,
    "when_busy": None,
    "hang_after_seconds": None,
    "cache": "",
    "near_copy": True,
}


def test_a_field_left_out_of_the_annotation_has_its_earlier_default() -> None:
    shortest = StepSpec.model_validate_json('{"name": "fit", "kind": "train", "template": "0"}')
    complete = {"name": "fit", "kind": "train", "template": "0", **LEFT_OUT, "retry": RETRY}
    assert shortest == StepSpec.model_validate(complete)

    sections = {"gpu": {"gpus": 1}, "checkpoints": {}, "retry": {}}
    in_full = {"gpu": {"gpus": 1, **GPU}, "checkpoints": CHECKPOINTS, "retry": RETRY}
    assert StepSpec.model_validate({**complete, **sections}) == StepSpec.model_validate({**complete, **in_full})


def test_every_field_that_may_be_left_out_is_held_here() -> None:
    spec = StepSpec.model_validate({"name": "fit", "kind": "train", "template": "0", "gpu": {"gpus": 1}})
    assert set(StepSpec.model_fields) == {"name", "kind", "template", "retry", *LEFT_OUT}
    assert set(type(spec.retry).model_fields) == set(RETRY)
    assert spec.gpu is not None
    assert set(type(spec.gpu).model_fields) == {"gpus", *GPU}
    whole = StepSpec.model_validate({"name": "fit", "kind": "train", "template": "0", "checkpoints": {}})
    assert set(type(whole.checkpoints).model_fields) == set(CHECKPOINTS)
