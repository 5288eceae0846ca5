"""Removing old checkpoints without ever removing the last good one.

Retention is the only deletion of the whole system. It runs after a commit, so
that a process killed anywhere in it has lost nothing that it had promised.
Manifest before shards: a checkpoint that is half removed is no checkpoint.
"""

from collections.abc import Collection, Iterable, Sequence

from tiphys.faults import failpoint
from tiphys.lineage.choose import StartsFrom, chain, commits_of
from tiphys.lineage.quarantine import quarantined
from tiphys.lineage.verify import checkpoint_fault
from tiphys.records import CheckpointRef
from tiphys.store import LineageLayout, Store


def expired(
    commits: Iterable[CheckpointRef], kept: Sequence[CheckpointRef], protected: Collection[CheckpointRef]
) -> list[CheckpointRef]:
    """Commits older than everything in ``kept`` that are not ``protected``, oldest first.

    Late commits are among them once they are older; a kept one never is.
    """
    if not kept:
        return []
    oldest = min(_age(ref) for ref in kept)
    return sorted((ref for ref in commits if _age(ref) < oldest and ref not in protected), key=_age)


class Retention:
    """Leaves ``keep_last`` valid checkpoints of a lineage, and those that are protected."""

    def __init__(self, store: Store, lineage: str, keep_last: int) -> None:
        self._store = store
        self._lineage = lineage
        self._layout = LineageLayout(lineage)
        self._keep_last = keep_last
        self._verified: set[CheckpointRef] = set()

    def trust(self, ref: CheckpointRef) -> None:
        """Take ``ref`` as valid without another look: it was just written, or read with every hash compared."""
        self._verified.add(ref)

    def apply(self, starts_from: StartsFrom, protected: Collection[CheckpointRef]) -> list[CheckpointRef]:
        """Remove what is expired, newest commits of the newest attempt counting first; answer what was removed.

        Nothing is removed while fewer than ``keep_last`` valid ones would remain.
        Quarantined checkpoints stay: they are evidence.
        """
        commits = commits_of(self._store, self._lineage)
        barred = quarantined(self._store, self._lineage)
        kept = self._newest_valid([ref for ref in chain(commits, self._lineage, starts_from) if ref not in barred])
        if len(kept) < self._keep_last:
            return []
        gone = expired(commits, kept, barred.union(protected))
        for ref in gone:
            self._store.delete(self._layout.manifest(ref.attempt, ref.global_step))
            failpoint("retention.after_manifest_delete")
        self._sweep(committed=set(commits).difference(gone) | barred, newest=max(kept, key=_age))
        return gone

    def _newest_valid(self, ordered: Iterable[CheckpointRef]) -> list[CheckpointRef]:
        kept: list[CheckpointRef] = []
        for ref in ordered:
            if len(kept) == self._keep_last:
                break
            if ref in self._verified or checkpoint_fault(self._store, ref) is None:
                self._verified.add(ref)
                kept.append(ref)
        return kept

    def _sweep(self, committed: set[CheckpointRef], newest: CheckpointRef) -> None:
        """Delete shards that no manifest names, and that nobody can be about to commit."""
        for info in list(self._store.list(self._layout.all_shards)):
            ref = self._layout.parse_shard(info.key)
            if ref is not None and ref not in committed and _age(ref) < _age(newest):
                self._store.delete(info.key)
                failpoint("retention.after_shard_delete")


def _age(ref: CheckpointRef) -> tuple[int, int]:
    return ref.attempt, ref.global_step
