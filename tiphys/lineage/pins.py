"""Checkpoints that somebody wants to stay: a release, a baseline, the start of a fork.

Whoever goes on from a checkpoint in another lineage pins it here, so that
retention never has to look through the claims of other runs.
"""

import contextlib
import re
from collections.abc import Mapping

from tiphys.errors import ConflictError, NotFoundError, ObjectExistsError, UsageError
from tiphys.records import CheckpointRef, PinRecord
from tiphys.store import LineageLayout, Store
from tiphys.store.layout import PIN_NAME


def pin(store: Store, ref: CheckpointRef, name: str, by: str = "") -> None:
    """Keep ``ref`` until `unpin`; nothing new if it has this pin.

    Costs a write, two listings and nothing else. Whoever deletes announces it
    and looks for pins only then, so that of the two at least one sees the other.

    Raises:
        UsageError: ``name`` cannot be the name of a pin.
        NotFoundError: there is no such checkpoint (any more); no pin is left.
        ConflictError: somebody began to delete it; the pin may have come too late.
    """
    if not re.fullmatch(PIN_NAME, name):
        raise UsageError(f"pin {name!r} is not valid: use letters, digits, '-', '_' and '.', at most 100")
    layout = LineageLayout(ref.lineage)
    key = layout.pin(ref.attempt, ref.global_step, name)
    with contextlib.suppress(ObjectExistsError):
        store.create(key, PinRecord(checkpoint=ref, name=name, by=by).to_bytes())
    announced = [info.key for info in store.list(layout.expiries(ref.attempt, ref.global_step))]
    if not _committed(store, ref):
        store.delete(key)
        raise NotFoundError(
            f"{store.url}: lineage {ref.lineage} has no checkpoint {ref}; `tiphys lineage` shows those it has"
        )
    if any(found and found[1] for found in map(layout.parse_expired, announced)):
        raise ConflictError(
            f"{store.url}: somebody was about to delete checkpoint {ref} of {ref.lineage} when it was pinned; the pin "
            "stands, and `tiphys gc --dry-run` shows whether it came in time"
        )


def unpin(store: Store, ref: CheckpointRef, name: str) -> None:
    """Take a pin away; what the policy says holds again.

    Raises:
        NotFoundError: the checkpoint has no such pin; the message names those it has.
    """
    names = pins_of(store, ref.lineage).get(ref, ())
    if name not in names:
        have = f"its pins are: {', '.join(names)}" if names else "it has none"
        raise NotFoundError(f"checkpoint {ref} of {ref.lineage} has no pin {name!r}; {have}")
    store.delete(LineageLayout(ref.lineage).pin(ref.attempt, ref.global_step, name))


def pins_of(store: Store, lineage: str) -> Mapping[CheckpointRef, tuple[str, ...]]:
    """Names of the pins of each pinned checkpoint; costs one listing."""
    layout = LineageLayout(lineage)
    found: dict[CheckpointRef, tuple[str, ...]] = {}
    for info in store.list(layout.all_pins):
        if (place := layout.parse_pin(info.key)) is not None:
            ref, name = place
            found[ref] = (*found.get(ref, ()), name)
    return found


def _committed(store: Store, ref: CheckpointRef) -> bool:
    return any(store.list(LineageLayout(ref.lineage).manifest(ref.attempt, ref.global_step)))
