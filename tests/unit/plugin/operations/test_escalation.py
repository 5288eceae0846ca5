"""An escalation reaches the pod of the next attempt: in admit's pod patch, its words, and the claim.

| what compile has made | what the patch does |
|---|---|
| request and limit of memory | both grow alike |
| a preference for nodes of its own | keeps it, and adds one |
| conditions on nodes of its own | keeps each alternative, and adds to it |
| a selector of spot nodes | takes that label out |
"""

import json
from typing import Any

from support.stories.plugin import Flow, World, fit, gpus, outputs, phase, said, workflow, world
from tiphys_plugin import Queues

from tiphys.protocol.step_spec import NodeLabelValue, RetryPolicy, StepSpec

GI = 1024**3
SPOT = NodeLabelValue(label="cloud.google.com/gke-spot", value="true")
ADMITTED = {"terminationGracePeriodSeconds": 30}


def submit(here: World, spec: StepSpec, resources: dict[str, Any] | None = None, **template: Any) -> Flow:
    """A workflow whose run template is as compile makes it."""
    made = workflow([spec])
    container = {"image": "i", "resources": resources or {}}
    made["spec"]["templates"].append({"name": f"{spec.name}-run", "container": container, **template})
    here.cluster.write_workflow(made)
    return Flow(here, "digits-abc12", "uid-1")


def fails(flow: Flow, number: int, **pod: Any) -> None:
    """Attempt ``number`` is opened and fails."""
    flow.admit("fit", number - 1)
    flow.pod("fit", number, number - 1, **{"phase": "Failed", "exit_code": 137, **pod})
    assert phase(flow.end_try("fit", number - 1, exit_code=str(pod.get("exit_code", 137)))) == "Error"


def patch(flow: Flow, number: int) -> dict[str, Any]:
    return json.loads(outputs(flow.admit("fit", number - 1))["pod-patch"])


def test_memory_grows_and_stays_over_an_eviction(here):
    retry = RetryPolicy(out_of_memory=3, memory_ceiling_bytes=64 * GI)
    resources = {"requests": {"memory": "4Gi", "cpu": "2"}, "limits": {"memory": "8Gi"}}
    flow = submit(here, fit(retry=retry), resources)
    assert patch(flow, 1) == ADMITTED
    fails(flow, 1, reason="OOMKilled")
    fails(flow, 2, reason="Evicted", message="low on resource")
    answer = flow.admit("fit", 2)
    grown = {"limits": {"memory": "12Gi"}, "requests": {"memory": "6Gi"}}
    assert json.loads(outputs(answer)["pod-patch"]) == {
        **ADMITTED,
        "containers": [{"name": "main", "resources": grown}],
    }
    assert said(answer) == "Attempt 3 starts from the beginning. After earlier failures: 12Gi of memory"


def test_a_repeated_call_and_a_restarted_plugin_answer_the_same(here):
    flow = submit(here, fit(retry=RetryPolicy(memory_ceiling_bytes=64 * GI)), {"limits": {"memory": "8Gi"}})
    fails(flow, 1, reason="OOMKilled")
    first = flow.admit("fit", 1)
    here.core = here.restart()
    assert flow.admit("fit", 1) == first
    assert "12Gi" in said(first)


def test_a_node_that_failed_twice_is_avoided_where_there_is_another(here):
    own = {"weight": 1, "preference": {"matchExpressions": [{"key": "disk", "operator": "In", "values": ["ssd"]}]}}
    affinity = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [own]}}
    flow = submit(here, fit(), affinity=affinity)
    for number in (1, 2):
        fails(flow, number, host="node-3")
    elsewhere = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["node-3"]}
    wish = {"weight": 100, "preference": {"matchExpressions": [elsewhere]}}
    assert patch(flow, 3)["affinity"] == {
        "nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [own, wish]}
    }


NODES = [{"name": name, "gpu_type": "A100", "gpus": gpus} for name, gpus in (("n1", 2), ("n2", 4), ("n3", 4))]


def test_the_queue_chooses_another_node_than_the_one_that_failed_twice(tmp_path):
    rules = Queues.model_validate({"queues": [{"name": "research", "gpus": {"A100": 10}}], "nodes": NODES})
    flow = submit(world(tmp_path, rules), fit(gpu=gpus(2)))

    def chosen(number: int) -> str:
        return patch(flow, number)["nodeSelector"]["kubernetes.io/hostname"]

    for number in (1, 2):
        assert chosen(number) == "n1"
        fails(flow, number, host="n1")
    assert chosen(3) in ("n2", "n3")


