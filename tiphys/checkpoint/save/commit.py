"""Writing a checkpoint: shards, then the fence, then the manifest, whose creation is the commit.

Until the manifest exists there is no checkpoint, so a process may die at any
point before it and leave nothing but bytes that retention sweeps up. Shards are
named by their content: a repeated save meets its own shards and never others.
Several travel at once, each hashed by the thread that sends it.

May this attempt still commit?

A node that lost its network goes on training while its replacement does the
same. The number of the attempt is its fence: once a higher one is claimed, or
the attempt's end is recorded, nothing it writes counts.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from tiphys.errors import FencedError, IntegrityError, NotFoundError, ObjectExistsError, StoreError
from tiphys.faults import failpoint
from tiphys.records import CheckpointManifest, Shard
from tiphys.store import LineageLayout, RunLayout, Store, claim
from tiphys.store.layout import parse_attempt
from tiphys.threads import in_parallel


class ShardSource(Protocol):
    """Bytes of one shard, made when they are wanted. ``suffix`` names their format."""

    @property
    def suffix(self) -> str: ...
    @property
    def size_bytes(self) -> int: ...
    def data(self) -> bytes | bytearray: ...


class Uploads:
    """How shards travel: ``threads`` at a time, told of each that has arrived.

    ``arrived`` is called with the bytes of a shard that is stored. ``cancel``
    ends a save between two shards with `UploadCancelledError`.
    """

    def __init__(self, threads: int = 4, arrived: Callable[[int], object] | None = None) -> None:
        self.threads = threads
        self._arrived = arrived
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        self._cancelled.set()

    def store(
        self, store: Store, draft: CheckpointManifest, shards: Sequence[ShardSource], rank: int = 0
    ) -> list[Shard]:
        """Store ``shards`` in parallel; answer them in their order."""
        layout = LineageLayout(draft.lineage)

        def send(index: int, shard: ShardSource) -> Shard:
            if self._cancelled.is_set():
                raise UploadCancelledError("the save was given up for a newer one")
            data = shard.data()
            sha256 = hashlib.sha256(data).hexdigest()
            key = layout.shard(draft.attempt, draft.global_step, index, sha256, shard.suffix, rank=rank)
            failpoint("checkpoint.before_shard")
            _store_shard(store, key, data, sha256)
            failpoint("checkpoint.after_shard")
            if self._arrived:
                self._arrived(len(data))
            return Shard(key=key, size=len(data), sha256=sha256, rank=rank)

        return in_parallel(send, shards, self.threads)


class UploadCancelledError(StoreError):
    """The save was given up before it was committed; what had arrived is swept up later."""


class LostSaveError(StoreError):
    """Another rank has no share in this save, so that trying it again would not help."""


def commit(
    store: Store,
    draft: CheckpointManifest,
    shards: Sequence[ShardSource],
    check_fence: Callable[[], None],
    uploads: Uploads | None = None,
) -> CheckpointManifest:
    """Store ``shards`` and commit ``draft`` with them; answer the manifest that stands.

    A second commit of the same step by the same attempt answers the first.

    Raises:
        FencedError: from ``check_fence``; nothing was committed.
        StoreError: storage failed; whether the commit stands is unknown only if
            the last write got no answer.
    """
    before = time.perf_counter()
    stored = (uploads or Uploads(threads=1)).store(store, draft, shards)
    return publish(store, complete(draft, stored, time.perf_counter() - before), check_fence)


def publish(store: Store, manifest: CheckpointManifest, check_fence: Callable[[], None]) -> CheckpointManifest:
    """Create the manifest of shards that are stored, which commits them; raises as `commit` does."""
    check_fence()
    failpoint("checkpoint.before_manifest")
    key = LineageLayout(manifest.lineage).manifest(manifest.attempt, manifest.global_step)
    held, won = claim(store, key, manifest.sealed())
    failpoint("checkpoint.after_manifest")
    if not won and held.shards != manifest.shards:
        raise StoreError(
            f"checkpoint {manifest.global_step} of attempt {manifest.attempt} exists with other content, written by an "
            "earlier process of this attempt; it stands, and the next step can be saved"
        )
    return held


def complete(draft: CheckpointManifest, stored: Sequence[Shard], upload_seconds: float) -> CheckpointManifest:
    """``draft`` with the shards that are stored now, and how long that took."""
    return draft.model_copy(update={"shards": tuple(stored), "upload_seconds": round(upload_seconds, 6)})


def _store_shard(store: Store, key: str, data: bytes | bytearray, sha256: str) -> None:
    try:
        store.create(key, data, sha256=sha256)
    except ObjectExistsError:
        # An earlier try of this save wrote it. Its name is its content's; trust it no further than that.
        if store.read(key) != data:
            raise IntegrityError(
                f"{store.url}: {key} holds other bytes than its name says, so this step cannot be saved"
            ) from None


def check_fence(store: Store, run: str, step: str, attempt: int) -> None:
    """Return if attempt ``attempt`` is the live one; costs one listing.

    ``store`` is the one that holds the run.

    Raises:
        FencedError: a newer attempt exists, or this one's end is recorded.
        NotFoundError: the store does not hold this attempt, so it can fence nobody.
    """
    claimed = False
    for info in store.list(RunLayout(run).step_attempts(step)):
        if (place := parse_attempt(info.key)) is None:
            continue
        _, number, is_end = place
        claimed = claimed or (number == attempt and not is_end)
        if number > attempt or (number == attempt and is_end):
            why = f"its end is recorded in {info.key}" if is_end and number == attempt else f"attempt {number} exists"
            raise FencedError(
                f"attempt {attempt} of {run}/{step} may not commit: {why}; "
                "this process must stop, whatever it has is superseded"
            )
    if not claimed:
        # Another store than the run's would let every writer through, and keep what nobody finds again.
        raise NotFoundError(
            f"{store.url} does not hold attempt {attempt} of {run}/{step}, so this is not the store of the run; check "
            "TIPHYS_STORE, and that the volume it lies on is mounted"
        )
