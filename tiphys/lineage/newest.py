"""What an attempt has saved last: what it would lose by an end now, and what is left of it after one."""

from tiphys.errors import IntegrityError, ObjectMissingError
from tiphys.lineage.verify import read_manifest
from tiphys.records import CheckpointManifest
from tiphys.store import LineageLayout, Store


def newest_commit(store: Store, lineage: str, attempt: int) -> CheckpointManifest | None:
    """The newest checkpoint that an attempt has committed; None if there is none. One listing and one read."""
    layout = LineageLayout(lineage)
    for info in store.list(layout.manifests):
        ref = layout.parse_checkpoint(info.key)
        if ref is None or ref.attempt > attempt:
            continue
        if ref.attempt < attempt:
            break
        try:
            return read_manifest(store, ref)
        except (IntegrityError, ObjectMissingError):
            continue
    return None
