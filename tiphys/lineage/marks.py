"""What is to be deleted, as storage remembers it: marks, and announcements of who deletes now.

A mark begins the delay and survives the process that made it; it goes last, so
that a deletion that died half way is found and finished. An announcement is
written before the last look for references. It carries the nonce of its author,
who alone takes it back: if others did, he could delete what they just rescued.
"""

import secrets
from collections.abc import Callable, Iterable
from datetime import datetime

from tiphys.errors import IntegrityError, ObjectMissingError
from tiphys.faults import failpoint
from tiphys.records import CheckpointRef, ExpiryRecord
from tiphys.store import LineageLayout, Store, claim, read_record
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
