"""The plugin over a bucket: keys are answered as Argo sees them in the bucket, and understood when they come back."""

import pytest
from support.emulators import ACCOUNT
from support.world import World, artifacts, commit, fit, outputs, phase, prep, records, world

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
    assert phase(flow.settle("fit", 0, exit_code="75")) == "Failed"
    again = flow.admit("fit", 1, artifacts=given)
    shards = "data/lineages/digits-abc12/fit/shards/000000001-000000000000100/"
    assert outputs(again)["checkpoint-uri"] == f"{here.store.url}/{shards}"
    keys = [record["step_key"] for record in records(here.store, "control/runs/digits-abc12/attempts/fit/")]
    assert len(set(keys)) == 1


def test_two_plugins_on_one_bucket_open_one_attempt(here):
    flow = here.submit(prep())
    first = flow.admit("prep")
    here.core = here.restart()
    assert flow.admit("prep") == first
    assert len(records(here.store, "control/runs/digits-abc12/attempts/")) == 1
