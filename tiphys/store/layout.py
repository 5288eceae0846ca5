"""Keys of all objects, except of Workflows (`workflow_layout`) and markers (`run_markers`). No other module builds any.

A store has two halves, for one policy of the storage service. Below ``control/`` lies what Tiphys acts on: services,
the local engine and people with its credentials write it. What programs and Argo's artifacts write is below ``data/``.

Numbers are zero-padded, so that listings return them in order. In ``manifests/``, ``quarantine/``, ``pins/``,
``tombstones/``, ``training-progress/`` and ``triggers/`` they count down, so that the newest is listed first.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from tiphys.records import CheckpointRef, check_run_name, check_step_id

StoreHalf = Literal["control/", "data/"]
CONTROL: Final = "control/"
DATA: Final = "data/"
FORMAT_MARKER = f"{CONTROL}format.json"
"""Key of the record that names the format of the store (`tiphys.store.format`)."""
RUNS = f"{CONTROL}runs/"
RUN_DATA = f"{DATA}runs/"
LINEAGES = f"{DATA}lineages/"
ALERTS = f"{CONTROL}alerts/"
MEMOS = f"{CONTROL}memo/"
TRIGGERS = f"{CONTROL}triggers/"
PIN_NAME = r"[A-Za-z0-9][-A-Za-z0-9_.]{0,99}"
_MAX_ATTEMPT = 10**9 - 1
MAX_GLOBAL_STEP = 10**15 - 1
_CHECKPOINT = re.compile(r"(\d{9})-(\d{15})\.json")
_STEP_TIME = re.compile(r"(\d{9})-(\d{9})-(\d{5})-(\d{1,15})", re.ASCII)
_ATTEMPT = re.compile(RUNS + r"[^/]+/attempts/([^/]+)/(\d{9})(\.end)?\.json")
_OUTPUT = re.compile(RUN_DATA + r"([^/]+)/outputs/([^/]+)/(\d{9})/(.+)", re.DOTALL)
_REUSED = re.compile(RUNS + r"[^/]+/reused/(\d{9})/([^/]+)\.json")
_REUSED_ATTEMPT = re.compile(RUNS + r"[^/]+/reused/(\d{9})/([^/]+)\.attempt-(\d{9})")
_DONE = re.compile(RUNS + r"[^/]+/done/([^/]+)/(\d{9})-([0-9a-f]{64})")


def _pad_number(value: int) -> str:
    return f"{value:09d}"


@dataclass(frozen=True)
class RunLayout:
    run: str

    def __post_init__(self) -> None:
        check_run_name(self.run)

    @property
    def control(self) -> str:
        """Prefix of the records of the run, which only Tiphys writes."""
        return f"{RUNS}{self.run}/"

    @property
    def data(self) -> str:
        """Prefix of what the programs of the run write, without their checkpoints."""
        return f"{RUN_DATA}{self.run}/"

    @property
    def lineages(self) -> str:
        """Prefix of the lineages of all training steps of the run."""
        return f"{LINEAGES}{self.run}/"

    @property
    def run_record(self) -> str:
        return f"{self.control}run.json"

    @property
    def submissions(self) -> str:
        return f"{self.control}submissions/"

    def submission(self, submission: int) -> str:
        return f"{self.submissions}{_pad_number(submission)}.json"

    def submission_binding(self, submission: int) -> str:
        return f"{self.submissions}{_pad_number(submission)}.bound.json"

    def submission_key(self, submission: int, key_digest: str) -> str:
        """Key of an empty object: this submission, which another call claimed, also answers this idempotency key."""
        return f"{self.submissions}{_pad_number(submission)}.key-{key_digest}"

    def submission_end(self, submission: int) -> str:
        return f"{self.submissions}{_pad_number(submission)}.end.json"

    def workflow(self, workflow_digest: str) -> str:
        """Key of a later Workflow of the run (`tiphys.records.WorkflowRecord`)."""
        return f"{self.control}workflows/{workflow_digest}.json"

    def auto_resume(self, submission: int) -> str:
        """Key of the record that the controller resumed the run automatically with this submission."""
        return f"{self.control}auto-resumes/{_pad_number(submission)}.json"

    def manual_stop(self, submission: int) -> str:
        return f"{self.control}auto-resumes/{_pad_number(submission)}.manual-stop.json"

    def items(self, submission: int) -> str:
        return f"{self.control}items/{_pad_number(submission)}/"

    def item(self, submission: int, step: str) -> str:
        return f"{self.items(submission)}{check_step_id(step)}.json"

    @property
    def all_reused(self) -> str:
        return f"{self.control}reused/"

    def reused(self, submission: int, step: str) -> str:
        return f"{self.all_reused}{_pad_number(submission)}/{check_step_id(step)}.json"

    def reused_attempt(self, submission: int, step: str, attempt: int) -> str:
        """Key of an empty object: submission ``submission`` reuses this attempt of the same step."""
        return f"{self.all_reused}{_pad_number(submission)}/{check_step_id(step)}.attempt-{_pad_number(attempt)}"

    @property
    def attempts(self) -> str:
        return f"{self.control}attempts/"

    def step_attempts(self, step: str) -> str:
        return f"{self.attempts}{check_step_id(step)}/"

    def attempt(self, step: str, attempt: int) -> str:
        return f"{self.step_attempts(step)}{_pad_number(attempt)}.json"

    def attempt_end(self, step: str, attempt: int) -> str:
        return f"{self.step_attempts(step)}{_pad_number(attempt)}.end.json"

    def eviction(self, step: str, attempt: int) -> str:
        """Key of the reason for which the service deleted the pods of an attempt."""
        return f"{self.step_attempts(step)}{_pad_number(attempt)}.evicted.json"

    def passed_over_end(self, step: str, attempt: int) -> str:
        """Key of the end that counts while the one under `attempt_end` cannot be read."""
        return f"{self.step_attempts(step)}{_pad_number(attempt)}.passed-over.json"

    @property
    def all_outputs(self) -> str:
        return f"{self.data}outputs/"

    def incarnations(self, step: str, attempt: int) -> str:
        """Prefix of what the processes of one attempt report of themselves; `tiphys.store.incarnations` names it."""
        return f"{self.data}incarnations/{check_step_id(step)}/{_pad_number(attempt)}/"

    def submission_report(self, submission: int) -> str:
        """Key of the page about a submission that Argo's UI shows."""
        return f"{self.control}reports/{_pad_number(submission)}.html"

    def program_output(self, step: str, attempt: int) -> str:
        """Prefix of what the training program of an attempt printed, as it stored it, with a final slash."""
        return f"{self.data}output/{check_step_id(step)}/{_pad_number(attempt)}/"

    def outputs(self, step: str, attempt: int) -> str:
        """Prefix of the outputs of an attempt, with a final slash."""
        return f"{self.all_outputs}{check_step_id(step)}/{_pad_number(attempt)}/"

    @property
    def done_markers(self) -> str:
        return f"{self.control}done/"

    def done_marker(self, step: str, attempt: int, listing_digest: str) -> str:
        return f"{self.done_markers}{check_step_id(step)}/{_pad_number(attempt)}-{listing_digest}"

    @property
    def all_progress(self) -> str:
        return f"{self.data}progress/"

    def progress(self, step: str, attempt: int) -> str:
        """Key of an empty object: this attempt has committed a checkpoint on a volume, which only its pod can read."""
        return f"{self.all_progress}{check_step_id(step)}/{_pad_number(attempt)}"

    @property
    def tracking(self) -> str:
        """Prefix of what the run knows of MLflow; `tiphys.tracking.records` names the objects below it."""
        return f"{self.data}tracking/"

    @property
    def events(self) -> str:
        """Prefix of the events of the services and of the local engine."""
        return f"{self.control}events/"

    @property
    def program_events(self) -> str:
        """Prefix of the events of the training programs."""
        return f"{self.data}events/"


