"""Reading every byte that records vouch for, as fast as the machine can hash.

A disk or a bucket can answer with other bytes of the right length, and nothing
but their hash tells. Objects are read in pieces of 1 MiB by several threads:
hashing releases the interpreter's lock, so that cores add up, and a piece that
stays in the processor's cache is hashed as fast as it arrives.
"""

import hashlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from tiphys.errors import ObjectMissingError
from tiphys.lineage.damage import Damage, Wanted, damage, size_damage
from tiphys.records import CheckpointRef

PIECE_BYTES = 1 << 20


class _StoppedError(Exception):
    """Somebody gave up waiting for the result."""


def check_bytes(
    wanted: Sequence[Wanted], *, run: str, jobs: int, barred: frozenset[CheckpointRef], advance: Callable[[int], None]
) -> list[Damage]:
    """Read and hash every object with ``jobs`` threads; what does not match its record, in the order of ``wanted``.

    ``advance`` is told of bytes as they are read, from any thread. An exception,
    also Ctrl-C, ends the threads within one piece each.

    Raises:
        StoreError: storage did not answer; that says nothing about the objects.
    """
    stop = threading.Event()
    found: dict[int, Damage] = {}
    # The largest first, so that the last thread is not left alone with one of them.
    order = sorted(range(len(wanted)), key=lambda index: -wanted[index].size)
    with ThreadPoolExecutor(max_workers=max(1, jobs), thread_name_prefix="verify") as pool:
        futures = {pool.submit(_check, wanted[index], run, barred, advance, stop): index for index in order}
        try:
            for future in as_completed(futures):
                if (fault := future.result()) is not None:
                    found[futures[future]] = fault
        except BaseException:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return [found[index] for index in sorted(found)]


def _check(
    wanted: Wanted, run: str, barred: frozenset[CheckpointRef], advance: Callable[[int], None], stop: threading.Event
) -> Damage | None:
    is_barred = wanted.place.checkpoint in barred
    size, sha256 = _read(wanted, advance, stop)
    if (size, sha256) != (wanted.size, wanted.sha256):
        # Once more: nothing must be condemned for what went wrong on the way.
        size, sha256 = _read(wanted, lambda _: None, stop)
    if size != wanted.size:
        return size_damage(wanted, size, run=run, barred=is_barred)
    if sha256 == wanted.sha256:
        return None
    fault = f"its sha256 is {sha256[:12]}…, its record says {wanted.sha256[:12]}…"
    return damage(wanted.place, wanted.key, fault, f"within 0-{size - 1}", run=run, barred=is_barred)


def _read(wanted: Wanted, advance: Callable[[int], None], stop: threading.Event) -> tuple[int | None, str]:
    """Bytes and hash of what storage holds; no size where there is no such object."""
    digest = hashlib.sha256()
    size = 0
    try:
        for piece in wanted.store.chunks(wanted.key, PIECE_BYTES):
            if stop.is_set():
                raise _StoppedError
            digest.update(piece)
            size += len(piece)
            advance(len(piece))
    except ObjectMissingError:
        return None, ""
    return size, digest.hexdigest()
