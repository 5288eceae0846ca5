"""What a call may be as long as: a Workflow's author writes it, and others pay for what is kept of it.

| field of the call            | at most                   |
|------------------------------|---------------------------|
| node                         | 5,120 characters          |
| item of a fan-out            | 4,096 characters          |
| run                          | 253 characters            |
| step                         | 63 characters             |
| uid                          | 128 characters            |
| submission                   | 9 digits of ASCII         |
| name, namespace of workflow  | 253 and 63 characters     |
| queue, GPU type of the step  | 253 and 63 characters     |
| versions of data of the step | 16,384 bytes together     |
| numbers of the step          | what they can mean        |
"""

import json
from typing import Any

import pytest
from structlog.testing import capture_logs
from support.builders.ledger import queues
from support.stories.plugin import World, fit, gpus, outputs, phase, said, world

from tiphys.protocol.step_spec import STEP_ANNOTATION

EIGHT = queues(research={"A100": 8, "*": 4})


@pytest.fixture
def here(tmp_path) -> World:
    return world(tmp_path, EIGHT)


def is_untouched(here: World) -> bool:
    snapshot = here.ledger.snapshot()
    return snapshot.leases == snapshot.pending == () and not list(here.store.list(""))


@pytest.mark.parametrize(
    ("field", "most"), [("node", 5120), ("item", 4096), ("run", 253), ("step", 63), ("uid", 128), ("submission", 9)]
)
def test_a_field_that_is_too_long_is_refused_in_a_sentence(here, field, most):
    flow = here.submit(fit(gpu=gpus(1)))
    body = {**flow.body("admit", "fit"), "run": "", "submission": "", "uid": flow.uid}
    too_long = ("1" if field == "submission" else "x") * (most + 1)
    answer = flow.call(
        {**body, field: f"{too_long[: -len(body['node'])]}{body['node']}" if field == "node" else too_long}
    )
    assert phase(answer) == "Failed"
    assert f"plugin.tiphys.{field} has {most + 1} characters, and at most {most} are allowed" in said(answer)
    assert is_untouched(here)


def test_a_node_of_649400_characters_takes_no_gpus_and_no_room(here):
    flow = here.submit(fit(gpu=gpus(1)))
    body = flow.body("admit", "fit", 0)
    huge = f"{flow.name}.{'x' * 649_400}.fit(0).admit"
    with capture_logs() as logged:
        answer = flow.call({**body, "node": huge})
    assert phase(answer) == "Failed", "Argo repeats what ends in Error"
    assert len(said(answer)) < 1000
    assert len(str(logged)) < 10_000
    assert is_untouched(here)


@pytest.mark.parametrize("field", ["name", "namespace"])
def test_the_name_of_the_workflow_has_a_limit(here, field):
    flow = here.submit(fit(gpu=gpus(1)))
    document = flow.document(flow.body("admit", "fit"))
    document["workflow"]["metadata"][field] = "x" * 5000
    answer = here.core.execute_document(document)
    assert phase(answer) == "Failed"
    assert f"workflow.metadata.{field} has 5000 characters" in said(answer)
    assert is_untouched(here)


@pytest.mark.parametrize("submission", ["9" * 5000, "１", "²", "1_0", "-1", "0"])
def test_a_submission_is_a_short_number_in_ascii(here, submission):
    flow = here.submit(fit(gpu=gpus(1)))
    flow.run, flow.submission = "digits", submission
    answer = flow.admit("fit")
    assert phase(answer) == "Failed"
    assert "plugin.tiphys.submission" in said(answer)
    assert is_untouched(here)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("queue", "q" * 200_000),
        ("queue", ""),
        ("gpu_type", "t" * 200_000),
        ("gpu_type", ""),
        ("gpus", 10**30),
        ("priority", 10**30),
        ("priority", -(10**30)),
        ("seconds", 10**30),
        ("min_gpu_memory_mb", 10**30),
        ("members", 10**4),
    ],
)
def test_a_step_whose_request_for_gpus_is_out_of_bounds_is_refused(here, field, value):
    flow = here.submit(fit(gpu=gpus(1)))
    manifest = here.cluster.workflow("ml", flow.name)
    assert manifest is not None
    _edit_step(manifest, gpu={field: value, **({"gpus": value} if field == "members" else {})})
    here.cluster.write_workflow(manifest)
    answer = flow.admit("fit", 0)
    assert said(answer).startswith("Refused: ")
    assert field in said(answer)
    assert len(said(answer)) < 1000
    assert is_untouched(here)
    later = here.submit(fit(gpu=gpus(8)), name="other-abc12", uid="uid-2")
    assert outputs(later.admit("fit", 0))["run"] == "true"


def test_versions_of_data_have_a_limit_together(here):
    flow = here.submit(fit(gpu=gpus(1)))
    manifest = here.cluster.workflow("ml", flow.name)
    assert manifest is not None
    longest = {"name": "x" * 1024, "algorithm": "md5", "digest": "0" * 32}
    _edit_step(manifest, data=[longest] * 16)
    here.cluster.write_workflow(manifest)
    answer = flow.admit("fit", 0)
    assert said(answer).startswith("Refused: ")
    assert "those of one step may take 16,384 bytes" in said(answer)
    assert len(said(answer)) < 1000
    assert is_untouched(here)


def _edit_step(manifest: dict[str, Any], gpu: dict[str, Any] | None = None, **changes: Any) -> None:
    for template in manifest["spec"]["templates"]:
        annotations = (template.get("metadata") or {}).get("annotations") or {}
        if STEP_ANNOTATION in annotations:
            spec = json.loads(annotations[STEP_ANNOTATION])
            annotations[STEP_ANNOTATION] = json.dumps({**spec, **changes, "gpu": {**spec["gpu"], **(gpu or {})}})


def test_a_fan_out_over_large_items_runs_as_ever(here):
    flow = here.submit(fit(fan_out=True, gpu=gpus(1)))
    item = f"0:{'x' * 3000}"
    assert outputs(flow.admit("fit", 0, item=item))["run"] == "true"