@dataclass(frozen=True)
class LineageLayout:
    """Keys of one lineage: the checkpoints of one training step."""

    lineage: str

    @property
    def prefix(self) -> str:
        return f"{LINEAGES}{self.lineage}/"

    @property
    def manifests(self) -> str:
        return f"{self.prefix}manifests/"

    def manifest(self, attempt: int, global_step: int) -> str:
        return f"{self.manifests}{_countdown(attempt, global_step)}.json"

    @property
    def all_shards(self) -> str:
        return f"{self.prefix}shards/"

    def shards(self, attempt: int, global_step: int) -> str:
        return f"{self.all_shards}{_pad_number(attempt)}-{global_step:015d}/"

    def shard(self, attempt: int, global_step: int, index: int, sha256: str, suffix: str, *, rank: int = 0) -> str:
        """Key of a shard. It contains the shard's hash, so that a repeated save can only meet equal shards."""
        writer = f"r{rank:05d}-" if rank else ""
        return f"{self.shards(attempt, global_step)}{writer}{index:05d}-{sha256[:16]}.{suffix}"

    def rank_parts(self, attempt: int, global_step: int, incarnation: int) -> str:
        """Prefix of the records of ranks that stored their shards. ``incarnation`` counts restarts of the processes."""
        return f"{self.shards(attempt, global_step)}part-{incarnation:05d}-"

    def rank_part(self, attempt: int, global_step: int, incarnation: int, rank: int) -> str:
        return f"{self.rank_parts(attempt, global_step, incarnation)}{rank:05d}.json"

    def abandoned_save(self, attempt: int, global_step: int, incarnation: int) -> str:
        """Key of the record that a rank could not store its shards of a checkpoint."""
        return f"{self.shards(attempt, global_step)}abandoned-{incarnation:05d}.json"

    def gang(self, attempt: int, incarnation: int) -> str:
        """Prefix of the records through which the ranks of an attempt coordinate."""
        return f"{self.prefix}gangs/{_pad_number(attempt)}-{incarnation:05d}/"

    def gang_opened(self, attempt: int, incarnation: int) -> str:
        """Key of the object that rank 0 creates once all ranks have joined this incarnation."""
        return f"{self.gang(attempt, incarnation)}opened"

    def save_requests(self, attempt: int, incarnation: int) -> str:
        return f"{self.gang(attempt, incarnation)}save-requests/"

    def save_request(self, attempt: int, incarnation: int, number: int) -> str:
        return f"{self.save_requests(attempt, incarnation)}{_pad_number(number)}.json"

    def votes(self, attempt: int, incarnation: int, ref: CheckpointRef) -> str:
        """Prefix of one empty object for each rank that has read ``ref`` and found it valid."""
        return f"{self.gang(attempt, incarnation)}votes/{ref.relative_to(self.lineage).replace('/', '.')}/"

    def step_times(self, attempt: int) -> str:
        """Prefix of the step times that the ranks of an attempt report."""
        return f"{self.prefix}step-times/{_pad_number(attempt)}/"

    def step_time(self, attempt: int, measured: "RankStepTime") -> str:
        """Key of an empty object whose name holds one step time."""
        micros = round(measured.own_seconds * 1e6)
        window, member = _pad_number(measured.window), _pad_number(measured.member)
        return f"{self.step_times(attempt)}{window}-{member}-{measured.rank:05d}-{micros}"

    @property
    def training_progress(self) -> str:
        """Prefix of the reports of training progress; the newest report of the newest attempt lists first."""
        return f"{self.prefix}training-progress/"

    def training_progress_report(self, attempt: int, milliseconds: int) -> str:
        """Key of a report. ``milliseconds`` since the epoch order the reports of an attempt."""
        return f"{self.training_progress}{_countdown(attempt, milliseconds)}.json"

    def parse_training_progress(self, key: str) -> int | None:
        """The attempt of a key below ``training-progress/``; None for any other key."""
        reported = self.parse_checkpoint(key)
        return reported.attempt if reported and key.startswith(self.training_progress) else None

    def parse_shard(self, key: str) -> CheckpointRef | None:
        """The checkpoint that a key below ``shards/`` belongs to; None for any other key."""
        match = re.fullmatch(r"(\d{9})-(\d{15})/.+", key.removeprefix(self.all_shards))
        return CheckpointRef(lineage=self.lineage, attempt=int(match[1]), global_step=int(match[2])) if match else None

    @property
    def all_quarantined(self) -> str:
        return f"{self.prefix}quarantine/"

    def quarantined(self, attempt: int, global_step: int) -> str:
        return f"{self.all_quarantined}{_countdown(attempt, global_step)}.json"

    @property
    def all_pins(self) -> str:
        return f"{self.prefix}pins/"

    def pins(self, attempt: int, global_step: int) -> str:
        return f"{self.all_pins}{_countdown(attempt, global_step)}/"

    def pin(self, attempt: int, global_step: int, name: str) -> str:
        return f"{self.pins(attempt, global_step)}{name}.json"

    def parse_pin(self, key: str) -> tuple[CheckpointRef, str] | None:
        """(checkpoint, name) of a key below ``pins/``; None for any other key."""
        match = re.fullmatch(r"(\d{9})-(\d{15})/(" + PIN_NAME + r")\.json", key.removeprefix(self.all_pins))
        return (self._ref_from_countdown(match[1], match[2]), match[3]) if match else None

    @property
    def all_tombstones(self) -> str:
        return f"{self.prefix}tombstones/"

    def tombstone(self, attempt: int, global_step: int) -> str:
        """Key of the tombstone of a checkpoint that no rule keeps any more."""
        return f"{self.all_tombstones}{_countdown(attempt, global_step)}.json"

    def tombstones(self, attempt: int, global_step: int) -> str:
        """Prefix of the tombstone of a checkpoint and of all its deletion notices."""
        return f"{self.all_tombstones}{_countdown(attempt, global_step)}."

    def deletion_notice(self, attempt: int, global_step: int, nonce: str) -> str:
        """Key of a deletion notice. Each deleting process has its own key, and withdraws only its own notice."""
        return f"{self.tombstones(attempt, global_step)}{nonce}.json"

    def parse_tombstone(self, key: str) -> tuple[CheckpointRef, str] | None:
        """(checkpoint, nonce of the notice or "" for the tombstone) of a key below ``tombstones/``; None otherwise."""
        match = re.fullmatch(r"(\d{9})-(\d{15})(?:\.([0-9a-f]+))?\.json", key.removeprefix(self.all_tombstones))
        return (self._ref_from_countdown(match[1], match[2]), match[3] or "") if match else None

    def parse_checkpoint(self, key: str) -> CheckpointRef | None:
        """The checkpoint that a manifest or quarantine key names; None for any other key."""
        match = _CHECKPOINT.fullmatch(key.rpartition("/")[2])
        return self._ref_from_countdown(match[1], match[2]) if match else None

    def _ref_from_countdown(self, attempt: str, global_step: str) -> CheckpointRef:
        return CheckpointRef(
            lineage=self.lineage, attempt=_MAX_ATTEMPT - int(attempt), global_step=MAX_GLOBAL_STEP - int(global_step)
        )


