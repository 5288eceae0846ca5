"""Where each record lies. No other module builds a key.

Numbers are padded, so that listings come in their order; in ``manifests/``,
``quarantine/``, ``pins/`` and ``expired/`` they count down, so that the newest
checkpoint lists first.
"""

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tiphys.records import CheckpointRef, check_run, check_step

RUNS = "runs/"
LINEAGES = "lineages/"
ALERTS = "alerts/"

PIN_NAME = r"[A-Za-z0-9][-A-Za-z0-9_.]{0,99}"

_ATTEMPT_TOP = 10**9 - 1
_STEP_TOP = 10**15 - 1
_CHECKPOINT = re.compile(r"(\d{9})-(\d{15})\.json")
_PIN = re.compile(r"(\d{9})-(\d{15})/(" + PIN_NAME + r")\.json")
_EXPIRED = re.compile(r"(\d{9})-(\d{15})(?:\.([0-9a-f]+))?\.json")
_SHARD = re.compile(r"(\d{9})-(\d{15})/.+")
_PACE = re.compile(r"(\d{9})-(\d{9})-(\d{5})-(\d+)")
_ALERT = re.compile(ALERTS + r"([0-9a-f]{32})/(firing|resolved|taken|done)\.json")
_ATTEMPT = re.compile(RUNS + r"[^/]+/attempts/([^/]+)/(\d{9})(\.end)?\.json")
_OUTPUT = re.compile(RUNS + r"([^/]+)/outputs/([^/]+)/(\d{9})/(.+)", re.DOTALL)
_ADOPTED = re.compile(RUNS + r"[^/]+/adopted/(\d{9})/([^/]+)\.json")
_ADOPTED_ATTEMPT = re.compile(RUNS + r"[^/]+/adopted/(\d{9})/([^/]+)\.attempt-(\d{9})")
_DONE = re.compile(RUNS + r"[^/]+/done/([^/]+)/(\d{9})-([0-9a-f]{64})")


def _number(value: int) -> str:
    return f"{value:09d}"


