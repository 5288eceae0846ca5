"""What an attempt has saved last: what it would lose by an end now, and what is left of it after one."""

from typing import NamedTuple

from tiphys.errors import IntegrityError, ObjectMissingError
from tiphys.lineage.verify import read_manifest
from tiphys.records import CheckpointManifest
from tiphys.store import LineageLayout, Store


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
