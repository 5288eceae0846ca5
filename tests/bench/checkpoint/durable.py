"""How long until a save is committed, beside one request with the same bytes, at the full speed of the server."""

from functools import partial
from typing import Any

from bench.checkpoint.ceilings import joined, put_object
from bench.checkpoint.samples import ratio, summary
from bench.checkpoint.server import plain_client
from bench.checkpoint.workload import Workload, commit, seconds, session
from bench.progress import say

from tiphys.store.s3_client import make_client


def measure(work: Workload) -> dict[str, Any]:
    """In turns, so that all see the same machine."""
    whole = joined(work.state)
    plain, lean, durable = [], [], []
    with work.server.at(None), session() as opened:
        opened.restore(default=work.state)
        commit(opened, 1, work)
        for step in range(2, work.repeats + 2):
            durable.append(seconds(partial(commit, opened, step, work)))
            plain.append(put_object(plain_client(), whole))
            lean.append(put_object(make_client(), whole))
            work.server.empty()
    found = {"plain": summary(plain), "lean": summary(lean), "committed": summary(durable)}
    say(f"committed after {found['committed']['median']} s, one put_object {found['plain']['median']} s")
    return {
        "committed_seconds": found["committed"],
        "put_object_seconds": found["plain"],
        "put_object_without_checksums_seconds": found["lean"],
        "ratio_without_checksums": ratio(found["lean"], found["committed"]),
        "line": {"durable_ratio": ratio(found["plain"], found["committed"])},
    }
