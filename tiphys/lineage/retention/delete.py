"""Two-phase deletion of expired checkpoints, which never deletes the last valid one.

Retention runs after a commit and in `tiphys gc`, and tolerates a kill at any
point. First an expired checkpoint is marked with a tombstone; it stays usable
during the delay. After the delay the process announces the deletion, reads all
references again, and deletes only what is still unreferenced: manifest before
shards, so that a partly deleted checkpoint is no checkpoint. The clock decides
only when a checkpoint is deleted; a referenced checkpoint is never deleted.

A tombstone outlives its process and is removed last, so that a later process
finds and completes an interrupted deletion. An announcement carries the nonce of
its author. Only the author withdraws it: if another process did, the author
could delete a checkpoint that was just rescued.
"""

import contextlib
import secrets
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import datetime, timedelta
from itertools import chain
from typing import NamedTuple

from tiphys.errors import ConflictError, IntegrityError, NotFoundError, ObjectMissingError, StoreError, StoreFullError
from tiphys.faults import failpoint
from tiphys.lineage.quarantine import list_quarantined
from tiphys.lineage.retention.policy import (
    LineageSnapshot,
    RetentionVerdict,
    age_key,
    evaluate_retention,
    list_pins,
    select_newest_valid,
)
from tiphys.lineage.select import StartCheckpoints, list_commits, order_candidates
from tiphys.lineage.validity import CheckpointValidity
from tiphys.protocol.step_spec import RetentionPolicy
from tiphys.records import CheckpointRef, TombstoneRecord, utc_now
from tiphys.store import LineageLayout, ObjectInfo, Store, claim_record, read_record
from tiphys.store.runs import read_concurrently


class Tombstones:
    """Tombstones (marks) and deletion announcements of one lineage."""

    def __init__(self, store: Store, lineage: str, now: Callable[[], datetime]) -> None:
        self._store = store
        self._now = now
        self._layout = LineageLayout(lineage)
        self._nonce = secrets.token_hex(8)
        self._marked_at: dict[CheckpointRef, datetime] = {}
        self._damaged: set[CheckpointRef] = set()

    def read(self) -> dict[CheckpointRef, datetime | None]:
        """Time of each mark; None if the mark is damaged or only an announcement exists.

        Costs one listing, and a read for each new mark.
        """
        listed = [parsed for info in self._store.list(self._layout.all_tombstones) if (parsed := self._parse(info.key))]
        marked = {ref for ref, nonce in listed if not nonce}
        new = sorted(marked.difference(self._marked_at), key=str)
        new_times = zip(new, read_concurrently(self._read, new), strict=True)
        self._marked_at = {ref: self._marked_at[ref] for ref in marked.intersection(self._marked_at)}
        self._marked_at |= {ref: since for ref, since in new_times if since is not None}
        return {ref: self._marked_at.get(ref) for ref, _ in listed}

    def marked_at(self, ref: CheckpointRef) -> datetime | None:
        """When ``ref`` was marked, as of the last read or write; None if it was not."""
        return self._marked_at.get(ref)

    def mark(self, ref: CheckpointRef) -> None:
        """Mark ``ref``, which starts its delay."""
        failpoint("retention.before_mark")
        if ref in self._damaged:  # a mark holds only a time, so a damaged one can be replaced
            self._store.delete(self._key(ref))
            self._damaged.discard(ref)
        record = TombstoneRecord(checkpoint=ref, written_at=self._now())
        with contextlib.suppress(ObjectMissingError):  # another process marked and deleted it in this moment
            self._marked_at[ref] = claim_record(self._store, self._key(ref), record).record.written_at
        failpoint("retention.after_mark")

    def unmark(self, ref: CheckpointRef) -> None:
        """Remove the mark. If ``ref`` expires again, its delay starts again."""
        self._marked_at.pop(ref, None)
        self._store.delete(self._key(ref))
        failpoint("retention.after_rescue")

    def announce_deletion(self, refs: Sequence[CheckpointRef]) -> Sequence[CheckpointRef]:
        """Announce deletions, before references are read for the last time; return those that are announced.

        A full store takes as many announcements as it has room for. If it takes none, a mark makes room for the first.

        Raises:
            StoreFullError: not even one announcement found room, so nothing may be deleted.
        """
        for count, ref in enumerate(refs):
            try:
                self._announce(ref)
            except StoreFullError:
                if count:
                    return refs[:count]
                self.unmark(next(filter(self.marked_at, refs), ref))
                self._announce(ref)
            failpoint("retention.after_announcement")
        return refs

    def withdraw_announcement(self, refs: Iterable[CheckpointRef]) -> None:
        """Withdraw the announcements of this process for ``refs``."""
        for ref in refs:
            self._store.delete(self._announcement_key(ref))

    def remove_all(self, ref: CheckpointRef) -> None:
        """Remove all announcements of the deleted checkpoint ``ref``, then its mark, which is listed last."""
        failpoint("retention.before_clear")
        for info in list(self._store.list(self._layout.tombstones(ref.attempt, ref.global_step))):
            self._store.delete(info.key)
            failpoint("retention.after_clear")
        self._marked_at.pop(ref, None)

    def _announce(self, ref: CheckpointRef) -> None:
        claim_record(self._store, self._announcement_key(ref), TombstoneRecord(checkpoint=ref))

    def _read(self, ref: CheckpointRef) -> datetime | None:
        try:
            return read_record(self._store, self._key(ref), TombstoneRecord).written_at
        except ObjectMissingError:  # another process removed it after it was listed
            return None
        except IntegrityError:
            self._damaged.add(ref)
            return None

    def _parse(self, key: str) -> tuple[CheckpointRef, str] | None:
        return self._layout.parse_tombstone(key)

    def _key(self, ref: CheckpointRef) -> str:
        return self._layout.tombstone(ref.attempt, ref.global_step)

    def _announcement_key(self, ref: CheckpointRef) -> str:
        return self._layout.deletion_notice(ref.attempt, ref.global_step, self._nonce)


