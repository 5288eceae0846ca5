"""Removing old checkpoints without ever removing the last good one.

Retention is the only deletion of the whole system. It runs after a commit, and
in `tiphys gc`; a process killed anywhere in it has lost nothing that it had
promised. A checkpoint goes in two steps. First it is marked, and stays as good
as any other for a while. When the delay is over its deletion is announced, all
references are read once more, and only then does it go: manifest before shards,
so that one that is half removed is no checkpoint. The clock decides when,
never whether: what something refers to stays, however late or early it is.

What is to be deleted, as storage remembers it: marks, and announcements of who deletes now.

A mark begins the delay and survives the process that made it; it goes last, so
that a deletion that died half way is found and finished. An announcement is
written before the last look for references. It carries the nonce of its author,
who alone takes it back: if others did, he could delete what they just rescued.
"""

import contextlib
import secrets
from collections.abc import Callable, Collection, Iterable
from datetime import datetime, timedelta
from typing import NamedTuple

from tiphys.errors import ConflictError, IntegrityError, NotFoundError, ObjectMissingError, StoreError
from tiphys.faults import failpoint
from tiphys.lineage.quarantine import quarantined
from tiphys.lineage.retention.policy import Observed, Verdict, age, judge, newest, pins_of
from tiphys.lineage.select import StartsFrom, chain, commits_of
from tiphys.lineage.validity import Validity
from tiphys.protocol.step_spec import Keep
from tiphys.records import CheckpointRef, ExpiryRecord, utc_now
from tiphys.store import LineageLayout, ObjectInfo, Store, claim, read_record
from tiphys.store.runs import concurrently


class Marks:
    """The marks of one lineage."""

    def __init__(self, store: Store, lineage: str, now: Callable[[], datetime]) -> None:
        self._store = store
        self._now = now
        self._layout = LineageLayout(lineage)
        self._nonce = secrets.token_hex(8)
        self._since: dict[CheckpointRef, datetime] = {}
        self._damaged: set[CheckpointRef] = set()

    def read(self) -> dict[CheckpointRef, datetime | None]:
        """What is marked, and since when; None where the mark is damaged, or only an announcement was left behind.

        Costs one listing, and a read for each mark that was not seen before.
        """
        listed = [place for info in self._store.list(self._layout.expired) if (place := self._parse(info.key))]
        marked = {ref for ref, nonce in listed if not nonce}
        new = sorted(marked.difference(self._since), key=str)
        read = zip(new, concurrently(self._read, new), strict=True)
        self._since = {ref: self._since[ref] for ref in marked.intersection(self._since)}
        self._since |= {ref: since for ref, since in read if since is not None}
        return {ref: self._since.get(ref) for ref, _ in listed}

    def since(self, ref: CheckpointRef) -> datetime | None:
        """When ``ref`` was marked, as last read or written; None if it was not."""
        return self._since.get(ref)

    def mark(self, ref: CheckpointRef) -> None:
        """Begin the delay of ``ref``."""
        failpoint("retention.before_mark")
        if ref in self._damaged:  # it says nothing but a time, so it can be written again
            self._store.delete(self._key(ref))
            self._damaged.discard(ref)
        record = ExpiryRecord(checkpoint=ref, written_at=self._now())
        self._since[ref] = claim(self._store, self._key(ref), record).record.written_at
        failpoint("retention.after_mark")

    def rescue(self, ref: CheckpointRef) -> None:
        """Take the mark away, so that the delay begins anew should it expire again."""
        self._since.pop(ref, None)
        self._store.delete(self._key(ref))
        failpoint("retention.after_rescue")

    def announce(self, refs: Iterable[CheckpointRef]) -> None:
        """Say that these are deleted now, before the last look for references."""
        for ref in refs:
            claim(self._store, self._announcement(ref), ExpiryRecord(checkpoint=ref))
            failpoint("retention.after_announcement")

    def withdraw(self, refs: Iterable[CheckpointRef]) -> None:
        """Take back what this process announced, and no other's announcement."""
        for ref in refs:
            self._store.delete(self._announcement(ref))

    def clear(self, ref: CheckpointRef) -> None:
        """Forget ``ref``, nothing of which is left: announcements list first, the mark goes last."""
        failpoint("retention.before_clear")
        for info in list(self._store.list(self._layout.expiries(ref.attempt, ref.global_step))):
            self._store.delete(info.key)
            failpoint("retention.after_clear")
        self._since.pop(ref, None)

    def _read(self, ref: CheckpointRef) -> datetime | None:
        try:
            return read_record(self._store, self._key(ref), ExpiryRecord).written_at
        except ObjectMissingError:  # only announcements are left, or somebody was faster
            return None
        except IntegrityError:
            self._damaged.add(ref)
            return None

    def _parse(self, key: str) -> tuple[CheckpointRef, str] | None:
        return self._layout.parse_expired(key)

    def _key(self, ref: CheckpointRef) -> str:
        return self._layout.expiry(ref.attempt, ref.global_step)

    def _announcement(self, ref: CheckpointRef) -> str:
        return self._layout.deletion(ref.attempt, ref.global_step, self._nonce)


