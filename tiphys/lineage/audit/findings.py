"""What `verify` finds: which object is wrong, in which bytes, and what a person does about it."""

from enum import StrEnum
from typing import NamedTuple

from tiphys.records import CheckpointRef, Record
from tiphys.store import Store


class Layer(StrEnum):
    """What an object is for. It decides what its loss costs, and the remedy."""

    RUN = "run"
    """The run's own record, or that of a submission."""
    CLAIM = "claim"
    END = "end"
    QUARANTINE = "quarantine"
    MANIFEST = "manifest"
    SHARD = "shard"
    OUTPUT = "output"


OF_CHECKPOINTS = (Layer.MANIFEST, Layer.SHARD)


class Place(NamedTuple):
    """Where an object belongs."""

    layer: Layer
    step: str = ""
    attempt: int | None = None
    checkpoint: CheckpointRef | None = None


class Wanted(NamedTuple):
    """An object whose bytes a record vouches for."""

    place: Place
    store: Store
    key: str
    size: int
    sha256: str


class Damage(Record):
    """One object that is not what was recorded."""

    layer: Layer
    step: str = ""
    attempt: int | None = None
    checkpoint: CheckpointRef | None = None
    key: str
    fault: str
    damaged_bytes: str
    """``all``, ``from <first>``, or ``within 0-<last>`` where one hash covers them all."""
    remedy: str
    barred: bool = False
    """Whether its checkpoint was in quarantine before: known, and loaded by nobody."""


class Barred(Record):
    """A checkpoint in quarantine."""

    checkpoint: CheckpointRef
    reason: str
    by: str


class Audit(Record):
    """The result of a verification. ``deep`` says whether bytes were read, or only records and sizes."""

    run: str
    deep: bool
    attempts: int
    checkpoints: int
    objects: int
    """Objects that records vouch for: shards and outputs."""
    size_bytes: int
    damage: tuple[Damage, ...] = ()
    quarantined: tuple[Barred, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def sound(self) -> bool:
        """Whether nothing is damaged that could still be used."""
        return all(found.barred for found in self.damage)


def damage(place: Place, key: str, fault: str, damaged_bytes: str = "all", *, run: str, barred: bool = False) -> Damage:
    """A finding with the remedy that goes with its layer."""
    return Damage(
        **place._asdict(),
        key=key,
        fault=fault,
        damaged_bytes=damaged_bytes,
        remedy=_remedy(place, run, barred=barred),
        barred=barred,
    )


def size_damage(wanted: Wanted, size: int | None, *, run: str, barred: bool = False) -> Damage | None:
    """What a listed size says against an object (None: it is not listed); None if nothing."""
    if size == wanted.size:
        return None
    if size is None:
        fault, which = "it is missing", "all"
    else:
        fault = f"it has {size} bytes, its record says {wanted.size}"
        which = f"from {min(size, wanted.size)}"
    return damage(wanted.place, wanted.key, fault, which, run=run, barred=barred)


def _remedy(place: Place, run: str, *, barred: bool) -> str:
    match place.layer:
        case Layer.MANIFEST | Layer.SHARD if barred:
            return "nothing: it is in quarantine, and no attempt loads it"
        case Layer.MANIFEST | Layer.SHARD:
            return (
                f"attempts fall back to an older checkpoint; `tiphys verify {run} --quarantine` bars this one for good"
            )
        case Layer.OUTPUT:
            return f"restore the object, or delete it and let `tiphys resume {run}` make it again"
        case Layer.QUARANTINE:
            return "delete the record, and bar the checkpoint again if it is damaged"
        case _:
            return "restore the object from a copy of the store: records are never edited, and this one decides things"