def test_a_preference_that_argo_fills_in_is_left_alone(here):
    own = {"weight": 1, "preference": {"matchExpressions": [{"key": "{{inputs.parameters.k}}", "operator": "Exists"}]}}
    affinity = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [own]}}
    flow = submit(here, fit(), affinity=affinity)
    for number in (1, 2):
        fails(flow, number, host="node-3")
    assert patch(flow, 3) == ADMITTED


def test_spot_nodes_are_left_and_every_condition_of_the_step_is_kept(here):
    spec = fit(retry=RetryPolicy(on_demand_after=2), spot=(SPOT,))
    terms = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": [zone]}]} for zone in ("a", "b")]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    selector = {SPOT.label: "true", "disk": "ssd"}
    flow = submit(here, spec, affinity={"nodeAffinity": required}, nodeSelector=selector)
    for number in (1, 2):
        fails(flow, number, exit_code=75)
    off = {"key": SPOT.label, "operator": "NotIn", "values": ["true"]}
    found = patch(flow, 3)
    node_affinity = found["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert [term["matchExpressions"][1:] for term in node_affinity["nodeSelectorTerms"]] == [[off], [off]]
    assert [term["matchExpressions"][0] for term in node_affinity["nodeSelectorTerms"]] == [
        term["matchExpressions"][0] for term in terms
    ]
    assert found["nodeSelector"] == {SPOT.label: None}


def test_a_program_is_advised_to_take_a_smaller_batch(here):
    flow = submit(here, fit(retry=RetryPolicy(gpu_out_of_memory=2)))
    fails(flow, 1, exit_code=1, termination_message="torch.OutOfMemoryError: CUDA out of memory")
    container = {"name": "main", "env": [{"name": "TIPHYS_BATCH_SCALE", "value": "0.5"}]}
    assert patch(flow, 2)["containers"] == [container]


def test_the_node_selector_of_the_ledger_is_kept(tmp_path):
    here = world(tmp_path, Queues.model_validate({"queues": [{"name": "research", "gpus": {"A100": 8}}]}))
    flow = submit(here, fit(gpu=gpus(1, gpu_type=None)))
    for number in (1, 2):
        fails(flow, number, host="node-3")
    found = patch(flow, 3)
    assert found["nodeSelector"] == {"nvidia.com/gpu.product": "A100"}
    assert "affinity" in found


def test_an_attempt_that_leaves_spot_nodes_gets_another_flavor_of_its_queue(tmp_path):
    flavors = [
        {"name": "a100-spot", "gpu_type": "A100", "node_labels": {SPOT.label: "true"}, "spot": True},
        {"name": "a100-own", "gpu_type": "A100", "node_labels": {SPOT.label: "false"}},
    ]
    quota = {"name": "research", "gpus": {"a100-spot": 8, "a100-own": 8}}
    here = world(tmp_path, Queues.model_validate({"queues": [quota], "flavors": flavors}))
    spec = fit(gpu=gpus(4, spot="allowed"), retry=RetryPolicy(on_demand_after=2), spot=(SPOT,))
    flow = submit(here, spec)
    for number in (1, 2):
        fails(flow, number, exit_code=75)
    assert patch(flow, 3)["nodeSelector"] == {"nvidia.com/gpu.product": "A100", SPOT.label: "false"}
    assert [one.pool for one in here.ledger.snapshot().leases] == ["a100-own"]


def test_an_attempt_that_was_granted_gpus_of_spot_nodes_may_run_on_them(tmp_path):
    flavors = [{"name": "a100-spot", "gpu_type": "A100", "node_labels": {SPOT.label: "true"}, "spot": True}]
    quota = {"name": "research", "gpus": {"a100-spot": 8}}
    here = world(tmp_path, Queues.model_validate({"queues": [quota], "flavors": flavors}))
    kinds = (SPOT, NodeLabelValue(label="cheap", value="true"))
    spec = fit(gpu=gpus(4, spot="allowed"), retry=RetryPolicy(on_demand_after=2), spot=kinds)
    flow = submit(here, spec)
    for number in (1, 2):
        fails(flow, number, exit_code=75)
    found = patch(flow, 3)
    assert found["nodeSelector"] == {"nvidia.com/gpu.product": "A100", SPOT.label: "true"}
    assert "affinity" not in found, "no flavor of other nodes could serve it"
