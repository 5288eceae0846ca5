"""How fast damage is looked for: a deep verification beside the hashing that the machine can do, and a restore that
compares hashes beside one that does not.
"""

import contextlib
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from bench.checkpoint.ceilings import joined, sha256
from bench.checkpoint.samples import ratio, significant, summary
from bench.checkpoint.server import STORE, scratch
from bench.checkpoint.workload import MIB, STEP, Workload, commit, new_run, seconds, session
from bench.progress import say
from support.lineage import write_run

from tiphys.checkpoint.restore import shard_reader
from tiphys.lineage.audit.audit import audit_run
from tiphys.store import Store, open_store

_PIECE_BYTES = 32 * MIB
_CORES = 2


def measure(work: Workload) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        folder = scratch(stack)
        found = _verification(work, f"file://{folder}")
    with work.server.at(None):
        bucket = _deep(work, STORE)
    restored = {name: _restore(work, network, work.repeats) for name, network in work.networks.items()}
    return {
        "deep_of_a_folder_bytes_per_second": found["deep"],
        "sha256_bytes_per_second": found["ceiling"],
        "deep_of_a_bucket_bytes_per_second": bucket,
        "restore": restored,
        "line": {
            "verify_over_sha256": ratio(found["deep"], found["ceiling"]),
            # At full speed the server and the loader fill both cores, and what is measured is the lack of a third.
            "restore_verify_overhead": restored["throttled"]["overhead"],
        },
    }


def _verification(work: Workload, url: str) -> dict[str, Any]:
    """On a folder in memory, since a server would share the cores; in turns with the ceiling."""
    whole = joined(work.state)
    pieces = [whole[start : start + _PIECE_BYTES] for start in range(0, len(whole), _PIECE_BYTES)]
    store, run = _saved(work, url)
    deep, ceiling = [], []
    for _ in range(work.repeats):
        deep.append(_audit(store, run))
        ceiling += sha256(pieces, _CORES, 1)["samples"]
    say(f"tiphys verify --deep: {summary(deep)['median']:.3g} B/s of a folder, sha256 {summary(ceiling)['median']:.3g}")
    return {"deep": summary(deep), "ceiling": summary(ceiling)}


def _deep(work: Workload, url: str) -> dict[str, Any]:
    store, run = _saved(work, url)
    rates = [_audit(store, run) for _ in range(work.repeats)]
    work.server.empty()
    return summary(rates)


def _audit(store: Store, run: str) -> float:
    """Bytes per second of a verification that reads everything."""
    sizes: list[int] = []
    took = seconds(lambda: sizes.append(_sound(store, run)))
    return sizes[0] / took


def _sound(store: Store, run: str) -> int:
    found = audit_run(store, run, deep=True, threads=_CORES)
    if not found.is_sound:
        raise RuntimeError(f"the verification found damage: {found.damage[0]}")
    return found.size_bytes


def _saved(work: Workload, url: str) -> tuple[Store, str]:
    """A run with one checkpoint."""
    store = open_store(url)
    run = new_run(store)
    write_run(store, run=run, step=STEP)
    with session(url, run) as opened:
        commit(opened, 1, work)
    return store, run


def _restore(work: Workload, network: float | None, repeats: int) -> dict[str, Any]:
    """Restores with and without hashes, in turns; the overhead is that of the medians."""
    with work.server.at(None):
        _, run = _saved(work, STORE)
    with work.server.at(network):
        compared, trusted = [], []
        _restored(run)
        for _ in range(repeats):
            compared.append(_restored(run))
            with _nothing_is_hashed():
                trusted.append(_restored(run))
    work.server.empty()
    with_hashes, without = summary(compared), summary(trusted)
    overhead = significant(with_hashes["median"] / without["median"])
    say(f"restore at {network or 'any'} MB/s: {with_hashes['median']} s, {without['median']} s without hashes")
    return {"seconds": with_hashes, "without_hashes_seconds": without, "overhead": overhead}


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