_IN_PASSING = 16
"""Checkpoints that one pass after a commit marks or deletes: saves wait for it, and another pass follows soon."""

Recheck = Callable[[], Collection[CheckpointRef] | None]


class Outlook(NamedTuple):
    """What would be done now."""

    marked: dict[CheckpointRef, datetime | None]
    """Marks that were there, and since when."""
    seen: Observed
    verdict: Verdict
    barred: set[CheckpointRef]


class Outcome(NamedTuple):
    """What was done. ``swept_bytes`` lay in shards that no manifest names."""

    outlook: Outlook
    marked: dict[CheckpointRef, datetime]
    """Since when each expired one has been marked, those included that this pass has marked."""
    deleted: list[CheckpointRef]
    swept_bytes: int


class Retention:
    """Keeps what ``keep`` wants of a lineage, and whatever something refers to; None keeps everything.

    Args:
        store: The store that holds the checkpoints.
        lineage: The lineage to clean.
        keep: What its author wants.
        recheck: Called between announcement and deletion. It answers what must
            stay besides, as read at that moment, or raises `FencedError` (or
            that its store is not the run's) for nothing to be deleted.
        now: Tells the time, for the delay alone.
    """

    def __init__(
        self,
        store: Store,
        lineage: str,
        keep: Keep | None,
        *,
        recheck: Recheck = tuple,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self._store = store
        self._lineage = lineage
        self._layout = LineageLayout(lineage)
        self._keep = keep
        self._recheck = recheck
        self._now = now
        self._marks = Marks(store, lineage, now)
        self._validity = Validity(store, lineage)
        self._swept = False

    def trust(self, ref: CheckpointRef) -> None:
        """Take ``ref`` as valid without another look: it was just written, or read with every hash compared."""
        self._validity.trust(ref)

    def apply(self, starts_from: StartsFrom, protected: Collection[CheckpointRef]) -> list[CheckpointRef]:
        """Mark what has expired, delete what was marked long enough; answer what was deleted.

        ``protected`` are references of the newest attempt. Quarantined and
        pinned checkpoints stay; nothing goes while too few valid ones remain.
        """
        return [] if self._keep is None else self.collect(starts_from, protected, at_most=_IN_PASSING).deleted

    def look(self, starts_from: StartsFrom, protected: Collection[CheckpointRef]) -> Outlook:
        """What `collect` would go by; writes nothing. Costs four listings, once all that is valid is known."""
        marked = self._marks.read()  # before the commits, so that a mark without one is that of a deletion
        commits = commits_of(self._store, self._lineage)
        barred = quarantined(self._store, self._lineage)
        usable = [ref for ref in chain(commits, self._lineage, starts_from) if ref not in barred]
        held: dict[CheckpointRef, list[str]] = {ref: ["quarantined"] for ref in barred}
        for ref in protected:
            held.setdefault(ref, []).append(f"attempt {max(starts_from, default=1)} started from it")
        for ref, names in pins_of(self._store, self._lineage).items():
            held.setdefault(ref, []).extend(f"pinned {name}" for name in names)
        seen = Observed(commits, usable, self._valid(usable), held)
        return Outlook(marked, seen, judge(self._keep, seen), barred)

    def collect(
        self, starts_from: StartsFrom, protected: Collection[CheckpointRef], at_most: int | None = None
    ) -> Outcome:
        """Like `apply`, and answer all that was seen and done; ``at_most`` so many are marked, and deleted."""
        outlook = self.look(starts_from, protected)
        self._settle_marks(outlook, at_most)
        marked = {ref: since for ref in outlook.verdict.expired if (since := self._marks.since(ref)) is not None}
        deleted = self._delete(self.due(outlook.verdict)[:at_most], starts_from, protected)
        return Outcome(outlook, marked, deleted, self._sweep(outlook))

    def due(self, verdict: Verdict) -> list[CheckpointRef]:
        """Which of the expired ones a pass deletes now, oldest first, by the marks that were last read."""
        if self._keep is None or not self._keep.delay_seconds:
            # Without a delay the clock has no say at all: another machine's may be ahead of ours.
            return list(verdict.expired)
        now, delay = self._now(), timedelta(seconds=self._keep.delay_seconds)
        marked = [(ref, since) for ref in verdict.expired if (since := self._marks.since(ref)) is not None]
        return [ref for ref, since in marked if now - since >= delay]

    def orphans(self, outlook: Outlook) -> list[ObjectInfo]:
        """Shards that no manifest names and that nobody can be about to commit; costs one listing of all shards."""
        recent = newest(self._keep, outlook.seen) if self._keep else []
        if self._keep is None or len(recent) < self._keep.last:
            return []
        named = {*outlook.seen.commits, *outlook.barred}
        youngest = max(map(age, recent))
        places = ((info, self._layout.parse_shard(info.key)) for info in self._store.list(self._layout.all_shards))
        return [info for info, ref in places if ref is not None and ref not in named and age(ref) < youngest]

    def _valid(self, usable: list[CheckpointRef]) -> dict[CheckpointRef, dict[str, float]]:
        if self._keep is None:
            return {}
        needs_all = self._keep.every_steps is not None or self._keep.best is not None
        found = self._validity.all(usable) if needs_all else self._validity.newest(usable, self._keep.last)
        return {ref: dict(metrics) for ref, metrics in found.items()}

    def _settle_marks(self, outlook: Outlook, at_most: int | None) -> None:
        """Marks are brought in line with the verdict, and deletions that somebody did not finish are finished."""
        commits, expired = set(outlook.seen.commits), set(outlook.verdict.expired)
        for ref, since in outlook.marked.items():
            if ref not in commits:
                self._remove_shards(ref)
            elif ref not in expired and since is not None:
                self._marks.rescue(ref)
        for ref in [ref for ref in outlook.verdict.expired if outlook.marked.get(ref) is None][:at_most]:
            self._marks.mark(ref)

    def _delete(
        self, due: list[CheckpointRef], starts_from: StartsFrom, protected: Collection[CheckpointRef]
    ) -> list[CheckpointRef]:
        if not due:
            return []
        self._marks.announce(due)
        try:
            still = set(self.look(starts_from, {*protected, *(self._recheck() or ())}).verdict.expired)
        except (ConflictError, NotFoundError):  # whoever saves next is told; tidying is no place to end a program
            still = set()
        except StoreError:
            with contextlib.suppress(StoreError):
                self._marks.withdraw(due)
            raise
        self._marks.withdraw([ref for ref in due if ref not in still])
        gone = [ref for ref in due if ref in still]
        for ref in gone:
            self._store.delete(self._layout.manifest(ref.attempt, ref.global_step))
            failpoint("retention.after_manifest_delete")
            self._remove_shards(ref)
        return gone

    def _remove_shards(self, ref: CheckpointRef) -> None:
        for info in list(self._store.list(self._layout.shards(ref.attempt, ref.global_step))):
            self._store.delete(info.key)
            failpoint("retention.after_shard_delete")
        self._marks.clear(ref)

    def _sweep(self, outlook: Outlook) -> int:
        """Once, delete what saves left behind that died; answer how many bytes that was."""
        if self._swept:
            return 0
        left = self.orphans(outlook)
        for info in left:
            self._store.delete(info.key)
            failpoint("retention.after_sweep")
        self._swept = self._keep is not None and len(newest(self._keep, outlook.seen)) == self._keep.last
        return sum(info.size for info in left)
