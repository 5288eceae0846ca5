"""The plugin over a bucket: keys are answered as Argo sees them in the bucket, and understood when they come back."""

import pytest
from support.fakes.argo_workflow import ArgoWorkflow, ungated
from support.servers.emulators import ACCOUNT
from support.stories.plugin import World, artifacts, commit, fit, outputs, phase, prep, records, said, world
from support.stories.recorded_flow import RecordedFlow

from tiphys.store import open_store

BUCKETS = {
    "s3": ("s3://{}", "bucket"),
    "gcs": ("gs://{}", "gcs_bucket"),
    "azure": (f"az://{ACCOUNT}/{{}}", "azure_container"),
}


@pytest.fixture(params=BUCKETS)
def here(tmp_path, request) -> World:
    url, bucket = BUCKETS[request.param]
    return world(tmp_path, store=open_store(f"{url.format(request.getfixturevalue(bucket))}/team/tiphys"))


def test_run_is_kept_below_the_prefix_of_the_store(here):
    flow = here.submit(prep(parameters=()), fit())
    admitted = flow.admit("prep")
    assert outputs(admitted)["outputs"] == "team/tiphys/data/runs/digits-abc12/outputs/prep/000000001"
    made = flow.write_output(admitted, "0/artifacts/data/rows.csv", b"1,2").rpartition("/")[0]
    verdict = flow.conclude("prep")
    assert artifacts(verdict) == {"data": made}

    # The step key follows the content of the input, so its key has to be understood again.
    given = [{"name": "data", "path": "/in", "s3": {"key": made}}]
    flow.admit("fit", 0, artifacts=given)
    commit(here.store, "digits-abc12/fit", attempt=1, step=100)
    assert phase(flow.end_try("fit", 0, exit_code="75")) == "Error"
    again = flow.admit("fit", 1, artifacts=given)
    shards = "data/lineages/digits-abc12/fit/shards/000000001-000000000000100/"
    assert outputs(again)["checkpoint-uri"] == f"{here.store.url}/{shards}"
    keys = [record["step_key"] for record in records(here.store, "control/runs/digits-abc12/attempts/fit/")]
    assert len(set(keys)) == 1


def test_outputs_of_a_step_without_a_gate_are_found_below_the_prefix_of_the_store(here):
    train = prep(name="train", template="t-train", parameters=(), artifacts=())
    first = RecordedFlow(here, ArgoWorkflow(here.store, [ungated(), train], {"train": "prep"}))
    artifact = first.finish(b"1,2")
    assert artifact["s3"]["key"] == f"team/tiphys/data/workflows/uid-1/{first.argo.pod()}/data"
    first.store("Succeeded")
    assert outputs(first.admit("train", artifact))["run"] == "true"
    assert phase(first.flow.conclude("train")) == "Succeeded"
    assert phase(first.finalize()) == "Succeeded"
    assert first.end().outputs_prefix == first.argo.folder()

    # The content of the input counts, and not its place.
    second = first.resumed()
    made_again = second.finish(b"1,2")
    second.store()
    assert said(second.admit("train", made_again)) == "Adopted from attempt 1"


def test_plugins_on_one_bucket_open_a_single_attempt(here):
    flow = here.submit(prep())
    first = flow.admit("prep")
    here.core = here.restart()
    assert flow.admit("prep") == first
    assert len(records(here.store, "control/runs/digits-abc12/attempts/")) == 1
