"""One try of a step: its claim before it starts, its end once it is over."""

from enum import StrEnum

from tiphys.records.base import Record, StoredRecord
from tiphys.records.manifest import CheckpointRef


class Cause(StrEnum):
    """Why an attempt ended without a result. Budgets are kept by cause."""

    PREEMPTION = "preemption"
    INFRASTRUCTURE = "infrastructure"
    OUT_OF_MEMORY = "out_of_memory"
    DEADLINE = "deadline"
    USER_ERROR = "user_error"
    OUTPUT_MISSING = "output_missing"
    UNKNOWN = "unknown"


class Skipped(Record):
    """A checkpoint that was passed over, and why, in words for a person."""

    checkpoint: CheckpointRef
    reason: str


class AttemptClaim(StoredRecord):
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
    lineage: str = ""
    """Empty for a step that keeps no checkpoints."""
    starts_from: CheckpointRef | None = None
    skipped: tuple[Skipped, ...] = ()
    pod_patch: str = ""
    """Strategic merge patch of the pod spec, JSON; empty for none."""
    lease: str = ""
    """Id of the GPU lease; empty for a step without GPUs."""


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


class AttemptEnd(StoredRecord):
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
    exit_code: int | None = None
    progress: bool = False
    step_key: str = ""
    outputs: tuple[Output, ...] = ()


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
