"""The checkpoints of one lineage: manifests, quarantine, the sizes of shards, and what has to be there."""

from collections.abc import Mapping

from tiphys.errors import ObjectMissingError
from tiphys.lineage.audit_attempts import AttemptRecords
from tiphys.lineage.audit_records import Reader
from tiphys.lineage.choose import commits_of
from tiphys.lineage.damage import Barred, Layer, Place, Wanted, size_damage
from tiphys.lineage.verify import manifest_fault
from tiphys.records import CheckpointManifest, CheckpointRef, QuarantineRecord
from tiphys.store import LineageLayout, RunLayout, Store, lineage_of


class LineageAudit:
    """Checks the checkpoints of ``step`` in the store of ``reader``, which collects what is found."""

    def __init__(self, reader: Reader, step: str, attempts: AttemptRecords) -> None:
        self._reader = reader
        self._step = step
        self._attempts = attempts
        self._lineage = lineage_of(reader.run, step)
        self._layout = LineageLayout(self._lineage)
        self.commits = commits_of(reader.store, self._lineage)
        self.barred: dict[CheckpointRef, Barred] = {}

    def check(self) -> None:
        """Everything but the bytes of shards."""
        for info in self._reader.store.list(self._layout.quarantine):
            if (ref := self._layout.parse_checkpoint(info.key)) is not None:
                self.barred[ref] = self._quarantine(ref, info.key)
        self._reader.read_ahead([self._layout.manifest(ref.attempt, ref.global_step) for ref in self.commits])
        sizes = {info.key: info.size for info in self._reader.store.list(self._layout.all_shards)}
        for ref in self.commits:
            self._check_checkpoint(ref, sizes)
        for attempt in {ref.attempt: ref for ref in self.commits if ref.attempt not in self._attempts.claimed}:
            key = RunLayout(self._reader.run).attempt(self._step, attempt)
            fault = "it is missing, yet it has committed checkpoints"
            self._reader.say(Place(Layer.CLAIM, self._step, attempt), key, fault)
        self._check_what_must_be_there()

    def _quarantine(self, ref: CheckpointRef, key: str) -> Barred:
        place = Place(Layer.QUARANTINE, self._step, ref.attempt, ref)
        record = self._reader.read(place, key, QuarantineRecord)
        if record is None:
            return Barred(checkpoint=ref, reason="its record cannot be read", by="unknown")
        if record.checkpoint != ref:
            self._reader.say(place, key, f"it is that of checkpoint {record.checkpoint}")
        return Barred(checkpoint=ref, reason=record.reason, by=record.by)

    def _check_checkpoint(self, ref: CheckpointRef, sizes: Mapping[str, int]) -> None:
        key = self._layout.manifest(ref.attempt, ref.global_step)
        place = Place(Layer.MANIFEST, self._step, ref.attempt, ref)
        barred = ref in self.barred
        manifest = self._reader.read(place, key, CheckpointManifest, barred=barred)
        if manifest is None:
            return
        if (fault := manifest_fault(manifest, ref)) is not None:
            self._reader.say(place, key, fault, barred=barred)
            return
        shards = [
            Wanted(place._replace(layer=Layer.SHARD), self._reader.store, shard.key, shard.size, shard.sha256)
            for shard in manifest.shards
        ]
        found = [size_damage(one, sizes.get(one.key), run=self._reader.run, barred=barred) for one in shards]
        if any(found) and is_gone(self._reader.store, key):
            return  # retention was faster
        self._reader.wanted += shards
        self._reader.found += [one for one in found if one is not None]

    def _check_what_must_be_there(self) -> None:
        """Retention leaves the newest checkpoint, and what an attempt that saved nothing yet is to start from."""
        newest = max(self._attempts.claims, default=0)
        if not newest or any(ref.attempt == newest for ref in self.commits):
            return
        start, end = self._attempts.claims[newest].starts_from, self._attempts.ends.get(newest)
        if end is not None and end.progress:
            fault = f"attempt {newest} has committed checkpoints, and none of them has a manifest"
            self._reader.say(Place(Layer.MANIFEST, self._step, newest), self._layout.manifests, fault)
        elif start is not None and start.lineage == self._lineage and {start}.isdisjoint({*self.commits, *self.barred}):
            key = self._layout.manifest(start.attempt, start.global_step)
            fault = f"it is missing, and attempt {newest} was to start from it"
            self._reader.say(Place(Layer.MANIFEST, self._step, start.attempt, start), key, fault)


def is_gone(store: Store, key: str) -> bool:
    """Whether there is no such object by now."""
    try:
        store.read(key)
    except ObjectMissingError:
        return True
    return False
