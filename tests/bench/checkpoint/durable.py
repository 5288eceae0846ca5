"""How long until a save is committed, beside one request with the same bytes, at the full speed of the server."""

from typing import Any

from bench.checkpoint.ceilings import joined, put_object
from bench.checkpoint.server import plain_client
from bench.checkpoint.workload import Workload, commit, session
from bench.progress import say
from bench.samples import interleaved, ratio, seconds, summary

from tiphys.store.buckets.s3_client import make_client


def measure(work: Workload) -> dict[str, Any]:
    """A save that is committed, one `put_object`, and one by a client that sends no checksums."""
    whole = joined(work.state)
    with work.server.at(None), session() as opened:
        opened.restore(default=work.state)
        commit(opened, 1, work)
        steps = iter(range(2, work.repeats + 2))

        def committed() -> float:
            took = seconds(lambda: commit(opened, next(steps), work))
            work.server.empty()
            return took

        times = interleaved(
            {
                "committed": committed,
                "put_object": lambda: put_object(plain_client(), whole),
                "put_object_without_checksums": lambda: put_object(make_client(), whole),
            },
            work.repeats,
        )
        work.server.empty()
    found = {f"{name}_seconds": summary(values) for name, values in times.items()}
    say(", ".join(f"{name} {value['median']}" for name, value in found.items()))
    return {
        **found,
        "ratio_without_checksums": ratio(times["put_object_without_checksums"], times["committed"]),
        "line": {"durable_ratio": ratio(times["put_object"], times["committed"])},
    }
