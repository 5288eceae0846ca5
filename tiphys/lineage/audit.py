"""Is everything that a run relies on what was recorded? The work behind ``tiphys verify``.

Every record is read and has to be byte for byte what its writer stored, of this
run and of this place; every object that a record vouches for has to be listed
with its size, and with ``deep`` to hold the bytes. Records also vouch for each
other: attempts are numbered without a gap, all but the newest have ended, and
what the newest started from is still there.
"""

import os
from collections.abc import Callable, Mapping

from tiphys.errors import NotFoundError
from tiphys.lineage.audit_attempts import AttemptRecords, audit_attempts, belongs
from tiphys.lineage.audit_checkpoints import LineageAudit, is_gone
from tiphys.lineage.audit_records import Reader, checkpoint_stores
from tiphys.lineage.damage import OF_CHECKPOINTS, Audit, Barred, Damage, Wanted
from tiphys.lineage.deep import check_bytes
from tiphys.lineage.quarantine import quarantine
from tiphys.records import CheckpointRef
from tiphys.store import LineageLayout, Store, read_run
from tiphys.store.layout import LINEAGES


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
