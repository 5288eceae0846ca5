"""Records of checkpoints: the manifest, its provenance, quarantine, pins and tombstones.

A checkpoint is a set of immutable shards and one manifest. Creating the manifest
is the commit. The other records are separate objects, because a stored record
is never changed.
"""

import itertools
import json
import math
from datetime import datetime, timedelta
from typing import Annotated, Any, ClassVar

from pydantic import Field, NonNegativeInt, PlainSerializer, ValidationInfo, model_validator

from tiphys.records.base import (
    MAX_PROGRAM_RECORD_BYTES,
    Record,
    StoredRecord,
    Timestamp,
    check_seal,
    compute_seal,
    shortened,
)
from tiphys.records.data_version import DataVersion

AS_JSON = PlainSerializer(
    lambda value: str(value) if isinstance(value, float) and not math.isfinite(value) else value, return_type=Any
)
"""Serializes a float that JSON has no number for as text: ``"nan"`` or ``"inf"``."""
Metric = Annotated[float, AS_JSON]
"""A float that may be infinite or no number."""


class CheckpointRef(Record):
    """Reference to one checkpoint of a lineage: the attempt that wrote it, and its global step."""

    lineage: str
    attempt: int
    global_step: NonNegativeInt

    def __str__(self) -> str:
        return f"{self.attempt}-{self.global_step}"

    def relative_to(self, lineage: str) -> str:
        """Its name as seen from ``lineage``: ``3-1200``, prefixed with its own lineage if that differs."""
        return str(self) if self.lineage == lineage else f"{self.lineage}/{self}"

    @property
    def display_name(self) -> str:
        """The checkpoint in messages: ``checkpoint 1200 of attempt 2``."""
        return f"checkpoint {self.global_step} of attempt {self.attempt}"


class Shard(Record):
    """One object of a checkpoint."""

    key: str
    size: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """Also its name in the cache of a node."""
    rank: int = 0
    """The rank that wrote it."""


class Provenance(Record):
    """Provenance of a checkpoint: code, data and environment. The default of each field means unknown."""

    epoch: int | None = None
    data_position: dict[str, int | float | str] = {}
    """Position in the data for the next step, in the program's own format, such as ``{"sample": 51200}``."""
    world_size: int = 1
    """Number of ranks."""
    git_commit: str = ""
    image: str = ""
    """Image of the training container, with its digest if the author gave one."""
    dataset: str = ""
    """Digest of the input data."""
    data: tuple[DataVersion, ...] = Field(default=(), exclude_if=lambda data: not data)
    """The input data that no step made."""
    parameters: str = ""
    """Digest of the step's parameters."""
    versions: dict[str, str] = {}
    """Versions of Python and of the loaded frameworks, by package."""


class RestartLoss(Record):
    """What a restart in the pod cost: the training since the commit that it went on from, and the restart itself."""

    committed_at: Timestamp
    """When that commit was made."""
    restored_at: Timestamp


MAX_RESTARTS = 200
"""Restarts whose cost a manifest holds, the newest."""


class StartTimes(Record):
    """Start-up times of an attempt, by the clock of its machine. Every manifest of the attempt repeats them."""

    opened_at: Timestamp
    """When the program opened its session. Before that, the pod was scheduled and libraries were loaded."""
    restored_at: Timestamp | None = None
    """When the restore was complete; None if the attempt began without a checkpoint."""
    first_step_at: Timestamp | None = None
    """When its first step was complete; None for a program that does not report its steps."""
    restarts: tuple[RestartLoss, ...] = Field(default=(), exclude_if=lambda restarts: not restarts)
    """Of its program in its pod, in order. The other times are those of its first process."""

    def add_restart(self, committed_at: datetime, restored_at: datetime) -> "StartTimes":
        """These times, with one more restart."""
        restart = RestartLoss(committed_at=committed_at, restored_at=restored_at)
        return self.model_copy(update={"restarts": (*self.restarts, restart)[-MAX_RESTARTS:]})

    def moments(self) -> list[datetime]:
        begin = [self.opened_at, self.restored_at, self.first_step_at]
        pairs = [(restart.committed_at, restart.restored_at) for restart in self.restarts]
        return [moment for moment in (*begin, *itertools.chain.from_iterable(pairs)) if moment is not None]

    def shift(self, by: timedelta) -> "StartTimes":
        """These times by another clock."""
        return StartTimes(
            opened_at=self.opened_at + by,
            restored_at=self.restored_at and self.restored_at + by,
            first_step_at=self.first_step_at and self.first_step_at + by,
            restarts=tuple(
                RestartLoss(committed_at=restart.committed_at + by, restored_at=restart.restored_at + by)
                for restart in self.restarts
            ),
        )


