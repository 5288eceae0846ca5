"""Is everything that a run relies on what was recorded? The work behind ``tiphys verify``.

Every record is read and has to be byte for byte what its writer stored, of this
run and of this place; every object that a record vouches for has to be listed
with its size, and with ``deep`` to hold the bytes. Records also vouch for each
other: attempts are numbered without a gap, all but the newest have ended, and
what the newest started from is still there.

Reading every byte that records vouch for, as fast as the machine can hash.

A disk or a bucket can answer with other bytes of the right length, and nothing
but their hash tells. Objects are read in pieces of 1 MiB by several threads:
hashing releases the interpreter's lock, so that cores add up, and a piece that
stays in the processor's cache is hashed as fast as it arrives.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from tiphys.errors import NotFoundError, ObjectMissingError
from tiphys.lineage.audit.checks import (
    AttemptRecords,
    LineageAudit,
    Reader,
    audit_attempts,
    belongs,
    checkpoint_stores,
    is_gone,
)
from tiphys.lineage.audit.findings import OF_CHECKPOINTS, Audit, Barred, Damage, Wanted, damage, size_damage
from tiphys.lineage.quarantine import quarantine
from tiphys.records import CheckpointRef
from tiphys.store import LineageLayout, Store, read_run
from tiphys.store.layout import LINEAGES

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


def _nobody_listens(_: int) -> None:
    """Progress that is not shown."""


def audit(
    store: Store,
    run: str,
    step: str = "",
    *,
    deep: bool = False,
    jobs: int | None = None,
    begin: Callable[[int], None] = _nobody_listens,
    advance: Callable[[int], None] = _nobody_listens,
) -> Audit:
    """Verify ``run``, or one step of it with all its items.

    Without ``deep`` it costs two reads for each record, and a listing for each
    lineage and each finished attempt; with it, every byte is read by ``jobs``
    threads, by default as many as there are cores. ``begin`` is told how many
    bytes that will be, ``advance`` of bytes as they are read, from any thread.

    Raises:
        NotFoundError: the store has no such run, or the run no such step.
        StoreError: storage did not answer.
    """
    found, wanted = survey(store, run, step)
    if not deep:
        return found
    broken = {one.key for one in found.damage}
    left = [one for one in wanted if one.key not in broken]
    begin(sum(one.size for one in left))
    barred = frozenset(one.checkpoint for one in found.quarantined)
    damaged = check_bytes(left, run=run, jobs=jobs or os.cpu_count() or 1, barred=barred, advance=advance)
    stores = {one.key: one.store for one in left}
    lasting = tuple(one for one in damaged if not _is_removed(stores[one.key], one))
    return found.model_copy(update={"deep": True, "damage": (*found.damage, *lasting)})


def survey(store: Store, run: str, step: str = "") -> tuple[Audit, list[Wanted]]:
    """Everything but the bytes, and the objects that records vouch for. Raises like `audit`."""
    reader = Reader(store, run)
    record = reader.run_record()
    if record is None and not reader.found:
        read_run(store, run)  # raises, and names similar runs
    reader.check_submissions()
    attempts = audit_attempts(reader, step)
    names = _lineages(store, run, attempts, step)
    if step and not attempts and not names:
        raise NotFoundError(f"run {run} has no step {step!r} that was ever started; `tiphys get {run}` lists its steps")
    store_of = checkpoint_stores(store, record)
    barred: list[Barred] = []
    checkpoints = 0
    for name in names:
        try:
            place = Reader(store_of(name), run)
        except NotFoundError as error:
            reader.notes.append(f"the checkpoints of {name} cannot be seen from here: {error}")
            continue
        lineage = LineageAudit(place, name, attempts.get(name, AttemptRecords()))
        lineage.check()
        reader.found += place.found
        reader.wanted += place.wanted
        barred += lineage.barred.values()
        checkpoints += len(lineage.commits)
    found = Audit(
        run=run,
        deep=False,
        attempts=sum(len(records.claimed) for records in attempts.values()),
        checkpoints=checkpoints,
        objects=len(reader.wanted),
        size_bytes=sum(one.size for one in reader.wanted),
        damage=tuple(reader.found),
        quarantined=tuple(barred),
        notes=tuple(reader.notes),
    )
    return found, reader.wanted


def bar(store: Store, found: Audit) -> list[CheckpointRef]:
    """Quarantine every checkpoint that was found damaged and was not barred; which ones."""
    store_of = checkpoint_stores(store, Reader(store, found.run).run_record())
    faults: dict[CheckpointRef, Damage] = {}
    for one in found.damage:
        if one.layer in OF_CHECKPOINTS and one.checkpoint is not None and not one.barred:
            faults.setdefault(one.checkpoint, one)
    for ref, one in faults.items():
        quarantine(store_of(one.step), ref, f"{one.key}: {one.fault}", by="verify")
    return list(faults)


def _lineages(store: Store, run: str, attempts: Mapping[str, AttemptRecords], step: str) -> list[str]:
    """Step ids that have checkpoints in the run's store, or attempts that keep some anywhere."""
    stored = (prefix.removeprefix(f"{LINEAGES}{run}/").rstrip("/") for prefix in store.prefixes(f"{LINEAGES}{run}/"))
    claimed = (name for name, records in attempts.items() if any(c.lineage for c in records.claims.values()))
    return sorted(name for name in {*stored, *claimed} if belongs(name, step))


def _is_removed(store: Store, found: Damage) -> bool:
    """Whether retention removed the checkpoint while it was read."""
    if found.checkpoint is None:
        return False
    ref = found.checkpoint
    return is_gone(store, LineageLayout(ref.lineage).manifest(ref.attempt, ref.global_step))