STEP_TIME_WINDOW_SECONDS = 300
"""Ranks report step times for windows of the wall clock, so that the windows of all ranks match."""


class RankStepTime(NamedTuple):
    """Median time that one rank worked on a step in a window, without waits for others. ``member`` is its pod."""

    window: int
    member: int
    rank: int
    own_seconds: float


def parse_step_time(key: str) -> RankStepTime | None:
    """The step time in a key of `LineageLayout.step_time`; None for any other key."""
    match = _STEP_TIME.fullmatch(key.rpartition("/")[2])
    return RankStepTime(int(match[1]), int(match[2]), int(match[3]), int(match[4]) / 1e6) if match else None


def lineage_name(run: str, step: str) -> str:
    return f"{check_run_name(run)}/{check_step_id(step)}"


def memo_key(step_key: str) -> str:
    """Key of the record that shares the result of a step between runs."""
    return f"{MEMOS}{step_key}.json"


def parse_memo(key: str) -> str | None:
    """The step key in a key of `memo_key`; None for any other key."""
    match = re.fullmatch(MEMOS + r"([0-9a-f]{64})\.json", key)
    return match[1] if match else None


def probe_folder(half: StoreHalf, nonce: str) -> str:
    """Prefix of the objects with which ``tiphys doctor`` tries out a half of the store; it removes them again."""
    return f"{half}probe/{nonce}/"


