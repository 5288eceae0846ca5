"""What a lease request takes over from the request of a step.

| step                              | requested                                         |
|-----------------------------------|---------------------------------------------------|
| one pod, or a gang                | all GPUs and members, whatever members it has     |
| elastic gang                      | the fewest members, and names the most            |
| elastic gang that has members     | as many as it has                                 |
| spot to be avoided                | ``avoided`` in place of the step's use of spot    |
"""

from typing import Any

import pytest
from tiphys_plugin.quota.lease import LeaseRequest, hash_node_name

from tiphys.protocol.step_spec import GpuRequest

ATTEMPT: dict[str, Any] = {
    "uid": "u1",
    "step": "fit",
    "node": "fit.admit",
    "namespace": "ml",
    "workflow": "wf",
    "instance": "wf.fit",
    "run": "digits",
    "attempt": 2,
}
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
        "gpu_types": (),
        "within": "rack",
    }
    assert {*fields, "speed"} == GpuRequest.model_fields.keys()  # the speed decides the order of gpu_types

    request = LeaseRequest.from_gpu_request(GpuRequest(**fields), **ATTEMPT, attained=7.0, first_start=9.0)

    kept = {**ATTEMPT, "node_hash": hash_node_name("fit.admit"), "instance_hash": hash_node_name("wf.fit")}
    del kept["node"], kept["instance"]
    assert request == LeaseRequest(**fields, **kept, attained=7.0, first_start=9.0)


def test_a_gang_that_is_not_elastic_requests_all_members() -> None:
    request = LeaseRequest.from_gpu_request(GpuRequest(gpus=8, members=4), **ATTEMPT, members=3)
    assert (request.gpus, request.members, request.max_members) == (8, 4, None)


def test_an_elastic_gang_requests_its_fewest_members_and_names_the_most() -> None:
    request = LeaseRequest.from_gpu_request(ELASTIC, **ATTEMPT)
    assert (request.gpus, request.members, request.min_members, request.max_members) == (16, 2, 2, 4)


def test_an_elastic_gang_that_runs_requests_the_members_that_it_has() -> None:
    request = LeaseRequest.from_gpu_request(ELASTIC, **ATTEMPT, members=3)
    assert (request.gpus, request.members, request.max_members) == (24, 3, 4)


def test_spot_flavors_are_avoided_on_demand() -> None:
    gpu = GpuRequest(gpus=1, spot="allowed")
    assert LeaseRequest.from_gpu_request(gpu, **ATTEMPT, avoid_spot=True).spot == "avoided"
    assert LeaseRequest.from_gpu_request(gpu, **ATTEMPT).spot == "allowed"


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
    request = LeaseRequest.from_gpu_request(GpuRequest(gpus=1), **{**ATTEMPT, "step": step, "instance": instance})
    assert request.step_name == name
