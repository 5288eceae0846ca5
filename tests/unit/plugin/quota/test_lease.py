"""What a lease request takes over from the request of a step.

| step                              | requested                                         |
|-----------------------------------|---------------------------------------------------|
| one pod, or a gang                | all GPUs and members, whatever members it has     |
| elastic gang                      | the fewest members, and names the most            |
| elastic gang that has members     | as many as it has                                 |
"""

from typing import Any

import pytest
from tiphys_plugin.quota.lease import LeaseRequest, StepAttempt, hash_node_name

from tiphys.protocol.step_spec import GpuRequest

ATTEMPT = StepAttempt(
    uid="u1", namespace="ml", workflow="wf", run="digits", step="fit", instance="wf.fit", node="fit.admit", number=2
)
ELASTIC = GpuRequest(gpus=32, members=4, min_members=2)


def test_every_field_of_the_step_and_of_the_attempt_arrives() -> None:
    fields: dict[str, Any] = {
        "gpus": 8,
        "gpu_type": "A100",
        "min_gpu_memory_mb": 40_000,
        "queue": "research",
        "priority": 5,
        "seconds": 3600,
        "members": 4,
        "tensor_parallel": 2,
        "spot": "allowed",
        "min_members": None,
        "resource": "amd.com/gpu",
        "gpu_types": (),
        "within": "rack",
    }
    assert {*fields, "speed"} == GpuRequest.model_fields.keys()  # the speed decides the order of gpu_types

    request = LeaseRequest.from_gpu_request(GpuRequest(**fields), ATTEMPT)

    kept = {"uid": "u1", "namespace": "ml", "workflow": "wf", "run": "digits", "step": "fit", "attempt": 2}
    hashes = {"node_hash": hash_node_name("fit.admit"), "instance_hash": hash_node_name("wf.fit")}
    assert request == LeaseRequest(**fields, **kept, **hashes)


def test_a_gang_that_is_not_elastic_requests_all_members() -> None:
    request = LeaseRequest.from_gpu_request(GpuRequest(gpus=8, members=4), ATTEMPT, members=3)
    assert (request.gpus, request.members, request.max_members) == (8, 4, None)


def test_an_elastic_gang_requests_its_fewest_members_and_names_the_most() -> None:
    request = LeaseRequest.from_gpu_request(ELASTIC, ATTEMPT)
    assert (request.gpus, request.members, request.min_members, request.max_members) == (16, 2, 2, 4)


def test_an_elastic_gang_that_runs_requests_the_members_that_it_has() -> None:
    request = LeaseRequest.from_gpu_request(ELASTIC, ATTEMPT, members=3)
    assert (request.gpus, request.members, request.max_members) == (24, 3, 4)


@pytest.mark.parametrize(
    ("step", "instance", "name"),
    [
        ("fit", "wf.fit", "fit"),
        ("fit.0123456789ab.0", "wf.fit(2:0.1)", "fit[2]"),
        ("fit.0123456789ab.0", "wf.of.me.fit(12:name:a.b(c),x:[1])", "fit[12]"),
        ("fit.0123456789ab.0", "wf.fit", "fit.0123456789ab.0"),
    ],
)
def test_an_item_is_named_by_its_index(step: str, instance: str, name: str) -> None:
    request = LeaseRequest.from_gpu_request(GpuRequest(gpus=1), ATTEMPT._replace(step=step, instance=instance))
    assert request.step_name == name