def idempotency_record_key(key_digest: str) -> str:
    """Key of the record of the run that an idempotency key created."""
    return f"{CONTROL}idempotency-keys/{key_digest}.json"


def triggered_run_key(template: str, digest: str, modified_seconds: int | None = None) -> str:
    """Key of the record of a triggered run; with a time, of its copy: that of the last modified object lists first."""
    order = "objects/" if modified_seconds is None else f"{_MAX_ATTEMPT * 10 - modified_seconds:010d}-"
    return f"{TRIGGERS}{template}/{order}{digest}.json"


def alert_key(alert: str, kind: Literal["firing", "resolved", "claim", "result"]) -> str:
    """Key of a record of one alert, by its id."""
    return f"{ALERTS}{alert}/{kind}.json"


def parse_alert(key: str) -> tuple[str, str] | None:
    """(id, kind) of a key below ``alerts/``; None for any other key."""
    match = re.fullmatch(ALERTS + r"([0-9a-f]{32})/(firing|resolved|claim|result)\.json", key)
    return (match[1], match[2]) if match else None


def parse_submission(key: str) -> tuple[int, str] | None:
    """(submission, ``claim``, ``bound`` or ``end``) of a key below ``submissions/``; None otherwise."""
    match = re.fullmatch(r".*submissions/(\d{9})(?:\.(bound|end))?\.json", key)
    return (int(match[1]), match[2] or "claim") if match else None


