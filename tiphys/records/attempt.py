"""Records of one attempt of a step: its claim, its end, and its outputs.

The claim is written before the attempt starts, the end after it is over. Both
are create-only, so that exactly one process opens and one process ends an
attempt.
"""

from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field, NonNegativeInt, PositiveInt

from tiphys.records.base import MAX_PROGRAM_RECORD_BYTES, Record, SealedRecord, StoredRecord, Timestamp, shortened
from tiphys.records.checkpoint import CheckpointManifest, CheckpointRef, StartTimes
from tiphys.records.data_version import DataVersion


class Cause(StrEnum):
    """Why an attempt ended without a result. Each cause has its own retry budget."""

    PREEMPTION = "preemption"
    INFRASTRUCTURE = "infrastructure"
    OUT_OF_MEMORY = "out_of_memory"
    """Host memory. GPU memory is a separate cause, because a larger memory limit of the pod does not help there."""
    DEADLINE = "deadline"
    USER_ERROR = "user_error"
    OUTPUT_MISSING = "output_missing"
    UNKNOWN = "unknown"
    GPU_OUT_OF_MEMORY = "gpu_out_of_memory"
    HANG = "hang"
    """No step was completed for far longer than before."""
    IMAGE = "image"
    """The registry answered that the image does not exist, or that this pod may not pull it."""
    STORAGE = "storage"
    """The checkpoint store was unavailable."""

    @property
    def display_name(self) -> str:
        """The cause in messages, such as ``GPU out of memory``."""
        return self.value.replace("_", " ").replace("gpu", "GPU")


class SkippedCheckpoint(Record):
    """A checkpoint that was not chosen as the start of an attempt, and the reason as a sentence."""

    checkpoint: CheckpointRef
    reason: str


class Escalation(Record):
    """Changes to the resources of an attempt that follow from the ends of earlier attempts."""

    memory_bytes: int | None = None
    """Memory limit of its container, raised or not; None if the policy does not manage memory."""
    on_demand: bool = False
    """Whether the attempt must not run on spot nodes."""
    avoided_nodes: tuple[str, ...] = ()
    batch_scale: float = 1.0
    """Recommended fraction of the usual batch size."""
    explanation: str = ""
    """The changes as a sentence; empty without changes."""


class AttemptClaim(SealedRecord):
    """``attempts/<step>/<k>.json``: the claim of the k-th attempt. k is its fencing number.

    Attempt k+1 may be claimed only after ``<k>.end.json`` exists. ``uid`` and
    ``node`` name the admit node that opened the attempt, so that a repeated call
    gets the same answer.
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
    """Digest of the values of its input parameters, which are also part of the step key."""
    dataset: str = ""
    """Digest of the names and contents of its input artifacts and data; empty for a step without any."""
    data: tuple[DataVersion, ...] = Field(default=(), exclude_if=lambda data: not data)
    """The data that it reads and no step made."""
    lineage: str = ""
    """Empty for a step that keeps no checkpoints."""
    starts_from: CheckpointRef | None = None
    skipped: tuple[SkippedCheckpoint, ...] = ()
    escalation: Escalation | None = Field(default=None, exclude_if=lambda escalation: escalation is None)
    """What changes after earlier failures; None for nothing."""
    lease: str = ""
    """Id of the GPU lease; empty for a step without GPUs."""
    nodes: tuple[str, ...] = Field(default=(), exclude_if=lambda nodes: not nodes)
    """The node of each of its pods, by rank; empty if Kubernetes chooses."""
    flavor: str = Field(default="", exclude_if=lambda flavor: not flavor)
    """The flavor of its GPUs; empty if no flavor is declared for them."""
    gpu_type: str = Field(default="", exclude_if=lambda gpu_type: not gpu_type)
    """The GPU type that the ledger chose; empty if the step names it, a flavor has it, or none was chosen."""
    members: PositiveInt | None = Field(default=None, exclude_if=lambda members: members is None)
    """Number of pods of an elastic gang at its start; None: the number that the step declares."""

    def has_advanced_to(self, newest: CheckpointManifest | None) -> bool:
        """Whether its newest checkpoint is of a later step than it started from: what it saves at a stop may not be."""
        return newest is not None and (self.starts_from is None or newest.global_step > self.starts_from.global_step)


class OutputKind(StrEnum):
    """Argo's two kinds of outputs."""

    PARAMETER = "parameter"
    ARTIFACT = "artifact"


class OutputObject(Record):
    """One stored object of an output, verified when the end record was written."""

    key: str
    size: int
    sha256: str
    version: str = Field(default="", exclude_if=lambda version: not version)
    """`ObjectInfo.version` in the listing before it was hashed."""


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


