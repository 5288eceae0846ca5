"""What a plan costs: runs of many items on a real S3 server, planned with every request counted, and delayed.

In turns with the baseline, a plain loop over the same items that asks for the output of each by name.
"""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench.checkpoint.server import BUCKET, S3, STORE, plain_client
from bench.progress import say
from bench.resume.runs import WRITERS, done, items_of, items_pipeline, put_all
from bench.resume.wire import DELAY_SECONDS, Wire
from bench.samples import interleaved, ratio, seconds, significant, summary
from tiphys_controller.submit.planner import plan_stored_run

from tiphys.records import RunRecord, json_digest
from tiphys.store import RunLayout, Store, open_store

SIZES = (10, 100, 1_000, 10_000)
MISSING = (0.0, 0.01, 0.5)
QUICK_SIZES, QUICK_MISSING = (10, 200), (0.01,)
ROUNDS = 3
SEED = 7
_BATCH = 1000


def measure(server: S3, quick: bool) -> dict[str, Any]:
    wire, rows = Wire(), []
    sizes, missing = (QUICK_SIZES, QUICK_MISSING) if quick else (SIZES, MISSING)
    with server.at(None), wire.tapped():
        for size in sizes:
            rows += list(_rows(wire, size, missing))
    largest = max(row["steps"] for row in rows)
    shown = next(row for row in rows if (row["steps"], row["missing_share"]) == (largest, 0.01))
    return {
        "settings": {"seed": SEED, "delay_seconds": DELAY_SECONDS},
        "rows": rows,
        "line": {"plan_10k_requests": shown["requests"], "plan_over_heads": shown["over_heads"]},
    }


def _rows(wire: Wire, size: int, missing: Sequence[float]) -> Iterator[dict[str, Any]]:
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
        yield _measured(wire, run, items, set(gone))


def _measured(wire: Wire, run: str, items: Sequence[str], gone: set[str]) -> dict[str, Any]:
    store, client = open_store(STORE), plain_client()
    store.read(RunLayout(run).run_record)  # connections are made before the clock runs
    client.list_buckets()
    sent: dict[str, int] = {}

    def counted(name: str, call: Callable[[], None]) -> float:
        before, took = wire.requests, seconds(call)
        sent[name] = wire.requests - before
        return took

    wire.delay = DELAY_SECONDS
    times = interleaved(
        {
            "plan": lambda: counted("plan", lambda: _plan(store, run, len(gone))),
            "heads": lambda: counted("heads", lambda: _head_all(client, run, items, len(gone))),
        },
        ROUNDS,
    )
    wire.delay = 0.0
    row = {
        "steps": len(items),
        "missing_share": significant(len(gone) / len(items)),
        "requests": sent["plan"],
        "head_requests": sent["heads"],
        "seconds": summary(times["plan"]),
        "head_seconds": summary(times["heads"]),
        "over_heads": ratio(times["plan"], times["heads"]),
    }
    say(f"plan: {json.dumps(row)}")
    return row


def _plan(store: Store, run: str, missing: int) -> None:
    found = plan_stored_run(store, run)
    assert bool(found.decisions.running_tasks) == bool(missing)


def _head_all(client: Any, run: str, items: Sequence[str], missing: int) -> None:
    """As many at a time as our own reads are."""
    keys = [f"store/{RunLayout(run).outputs(item, 1)}parameters/loss" for item in items]

    def is_there(key: str) -> bool:
        try:
            client.head_object(Bucket=BUCKET, Key=key)
        except client.exceptions.ClientError:
            return False
        return True

    with ThreadPoolExecutor(WRITERS) as pool:
        assert sum(pool.map(is_there, keys)) == len(items) - missing


def _remove(run: str, items: Sequence[str]) -> None:
    """Items that never ran."""
    client = plain_client()
    keys = [{"Key": f"store/{key}"} for item in items for key in done(run, item)]
    for first in range(0, len(keys), _BATCH):
        client.delete_objects(Bucket=BUCKET, Delete={"Objects": keys[first : first + _BATCH], "Quiet": True})