def event_batch_key(prefix: str, number: int) -> str:
    """Key of a batch of events below `RunLayout.events` or `RunLayout.program_events`."""
    return f"{prefix}{_pad_number(number)}.json"


def parse_event_batch(key: str) -> int | None:
    """Number of a key below ``events/``; None for any other key."""
    match = re.fullmatch(r".*events/(\d{9})\.json", key)
    return int(match[1]) if match else None


class AttemptRecordKey(NamedTuple):
    """Key of a claim or, with ``is_end``, of an end record below ``attempts/``."""

    step: str
    attempt: int
    is_end: bool


class OutputKey(NamedTuple):
    """Key of an object below ``outputs/``; ``name`` is relative to `RunLayout.outputs`."""

    run: str
    step: str
    attempt: int
    name: str


class DoneMarkerKey(NamedTuple):
    """Key of a projection below ``done/``."""

    step: str
    attempt: int
    listing_digest: str


class ReuseRecordKey(NamedTuple):
    submission: int
    step: str


class ReusedAttemptKey(NamedTuple):
    """Key of the projection of a reuse record that names an attempt of the same step."""

    submission: int
    step: str
    attempt: int


ListedKey = AttemptRecordKey | OutputKey | DoneMarkerKey | ReuseRecordKey | ReusedAttemptKey


def parse_listed_key(key: str) -> ListedKey | None:
    """The typed form of a key that a listing of a run's results shows; None for any other key."""
    folders = key.split("/", 4)
    for parse in _LISTED_KEY_PARSERS.get(folders[3], ()) if len(folders) == 5 else ():
        if (listed := parse(key)) is not None:
            return listed
    return None


def parse_attempt(key: str) -> AttemptRecordKey | None:
    """Step id and attempt of a key below ``attempts/``; None for any other key."""
    match = _ATTEMPT.fullmatch(key)
    return AttemptRecordKey(match[1], int(match[2]), bool(match[3])) if match else None


def parse_output(key: str) -> OutputKey | None:
    """Run, step id and attempt of a key below ``outputs/``; None for any other key."""
    match = _OUTPUT.fullmatch(key)
    return OutputKey(match[1], match[2], int(match[3]), match[4]) if match else None


def parse_done(key: str) -> DoneMarkerKey | None:
    """Step id, attempt and listing digest of a key below ``done/``; None for any other key."""
    match = _DONE.fullmatch(key)
    return DoneMarkerKey(match[1], int(match[2]), match[3]) if match else None


def parse_reused(key: str) -> ReuseRecordKey | None:
    """Submission and step id of a reuse record below ``reused/``; None for any other key."""
    match = _REUSED.fullmatch(key)
    return ReuseRecordKey(int(match[1]), match[2]) if match else None


def parse_reused_attempt(key: str) -> ReusedAttemptKey | None:
    """Submission, step id and attempt of a key of `RunLayout.reused_attempt`; None for any other key."""
    match = _REUSED_ATTEMPT.fullmatch(key)
    return ReusedAttemptKey(int(match[1]), match[2], int(match[3])) if match else None


_LISTED_KEY_PARSERS: Mapping[str, tuple[Callable[[str], ListedKey | None], ...]] = {
    "attempts": (parse_attempt,),
    "outputs": (parse_output,),
    "done": (parse_done,),
    "reused": (parse_reused, parse_reused_attempt),
}


def _countdown(attempt: int, global_step: int) -> str:
    return f"{_MAX_ATTEMPT - attempt:09d}-{MAX_GLOBAL_STEP - global_step:015d}"