class AttemptEndOutcome(StrEnum):
    DONE = "done"
    FAILED = "failed"
    FENCED = "fenced"


STOPPED_MESSAGE = "stopped by a person"
"""Message of an end with `AttemptEnd.stopped`."""


class CheckpointCrash(Record):
    """A crash after the load of a checkpoint, in a form in which two crashes can be compared."""

    loaded: CheckpointRef
    fingerprint: str
    """Equal for crashes of the same kind."""
    steps: int | None = None
    """Steps completed since the load; None if unknown."""


class IncarnationRecord(StoredRecord):
    """``incarnations/<step>/<k>/<n>.json``: the program of attempt k goes on in its pod, as its n-th process."""

    max_bytes: ClassVar[int] = MAX_PROGRAM_RECORD_BYTES

    run: str
    step: str
    attempt: int
    incarnation: Annotated[int, Field(gt=1)]
    cause: Cause
    """Why the incarnation before ended, as the launcher judged it."""
    exit_code: int
    """Of the incarnation before, as a shell reports it."""
    ended_at: Timestamp
    """When the incarnation before ended, by the clock of the pod."""


class GangRestartRequest(IncarnationRecord):
    """``gang-restarts/<step>/<k>/<n>/request.json``: a member lost its program, and asks that all start the n-th."""

    member: NonNegativeInt
    """The member that lost its program, or that is gone."""
    is_gone: bool = False
    """Whether ``member``, which hosts the rendezvous of an elastic gang, left it, or answers no connection."""


class GangRestartDecision(StoredRecord):
    """``gang-restarts/<step>/<k>/<n>/decision.json``: whether all members start their programs again, or none does."""

    max_bytes: ClassVar[int] = MAX_PROGRAM_RECORD_BYTES

    run: str
    step: str
    attempt: int
    incarnation: Annotated[int, Field(gt=1)]
    exit_code: int | None = None
    """Exit code of all launchers; None if the programs are started."""
    reason: str = ""
    """Why they are not."""
    port: int | None = None
    """Where the host listens from now on; None for the port that the pods were created with."""
    host: NonNegativeInt = 0
    """The member at which all meet: the first, or in an elastic gang that lost it another one."""


class CrashRecord(StoredRecord):
    """``incarnations/<step>/<k>/<n>.crash.json``: the error that ended the n-th process of attempt k, as it told it."""

    max_bytes: ClassVar[int] = MAX_PROGRAM_RECORD_BYTES

    run: str
    step: str
    attempt: int
    error: Annotated[str, shortened(4096)]
    """The exception, in one line."""
    incarnation: PositiveInt = Field(default=1, exclude_if=lambda incarnation: incarnation == 1)
    fingerprint: Annotated[str, shortened(1024)] = ""
    """The exception without parts that differ between occurrences; empty for errors that no checkpoint can cause."""
    global_step: NonNegativeInt | None = None
    """Global step at the crash; None if no step was completed."""
    restored: CheckpointRef | None = None
    """The checkpoint that it had restored, or was restoring."""
    stuck_seconds: float | None = None
    """Seconds without a completed step when the hang watchdog ended it; None if it was not ended for a hang."""
    stacks: Annotated[str, shortened(32 << 10)] = ""
    """Stacks of its threads at that moment."""


class Preemption(Record):
    """A preemption by a queue, or by a node that fails: the attempt had to save and end. Records the lost work."""

    for_step: str
    for_run: str = ""
    """Step and run that needed the GPUs; empty if their request no longer waited."""
    for_step_name: str = ""
    """Name of that step or item for people, such as ``fit[2]``."""
    reason: Annotated[str, shortened(300)] = Field(default="", exclude_if=lambda reason: not reason)
    """Why the authority over the GPUs took them back, if it was for no step."""
    nodes: tuple[str, ...] = Field(default=(), exclude_if=lambda nodes: not nodes)
    """Nodes that it had to leave because they fail or are about to be removed; empty if its queue preempted it."""
    moves: bool = Field(default=False, exclude_if=lambda moves: not moves)
    """Whether it made room on its nodes, because others had room for it; False if it lost its place."""
    asked_at: Timestamp
    gone_at: Timestamp
    """When all its pods had ended."""
    gpus: int
    committed: CheckpointRef | None = None
    """Its newest checkpoint; None if it committed none that is visible outside its pods."""
    seconds_lost: float | None = None
    """Seconds between that checkpoint, or the start, and the preemption request; None if unknown."""

    @property
    def gpu_seconds_lost(self) -> float | None:
        return self.gpus * self.seconds_lost if self.seconds_lost is not None else None