_MAX_PER_PASS = 16
"""Maximum of checkpoints that one pass after a commit marks or deletes, because the next save waits for the pass."""
_COMMITS_PER_REQUEST = 1000
"""Checkpoints that a request lists. A pass that took more requests serves as many commits, so the cost of a commit does
not grow with the lineage, and a thousandth of the checkpoints stay longer."""

RecheckReferences = Callable[[], Collection[CheckpointRef] | None]


class RetentionPlan(NamedTuple):
    """The state of a lineage and the decision about its checkpoints."""

    marked: dict[CheckpointRef, datetime | None]
    """Existing marks and their times."""
    snapshot: LineageSnapshot
    verdict: RetentionVerdict
    quarantined: set[CheckpointRef]


class RetentionResult(NamedTuple):
    plan: RetentionPlan
    marked: dict[CheckpointRef, datetime]
    """Times of the marks of all expired checkpoints, including marks of this pass."""
    deleted: list[CheckpointRef]
    orphan_bytes: int
    """Bytes of the deleted shards that no manifest names."""


class Retention:
    """Applies a retention policy to one lineage. Referenced checkpoints are always kept.

    Args:
        recheck: Called between announcement and deletion. Returns further
            checkpoints to keep, or raises `ConflictError` (such as
            `FencedError`) or `NotFoundError` if nothing may be deleted.
    """

    def __init__(
        self,
        store: Store,
        lineage: str,
        keep: RetentionPolicy | None,
        *,
        recheck: RecheckReferences = tuple,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self._store = store
        self._lineage = lineage
        self._layout = LineageLayout(lineage)
        self._keep = keep
        self._recheck = recheck
        self._now = now
        self._tombstones = Tombstones(store, lineage, now)
        self._validity = CheckpointValidity(store, lineage)
        self._orphans_deleted = False
        self._commits_per_pass = 1
        self._commits_served = 0
        """By the last pass; 0 before the first."""

    def trust(self, ref: CheckpointRef) -> None:
        """Count ``ref`` as valid without a check: it was just written, or read with all hashes verified."""
        self._validity.trust(ref)

    def apply(self, starts_from: StartCheckpoints, protected: Collection[CheckpointRef]) -> list[CheckpointRef]:
        """Mark expired checkpoints, and delete those whose delay is over, after a commit; return the deleted ones.

        Quarantined and pinned checkpoints stay. Nothing expires while there are
        fewer valid checkpoints than the policy keeps.

        ``starts_from`` are the start checkpoints of all attempts, ``protected`` those that the newest attempt refers
        to.
        """
        if self._keep is None:
            return []
        if 0 < self._commits_served < self._commits_per_pass:
            self._commits_served += 1
            return []
        result = self.collect(starts_from, protected, limit=_MAX_PER_PASS * self._commits_per_pass)
        commits = len(result.plan.snapshot.commits)
        self._commits_served, self._commits_per_pass = 1, 1 + commits // (_COMMITS_PER_REQUEST + 1)
        return result.deleted

    def make_room(
        self, starts_from: StartCheckpoints, protected: Collection[CheckpointRef], saving: CheckpointRef
    ) -> int:
        """Delete at once what has expired, and shards of saves that failed, because the store is full.

        The delay of expired checkpoints is not waited for. Everything that `apply` keeps stays.

        ``saving`` is the checkpoint for which there is no room: the attempt commits in the order of its steps.

        Returns:
            Number of deleted checkpoints and shards.

        Raises:
            StoreFullError: the store has no room for the announcement of a deletion.
        """
        plan = self.plan(starts_from, protected)
        named = {*plan.snapshot.commits, *plan.quarantined}
        shards = self._store.list(self._layout.all_shards) if self._keep is not None else ()
        refs = ((info, self._layout.parse_shard(info.key)) for info in shards)
        failed = [info for info, ref in refs if ref and ref not in named and _is_earlier_save(ref, saving)]
        orphans = {info.key for info in (*self.list_orphans(plan), *failed)}
        self._recheck()
        for key in orphans:
            self._store.delete(key)
        return len(orphans) + len(self._delete(list(plan.verdict.expired), starts_from, protected))

    def plan(self, starts_from: StartCheckpoints, protected: Collection[CheckpointRef]) -> RetentionPlan:
        """The plan of `collect`; writes nothing. Costs four listings if the validity of all checkpoints is cached."""
        marked = self._tombstones.read()  # before the commits, so that a mark without a commit means a deletion
        commits = list_commits(self._store, self._lineage)
        quarantined = list_quarantined(self._store, self._lineage)
        usable = [ref for ref in order_candidates(commits, self._lineage, starts_from) if ref not in quarantined]
        self._validity.forget_except(usable)
        references: dict[CheckpointRef, list[str]] = {ref: ["quarantined"] for ref in quarantined}
        for ref in protected:
            references.setdefault(ref, []).append(f"attempt {max(starts_from, default=1)} started from it")
        for ref, names in list_pins(self._store, self._lineage).items():
            references.setdefault(ref, []).extend(f"pinned {name}" for name in names)
        snapshot = LineageSnapshot(commits, usable, self._valid(usable), references)
        return RetentionPlan(marked, snapshot, evaluate_retention(self._keep, snapshot), quarantined)

    def collect(
        self, starts_from: StartCheckpoints, protected: Collection[CheckpointRef], limit: int | None = None
    ) -> RetentionResult:
        """Like `apply`, with a full result; ``limit`` is the maximum number of marks and of deletions."""
        plan = self.plan(starts_from, protected)
        self._reconcile_marks(plan, limit)
        marked = {ref: since for ref in plan.verdict.expired if (since := self._tombstones.marked_at(ref)) is not None}
        deleted = self._delete(self.select_due(plan.verdict)[:limit], starts_from, protected)
        return RetentionResult(plan, marked, deleted, self._delete_orphans(plan))

    def select_due(self, verdict: RetentionVerdict) -> list[CheckpointRef]:
        """Expired checkpoints whose delay is over, oldest first, by the marks of the last read."""
        if self._keep is None or not self._keep.delay_seconds:
            # Without a delay no clock is compared: the marking machine's clock may be ahead.
            return list(verdict.expired)
        now, delay = self._now(), timedelta(seconds=self._keep.delay_seconds)
        marked = [(ref, since) for ref in verdict.expired if (since := self._tombstones.marked_at(ref)) is not None]
        return [ref for ref, since in marked if now - since >= delay]

    def list_orphans(self, plan: RetentionPlan) -> list[ObjectInfo]:
        """Shards and refused pins of checkpoints that are not there and too old for a pending commit; two listings."""
        recent = select_newest_valid(self._keep, plan.snapshot) if self._keep else []
        if self._keep is None or len(recent) < self._keep.last:
            return []
        named = {*plan.snapshot.commits, *plan.quarantined}
        youngest = max(map(age_key, recent))
        shards = ((info, self._layout.parse_shard(info.key)) for info in self._store.list(self._layout.all_shards))
        pins = ((info, self._layout.parse_pin(info.key)) for info in self._store.list(self._layout.all_pins))
        refs = chain(shards, ((info, pin and pin[0]) for info, pin in pins))
        return [info for info, ref in refs if ref is not None and ref not in named and age_key(ref) < youngest]

    def _valid(self, usable: list[CheckpointRef]) -> dict[CheckpointRef, dict[str, float]]:
        if self._keep is None:
            return {}
        needs_all = self._keep.every_steps is not None or self._keep.best is not None
        valid = self._validity.all_valid(usable) if needs_all else self._validity.newest_valid(usable, self._keep.last)
        return {ref: dict(metrics) for ref, metrics in valid.items()}

    def _reconcile_marks(self, plan: RetentionPlan, limit: int | None) -> None:
        """Complete interrupted deletions, unmark checkpoints that no longer expire, and mark those that do."""
        commits, expired = set(plan.snapshot.commits), set(plan.verdict.expired)
        for ref, since in plan.marked.items():
            if ref not in commits:
                self._remove_shards(ref)
            elif ref not in expired and since is not None:
                self._tombstones.unmark(ref)
        for ref in [ref for ref in plan.verdict.expired if plan.marked.get(ref) is None][:limit]:
            self._tombstones.mark(ref)

    def _delete(
        self, due: list[CheckpointRef], starts_from: StartCheckpoints, protected: Collection[CheckpointRef]
    ) -> list[CheckpointRef]:
        if not due:
            return []
        # Without an announcement a pin could come after the last look at the pins, and be acknowledged.
        announced = self._tombstones.announce_deletion(due)
        try:
            still_expired = set(self.plan(starts_from, {*protected, *(self._recheck() or ())}).verdict.expired)
        except (ConflictError, NotFoundError):  # the next save reports this; retention must not end the program
            still_expired = set()
        except StoreError:
            with contextlib.suppress(StoreError):
                self._tombstones.withdraw_announcement(announced)
            raise
        self._tombstones.withdraw_announcement([ref for ref in announced if ref not in still_expired])
        deleted = [ref for ref in announced if ref in still_expired]
        for ref in deleted:
            self._store.delete(self._layout.manifest(ref.attempt, ref.global_step))
            failpoint("retention.after_manifest_delete")
            self._remove_shards(ref)
        return deleted

    def _remove_shards(self, ref: CheckpointRef) -> None:
        for info in list(self._store.list(self._layout.shards(ref.attempt, ref.global_step))):
            self._store.delete(info.key)
            failpoint("retention.after_shard_delete")
        self._tombstones.remove_all(ref)

    def _delete_orphans(self, plan: RetentionPlan) -> int:
        """Delete the shards of interrupted saves and refused pins, once per instance; return their bytes."""
        if self._orphans_deleted:
            return 0
        orphans = self.list_orphans(plan)
        for info in orphans:
            self._store.delete(info.key)
            failpoint("retention.after_sweep")
        self._orphans_deleted = (
            self._keep is not None and len(select_newest_valid(self._keep, plan.snapshot)) == self._keep.last
        )
        return sum(info.size for info in orphans)


def _is_earlier_save(ref: CheckpointRef, saving: CheckpointRef) -> bool:
    """Whether ``ref`` is a step of the attempt of ``saving`` before it."""
    return ref.attempt == saving.attempt and ref.global_step < saving.global_step
