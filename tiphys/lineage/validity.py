"""Which checkpoints of a lineage are valid, asking storage about each only once.

Manifests are immutable, so what they say is remembered: a training process that
saves every minute must not read a thousand manifests every minute.

What makes a checkpoint valid, short of reading its bytes.

The manifest is the commit, but it is only believed when it speaks of itself, of
this lineage's own shards, and of sizes that storage confirms. Hashes are
compared by whoever reads the bytes anyway, the training program.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

from tiphys.errors import IntegrityError, ObjectMissingError
from tiphys.lineage.retention.policy import Metrics
from tiphys.records import CheckpointManifest, CheckpointRef
from tiphys.store import LineageLayout, Store, read_record
from tiphys.store.runs import concurrently


def read_manifest(store: Store, ref: CheckpointRef) -> CheckpointManifest:
    """The manifest of ``ref``.

    Raises:
        ObjectMissingError: there is none, so there is no such checkpoint.
        IntegrityError: it is damaged, or is the manifest of something else.
    """
    key = LineageLayout(ref.lineage).manifest(ref.attempt, ref.global_step)
    manifest = read_record(store, key, CheckpointManifest)
    if (fault := manifest_fault(manifest, ref)) is not None:
        raise IntegrityError(f"{key}: {fault}")
    return manifest


def manifest_fault(manifest: CheckpointManifest, ref: CheckpointRef) -> str | None:
    """Why ``manifest`` cannot be that of ``ref``; None if it can."""
    if manifest.ref != ref:
        return f"the manifest is that of checkpoint {manifest.ref} of {manifest.lineage}"
    keys = [shard.key for shard in manifest.shards]
    if not keys or len(set(keys)) != len(keys):
        return "the manifest names no shards, or one of them twice"
    prefix = LineageLayout(ref.lineage).shards(ref.attempt, ref.global_step)
    foreign = next((key for key in keys if not key.startswith(prefix)), None)
    return None if foreign is None else f"the manifest names {foreign}, which belongs to another checkpoint"


def listing_fault(manifest: CheckpointManifest, sizes: Mapping[str, int]) -> str | None:
    """The first shard that a listing (key → bytes) does not confirm; None if it confirms all."""
    for shard in manifest.shards:
        size = sizes.get(shard.key)
        if size is None:
            return f"shard {shard.key} is missing"
        if size != shard.size:
            return f"shard {shard.key} has {size} bytes, the manifest says {shard.size}"
    return None


def checkpoint_fault(store: Store, ref: CheckpointRef) -> str | None:
    """Why ``ref`` cannot be used, by its manifest and one listing of its shards; None if it can."""
    try:
        manifest = read_manifest(store, ref)
    except IntegrityError as error:
        return str(error)
    prefix = LineageLayout(ref.lineage).shards(ref.attempt, ref.global_step)
    return listing_fault(manifest, {info.key: info.size for info in store.list(prefix)})


class Validity:
    """Validity and metrics of the checkpoints of one lineage, as far as they were asked for."""

    def __init__(self, store: Store, lineage: str) -> None:
        self._store = store
        self._layout = LineageLayout(lineage)
        self._trusted: set[CheckpointRef] = set()
        self._metrics: dict[CheckpointRef, Metrics] = {}

    def trust(self, ref: CheckpointRef) -> None:
        """Take ``ref`` as valid without another look."""
        self._trusted.add(ref)

    def newest(self, usable: Iterable[CheckpointRef], count: int) -> Mapping[CheckpointRef, Metrics]:
        """The first ``count`` valid ones, without metrics that nobody has read; looks at no more than it must."""
        found: dict[CheckpointRef, Metrics] = {}
        rest = iter(usable)
        while batch := list(islice(rest, count - len(found))):
            self._look([ref for ref in batch if ref not in self._trusted])
            found |= {ref: self._metrics.get(ref, {}) for ref in batch if ref in self._trusted}
        return found

    def all(self, usable: Sequence[CheckpointRef]) -> Mapping[CheckpointRef, Metrics]:
        """Every valid one with its metrics: reads each manifest once, and lists all shards if any is new."""
        self._look([ref for ref in usable if ref not in self._metrics])
        self._metrics = {ref: self._metrics[ref] for ref in usable if ref in self._metrics}
        return {ref: metrics for ref, metrics in self._metrics.items() if ref in self._trusted}

    def _look(self, refs: Sequence[CheckpointRef]) -> None:
        """Read the manifests of ``refs``, and trust those that the listing of all shards confirms."""
        read = concurrently(lambda ref: readable(self._store, ref), refs)
        manifests = [manifest for manifest in read if manifest is not None]
        self._metrics |= {manifest.ref: manifest.metrics for manifest in manifests}
        new = [manifest for manifest in manifests if manifest.ref not in self._trusted]
        if new:
            sizes = {info.key: info.size for info in self._store.list(self._layout.all_shards)}
            self._trusted |= {manifest.ref for manifest in new if listing_fault(manifest, sizes) is None}


def readable(store: Store, ref: CheckpointRef) -> CheckpointManifest | None:
    """The manifest of ``ref``; None if it is damaged, or not there any more."""
    try:
        return read_manifest(store, ref)
    except (IntegrityError, ObjectMissingError):
        return None
