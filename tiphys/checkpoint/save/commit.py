"""The commit protocol: store the shards, check the fence, then create the manifest, whose creation is the commit.

A checkpoint exists only once its manifest exists, so a process may die at any
point before that and leave only objects that retention deletes. The key of a
shard contains the hash of its content, so a repeated save finds its own shards
and overwrites no others.

A node that lost its network keeps training while its replacement does the same.
The number of the attempt is the fencing token: once a higher number is claimed,
or the end of the attempt is recorded, the attempt can commit no more.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from tiphys.checkpoint.restore.shard_reader import NodeCache
from tiphys.checkpoint.settings import CheckpointSettings
from tiphys.errors import FencedError, IntegrityError, NotFoundError, ObjectExistsError, StoreError
from tiphys.faults import failpoint
from tiphys.protocol import environment
from tiphys.records import CheckpointManifest, GangRestartDecision, Shard
from tiphys.store import LineageLayout, RunLayout, Store, claim_record, find_record
from tiphys.store.incarnations import gang_decision_key
from tiphys.store.layout import parse_attempt
from tiphys.threads import map_parallel


class ShardSource(Protocol):
    """One shard before it is stored. ``suffix`` is its file extension; ``data`` produces its bytes on demand."""

    @property
    def suffix(self) -> str: ...
    @property
    def size_bytes(self) -> int: ...
    def data(self) -> bytes | bytearray: ...


class BufferedShard(NamedTuple):
    """A shard whose bytes are in ``buffer``."""

    suffix: str
    buffer: bytes | bytearray | memoryview

    @property
    def size_bytes(self) -> int:
        return len(self.buffer)

    def data(self) -> bytes | bytearray:
        # Bytes in the near memory are copied: what is hashed is what is sent, and clients of buckets take no view.
        return bytes(self.buffer) if isinstance(self.buffer, memoryview) else self.buffer


class ShardUploader:
    """Uploads the shards of one save in parallel.

    Args:
        on_stored: Called with the size of each shard in bytes once it is stored,
            on the thread that uploaded it.
        cache: Cache of the node, which gets each shard once it is stored; None for none.
        confirm: Called once all shards are stored, before any record names them; raises `StepLostError` if they are
            no copy of one state.
    """

    def __init__(
        self,
        threads: int = 4,
        on_stored: Callable[[int], object] | None = None,
        cache: NodeCache | None = None,
        confirm: Callable[[], object] | None = None,
    ) -> None:
        self.threads = threads
        self._cache = cache
        self._on_stored = on_stored
        self._confirm = confirm
        self._cancelled = threading.Event()
        self.digests: list[str] = []
        """SHA-256 of each shard, once all are stored."""

    def cancel(self) -> None:
        """Stop before the next shard; `store` raises `UploadCancelledError`. Any thread may call this."""
        self._cancelled.set()

    def store(
        self, store: Store, draft: CheckpointManifest, shards: Sequence[ShardSource], rank: int = 0
    ) -> list[Shard]:
        """Store ``shards`` as rank ``rank`` and return their records in the same order.

        Raises:
            UploadCancelledError: `cancel` was called before all shards were stored.
            StepLostError: a shard's key exists with other content, or ``confirm`` raised it.
            StoreError: storage failed.
        """
        layout = LineageLayout(draft.lineage)
        # After SIGTERM there is no time for it, and the next attempt may run on another node.
        cache = None if draft.reason == "sigterm" else self._cache

        def upload(index: int, shard: ShardSource) -> Shard:
            if self._cancelled.is_set():
                raise UploadCancelledError("the save was cancelled before its upload was complete")
            data = shard.data()
            sha256 = hashlib.sha256(data).hexdigest()
            key = layout.shard(draft.attempt, draft.global_step, index, sha256, shard.suffix, rank=rank)
            failpoint("checkpoint.before_shard")
            _store_shard(store, key, data, sha256)
            failpoint("checkpoint.after_shard")
            if cache and not cache.has(sha256, len(data)):
                cache.add(sha256, memoryview(data))
            if self._on_stored:
                self._on_stored(len(data))
            return Shard(key=key, size=len(data), sha256=sha256, rank=rank)

        stored = map_parallel(upload, shards, self.threads)
        if self._confirm:
            self._confirm()
        self.digests = [shard.sha256 for shard in stored]
        if cache:
            cache.trim(set(self.digests))
        return stored


class UploadCancelledError(StoreError):
    """The save was cancelled before its commit; retention deletes the shards that it stored."""


class StepLostError(IntegrityError):
    """This step cannot be saved, whereas the next one can."""


class AttemptFence:
    """The fence of one attempt, whose claim and end are in ``run_store``.

    Args:
        incarnation: That of this process in a gang, where another pod may decide that the next one is started; None in
            a single pod, whose launcher leaves no process of an incarnation before it starts the next.
    """

    def __init__(self, run_store: Store, run: str, step: str, attempt: int, incarnation: int | None = None) -> None:
        self._run_store = run_store
        self._run = run
        self._step = step
        self._attempt = attempt
        self._incarnation = incarnation

    @classmethod
    def of(cls, settings: CheckpointSettings, run_store: Store, environ: Mapping[str, str]) -> "AttemptFence":
        """The fence of the process whose settings and variables these are."""
        incarnation = settings.incarnation if environment.MEMBERS in environ else None
        return cls(run_store, settings.run, settings.step, settings.attempt, incarnation)

    def check(self) -> None:
        """Return if this process may still commit; raises as `check_fence` does."""
        check_fence(self._run_store, self._run, self._step, self._attempt)
        if self._incarnation is None:
            return
        following = self._incarnation + 1
        key = gang_decision_key(RunLayout(self._run), self._step, self._attempt, following)
        decision = find_record(self._run_store, key, GangRestartDecision)
        if decision and decision.exit_code is None:
            raise FencedError(
                f"process {self._incarnation} of attempt {self._attempt} of {self._run}/{self._step} may not commit: "
                f"process {following} of its gang is started; this one must stop, because nothing that it writes counts"
            )


def commit_checkpoint(
    store: Store,
    draft: CheckpointManifest,
    shards: Sequence[ShardSource],
    check_fence: Callable[[], None],
    uploader: ShardUploader | None = None,
) -> CheckpointManifest:
    """Store ``shards``, commit ``draft`` with them and return the stored manifest.

    A second commit of the same step by the same attempt returns the first one.

    Raises:
        FencedError: from ``check_fence``; nothing was committed.
        StoreError: storage failed. The manifest may exist if only the answer to the last write was lost.
    """
    before = time.perf_counter()
    stored = (uploader or ShardUploader(threads=1)).store(store, draft, shards)
    return publish_manifest(store, complete_manifest(draft, stored, time.perf_counter() - before), check_fence)


def publish_manifest(store: Store, manifest: CheckpointManifest, check_fence: Callable[[], None]) -> CheckpointManifest:
    """Create ``manifest``, whose shards are all stored; this is the commit. Raises as `commit_checkpoint` does."""
    # After the upload, which takes minutes, and not before it: a replacement that was claimed meanwhile has chosen its
    # start without this checkpoint.
    check_fence()
    failpoint("checkpoint.before_manifest")
    key = LineageLayout(manifest.lineage).manifest(manifest.attempt, manifest.global_step)
    stored, created = claim_record(store, key, manifest.with_seal())
    failpoint("checkpoint.after_manifest")
    # Equal shards: only the answer to an earlier write was lost. Others: the program began again, or Argo made its pod
    # twice, under one attempt number, which the fence cannot tell apart. Readers may have begun from the first one.
    if not created and stored.shards != manifest.shards:
        raise StepLostError(
            f"checkpoint {manifest.global_step} of attempt {manifest.attempt} exists with other content, written by an "
            "earlier process of this attempt; it is kept, and the next step can be saved"
        )
    return stored


def complete_manifest(draft: CheckpointManifest, shards: Sequence[Shard], upload_seconds: float) -> CheckpointManifest:
    """Return ``draft`` with its stored shards and the duration of the upload."""
    return draft.model_copy(update={"shards": tuple(shards), "upload_seconds": round(upload_seconds, 6)})


def _store_shard(store: Store, key: str, data: bytes | bytearray, sha256: str) -> None:
    try:
        store.create(key, data, sha256=sha256)
    except ObjectExistsError:
        # An earlier try of this save stored it. The hash in the key does not prove the content: compare the bytes.
        if b"".join(store.chunks(key)) != data:
            raise StepLostError(
                f"{store.url}: an earlier process of this attempt stored {key}, and it is damaged; it is kept, and the "
                "next step can be saved"
            ) from None


def check_fence(store: Store, run: str, step: str, attempt: int) -> None:
    """Return if attempt ``attempt`` may still commit; costs one listing.

    ``store`` is the store of the run.

    Raises:
        FencedError: a newer attempt exists, or the end of this one is recorded.
        NotFoundError: the store does not contain this attempt, so it is not the store of the run.
    """
    claimed = False
    for info in store.list(RunLayout(run).step_attempts(step)):
        if (parsed := parse_attempt(info.key)) is None:
            continue
        _, number, is_end = parsed
        claimed = claimed or (number == attempt and not is_end)
        # An end fences before the next claim exists: it names the last checkpoint, by which the retry was decided.
        if number > attempt or (number == attempt and is_end):
            why = f"its end is recorded in {info.key}" if is_end and number == attempt else f"attempt {number} exists"
            raise FencedError(
                f"attempt {attempt} of {run}/{step} may not commit: {why}; "
                "this process must stop, because nothing that it writes counts any more"
            )
    if not claimed:
        # A store without attempts would fence no attempt, and no resume would look for checkpoints in it.
        raise NotFoundError(
            f"{store.url} does not hold attempt {attempt} of {run}/{step}, so this is not the store of the run; check "
            "TIPHYS_STORE, and that its volume is mounted"
        )
