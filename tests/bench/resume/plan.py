"""What a plan costs: runs of many items on a real S3 server, planned with every request counted, and delayed."""

import json
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench.checkpoint.server import BUCKET, S3, STORE, plain_client
from bench.progress import say
from bench.resume.runs import WRITERS, done, items_of, items_pipeline, put_all
from bench.resume.wire import DELAY_SECONDS, Wire
from bench.samples import significant
from tiphys_controller.submit.planner import plan_stored_run

from tiphys.records import RunRecord, json_digest
from tiphys.store import RunLayout, open_store

SIZES = (10, 100, 1_000, 10_000)
MISSING = (0.0, 0.01, 0.5)
DELAYS = (0.0, DELAY_SECONDS)
QUICK_SIZES, QUICK_MISSING, QUICK_DELAYS = (10, 200), (0.01,), (DELAY_SECONDS,)
SEED = 7
_BATCH = 1000


def measure(server: S3, quick: bool) -> dict[str, Any]:
    wire, rows = Wire(), []
    sizes, missing, delays = (QUICK_SIZES, QUICK_MISSING, QUICK_DELAYS) if quick else (SIZES, MISSING, DELAYS)
    with server.at(None), wire.tapped():
        for size in sizes:
            rows += list(_rows(wire, size, missing, delays))
    largest = max(row["steps"] for row in rows)
    wanted = (largest, 0.01, DELAY_SECONDS)
    line = next(row for row in rows if (row["steps"], row["missing_share"], row["delay_seconds"]) == wanted)
    return {
        "settings": {"seed": SEED, "delays": delays},
        "rows": rows,
        "line": {"plan_10k_requests": line["requests"], "plan_10k_seconds": line["seconds"]},
    }


def _rows(wire: Wire, size: int, missing: Sequence[float], delays: Sequence[float]) -> Iterator[dict[str, Any]]:
    run = f"plan-{size}"
    pipeline = items_pipeline(size)
    items, manifest = items_of(pipeline), pipeline.manifest
    record = RunRecord(run=run, pipeline="plan", workflow=manifest, digest=json_digest(manifest))
    objects = (
        (RunLayout(run).run_record, record.to_bytes()),
        *(one for item in items for one in done(run, item).items()),
    )
    say(f"plan: wrote {put_all(objects)} objects of run {run}")
    gone: list[str] = []
    order = random.Random(SEED).sample(items, len(items))
    for share in missing:
        more = order[len(gone) : round(share * size)]
        _remove(run, more)
        gone += more
        for delay in delays:
            wire.delay = delay
            row = {"steps": size, "missing_share": share, "missing": len(gone), "delay_seconds": delay}
            row |= _planned(wire, run, len(gone)) | _one_by_one(wire, run, items, set(gone))
            say(f"plan: {json.dumps(row)}")
            yield row
        wire.delay = 0.0


def _planned(wire: Wire, run: str, missing: int) -> dict[str, Any]:
    store = open_store(STORE)
    store.read(RunLayout(run).run_record)  # the connection is made before the clock runs
    sent, begin = wire.requests, time.perf_counter()
    found = plan_stored_run(store, run)
    seconds = time.perf_counter() - begin
    assert bool(found.decisions.running_tasks) == bool(missing)
    return {"requests": wire.requests - sent, "seconds": significant(seconds)}


def _one_by_one(wire: Wire, run: str, items: Sequence[str], gone: set[str]) -> dict[str, Any]:
    """The naive way: ask for each output by name, as many at a time as our own reads are."""
    client = plain_client()
    sent, begin = wire.requests, time.perf_counter()
    keys = [f"store/{RunLayout(run).outputs(item, 1)}parameters/loss" for item in items]

    def there(key: str) -> bool:
        try:
            client.head_object(Bucket=BUCKET, Key=key)
        except client.exceptions.ClientError:
            return False
        return True

    with ThreadPoolExecutor(WRITERS) as pool:
        found = sum(pool.map(there, keys))
    assert found == len(items) - len(gone)
    return {"head_requests": wire.requests - sent, "head_seconds": significant(time.perf_counter() - begin)}


def _remove(run: str, items: Sequence[str]) -> None:
    """Items that never ran."""
    client = plain_client()
    keys = [{"Key": f"store/{key}"} for item in items for key in done(run, item)]
    for first in range(0, len(keys), _BATCH):
        client.delete_objects(Bucket=BUCKET, Delete={"Objects": keys[first : first + _BATCH], "Quiet": True})
