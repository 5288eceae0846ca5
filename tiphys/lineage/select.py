"""Selection of the checkpoint from which the next attempt starts.

The candidates are the commits of the newest attempt, then the checkpoint from
which it started and older ones of that attempt, and so on. The newest valid
candidate is chosen. A late commit, by a pod that was presumed dead, is no
candidate: a newer attempt has already continued from an older checkpoint, and
the late one would discard its training or mix the two.

The module also reads the newest commit of an attempt, to compute the lost work.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from tiphys.errors import IntegrityError, ObjectMissingError
from tiphys.lineage.quarantine import QuarantineListing, read_quarantine_reason
from tiphys.lineage.validity import checkpoint_fault, read_manifest
from tiphys.records import CheckpointManifest, CheckpointRef, SkippedCheckpoint
from tiphys.store import Attempt, LineageLayout, Store

StartCheckpoints = Mapping[int, CheckpointRef | None]
"""Start checkpoint of each attempt of a step, by number; None for the beginning."""


class CheckpointChoice(NamedTuple):
    """The chosen start checkpoint; None for the beginning.

    ``skipped`` are better candidates that cannot be used, with the reasons.
    """

    checkpoint: CheckpointRef | None
    skipped: tuple[SkippedCheckpoint, ...]


_MAX_RECORDED_SKIPS, _MAX_REASON_CHARACTERS = 20, 500


def shorten_skipped(skipped: Sequence[SkippedCheckpoint]) -> tuple[SkippedCheckpoint, ...]:
    """The first of ``skipped``; the last one says how many follow: a claim with 20,000 is too large."""
    kept = [skip.model_copy(update={"reason": skip.reason[:_MAX_REASON_CHARACTERS]}) for skip in skipped]
    if (more := len(kept) - _MAX_RECORDED_SKIPS) > 0:
        last = kept[_MAX_RECORDED_SKIPS - 1]
        note = f"{last.reason}; so are {more} older ones, which `tiphys lineage` lists"
        kept[_MAX_RECORDED_SKIPS - 1 :] = [last.model_copy(update={"reason": note})]
    return tuple(kept)


START_FROM_BEGINNING = CheckpointChoice(None, ())


def order_candidates(
    commits: Iterable[CheckpointRef], lineage: str, starts_from: StartCheckpoints
) -> tuple[CheckpointRef, ...]:
    """Commits of ``lineage`` from which an attempt after the newest one may start, best first. Pure.

    The order is: commits of the newest attempt, newest first; then its start
    checkpoint and older commits of that attempt; and so on back to the beginning.
    Late commits are left out.
    """
    newest_first = sorted(commits, key=lambda commit: (-commit.attempt, -commit.global_step))
    return tuple(iter_candidates(newest_first, lineage, starts_from))


def iter_candidates(
    newest_first: Iterable[CheckpointRef], lineage: str, starts_from: StartCheckpoints
) -> Iterator[CheckpointRef]:
    """`order_candidates` of commits in the order of their keys, of which it takes no more than are asked for. Pure."""
    attempt = max(starts_from, default=0)
    ceiling: int | None = None
    for commit in newest_first:
        while commit.attempt < attempt:
            start = starts_from.get(attempt)
            if start is None or start.lineage != lineage or start.attempt >= attempt:
                return
            attempt, ceiling = start.attempt, start.global_step
        if commit.attempt == attempt and (ceiling is None or commit.global_step <= ceiling):
            yield commit


def infer_starts(
    commits: Sequence[CheckpointRef], lineage: str, attempts: Iterable[int], restored: StartCheckpoints
) -> StartCheckpoints:
    """Start checkpoints of attempts on a volume, which claims cannot name because only pods can read it. Pure.

    An attempt without a manifest, or whose manifests name only its own
    checkpoints because its pod was created again, counts as started from the best
    candidate before it. Without a commit it cannot have diverged.
    """
    restored = {attempt: ref for attempt, ref in restored.items() if ref is None or ref.attempt < attempt}
    starts: dict[int, CheckpointRef | None] = {}
    for attempt in sorted(attempts):
        before = order_candidates([commit for commit in commits if commit.attempt < attempt], lineage, starts)
        starts[attempt] = restored[attempt] if attempt in restored else next(iter(before), None)
    return starts


def infer_starts_from_volume(store: Store, lineage: str, attempts: Iterable[int]) -> StartCheckpoints:
    """Like `infer_starts`, from ``store``; costs one listing and a read for each attempt that committed."""
    commits = list_commits(store, lineage)
    manifests: list[CheckpointManifest] = []
    for newest in {ref.attempt: ref for ref in reversed(commits)}.values():
        with contextlib.suppress(IntegrityError, ObjectMissingError):
            manifests.append(_read_manifest_of_first_pod(store, newest))
    return infer_starts(commits, lineage, attempts, restored_by_attempt(manifests))


def _read_manifest_of_first_pod(store: Store, newest: CheckpointRef) -> CheckpointManifest:
    """The manifest of an attempt that names its first start checkpoint.

    Argo creates a pod again that is lost without a status. The attempt then restores its own checkpoint.
    """
    manifest = read_manifest(store, newest)
    # A forged circle of manifests must end, so each must be older than the one before.
    while (older := manifest.restored) is not None and older.attempt == manifest.attempt:
        if older.global_step >= manifest.global_step:
            raise IntegrityError(
                f"the manifest of checkpoint {manifest.ref} names {older} as restored, which is not older"
            )
        manifest = read_manifest(store, older)
    return manifest


def list_commits(store: Store, lineage: str, most: int | None = None) -> list[CheckpointRef]:
    """All committed checkpoints of a lineage, or the newest ``most``, newest first; costs one listing."""
    return list(islice(iter_commits(store, lineage), most))


def iter_commits(store: Store, lineage: str) -> Iterator[CheckpointRef]:
    """The committed checkpoints of a lineage, newest first; lists as far as they are asked for."""
    layout = LineageLayout(lineage)
    refs = (layout.parse_checkpoint(info.key) for info in store.list(layout.manifests))
    return (ref for ref in refs if ref is not None)


def starts_from_claims(attempts: Iterable[Attempt]) -> dict[int, CheckpointRef | None]:
    """Start checkpoints from the claims of attempts, by attempt."""
    return {attempt.claim.attempt: attempt.claim.starts_from for attempt in attempts}


def restored_by_attempt(manifests: Iterable[CheckpointManifest]) -> dict[int, CheckpointRef | None]:
    return {manifest.attempt: manifest.restored for manifest in manifests}


def choose_checkpoint(store: Store, lineage: str, attempts: Sequence[Attempt]) -> CheckpointChoice:
    """The newest valid checkpoint for the start of the attempt after ``attempts``.

    Costs two listings as far as the first valid candidate, and a read and a listing for each
    candidate up to it. Bytes are not read: the training program verifies all hashes.
    """
    starts_from = starts_from_claims(attempts)
    return choose_first_valid(store, iter_candidates(iter_commits(store, lineage), lineage, starts_from))


def choose_first_valid(store: Store, candidates: Iterable[CheckpointRef]) -> CheckpointChoice:
    """The first of ``candidates`` that is valid and not in quarantine."""
    quarantined = QuarantineListing(store)
    skipped: list[SkippedCheckpoint] = []
    for ref in candidates:
        fault = read_quarantine_reason(store, ref) if ref in quarantined else _unusable_reason(store, ref)
        if fault is None:
            return CheckpointChoice(ref, tuple(skipped))
        skipped.append(SkippedCheckpoint(checkpoint=ref, reason=fault))
    return CheckpointChoice(None, tuple(skipped))


def _unusable_reason(store: Store, ref: CheckpointRef) -> str | None:
    """Why ``ref`` cannot be used, apart from quarantine; None if it can."""
    try:
        return checkpoint_fault(store, ref)
    except ObjectMissingError:  # retention removed it after it was listed
        return "it was removed during the selection"


def read_newest_commit(store: Store, lineage: str, attempt: int) -> CheckpointManifest | None:
    """The newest readable manifest of an attempt; None if there is none. Costs one listing and one read."""
    return read_attempt_commits(store, lineage, attempt).newest


class AttemptCommits(NamedTuple):
    """The newest readable manifest of an attempt, and whether a newer one cannot be read."""

    newest: CheckpointManifest | None
    has_unreadable: bool = False


def read_attempt_commits(store: Store, lineage: str, attempt: int) -> AttemptCommits:
    """Read the newest manifest of an attempt. Costs one listing, and one read if all manifests are readable."""
    layout = LineageLayout(lineage)
    unreadable = False
    for info in store.list(layout.manifests):
        ref = layout.parse_checkpoint(info.key)
        if ref is None or ref.attempt > attempt:
            continue
        if ref.attempt < attempt:
            break
        try:
            return AttemptCommits(read_manifest(store, ref), unreadable)
        except IntegrityError:
            unreadable = True
        except ObjectMissingError:  # retention removed it after it was listed
            continue
    return AttemptCommits(None, unreadable)
