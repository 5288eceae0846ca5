"""One try of a step: its claim before it starts, its end once it is over.

Why an attempt ended without a result, in words that a reader of an older version can still read.

A training image may hold an older Tiphys than the service that ends its
attempts. So causes that came later are stored as the older, broader one that
they were part of, with the exact one beside it; who does not know that field
reads what it always read.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from pydantic import Field, NonNegativeInt, PositiveInt

from tiphys.records.base import Record, SealedRecord, StoredRecord, Timestamp
from tiphys.records.checkpoint import Began, CheckpointManifest, CheckpointRef


class Cause(StrEnum):
    """Why an attempt ended without a result. Budgets are kept by cause."""

    PREEMPTION = "preemption"
    INFRASTRUCTURE = "infrastructure"
    OUT_OF_MEMORY = "out_of_memory"
    """Of the host; the GPU's has a cause of its own, because more memory of the pod does not help it."""
    DEADLINE = "deadline"
    USER_ERROR = "user_error"
    OUTPUT_MISSING = "output_missing"
    UNKNOWN = "unknown"
    GPU_OUT_OF_MEMORY = "gpu_out_of_memory"
    HANG = "hang"
    """No step was completed for far longer than before."""
    IMAGE = "image"
    """The registry answered, and has no such image for this pod."""
    STORAGE = "storage"
    """The store of checkpoints was out of reach."""

    @property
    def broader(self) -> "Cause":
        """The cause that this one was part of before it had a name; itself if it always had one."""
        return _BROADER.get(self, self)

    @property
    def words(self) -> str:
        """As a person says it."""
        return self.value.replace("_", " ").replace("gpu", "GPU")


_BROADER: Mapping[Cause, Cause] = {
    Cause.GPU_OUT_OF_MEMORY: Cause.USER_ERROR,
    Cause.HANG: Cause.UNKNOWN,
    Cause.IMAGE: Cause.INFRASTRUCTURE,
    Cause.STORAGE: Cause.INFRASTRUCTURE,
}
_EXACT = "exact_cause"


def for_storage(document: dict[str, Any]) -> dict[str, Any]:
    """``document`` with a ``cause`` that every version knows, and the exact one in a field of its own."""
    cause = document.get("cause")
    if cause is None or Cause(cause).broader == cause:
        return document
    return {**document, "cause": Cause(cause).broader.value, _EXACT: cause}


def from_storage(document: dict[str, Any]) -> dict[str, Any]:
    """What `for_storage` was given; an exact cause that only a later version knows is left out."""
    exact = document.get(_EXACT)
    kept = {name: value for name, value in document.items() if name != _EXACT}
    return {**kept, "cause": exact} if exact in list(Cause) else kept


class Skipped(Record):
    """A checkpoint that was passed over, and why, in words for a person."""

    checkpoint: CheckpointRef
    reason: str


class Escalation(Record):
    """What an attempt is given that the step does not ask for, because of how those before it have ended."""

    memory_bytes: int | None = None
    """What its container may use, also where that is no more than before; None where it is not kept."""
    on_demand: bool = False
    """Whether it stays off spot nodes."""
    avoided_nodes: tuple[str, ...] = ()
    batch_scale: float = 1.0
    """How much of its usual batch the program is advised to take."""
    words: str = ""
    """What is different, for a person; empty where nothing is."""


class AttemptClaim(SealedRecord):
    """``attempts/<step>/<k>.json``: the right to be the k-th attempt. k is its fence.

    k+1 may be claimed only once ``<k>.end.json`` exists. ``uid`` and ``node``
    name the admit node that opened it, so that a repeated call finds its answer
    here.
    """

    run: str
    step: str
    attempt: int
    submission: int
    uid: str
    node: str
    instance: str
    """Node name of the step within the workflow, without its attempts."""
    step_key: str
    parameters: str = ""
    """Digest of the values of its input parameters, which the step key holds among other things."""
    dataset: str = ""
    """Digest of the content of its input artifacts, by name; empty for a step without any."""
    lineage: str = ""
    """Empty for a step that keeps no checkpoints."""
    starts_from: CheckpointRef | None = None
    skipped: tuple[Skipped, ...] = ()
    pod_patch: str = ""
    """Strategic merge patch of the pod spec, JSON; empty for none."""
    escalation: Escalation | None = Field(default=None, exclude_if=lambda escalation: escalation is None)
    """What of `pod_patch` is due to earlier failures."""
    lease: str = ""
    """Id of the GPU lease; empty for a step without GPUs."""
    nodes: tuple[str, ...] = Field(default=(), exclude_if=lambda nodes: not nodes)
    """The node that each of its pods has to run on, by rank; empty where that is left to Kubernetes."""
    flavor: str = Field(default="", exclude_if=lambda flavor: not flavor)
    """The flavor of its GPUs; empty where none is declared for them."""
    members: PositiveInt | None = Field(default=None, exclude_if=lambda members: members is None)
    """With how many pods it starts, where the author left that open; None: with as many as the step says."""


class OutputKind(StrEnum):
    """Argo's two kinds of outputs."""

    PARAMETER = "parameter"
    ARTIFACT = "artifact"


