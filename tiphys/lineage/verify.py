"""What makes a checkpoint valid, short of reading its bytes.

The manifest is the commit, but it is only believed when it speaks of itself, of
this lineage's own shards, and of sizes that storage confirms. Hashes are
compared by whoever reads the bytes anyway, the training program.
"""

from collections.abc import Mapping

from tiphys.errors import IntegrityError
from tiphys.records import CheckpointManifest, CheckpointRef
from tiphys.store import LineageLayout, Store, read_record


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
