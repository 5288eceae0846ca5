"""The kind `GPULedger` declares all that a queue file may say about nodes: what it does not declare is dropped."""

from pathlib import Path

import pytest
import yaml
from tiphys_plugin.quota.flavors import ClusterNodes, HealthSignal
from tiphys_plugin.quota.placement.model import GpuNode

CRD = yaml.safe_load((Path(__file__).parents[4] / "charts/tiphys/crds/gpuledger.yaml").read_text())["spec"]
SPEC = CRD["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
CLUSTER_NODES = SPEC["cluster_nodes"]["properties"]
SIGN = CLUSTER_NODES["signs"]["items"]["properties"]


@pytest.mark.parametrize(
    ("declared", "model"),
    [(CLUSTER_NODES, ClusterNodes), (SIGN, HealthSignal), (SPEC["nodes"]["items"]["properties"], GpuNode)],
    ids=["cluster_nodes", "signs", "nodes"],
)
def test_every_field_is_declared(declared, model):
    assert declared.keys() == model.model_fields.keys()


@pytest.mark.parametrize("field", ["kind", "means"])
def test_the_same_words_are_allowed(field):
    schema = HealthSignal.model_json_schema()["properties"][field]
    assert SIGN[field]["enum"] == schema["enum"]