class OutputObject(Record):
    """One object in storage below an output, verified when its end record was written."""

    key: str
    size: int
    sha256: str


class Output(Record):
    """One declared output. A directory artifact has many objects and ``directory`` set."""

    name: str
    kind: OutputKind
    key: str
    """Key of the object, or the prefix of a directory (without a final slash)."""
    directory: bool = False
    value: str | None = None
    """The text of a parameter."""
    objects: tuple[OutputObject, ...] = ()


class Outcome(StrEnum):
    """How an attempt ended."""

    DONE = "done"
    FAILED = "failed"
    FENCED = "fenced"


class Death(Record):
    """How an attempt failed that had loaded a checkpoint, in a form that tells whether two died alike."""

    loaded: CheckpointRef
    fingerprint: str
    """Equal for deaths of the same kind."""
    steps: int | None = None
    """Steps completed since the load; None if nobody knows."""


class CrashRecord(StoredRecord):
    """``attempts/<step>/<k>.crash.json``: what ended the training program of attempt k, as it saw it itself."""

    run: str
    step: str
    attempt: int
    error: str
    """The exception, in one line, for a person."""
    fingerprint: str = ""
    """The same without what differs from one time to the next; empty for errors that no checkpoint can cause."""
    global_step: NonNegativeInt | None = None
    """Steps completed by then; None if it did not get to any."""
    restored: CheckpointRef | None = None
    """What it had restored, or was restoring."""
    stuck_seconds: float | None = None
    """How long it had completed no step when it was ended for that; None for a program that ended by itself."""
    stacks: str = ""
    """Where its threads were then."""


class Preemption(Record):
    """That an attempt was asked to save and go by the rules of its queue, and what that has cost."""

    for_step: str
    for_run: str = ""
    """Of the step that its GPUs were wanted for; empty if that waited no more, and so nobody knows it."""
    asked_at: Timestamp
    gone_at: Timestamp
    """When all its pods were seen to be gone."""
    gpus: int
    committed: CheckpointRef | None = None
    """Its newest checkpoint; None if it has committed none that can be seen from outside of its pods."""
    seconds_lost: float | None = None
    """Training between that checkpoint, or its start, and the moment at which it was asked; None if nobody can say."""

    @property
    def gpu_seconds_lost(self) -> float | None:
        return self.gpus * self.seconds_lost if self.seconds_lost is not None else None


class Saved(Record):
    """The newest checkpoint of an attempt that is over; retention may remove it, and what it tells of time stays."""

    checkpoint: CheckpointRef
    at: Timestamp
    """The moment that its state is of."""
    began: Began | None = None

    @classmethod
    def of(cls, manifest: CheckpointManifest) -> "Saved":
        return cls(checkpoint=manifest.ref, at=manifest.written_at, began=manifest.began)


class Evidence(Record):
    """What a failed end was judged by."""

    rule: str
    """Name of the rule of the classifier that decided."""
    words: str = ""
    """What it found, as it was written there; empty where an exit code or the lack of anything decided."""
    node: str = ""
    """The node that the attempt, or the pod of it that ended first, had run on; empty if nobody knows."""


class AttemptEnd(SealedRecord):
    """``attempts/<step>/<k>.end.json``: the one answer to how attempt k ended.

    ``progress`` is true when the attempt committed at least one checkpoint; it
    refunds the budgets charged before it.
    """

    run: str
    step: str
    attempt: int
    submission: int
    outcome: Outcome
    cause: Cause | None = None
    message: str = ""
    evidence: Evidence | None = None
    """None for an end that was not judged, or before evidence was kept."""
    exit_code: int | None = None
    progress: bool = False
    progress_unknown: bool = Field(default=False, exclude_if=lambda unknown: not unknown)
    """Whether it has committed what cannot be read, so that nobody can say how far it got; it costs nothing then."""
    death: Death | None = None
    """None where the end says nothing about a checkpoint."""
    suspect: CheckpointRef | None = None
    """The checkpoint that this end was one too many for: it is quarantined, and an older one gets its try."""
    preempted: Preemption | None = None
    """None where nobody asked it to go; the end may still have another cause, such as a crash while it saved."""
    over_at: Timestamp | None = None
    """When its pod began to end, as the cluster tells it; None if nobody saw that."""
    saved: Saved | None = None
    """Its newest checkpoint; None if it committed none that can be seen from outside of its pods."""
    step_key: str = ""
    outputs: tuple[Output, ...] = ()

    @classmethod
    def for_storage(cls, document: dict[str, Any]) -> dict[str, Any]:
        return for_storage(document)

    @classmethod
    def from_storage(cls, document: dict[str, Any]) -> dict[str, Any]:
        return from_storage(document)


class AdoptedRecord(StoredRecord):
    """``adopted/<n>/<step>.json``: submission n took over a finished result instead of running the step.

    ``source_run`` differs from ``run`` when the result is shared between runs.
    """

    run: str
    submission: int
    step: str
    step_key: str
    source_run: str
    source_step: str
    source_attempt: int


class MemoRecord(StoredRecord):
    """``memo/<step key>.json``: points at a done end record that other runs may adopt."""

    run: str
    step: str
    attempt: int
