"""Validity of checkpoints, as far as it can be checked without reading their bytes.

A manifest is the commit of a checkpoint. It is valid if it names its own
reference, only shards of that checkpoint, and sizes that a listing confirms. The
training program verifies the hashes when it reads the bytes.

`CheckpointValidity` caches the results of one lineage, because manifests are
immutable and a training process that saves every minute must not read a
thousand manifests every minute.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

from tiphys.errors import IntegrityError, ObjectMissingError
from tiphys.lineage.retention.policy import Metrics
from tiphys.records import CheckpointManifest, CheckpointRef
from tiphys.store import LineageLayout, Store, read_record
from tiphys.store.runs import read_concurrently


def read_manifest(store: Store, ref: CheckpointRef) -> CheckpointManifest:
    """The manifest of ``ref``.

    Raises:
        ObjectMissingError: there is no such checkpoint.
        IntegrityError: the manifest is damaged, or belongs to another checkpoint.
    """
    key = LineageLayout(ref.lineage).manifest(ref.attempt, ref.global_step)
    manifest = read_record(store, key, CheckpointManifest)
    if (fault := manifest_fault(manifest, ref)) is not None:
        raise IntegrityError(f"{key}: {fault}")
    return manifest


def manifest_fault(manifest: CheckpointManifest, ref: CheckpointRef) -> str | None:
    """Why ``manifest`` cannot be the manifest of ``ref``; None if it can."""
    if manifest.ref != ref:
        return f"the manifest is that of checkpoint {manifest.ref} of {manifest.lineage}"
    keys = [shard.key for shard in manifest.shards]
    if not keys or len(set(keys)) != len(keys):
        return "the manifest names no shards, or a shard twice"
    prefix = LineageLayout(ref.lineage).shards(ref.attempt, ref.global_step)
    foreign = next((key for key in keys if not key.startswith(prefix)), None)
    return None if foreign is None else f"the manifest names {foreign}, which belongs to another checkpoint"


def listing_fault(manifest: CheckpointManifest, sizes: Mapping[str, int]) -> str | None:
    """The first shard that is missing or has another size; None if a listing (bytes by key) confirms all."""
    for shard in manifest.shards:
        size = sizes.get(shard.key)
        if size is None:
            return f"shard {shard.key} is missing"
        if size != shard.size:
            return f"shard {shard.key} has {size} bytes, the manifest says {shard.size}"
    return None


def checkpoint_fault(store: Store, ref: CheckpointRef) -> str | None:
    """Why ``ref`` is not valid, by its manifest and one listing of its shards; None if it is.

    Raises:
        ObjectMissingError: there is no such checkpoint.
    """
    try:
        manifest = read_manifest(store, ref)
    except IntegrityError as error:
        return str(error)
    prefix = LineageLayout(ref.lineage).shards(ref.attempt, ref.global_step)
    return listing_fault(manifest, {info.key: info.size for info in store.list(prefix)})


class CheckpointValidity:
    """Cached validity and metrics of the checkpoints of one lineage."""

    def __init__(self, store: Store, lineage: str) -> None:
        self._store = store
        self._layout = LineageLayout(lineage)
        self._trusted: set[CheckpointRef] = set()
        self._metrics: dict[CheckpointRef, Metrics] = {}

    def trust(self, ref: CheckpointRef) -> None:
        """Count ``ref`` as valid without a check."""
        self._trusted.add(ref)

    def forget_except(self, refs: Iterable[CheckpointRef]) -> None:
        """Forget checkpoints that are gone, which a long training has by the thousand."""
        self._trusted.intersection_update(refs)

    def newest_valid(self, usable: Iterable[CheckpointRef], count: int) -> Mapping[CheckpointRef, Metrics]:
        """The first ``count`` valid checkpoints of ``usable``, with the metrics that are cached; checks no others."""
        valid: dict[CheckpointRef, Metrics] = {}
        remaining = iter(usable)
        while batch := list(islice(remaining, count - len(valid))):
            self._check([ref for ref in batch if ref not in self._trusted])
            valid |= {ref: self._metrics.get(ref, {}) for ref in batch if ref in self._trusted}
        return valid

    def all_valid(self, usable: Sequence[CheckpointRef]) -> Mapping[CheckpointRef, Metrics]:
        """All valid checkpoints of ``usable`` with metrics. Reads each manifest once, and lists shards for new ones."""
        self._check([ref for ref in usable if ref not in self._metrics])
        self._metrics = {ref: self._metrics[ref] for ref in usable if ref in self._metrics}
        return {ref: metrics for ref, metrics in self._metrics.items() if ref in self._trusted}

    def _check(self, refs: Sequence[CheckpointRef]) -> None:
        """Read the manifests of ``refs``, and trust those that a listing of all shards confirms."""
        results = read_concurrently(lambda ref: read_valid_manifest(self._store, ref), refs)
        manifests = [manifest for manifest in results if manifest is not None]
        self._metrics |= {manifest.ref: manifest.metrics for manifest in manifests}
        new = [manifest for manifest in manifests if manifest.ref not in self._trusted]
        if new:
            sizes = {info.key: info.size for info in self._store.list(self._layout.all_shards)}
            self._trusted |= {manifest.ref for manifest in new if listing_fault(manifest, sizes) is None}


def read_valid_manifest(store: Store, ref: CheckpointRef) -> CheckpointManifest | None:
    """The manifest of ``ref``; None if it is damaged or missing."""
    try:
        return read_manifest(store, ref)
    except (IntegrityError, ObjectMissingError):
        return None
