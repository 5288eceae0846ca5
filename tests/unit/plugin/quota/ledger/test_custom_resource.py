"""The kind `GPULedger` that the chart brings declares what the service writes and what a queue file may say."""

import re
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError
from support.builders.ledger import lease, ledger_status
from tiphys_plugin.quota.flavors import ClusterNodes, Flavor, Toleration
from tiphys_plugin.quota.lease import LedgerState
from tiphys_plugin.quota.ledger.ledger_object import MAX_ENTRY_BYTES
from tiphys_plugin.quota.queue import Queue
from tiphys_plugin.quota.queues import InventoryEntry, Queues

from tiphys.kube.resources import GPU_LEDGER_RECORDS, GPU_LEDGERS

KINDS = Path(__file__).parents[5] / "charts/tiphys/crds"
CRD = yaml.safe_load((KINDS / "gpuledger.yaml").read_text())["spec"]
RECORD = yaml.safe_load((KINDS / "gpuledgerrecord.yaml").read_text())["spec"]
[VERSION] = CRD["versions"]
SPEC, STATUS = (VERSION["schema"]["openAPIV3Schema"]["properties"][part]["properties"] for part in ("spec", "status"))


def test_names_are_those_that_the_service_asks_for():
    names = (CRD["group"], VERSION["name"], CRD["names"]["plural"], CRD["names"]["kind"])
    assert names == tuple(GPU_LEDGERS)
    assert VERSION["subresources"] == {"status": {}}


def test_records_have_the_name_and_the_size_that_the_service_writes():
    [version] = RECORD["versions"]
    assert (RECORD["group"], version["name"], RECORD["names"]["plural"], RECORD["names"]["kind"]) == tuple(
        GPU_LEDGER_RECORDS
    )
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    assert spec["properties"]["data"]["maxLength"] > 4 / 3 * MAX_ENTRY_BYTES, "a part that compression does not shorten"
    assert "self == oldSelf" in [one["rule"] for one in spec["x-kubernetes-validations"]]


def test_spec_declares_every_field_of_a_queue_file():
    assert SPEC.keys() == Queues.model_fields.keys()
    assert SPEC["queues"]["items"]["properties"].keys() == Queue.model_fields.keys()
    flavor = SPEC["flavors"]["items"]["properties"]
    assert flavor.keys() == Flavor.model_fields.keys()
    assert flavor["tolerations"]["items"]["properties"].keys() == Toleration.model_fields.keys()
    assert SPEC["inventory"]["additionalProperties"]["properties"].keys() == InventoryEntry.model_fields.keys()


@pytest.mark.parametrize("name", ["", " ", " a", "a ", "a\nb"])
def test_names_that_a_queue_file_must_not_have_are_refused_by_the_kind(name):
    queue, flavor = SPEC["queues"]["items"]["properties"], SPEC["flavors"]["items"]["properties"]
    for schema in (queue["name"], queue["cohort"], flavor["name"], SPEC["nodes"]["items"]["properties"]["name"]):
        assert len(name) < schema["minLength"] or not re.search(schema["pattern"], name)
    with pytest.raises(ValidationError, match="is no name"):
        Queue(name="a", gpus={}, cohort=name)


@pytest.mark.parametrize(
    ("value", "accepted"), [("a", True), ("a.B_c-1", True), ("", True), ("a b", False), ("-a", False)]
)
def test_label_values_are_those_of_a_queue_file(value, accepted):
    flavor, nodes = SPEC["flavors"]["items"]["properties"], SPEC["cluster_nodes"]["properties"]
    for schema in (flavor["node_labels"], nodes["selector"]):
        assert bool(re.search(schema["additionalProperties"]["pattern"], value)) == accepted
    try:
        ClusterNodes(selector={"pool": value})
    except ValidationError:
        assert not accepted
    else:
        assert accepted


def test_the_written_status_has_every_required_field():
    status = ledger_status(LedgerState((lease(8),)))
    assert STATUS.keys() == status.keys()
    for part in ("summary", "log"):
        assert STATUS[part]["properties"].keys() <= status[part].keys()
    assert set(STATUS["log"]["required"]) <= status["log"].keys()


def test_columns_show_what_is_written():
    summary = ledger_status(LedgerState())["summary"]
    shown = [column["jsonPath"] for column in VERSION["additionalPrinterColumns"]]
    assert {path for path in shown if path.startswith(".status")} == {f".status.summary.{name}" for name in summary}