class LastCheckpoint(Record):
    """The newest checkpoint of an ended attempt. Its times stay known after retention removes the checkpoint."""

    checkpoint: CheckpointRef
    at: Timestamp
    """When its state was taken."""
    began: StartTimes
    at_stop: bool = Field(default=False, exclude_if=lambda at_stop: not at_stop)
    """Whether the program saved it because it had to stop, so that it trained no further."""

    @classmethod
    def from_manifest(cls, manifest: CheckpointManifest) -> "LastCheckpoint":
        at_stop = manifest.reason == "sigterm"
        return cls(checkpoint=manifest.ref, at=manifest.written_at, began=manifest.began, at_stop=at_stop)


class FailureEvidence(Record):
    """The evidence on which the classifier decided the cause of a failure."""

    rule: str
    """Name of the rule that matched."""
    matched_text: Annotated[str, shortened(300)] = ""
    """The matched text, verbatim; empty if an exit code or missing evidence decided."""
    node: str = ""
    """Node of the attempt, or of its pod that ended first; empty if unknown."""


class AttemptEnd(SealedRecord):
    """``attempts/<step>/<k>.end.json``: the single record of how attempt k ended.

    ``progress`` is true if the attempt committed a checkpoint of a later step than
    it started from. Such an end refunds the retry budgets charged before it.
    """

    damage_remedy: ClassVar[str] = (
        "restore the object, or pass it over with `tiphys resume --force` (or --from its step), which runs the step "
        "again"
    )

    run: str
    step: str
    attempt: int
    submission: int
    outcome: AttemptEndOutcome
    cause: Cause | None = None
    message: str = ""
    evidence: FailureEvidence | None = None
    """None for an end that was not classified."""
    exit_code: int | None = None
    stopped: bool = Field(default=False, exclude_if=lambda stopped: not stopped)
    """Whether a person stopped its workflow. Its outcome is then `AttemptEndOutcome.FENCED`, and it did not fail."""
    last_alive_at: Timestamp | None = Field(default=None, exclude_if=lambda moment: moment is None)
    """Last sign of life, if this record was written much later; None: it ended shortly before this record."""
    progress: bool = False
    progress_unknown: bool = Field(default=False, exclude_if=lambda unknown: not unknown)
    """Whether it committed checkpoints that cannot be read, so its progress is unknown. No budget is charged then."""
    checkpoint_crash: CheckpointCrash | None = None
    """None if the end says nothing about a checkpoint."""
    suspect: CheckpointRef | None = None
    """The checkpoint that this crash put into quarantine; the next attempt starts from an older one."""
    preempted: Preemption | None = None
    """None without a preemption request. The end may still have another cause, such as a crash during the save."""
    terminating_at: Timestamp | None = None
    """When its pod began to terminate, by the cluster's clock; None if that was not observed."""
    last_checkpoint: LastCheckpoint | None = None
    """Its newest checkpoint; None if it committed none that is visible outside its pods."""
    step_key: str = ""
    outputs: tuple[Output, ...] = ()
    outputs_prefix: str = Field(default="", exclude_if=lambda prefix: not prefix)
    """Prefix of the keys of its outputs, with a final slash; empty: the place that belongs to the attempt."""
    incarnations: PositiveInt = Field(default=1, exclude_if=lambda incarnations: incarnations == 1)
    """How often its program was started: more than once if it was started again in its pod."""

    @property
    def outcome_name(self) -> str:
        """Its outcome for people: ``stopped`` if a person stopped its workflow, which is recorded as a fence."""
        return "stopped" if self.stopped else self.outcome.value

    @property
    def ended_at(self) -> Timestamp:
        """When the attempt ended, as far as is known."""
        return self.last_alive_at or self.written_at

    @property
    def lost_gpus_to_queue(self) -> bool:
        """Whether it ended because its queue gave its GPUs to another, which is charged to no budget."""
        return self.cause is Cause.PREEMPTION and self.preempted is not None and not self.preempted.nodes


class EvictionRecord(StoredRecord):
    """``attempts/<step>/<k>.evicted.json``: why the service is about to delete the pods of attempt k."""

    run: str
    step: str
    attempt: int
    reason: str
    nodes: tuple[str, ...] = ()
    """Nodes that it has to leave."""


class ReuseRecord(StoredRecord):
    """``reused/<n>/<step>.json``: submission n reused a finished result instead of running the step.

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
    """``memo/<step key>.json``: names a done attempt whose result other runs may reuse."""

    damage_remedy: ClassVar[str] = "`tiphys cache drop --damaged` shows it, and with `--yes` drops it"

    run: str
    step: str
    attempt: int
