"""Checkpoints: immutable shards and one manifest, whose creation is the commit.

What retention leaves in storage: what people pinned, and what is about to go.
"""

import json
import math
from typing import Annotated, Any

from pydantic import NonNegativeInt, PlainSerializer, ValidationInfo, model_validator

from tiphys.records.base import Record, StoredRecord, Timestamp, check_version, seal

Metric = Annotated[float, PlainSerializer(lambda value: value if math.isfinite(value) else str(value))]
"""A float whose JSON form is text where JSON has no number: ``"nan"`` or ``"inf"``."""


class CheckpointRef(Record):
    """Names one checkpoint of a lineage: the attempt that wrote it and its global step."""

    lineage: str
    attempt: int
    global_step: NonNegativeInt

    def __str__(self) -> str:
        return f"{self.attempt}-{self.global_step}"

    def within(self, lineage: str) -> str:
        """Its name in ``lineage``: ``3-1200``, and with its own lineage before that if it is of another one."""
        return str(self) if self.lineage == lineage else f"{self.lineage}/{self}"

    @property
    def words(self) -> str:
        """For a sentence: ``checkpoint 1200 of attempt 2``."""
        return f"checkpoint {self.global_step} of attempt {self.attempt}"


class Shard(Record):
    """One object of a checkpoint."""

    key: str
    size: int
    sha256: str
    rank: int = 0
    """The process that wrote it, among the ``world_size`` of the attempt."""


class Facts(Record):
    """What a checkpoint was made with. Every field may be unknown, which is its default."""

    epoch: int | None = None
    data_position: dict[str, int | float | str] = {}
    """Where in the data the next step goes on, in the program's own words, such as ``{"sample": 51200}``."""
    world_size: int = 1
    """Processes that trained together."""
    git_commit: str = ""
    image: str = ""
    """Image of the training container, with its digest if the author gave one."""
    dataset: str = ""
    """Fingerprint of the data."""
    parameters: str = ""
    """Digest of the step's parameters."""
    versions: dict[str, str] = {}
    """Versions of Python and of the frameworks that were loaded, by package."""


class Began(Record):
    """When an attempt got to train, by the clock of its machine; every manifest of the attempt says it."""

    opened_at: Timestamp
    """When the program opened its session: until then its pod was scheduled and its libraries were loaded."""
    restored_at: Timestamp | None = None
    """When it had restored a checkpoint; None if it began without one."""
    first_step_at: Timestamp | None = None
    """When its first step was complete; None for a program that does not tell its steps."""


class CheckpointManifest(StoredRecord):
    """``manifests/…json``: names every byte of a checkpoint. Without it there is none.

    What is stored is `sealed`, so that the manifest itself is as well protected
    as the bytes that it names; reading one that was changed since fails.
    """

    lineage: str
    run: str
    step: str
    attempt: int
    global_step: NonNegativeInt
    shards: tuple[Shard, ...]
    parent: CheckpointRef | None = None
    """The checkpoint this attempt had restored or committed before."""
    restored: CheckpointRef | None = None
    """What this attempt had restored when it began, in every manifest of it."""
    metrics: dict[str, Metric] = {}
    facts: Facts = Facts()
    framework: str = ""
    """Adapter that can read the shards, such as ``numpy``."""
    reason: str = "due"
    """``due``, ``asked`` or ``sigterm``."""
    stage_seconds: float = 0.0
    """How long the training waited while its state was copied."""
    upload_seconds: float = 0.0
    """How long the bytes travelled, hashing included."""
    began: Began | None = None
    """None in what was saved before this was told."""
    seal: str = ""
    """Digest of all other fields of the stored document."""

    def sealed(self) -> "CheckpointManifest":
        """This manifest as it is to be stored."""
        return self.model_copy(update={"seal": seal(json.loads(self.to_bytes()))})

    @model_validator(mode="before")
    @classmethod
    def _check_seal(cls, document: Any, info: ValidationInfo) -> Any:
        # On the document rather than the model, which leaves out fields that a later version added.
        if info.mode != "json" or not isinstance(document, dict):
            return document
        check_version(document)
        if document.get("seal") != seal(document):
            raise ValueError("it was changed after it was written, its seal does not match")
        return document

    @property
    def ref(self) -> CheckpointRef:
        return CheckpointRef(lineage=self.lineage, attempt=self.attempt, global_step=self.global_step)

    @property
    def size_bytes(self) -> int:
        return sum(shard.size for shard in self.shards)


class QuarantineRecord(StoredRecord):
    """``quarantine/…json``: this checkpoint must not be loaded, and why."""

    checkpoint: CheckpointRef
    reason: str
    by: str
    """Who decided: ``restore`` or ``verify`` for bytes that do not match, ``settle`` for a suspect, or a person."""


class PinRecord(StoredRecord):
    """``pins/<k>-<step>/<name>.json``: this checkpoint stays until the pin is taken away."""

    checkpoint: CheckpointRef
    name: str
    by: str = ""
    """Who wants it: a person, or ``fork`` for another lineage that goes on from it."""


class ExpiryRecord(StoredRecord):
    """``expired/<k>-<step>.json``: no rule keeps this checkpoint, so that it will be deleted.

    Under ``expired/<k>-<step>.<nonce>.json`` the same record announces that
    somebody deletes it now, unless he still finds a reference.
    """

    checkpoint: CheckpointRef
