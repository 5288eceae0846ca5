"""Findings and report of an audit: each names the damaged object, its damaged bytes, and the remedy."""

from enum import StrEnum
from typing import NamedTuple

from tiphys.records import CheckpointRef, Record
from tiphys.store import Store


class AuditLayer(StrEnum):
    """Purpose of an object. It determines the remedy."""

    RUN = "run"
    """The record of the run, or of a submission."""
    CLAIM = "claim"
    END = "end"
    QUARANTINE = "quarantine"
    MANIFEST = "manifest"
    SHARD = "shard"
    OUTPUT = "output"


CHECKPOINT_LAYERS = (AuditLayer.MANIFEST, AuditLayer.SHARD)


class ObjectLocation(NamedTuple):
    """Purpose of an object, and the step, attempt and checkpoint to which it belongs."""

    layer: AuditLayer
    step: str = ""
    attempt: int | None = None
    checkpoint: CheckpointRef | None = None


class ExpectedObject(NamedTuple):
    """An object whose size and hash a record holds."""

    location: ObjectLocation
    store: Store
    key: str
    size: int
    sha256: str


class AuditFinding(Record):
    """One object that differs from its record, or is missing."""

    layer: AuditLayer
    step: str = ""
    attempt: int | None = None
    checkpoint: CheckpointRef | None = None
    key: str
    fault: str
    damaged_bytes: str
    """``all``, ``from <first>``, or ``within 0-<last>`` if one hash covers them all."""
    remedy: str
    barred: bool = False
    """Whether its checkpoint was already in quarantine, so that no attempt loads it."""


class QuarantinedCheckpoint(Record):
    checkpoint: CheckpointRef
    reason: str
    by: str


class AuditReport(Record):
    """The result of an audit. ``deep`` says whether bytes were read, or only records and sizes."""

    run: str
    deep: bool
    attempts: int
    checkpoints: int
    objects: int
    """Objects that records name: shards and outputs."""
    size_bytes: int
    damage: tuple[AuditFinding, ...] = ()
    quarantined: tuple[QuarantinedCheckpoint, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_sound(self) -> bool:
        """Whether all damage is in quarantined checkpoints."""
        return all(finding.barred for finding in self.damage)


def make_finding(
    location: ObjectLocation,
    key: str,
    fault: str,
    damaged_bytes: str = "all",
    *,
    run: str,
    is_quarantined: bool = False,
) -> AuditFinding:
    """Create a finding with the remedy of its layer."""
    return AuditFinding(
        **location._asdict(),
        key=key,
        fault=fault,
        damaged_bytes=damaged_bytes,
        remedy=_remedy(location, run, is_quarantined=is_quarantined),
        barred=is_quarantined,
    )


def check_size(
    expected: ExpectedObject, size: int | None, *, run: str, is_quarantined: bool = False
) -> AuditFinding | None:
    """The finding for an object with the listed ``size``, None if not listed; None if the size is right."""
    if size == expected.size:
        return None
    if size is None:
        fault, damaged_bytes = "it is missing", "all"
    else:
        fault = f"it has {size} bytes, its record says {expected.size}"
        damaged_bytes = f"from {min(size, expected.size)}"
    return make_finding(expected.location, expected.key, fault, damaged_bytes, run=run, is_quarantined=is_quarantined)


def _remedy(location: ObjectLocation, run: str, *, is_quarantined: bool) -> str:
    match location.layer:
        case AuditLayer.MANIFEST | AuditLayer.SHARD if is_quarantined:
            return "nothing: it is in quarantine, and no attempt loads it"
        case AuditLayer.MANIFEST | AuditLayer.SHARD:
            return f"attempts fall back to an older checkpoint; `tiphys verify {run} --quarantine` quarantines this one"
        case AuditLayer.OUTPUT:
            return f"restore the object, or delete it and let `tiphys resume {run}` produce it again"
        case AuditLayer.QUARANTINE:
            return "delete the record, and quarantine the checkpoint again if it is damaged"
        case AuditLayer.END:
            return f"restore the object, or pass it over with `tiphys resume {run} --force`, which runs the step again"
        case _:
            return (
                "restore the object from a copy of the store: records are never edited, and resumes depend on this one"
            )
