"""Which checkpoints of a lineage are valid, asking storage about each only once.

Manifests are immutable, so what they say is remembered: a training process that
saves every minute must not read a thousand manifests every minute.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

from tiphys.errors import IntegrityError, ObjectMissingError
from tiphys.lineage.keeping import Metrics
from tiphys.lineage.verify import listing_fault, read_manifest
from tiphys.records import CheckpointManifest, CheckpointRef
from tiphys.store import LineageLayout, Store
from tiphys.store.runs import concurrently


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
