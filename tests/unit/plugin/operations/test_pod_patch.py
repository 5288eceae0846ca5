"""Where the pods of an attempt are sent: by the flavor, the type and the nodes that its lease is counted on.

| the lease is of          | the pod gets                                                            |
|--------------------------|-------------------------------------------------------------------------|
| a flavor                 | its labels and those of its type; its tolerations beside the step's own  |
| a type that was chosen   | the label of the type                                                   |
| the type that was named  | nothing: the compiled step has the label                                |
| one node                 | the host name                                                           |
"""

import json

import pytest
from support.builders.ledger import queues
from support.stories.plugin import Flow, World, fit, gpus, outputs, phase, said, workflow, world
from tiphys_plugin import PluginCore, SqliteLedger
from tiphys_plugin.quota.queues import Queues

from tiphys.protocol.gang import GangSpec
from tiphys.records import AttemptClaim
from tiphys.store import RunLayout, read_record

QUOTA = {"a100-own": 8, "a100-spot": 8, "T4": 8}
SPOT = [
    {"key": "spot", "operator": "Equal", "value": "yes", "effect": "NoSchedule"},
    {"key": "gpu", "operator": "Exists"},
]
OWN = {"key": "mine", "operator": "Exists"}
RULES = Queues.model_validate(
    {
        "queues": [{"name": "research", "gpus": QUOTA, "flavor_order": ["a100-spot"]}],
        "flavors": [
            {"name": "a100-own", "gpu_type": "A100", "node_labels": {"pool": "own"}},
            {
                "name": "a100-spot",
                "gpu_type": "A100",
                "node_labels": {"pool": "spot"},
                "tolerations": [
                    {"key": "spot", "value": "yes", "effect": "NoSchedule"},
                    {"key": "gpu", "operator": "Exists"},
                ],
                "spot": True,
            },
        ],
    }
)


@pytest.fixture
def here(tmp_path) -> World:
    return world(tmp_path, RULES)


def patched(here: World, spec, run: dict | None = None, **workflow_spec) -> dict:
    document = workflow([spec])
    document["spec"]["templates"].append({"name": "fit-run", "container": {"image": "i"}, **(run or {})})
    document["spec"] |= workflow_spec
    here.cluster.write_workflow(document)
    reply = Flow(here, "digits-abc12", "uid-1").admit("fit", 0)
    assert outputs(reply)["run"] == "true", said(reply)
    return json.loads(outputs(reply)["pod-patch"])


def test_a_pod_is_sent_to_its_flavor(here):
    patch = patched(here, fit(gpu=gpus(2)))
    assert patch["nodeSelector"] == {"nvidia.com/gpu.product": "A100", "pool": "own"}
    assert "tolerations" not in patch, "those of the step stay as they are"
    assert patched(here, fit(gpu=gpus(2))) == patch, "asked again, it answers the same"


@pytest.mark.parametrize(
    ("run", "more", "own"),
    [
        ({}, {}, []),
        ({"tolerations": [OWN]}, {"tolerations": [{"key": "other"}]}, [OWN]),
        ({}, {"tolerations": [OWN]}, [OWN]),
        ({}, {"templateDefaults": {"tolerations": [OWN]}, "tolerations": [{"key": "other"}]}, [OWN]),
    ],
    ids=["none", "of the step", "of the workflow", "of all templates"],
)
def test_tolerations_of_the_flavor_come_beside_those_that_the_pod_would_have(here, run, more, own):
    patch = patched(here, fit(gpu=gpus(2, spot="allowed")), run, **more)
    assert patch["nodeSelector"] == {"nvidia.com/gpu.product": "A100", "pool": "spot"}
    assert patch["tolerations"] == [*own, *SPOT]


def test_tolerations_that_argo_fills_in_are_refused_with_their_remedy_and_hold_no_gpus(here):
    spec = fit(gpu=gpus(2, spot="only"))
    document = workflow([spec])
    filled = [{"key": "{{inputs.parameters.taint}}"}]
    document["spec"]["templates"].append({"name": "fit-run", "container": {}, "tolerations": filled})
    here.cluster.write_workflow(document)
    reply = Flow(here, "digits-abc12", "uid-1").admit("fit", 0)
    assert phase(reply) == "Failed"
    assert "without placeholders" in said(reply)
    assert here.ledger.snapshot().leases == ()


def test_a_type_that_was_chosen_without_a_flavor_is_asked_for(tmp_path):
    plain = world(tmp_path, queues(research={"T4": 8}))
    assert patched(plain, fit(gpu=gpus(2, gpu_type=None)))["nodeSelector"] == {"nvidia.com/gpu.product": "T4"}


def test_of_several_types_the_one_that_was_chosen_is_asked_for(tmp_path):
    plain = world(tmp_path, queues(research={"T4": 8, "A100": 1}))
    wanted = fit(gpu=gpus(2, gpu_type=None, gpu_types=("A100", "T4")))
    assert patched(plain, wanted)["nodeSelector"] == {"nvidia.com/gpu.product": "T4"}


def test_the_node_is_patched_beside_the_flavor(tmp_path):
    nodes = [{"name": f"n-{pool}", "gpu_type": "A100", "gpus": 8, "labels": {"pool": pool}} for pool in ("own", "spot")]
    nodes.append({"name": "n-t4", "gpu_type": "T4", "gpus": 8})
    placed = world(tmp_path, Queues.model_validate({**RULES.model_dump(exclude_defaults=True), "nodes": nodes}))
    patch = patched(placed, fit(gpu=gpus(8)))
    assert patch["nodeSelector"]["kubernetes.io/hostname"] == "n-own"


def test_pods_of_a_gang_get_the_same_by_their_manifest(here):
    spec = fit(gpu=gpus(8, members=4, spot="only"), gang=GangSpec(members=4), artifacts=())
    answer = outputs(here.submit(spec).admit("fit", 0))
    assert json.loads(f"[{answer['tolerations']}]") == SPOT
    requirements = {one["key"]: one for one in json.loads(f"[{answer['node-requirements']}]")}
    assert requirements["pool"] == {"key": "pool", "operator": "In", "values": ["spot"]}
    assert requirements["nvidia.com/gpu.product"]["values"] == ["A100"]


def test_the_claim_and_the_ledger_name_the_flavor(here):
    flow = here.submit(fit(gpu=gpus(2)))
    assert "holds 2 a100-own of queue research" in said(flow.admit("fit", 0))
    claim = read_record(here.store, RunLayout("digits-abc12").attempt("fit", 1), AttemptClaim)
    assert claim.flavor == "a100-own"


def test_a_lost_ledger_finds_the_flavor_again(here):
    flow = here.submit(fit(gpu=gpus(2)))
    flow.admit("fit", 0)
    flow.pod("fit", 1, gpus=2)
    [before] = here.ledger.snapshot().leases
    here.ledger.close()
    here.ledger = SqliteLedger(here.root / "new.db", RULES, clock=here.clock)
    PluginCore(here.store, here.cluster, here.ledger, clock=here.clock)
    [after] = here.ledger.snapshot().leases
    assert (after.id, after.pool) == (before.id, "a100-own")