@dataclass(frozen=True)
class RunLayout:
    """Keys of one run."""

    run: str

    def __post_init__(self) -> None:
        check_run(self.run)

    @property
    def prefix(self) -> str:
        return f"{RUNS}{self.run}/"

    @property
    def record(self) -> str:
        return f"{self.prefix}run.json"

    @property
    def submissions(self) -> str:
        return f"{self.prefix}submissions/"

    def submission(self, submission: int) -> str:
        return f"{self.submissions}{_number(submission)}.json"

    def submission_bound(self, submission: int) -> str:
        return f"{self.submissions}{_number(submission)}.bound.json"

    def submission_end(self, submission: int) -> str:
        return f"{self.submissions}{_number(submission)}.end.json"

    def workflow(self, workflow_digest: str) -> str:
        """A Workflow other than the first one that the run went on with."""
        return f"{self.prefix}workflows/{workflow_digest}.json"

    def automatic(self, submission: int) -> str:
        """That the controller was about to make this submission by itself."""
        return f"{self.prefix}automatic/{_number(submission)}.json"

    def left_alone(self, submission: int) -> str:
        return f"{self.prefix}automatic/{_number(submission)}.left.json"

    def items(self, submission: int) -> str:
        return f"{self.prefix}items/{_number(submission)}/"

    def item(self, submission: int, step: str) -> str:
        return f"{self.items(submission)}{check_step(step)}.json"

    @property
    def adoptions(self) -> str:
        return f"{self.prefix}adopted/"

    def adopted(self, submission: int, step: str) -> str:
        return f"{self.adoptions}{_number(submission)}/{check_step(step)}.json"

    def adopted_attempt(self, submission: int, step: str, attempt: int) -> str:
        """Projection of a record above that names an attempt of this very step; empty."""
        return f"{self.adoptions}{_number(submission)}/{check_step(step)}.attempt-{_number(attempt)}"

    @property
    def attempts(self) -> str:
        return f"{self.prefix}attempts/"

    def step_attempts(self, step: str) -> str:
        return f"{self.attempts}{check_step(step)}/"

    def attempt(self, step: str, attempt: int) -> str:
        return f"{self.step_attempts(step)}{_number(attempt)}.json"

    def attempt_end(self, step: str, attempt: int) -> str:
        return f"{self.step_attempts(step)}{_number(attempt)}.end.json"

    @property
    def all_outputs(self) -> str:
        return f"{self.prefix}outputs/"

    def attempt_crash(self, step: str, attempt: int) -> str:
        """What the training program of this attempt left about the error that ended it."""
        return f"{self.step_attempts(step)}{_number(attempt)}.crash.json"

    def outputs(self, step: str, attempt: int) -> str:
        """Prefix of the bytes an attempt produced, with a final slash."""
        return f"{self.all_outputs}{check_step(step)}/{_number(attempt)}/"

    @property
    def done(self) -> str:
        return f"{self.prefix}done/"

    def step_done(self, step: str) -> str:
        return f"{self.done}{check_step(step)}/"

    def done_projection(self, step: str, attempt: int, listing_digest: str) -> str:
        return f"{self.step_done(step)}{_number(attempt)}-{listing_digest}"

    @property
    def all_progress(self) -> str:
        return f"{self.prefix}progress/"

    def progress(self, step: str, attempt: int) -> str:
        """Empty object: this attempt has committed a checkpoint on a volume, which only its pod sees."""
        return f"{self.all_progress}{check_step(step)}/{_number(attempt)}"

    @property
    def events(self) -> str:
        return f"{self.prefix}events/"

    def event_batch(self, number: int) -> str:
        return f"{self.events}{_number(number)}.json"


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
        return f"{self.all_shards}{_number(attempt)}-{global_step:015d}/"

    def shard(self, attempt: int, global_step: int, index: int, sha256: str, suffix: str, *, rank: int = 0) -> str:
        """Named by its content, so that a repeated save meets its own shards and never others."""
        writer = f"r{rank:05d}-" if rank else ""
        return f"{self.shards(attempt, global_step)}{writer}{index:05d}-{sha256[:16]}.{suffix}"

    def parts(self, attempt: int, global_step: int, incarnation: int) -> str:
        """Start of the keys of what ranks have stored of a checkpoint, by the restart of the attempt's processes."""
        return f"{self.shards(attempt, global_step)}part-{incarnation:05d}-"

    def part(self, attempt: int, global_step: int, incarnation: int, rank: int) -> str:
        return f"{self.parts(attempt, global_step, incarnation)}{rank:05d}.json"

    def lost(self, attempt: int, global_step: int, incarnation: int) -> str:
        """Key that says of a checkpoint that some rank could not store its share."""
        return f"{self.shards(attempt, global_step)}lost-{incarnation:05d}.json"

    def gang(self, attempt: int, incarnation: int) -> str:
        """Prefix of what the ranks of an attempt tell each other."""
        return f"{self.prefix}gangs/{_number(attempt)}-{incarnation:05d}/"

    def opened(self, attempt: int, incarnation: int) -> str:
        """Key of what the first rank leaves when the ranks have met under this number."""
        return f"{self.gang(attempt, incarnation)}opened"

    def calls(self, attempt: int, incarnation: int) -> str:
        return f"{self.gang(attempt, incarnation)}calls/"

    def call(self, attempt: int, incarnation: int, number: int) -> str:
        return f"{self.calls(attempt, incarnation)}{_number(number)}.json"

    def votes(self, attempt: int, incarnation: int, ref: CheckpointRef) -> str:
        """Prefix of one empty object for each rank that has read ``ref`` and found it valid."""
        return f"{self.gang(attempt, incarnation)}votes/{ref.within(self.lineage).replace('/', '.')}/"

    def paces(self, attempt: int) -> str:
        """Prefix of what the ranks of an attempt tell of their pace."""
        return f"{self.prefix}pace/{_number(attempt)}/"

    def pace(self, attempt: int, told: "RankPace") -> str:
        """Key of an empty object that tells by its name."""
        micros = round(told.own_seconds * 1e6)
        return f"{self.paces(attempt)}{_number(told.window)}-{_number(told.member)}-{told.rank:05d}-{micros}"

    def parse_shard(self, key: str) -> CheckpointRef | None:
        """The checkpoint that a key below ``shards/`` belongs to; None for any other key."""
        match = _SHARD.fullmatch(key.removeprefix(self.all_shards))
        return CheckpointRef(lineage=self.lineage, attempt=int(match[1]), global_step=int(match[2])) if match else None

    @property
    def quarantine(self) -> str:
        return f"{self.prefix}quarantine/"

    def quarantined(self, attempt: int, global_step: int) -> str:
        return f"{self.quarantine}{_countdown(attempt, global_step)}.json"

    @property
    def all_pins(self) -> str:
        return f"{self.prefix}pins/"

    def pins(self, attempt: int, global_step: int) -> str:
        return f"{self.all_pins}{_countdown(attempt, global_step)}/"

    def pin(self, attempt: int, global_step: int, name: str) -> str:
        return f"{self.pins(attempt, global_step)}{name}.json"

    def parse_pin(self, key: str) -> tuple[CheckpointRef, str] | None:
        """(checkpoint, name) of a key below ``pins/``; None for any other key."""
        match = _PIN.fullmatch(key.removeprefix(self.all_pins))
        return (self._counted_down(match[1], match[2]), match[3]) if match else None

    @property
    def expired(self) -> str:
        return f"{self.prefix}expired/"

    def expiry(self, attempt: int, global_step: int) -> str:
        """Mark: no rule keeps this checkpoint any more."""
        return f"{self.expired}{_countdown(attempt, global_step)}.json"

    def expiries(self, attempt: int, global_step: int) -> str:
        """Prefix of the mark of a checkpoint and of all announcements that it is being deleted."""
        return f"{self.expired}{_countdown(attempt, global_step)}."

    def deletion(self, attempt: int, global_step: int, nonce: str) -> str:
        """Announcement of one who deletes it now; each has a key of his own, and takes only that one back."""
        return f"{self.expiries(attempt, global_step)}{nonce}.json"

    def parse_expired(self, key: str) -> tuple[CheckpointRef, str] | None:
        """(checkpoint, nonce of the announcement or "" for the mark) of a key below ``expired/``; None otherwise."""
        match = _EXPIRED.fullmatch(key.removeprefix(self.expired))
        return (self._counted_down(match[1], match[2]), match[3] or "") if match else None

    def parse_checkpoint(self, key: str) -> CheckpointRef | None:
        """The checkpoint that a manifest or quarantine key names; None for any other key."""
        match = _CHECKPOINT.fullmatch(key.rpartition("/")[2])
        return self._counted_down(match[1], match[2]) if match else None

    def _counted_down(self, attempt: str, global_step: str) -> CheckpointRef:
        return CheckpointRef(
            lineage=self.lineage, attempt=_ATTEMPT_TOP - int(attempt), global_step=_STEP_TOP - int(global_step)
        )


