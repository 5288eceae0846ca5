"""What a training may meet by its own doing, and what has to be on record afterwards.

A row is the same on the local engine and on a cluster; only what kills from
outside, such as a drain, belongs to one place alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hera.workflows import Resources

from hera_pipelines import Retries
from support.stories.interrupted_training.pipelines import expected_version
from tiphys.lineage.select import list_commits
from tiphys.records import AttemptEnd, AttemptEndOutcome, Cause
from tiphys.store import Attempt, Store, lineage_name, read_step_attempts

STEPS = 12
MET_AT = 7
"""Step at which the first attempt meets its fate: one after a checkpoint."""
DEADLINE = "40s"
"""Long enough for a slow machine to get to `MET_AT`; the attempt that meets it waits for its end."""


@dataclass(frozen=True)
class Fate:
    """One row: what happens, why Tiphys says it happened, and whether the training goes on."""

    name: str
    fate: str = ""
    cause: Cause | None = None
    goes_on: bool = True
    processes: int = 1
    """Processes of the last attempt, in one pod."""
    training: Mapping[str, Any] = field(default_factory=dict)
    train_options: Mapping[str, Any] = field(default_factory=dict)
    without_cluster: bool = True
    """False where it takes a real kernel or kubelet, or a long time."""

    @property
    def phase(self) -> str:
        """How the Workflow ends."""
        return "Succeeded" if self.goes_on else "Failed"

    @property
    def arguments(self) -> dict[str, Any]:
        """What `story` takes. Where the training goes on, no budget but that of its cause allows it to."""
        met = f"{self.fate}@{MET_AT}" if self.fate else ""
        budgets = {"retries": only(self.cause)} if self.cause is not None and self.goes_on else {}
        training = {**self.training, **budgets}
        return {"steps": STEPS, "fate": met, "training": training, "train_options": self.train_options}

    def check(self, store: Store, run: str) -> None:
        """Hold the records of a finished run against this row."""
        attempts = read_step_attempts(store, run, "train")
        if self.cause is not None:
            first = ended(attempts[0])
            assert (first.outcome, first.cause) == (AttemptEndOutcome.FAILED, self.cause), first.message
            assert first.progress
        assert len(attempts) == (2 if self.cause is not None and self.goes_on else 1)
        if self.goes_on:
            last = ended(attempts[-1])
            assert (last.outcome, last.incarnations) == (AttemptEndOutcome.DONE, self.processes), last.message
            assert version(store, run) == expected_version(STEPS)
        check_starts(store, run)


def only(cause: Cause) -> Retries:
    """Budgets that allow one attempt to end by ``cause``, and none by anything else; each process has its own pod."""
    nothing: dict[str, Any] = {one.value: 0 for one in Cause}
    return Retries(**{**nothing, cause.value: 1}, backoff="1s", in_place=False)


def ended(attempt: Attempt) -> AttemptEnd:
    """The end of an attempt, which must have one."""
    assert attempt.end is not None, f"attempt {attempt.claim.attempt} of {attempt.claim.step} has no end"
    return attempt.end


def version(store: Store, run: str) -> str:
    """What register said the model is called."""
    [output] = ended(read_step_attempts(store, run, "register")[-1]).outputs
    return output.value or ""


def model(store: Store, run: str) -> str:
    """What the training left as its model."""
    outputs = ended(read_step_attempts(store, run, "train")[-1]).outputs
    [key] = [output.key for output in outputs if output.name == "model"]
    return store.read(key).decode()


def check_starts(store: Store, run: str) -> None:
    """Every attempt started from the newest checkpoint of those before it, and none committed beside another."""
    commits = list_commits(store, lineage_name(run, "train"))
    for before, attempt in zip((attempts := read_step_attempts(store, run, "train")), attempts[1:], strict=False):
        mine = [ref for ref in commits if ref.attempt == before.claim.attempt]
        newest = max(mine, key=lambda ref: ref.global_step, default=before.claim.starts_from)
        assert attempt.claim.starts_from == newest


FATES = (
    Fate("undisturbed"),
    Fate("killed", fate="kill", cause=Cause.INFRASTRUCTURE),
    Fate("killed once", fate="once", processes=2),
    Fate("broken", fate="error", cause=Cause.USER_ERROR, goes_on=False),
    Fate(
        "too long",
        fate="wait",
        cause=Cause.DEADLINE,
        goes_on=False,
        training={"deadline": DEADLINE},
        without_cluster=False,
    ),
    Fate(
        "too long, with a budget",
        fate="wait",
        cause=Cause.DEADLINE,
        training={"deadline": DEADLINE},
        without_cluster=False,
    ),
    Fate(
        "too much memory",
        fate="memory",
        cause=Cause.OUT_OF_MEMORY,
        train_options={"resources": Resources(memory_request="64Mi", memory_limit="192Mi")},
        without_cluster=False,
    ),
)
