"""Audit of a run, the implementation of ``tiphys verify``.

Every record must be byte for byte what its writer stored, and belong to its run
and key. Every object that a record names must be listed with its size. Attempts
must be numbered without a gap, all but the newest must have ended, and the start
checkpoint of the newest must exist.

A deep audit also reads all bytes, because a disk or a bucket can return wrong
bytes of the right length. Several threads read pieces of 1 MiB: hashing releases
the interpreter lock, so that all cores work, and a piece fits into the
processor's cache.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from tiphys.errors import NotFoundError, ObjectMissingError
from tiphys.lineage.audit.checks import (
    AttemptRecords,
    AuditReader,
    LineageAudit,
    audit_attempts,
    checkpoint_store_resolver,
    is_deleted,
)
from tiphys.lineage.audit.findings import (
    CHECKPOINT_LAYERS,
    AuditFinding,
    AuditReport,
    ExpectedObject,
    QuarantinedCheckpoint,
    check_size,
    make_finding,
)
from tiphys.lineage.quarantine import quarantine_checkpoint
from tiphys.lineage.step_names import selects_step
from tiphys.records import CheckpointRef
from tiphys.store import LineageLayout, Store, read_run
from tiphys.store.layout import LINEAGES

CHUNK_BYTES = 1 << 20


class _StoppedError(Exception):
    """The caller no longer waits for the result."""


def check_bytes(
    expected_objects: Sequence[ExpectedObject],
    *,
    run: str,
    threads: int,
    quarantined: frozenset[CheckpointRef],
    on_bytes_read: Callable[[int], None],
) -> list[AuditFinding]:
    """Hash every object and return the mismatches, in the order of ``expected_objects``.

    An exception, also Ctrl-C, ends each thread after its current piece.

    ``on_bytes_read`` is called with the number of bytes of each piece, from any thread.

    Raises:
        StoreError: storage did not answer, so the state of the objects is unknown.
    """
    stop = threading.Event()
    findings: dict[int, AuditFinding] = {}
    # The largest objects first, so that no thread is left with a large object at the end.
    order = sorted(range(len(expected_objects)), key=lambda index: -expected_objects[index].size)
    with ThreadPoolExecutor(max_workers=max(1, threads), thread_name_prefix="verify") as pool:
        futures = {
            pool.submit(_check_object, expected_objects[index], run, quarantined, on_bytes_read, stop): index
            for index in order
        }
        try:
            for future in as_completed(futures):
                if (fault := future.result()) is not None:
                    findings[futures[future]] = fault
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    return [findings[index] for index in sorted(findings)]


def _check_object(
    expected: ExpectedObject,
    run: str,
    quarantined: frozenset[CheckpointRef],
    on_bytes_read: Callable[[int], None],
    stop: threading.Event,
) -> AuditFinding | None:
    is_quarantined = expected.location.checkpoint in quarantined
    size, sha256 = _hash_object(expected, on_bytes_read, stop)
    if (size, sha256) != (expected.size, expected.sha256):
        # Read again, because the first mismatch may be an error of the transfer.
        size, sha256 = _hash_object(expected, lambda _: None, stop)
    if size != expected.size:
        return check_size(expected, size, run=run, is_quarantined=is_quarantined)
    if sha256 == expected.sha256:
        return None
    fault = f"its sha256 is {sha256[:12]}…, its record says {expected.sha256[:12]}…"
    return make_finding(
        expected.location, expected.key, fault, f"within 0-{size - 1}", run=run, is_quarantined=is_quarantined
    )


def _hash_object(
    expected: ExpectedObject, on_bytes_read: Callable[[int], None], stop: threading.Event
) -> tuple[int | None, str]:
    """Size in bytes and SHA-256 of the stored object; no size if it does not exist."""
    digest = hashlib.sha256()
    size = 0
    try:
        for piece in expected.store.chunks(expected.key, CHUNK_BYTES):
            if stop.is_set():
                raise _StoppedError
            digest.update(piece)
            size += len(piece)
            on_bytes_read(len(piece))
    except ObjectMissingError:
        return None, ""
    return size, digest.hexdigest()


def _ignore_progress(_: int) -> None:
    """Discard progress."""


def audit_run(
    store: Store,
    run: str,
    step: str = "",
    *,
    deep: bool = False,
    threads: int | None = None,
    on_total_bytes: Callable[[int], None] = _ignore_progress,
    on_bytes_read: Callable[[int], None] = _ignore_progress,
) -> AuditReport:
    """Audit a run, or one step of it with all its items.

    Costs a read for each record, and a listing for each lineage and each finished
    attempt; with ``deep`` all bytes are read in addition.

    An empty ``step`` means all steps. ``on_total_bytes`` is called once with the number of bytes that will be read,
    ``on_bytes_read`` with that of each piece, from any thread.

    Raises:
        NotFoundError: the store has no such run, or the run has no such step.
        StoreError: storage did not answer.
    """
    report, expected_objects = audit_without_bytes(store, run, step)
    if not deep:
        return report
    damaged_keys = {finding.key for finding in report.damage}
    unchecked = [expected for expected in expected_objects if expected.key not in damaged_keys]
    on_total_bytes(sum(expected.size for expected in unchecked))
    quarantined = frozenset(entry.checkpoint for entry in report.quarantined)
    findings = check_bytes(
        unchecked, run=run, threads=threads or os.cpu_count() or 1, quarantined=quarantined, on_bytes_read=on_bytes_read
    )
    stores = {expected.key: expected.store for expected in unchecked}
    damage = tuple(finding for finding in findings if not _is_checkpoint_removed(stores[finding.key], finding))
    return report.model_copy(update={"deep": True, "damage": (*report.damage, *damage)})


def audit_without_bytes(store: Store, run: str, step: str = "") -> tuple[AuditReport, list[ExpectedObject]]:
    """Audit everything except the bytes; also return the objects that records name. Raises like `audit_run`."""
    reader = AuditReader(store, run)
    record = reader.read_run_record()
    if record is None and not reader.findings:
        read_run(store, run)  # raises, and names similar runs
    reader.check_submissions()
    attempts = audit_attempts(reader, step)
    names = _list_lineages(store, run, attempts, step)
    if step and not attempts and not names:
        raise NotFoundError(f"run {run} has no step {step!r} that was ever started; `tiphys get {run}` lists its steps")
    store_of = checkpoint_store_resolver(store, record)
    quarantined: list[QuarantinedCheckpoint] = []
    checkpoints = 0
    for name in names:
        try:
            lineage_reader = AuditReader(store_of(name), run)
        except NotFoundError as error:
            reader.notes.append(f"the checkpoints of {name} cannot be read from this machine: {error}")
            continue
        lineage = LineageAudit(lineage_reader, name, attempts.get(name, AttemptRecords()))
        lineage.check()
        reader.findings += lineage_reader.findings
        reader.expected_objects += lineage_reader.expected_objects
        quarantined += lineage.quarantined.values()
        checkpoints += len(lineage.commits)
    report = AuditReport(
        run=run,
        deep=False,
        attempts=sum(len(records.claimed) for records in attempts.values()),
        checkpoints=checkpoints,
        objects=len(reader.expected_objects),
        size_bytes=sum(expected.size for expected in reader.expected_objects),
        damage=tuple(reader.findings),
        quarantined=tuple(quarantined),
        notes=tuple(reader.notes),
    )
    return report, reader.expected_objects


def quarantine_damaged(store: Store, report: AuditReport) -> list[CheckpointRef]:
    """Quarantine the damaged checkpoints of ``report`` that are not in quarantine; return them."""
    store_of = checkpoint_store_resolver(store, AuditReader(store, report.run).read_run_record())
    first_findings: dict[CheckpointRef, AuditFinding] = {}
    for finding in report.damage:
        if finding.layer in CHECKPOINT_LAYERS and finding.checkpoint is not None and not finding.barred:
            first_findings.setdefault(finding.checkpoint, finding)
    for ref, finding in first_findings.items():
        quarantine_checkpoint(store_of(finding.step), ref, f"{finding.key}: {finding.fault}", by="verify")
    return list(first_findings)


def _list_lineages(store: Store, run: str, attempts: Mapping[str, AttemptRecords], step: str) -> list[str]:
    """Step ids with checkpoints in the run's store, or with attempts that have a lineage."""
    stored = (prefix.removeprefix(f"{LINEAGES}{run}/").rstrip("/") for prefix in store.prefixes(f"{LINEAGES}{run}/"))
    claimed = (name for name, records in attempts.items() if any(c.lineage for c in records.claims.values()))
    return sorted(name for name in {*stored, *claimed} if selects_step(step, name))


def _is_checkpoint_removed(store: Store, finding: AuditFinding) -> bool:
    """Whether retention removed the checkpoint during the audit."""
    if finding.checkpoint is None:
        return False
    ref = finding.checkpoint
    return is_deleted(store, LineageLayout(ref.lineage).manifest(ref.attempt, ref.global_step))