PACE_WINDOW_SECONDS = 300
"""Ranks tell their pace for windows of the clock on the wall, so that all tell of the same ones."""


class RankPace(NamedTuple):
    """How long one rank worked by itself for a step, as the median of a window; ``member`` is its pod."""

    window: int
    member: int
    rank: int
    own_seconds: float


def parse_pace(key: str) -> RankPace | None:
    """What a key of `LineageLayout.pace` tells; None for any other key."""
    match = _PACE.fullmatch(key.rpartition("/")[2])
    return RankPace(int(match[1]), int(match[2]), int(match[3]), int(match[4]) / 1e6) if match else None


def lineage_of(run: str, step: str) -> str:
    """Name of the lineage that belongs to a training step of a run."""
    return f"{check_run(run)}/{check_step(step)}"


def memo_key(step_key: str) -> str:
    """Key of the pointer that shares a step's result between runs."""
    return f"memo/{step_key}.json"


def start_key(key_digest: str) -> str:
    """Key of the record of which run was begun under an idempotency key."""
    return f"keys/{key_digest}.json"


def alert_key(alert: str, what: Literal["firing", "resolved", "taken", "done"]) -> str:
    """Key of a record about one alert, by its id."""
    return f"{ALERTS}{alert}/{what}.json"


def parse_alert(key: str) -> tuple[str, str] | None:
    """(id, what) of a key below ``alerts/``; None for any other key."""
    match = _ALERT.fullmatch(key)
    return (match[1], match[2]) if match else None


def parse_submission(key: str) -> tuple[int, str] | None:
    """(submission, ``claim``, ``bound`` or ``end``) of a key below ``submissions/``; None otherwise."""
    match = re.fullmatch(r".*submissions/(\d{9})(?:\.(bound|end))?\.json", key)
    return (int(match[1]), match[2] or "claim") if match else None


def parse_event_batch(key: str) -> int | None:
    """Number of a key below ``events/``; None for any other key."""
    match = re.fullmatch(r".*events/(\d{9})\.json", key)
    return int(match[1]) if match else None


def parse_attempt(key: str) -> tuple[str, int, bool] | None:
    """(step id, attempt, whether it is the end record) of a key below ``attempts/``; None otherwise."""
    match = _ATTEMPT.fullmatch(key)
    return (match[1], int(match[2]), bool(match[3])) if match else None


def parse_output(key: str) -> tuple[str, str, int, str] | None:
    """(run, step id, attempt, key relative to `RunLayout.outputs`) of a key below ``outputs/``; None otherwise."""
    match = _OUTPUT.fullmatch(key)
    return (match[1], match[2], int(match[3]), match[4]) if match else None


def parse_done(key: str) -> tuple[str, int, str] | None:
    """(step id, attempt, listing digest) of a key below ``done/``; None otherwise."""
    match = _DONE.fullmatch(key)
    return (match[1], int(match[2]), match[3]) if match else None


def parse_adopted(key: str) -> tuple[int, str] | None:
    """(submission, step id) of a key below ``adopted/``; None otherwise."""
    match = _ADOPTED.fullmatch(key)
    return (int(match[1]), match[2]) if match else None


def parse_adopted_attempt(key: str) -> tuple[int, str, int] | None:
    """(submission, step id, attempt) of the projection of a key below ``adopted/``; None otherwise."""
    match = _ADOPTED_ATTEMPT.fullmatch(key)
    return (int(match[1]), match[2], int(match[3])) if match else None


def _countdown(attempt: int, global_step: int) -> str:
    return f"{_ATTEMPT_TOP - attempt:09d}-{_STEP_TOP - global_step:015d}"
