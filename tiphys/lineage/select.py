"""Which checkpoint does the next attempt start from?

Attempts from the newest down: the first that has a valid commit gives its
newest valid one; an attempt without any is followed to what it started from.
A pod that was believed dead can still commit. Its checkpoint is newer by the
clock, yet another attempt has gone on from an older one, so it must lose: going
back to it would throw away, or mix, what was trained since.

What an attempt has saved last: what it would lose by an end now, and what is left of it after one.
"""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from tiphys.errors import IntegrityError, ObjectMissingError
from tiphys.lineage.quarantine import quarantine_reason, quarantined
from tiphys.lineage.validity import checkpoint_fault, read_manifest
from tiphys.records import CheckpointManifest, CheckpointRef, Skipped
from tiphys.store import Attempt, LineageLayout, Store

StartsFrom = Mapping[int, CheckpointRef | None]
"""Attempts of the step, and the checkpoint that each started from."""


class Choice(NamedTuple):
    """``checkpoint`` is where to start, None for the beginning.

    ``candidates`` begins with it and goes on with what to fall back to;
    ``skipped`` are those that would have come first, and why they did not.
    """

    checkpoint: CheckpointRef | None
    candidates: tuple[CheckpointRef, ...]
    skipped: tuple[Skipped, ...]


BEGINNING = Choice(None, (), ())


def chain(commits: Iterable[CheckpointRef], lineage: str, starts_from: StartsFrom) -> tuple[CheckpointRef, ...]:
    """Commits of ``lineage`` that the newest attempt may go on from, best first.

    Its own, newest first; then the one it started from and older ones of that
    attempt; and so on back to the beginning. Late commits are not among them.
    """
    steps: dict[int, list[CheckpointRef]] = {}
    for commit in commits:
        steps.setdefault(commit.attempt, []).append(commit)
    found: list[CheckpointRef] = []
    attempt = max(starts_from, default=0)
    ceiling: int | None = None
    while True:
        own = sorted(steps.get(attempt, []), key=lambda commit: -commit.global_step)
        found += [commit for commit in own if ceiling is None or commit.global_step <= ceiling]
        start = starts_from.get(attempt)
        if start is None or start.lineage != lineage or start.attempt >= attempt:
            return tuple(found)
        attempt, ceiling = start.attempt, start.global_step


def inferred_starts(
    commits: Sequence[CheckpointRef], lineage: str, attempts: Iterable[int], restored: StartsFrom
) -> StartsFrom:
    """What each attempt started from, where claims cannot say because only pods see the checkpoints.

    ``restored`` holds what the manifests of an attempt tell. An attempt that
    left none also left nothing to mix with: it counts as having started from
    the best of those before it. So does one that tells only of itself, because
    its pod was made again. Pure.
    """
    restored = {attempt: ref for attempt, ref in restored.items() if ref is None or ref.attempt < attempt}
    starts: dict[int, CheckpointRef | None] = {}
    for attempt in sorted(attempts):
        before = chain([commit for commit in commits if commit.attempt < attempt], lineage, starts)
        starts[attempt] = restored[attempt] if attempt in restored else next(iter(before), None)
    return starts


def starts_on_volume(store: Store, lineage: str, attempts: Iterable[int]) -> StartsFrom:
    """Like `inferred_starts`, from ``store``; costs one listing and a read for each attempt that committed."""
    commits = commits_of(store, lineage)
    manifests: list[CheckpointManifest] = []
    for newest in {ref.attempt: ref for ref in reversed(commits)}.values():
        with contextlib.suppress(IntegrityError, ObjectMissingError):
            manifests.append(_of_the_first_pod(store, newest))
    return inferred_starts(commits, lineage, attempts, restored_by(manifests))


def _of_the_first_pod(store: Store, newest: CheckpointRef) -> CheckpointManifest:
    """Argo makes a pod again that is gone and never told its end; then the attempt goes on from its own checkpoint."""
    manifest = read_manifest(store, newest)
    while manifest.restored is not None and manifest.restored.attempt == manifest.attempt:
        manifest = read_manifest(store, manifest.restored)
    return manifest


def commits_of(store: Store, lineage: str) -> list[CheckpointRef]:
    """Every checkpoint of a lineage that has a manifest, newest first; costs one listing."""
    layout = LineageLayout(lineage)
    found = (layout.parse_checkpoint(info.key) for info in store.list(layout.manifests))
    return [ref for ref in found if ref is not None]


def starts_of(attempts: Iterable[Attempt]) -> dict[int, CheckpointRef | None]:
    """What the claim of each attempt names as its start, by its number."""
    return {attempt.claim.attempt: attempt.claim.starts_from for attempt in attempts}


def restored_by(manifests: Iterable[CheckpointManifest]) -> dict[int, CheckpointRef | None]:
    """What the manifests of each attempt say that it had restored."""
    return {manifest.attempt: manifest.restored for manifest in manifests}


def choose(store: Store, lineage: str, attempts: Sequence[Attempt]) -> Choice:
    """The newest valid checkpoint that the attempt after ``attempts`` may start from.

    ``store`` is the one that holds the checkpoints. Costs two listings, and one
    read and one listing for each checkpoint looked at; it stops at the first
    valid one. Bytes are not read: the training program verifies every hash.
    """
    barred = quarantined(store, lineage)
    ordered = chain(commits_of(store, lineage), lineage, starts_of(attempts))
    skipped: list[Skipped] = []
    for index, ref in enumerate(ordered):
        fault = quarantine_reason(store, ref) if ref in barred else fault_of(store, ref)
        if fault is None:
            return Choice(ref, tuple(r for r in ordered[index:] if r not in barred), tuple(skipped))
        skipped.append(Skipped(checkpoint=ref, reason=fault))
    return Choice(None, (), tuple(skipped))


def fault_of(store: Store, ref: CheckpointRef) -> str | None:
    """Why ``ref`` cannot be used, quarantine aside; None if it can."""
    try:
        return checkpoint_fault(store, ref)
    except ObjectMissingError:  # retention removed it after it was listed
        return "it was removed while the choice was made"


def newest_commit(store: Store, lineage: str, attempt: int) -> CheckpointManifest | None:
    """The newest checkpoint that an attempt has committed; None if there is none. One listing and one read."""
    return looked_up(store, lineage, attempt).newest


class Commits(NamedTuple):
    """``newest`` that can be read. ``unreadable`` says that there is another, which tells nothing."""

    newest: CheckpointManifest | None
    unreadable: bool = False


def looked_up(store: Store, lineage: str, attempt: int) -> Commits:
    """What can be told of the checkpoints of an attempt. One listing and one read."""
    layout = LineageLayout(lineage)
    unreadable = False
    for info in store.list(layout.manifests):
        ref = layout.parse_checkpoint(info.key)
        if ref is None or ref.attempt > attempt:
            continue
        if ref.attempt < attempt:
            break
        try:
            return Commits(read_manifest(store, ref), unreadable)
        except IntegrityError:
            unreadable = True
        except ObjectMissingError:  # retention was faster
            continue
    return Commits(None, unreadable)
