"""How fast damage is looked for: a deep verification beside the hashing that the machine can do, and a restore that
compares hashes beside one that does not.
"""

import contextlib
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from bench.checkpoint.ceilings import cut, joined, sha256_seconds
from bench.checkpoint.server import STORE, scratch
from bench.checkpoint.workload import STEP, Workload, commit, new_run, session
from bench.progress import say
from bench.samples import interleaved, ratio, seconds, summary
from support.builders.lineage import write_run

from tiphys.checkpoint.restore import shard_reader
from tiphys.lineage.audit.audit import audit_run
from tiphys.store import Store, open_store

_CORES = 2


def measure(work: Workload) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        folder = scratch(stack)
        found = _verification(work, f"file://{folder}")
    with work.server.at(None):
        bucket = _deep(work, STORE)
    restored = {name: _restore(work, network, work.repeats) for name, network in work.networks.items()}
    return {
        "deep_of_a_folder_seconds": summary(found["deep"]),
        "sha256_seconds": summary(found["sha256"]),
        "deep_of_a_bucket_seconds": summary(bucket),
        "restore": restored,
        "line": {
            "verify_over_sha256": ratio(found["sha256"], found["deep"]),
            "restore_verify_overhead": restored["throttled"]["overhead"],
            # At full speed reading alone fills all cores, so a hash takes its time wherever it is computed.
            **({"restore_over_read_and_hash": restored["free"]["over_read_and_hash"]} if "free" in restored else {}),
        },
    }


def _verification(work: Workload, url: str) -> dict[str, list[float]]:
    """On a folder in memory, since a server would share the cores; in turns with the ceiling."""
    pieces = cut(joined(work.state))
    store, run = _saved(work, url)
    found = interleaved(
        {"deep": lambda: _audit(store, run), "sha256": lambda: sha256_seconds(pieces, _CORES)}, work.repeats
    )
    say(f"tiphys verify --deep: {summary(found['deep'])['median']} s, sha256 {summary(found['sha256'])['median']} s")
    return found


def _deep(work: Workload, url: str) -> list[float]:
    store, run = _saved(work, url)
    times = [_audit(store, run) for _ in range(work.repeats)]
    work.server.empty()
    return times


def _audit(store: Store, run: str) -> float:
    """Seconds of a verification that reads everything."""
    return seconds(lambda: _check_soundness(store, run))


def _check_soundness(store: Store, run: str) -> None:
    found = audit_run(store, run, deep=True, threads=_CORES)
    if not found.is_sound:
        raise RuntimeError(f"the verification found damage: {found.damage[0]}")


def _saved(work: Workload, url: str) -> tuple[Store, str]:
    """A run with one checkpoint."""
    store = open_store(url)
    run = new_run(store)
    write_run(store, run=run, step=STEP)
    with session(url, run) as opened:
        commit(opened, 1, work)
    return store, run


def _restore(work: Workload, network: float | None, repeats: int) -> dict[str, Any]:
    """Restores with and without hashes, in turns."""
    with work.server.at(None):
        _, run = _saved(work, STORE)
    pieces = cut(joined(work.state))
    with work.server.at(network):
        _restored(run)
        times = interleaved(
            {
                "with": lambda: _restored(run),
                "without": lambda: _restored_unverified(run),
                "sha256": lambda: sha256_seconds(pieces, _CORES),
            },
            repeats,
        )
    work.server.empty()
    with_hashes, without = summary(times["with"]), summary(times["without"])
    say(f"restore at {network or 'any'} MB/s: {with_hashes['median']} s, {without['median']} s without hashes")
    in_a_row = [read + hashed for read, hashed in zip(times["without"], times["sha256"], strict=True)]
    return {
        "seconds": with_hashes,
        "without_hashes_seconds": without,
        "sha256_seconds": summary(times["sha256"]),
        "overhead": ratio(times["with"], times["without"]),
        "over_read_and_hash": ratio(times["with"], in_a_row),
    }


def _restored_unverified(run: str) -> float:
    with _nothing_is_hashed():
        return _restored(run)


def _restored(run: str) -> float:
    """Seconds in which the next attempt has its state."""
    with session(STORE, run) as opened:
        states: list[Any] = []
        took = seconds(lambda: states.append(opened.restore()))
        if states[0] is None:
            raise RuntimeError("nothing was restored")
    return took


class _AnyDigest(str):
    """A hash that equals every other."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False


class _NoHash:
    """What a loader that trusts storage would do."""

    def __init__(self, data: object = b"") -> None:
        """Of any data."""

    def update(self, data: object) -> None:
        """Look away."""

    def hexdigest(self) -> str:
        return _AnyDigest()


@contextmanager
def _nothing_is_hashed() -> Iterator[None]:
    with mock.patch.object(shard_reader, "hashlib", mock.Mock(spec=hashlib, sha256=_NoHash)):
        yield