class CheckpointManifest(StoredRecord):
    """``manifests/…json``: the list of all shards of a checkpoint. Shards without a manifest are no checkpoint.

    The stored form carries a seal (`with_seal`), so that the manifest is as well
    protected as the bytes that it lists. Reading a changed manifest fails.
    """

    lineage: str
    run: str
    step: str
    attempt: int
    global_step: NonNegativeInt
    shards: tuple[Shard, ...]
    parent: CheckpointRef | None = None
    """The checkpoint that this attempt had restored or committed immediately before."""
    restored: CheckpointRef | None = None
    """The checkpoint that this attempt restored at its start; the same in all its manifests."""
    metrics: dict[str, Metric] = {}
    facts: Provenance = Provenance()
    framework: str = ""
    """Adapter that can read the shards, such as ``numpy``."""
    reason: str = "due"
    """``due``, ``asked`` or ``sigterm``."""
    stage_seconds: float = 0.0
    """How long the training waited for the copy of its state."""
    upload_seconds: float = 0.0
    """How long the upload took, hashing included."""
    began: StartTimes
    seal: str = ""
    """Digest of all other fields of the stored document."""

    def with_seal(self) -> "CheckpointManifest":
        """This manifest with its seal, as it is stored."""
        return self.model_copy(update={"seal": compute_seal(json.loads(self.to_bytes()))})

    @model_validator(mode="before")
    @classmethod
    def _check_seal(cls, document: Any, info: ValidationInfo) -> Any:
        # Checked on the document: the model drops fields that a later version added.
        if info.mode != "json" or not isinstance(document, dict):
            return document
        check_seal(document)
        return document

    @property
    def ref(self) -> CheckpointRef:
        return CheckpointRef(lineage=self.lineage, attempt=self.attempt, global_step=self.global_step)

    @property
    def size_bytes(self) -> int:
        return sum(shard.size for shard in self.shards)


class QuarantineRecord(StoredRecord):
    """``quarantine/…json``: this checkpoint must not be loaded, and why."""

    max_bytes: ClassVar[int] = MAX_PROGRAM_RECORD_BYTES

    checkpoint: CheckpointRef
    reason: Annotated[str, shortened(500)]
    by: Annotated[str, shortened(100)]
    """``restore`` or ``verify`` for bytes that do not match, ``conclude`` for a suspect, or the name of a person."""


class PinRecord(StoredRecord):
    """``pins/<k>-<step>/<name>.json``: retention keeps this checkpoint until the pin is removed."""

    max_bytes: ClassVar[int] = MAX_PROGRAM_RECORD_BYTES

    checkpoint: CheckpointRef
    name: str
    by: str = ""
    """Author of the pin: a person, or ``fork`` for a lineage that starts from this checkpoint."""


class TombstoneRecord(StoredRecord):
    """``tombstones/<k>-<step>.json``: no rule keeps this checkpoint, so it will be deleted after a delay.

    Under ``tombstones/<k>-<step>.<nonce>.json`` the same record announces that a
    process is about to delete it, unless that process still finds a reference.
    """

    max_bytes: ClassVar[int] = MAX_PROGRAM_RECORD_BYTES

    checkpoint: CheckpointRef
