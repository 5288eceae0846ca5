"""Attends to one run at a time: looks, decides, and resumes it if that is due. Whoever calls says when.

The loop calls it for runs that have ended, and the worker behind the webhooks
for those that an alert is about. It keeps in memory only since when it has seen
what: all counts come from storage.

Carries out what was decided: the decision is recorded first, so that every try is counted, also one that dies.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from tiphys.errors import ConflictError, FencedError, UsageError
from tiphys.faults import failpoint
from tiphys.protocol.auto_resume_policy import AutoResumePolicy, auto_resume_of
from tiphys.records import AutomaticResume, LeftAlone, RunRecord
from tiphys.store import RunLayout, Store, claim, find_record, read_run, submissions
from tiphys_controller.auto_resume.decide import Action, Decision, decide
from tiphys_controller.auto_resume.observation_health import Health, TokenBucket, distrust
from tiphys_controller.auto_resume.observe import look
from tiphys_controller.auto_resume.state import Limits, Mode, Observed, RunKey, Standing
from tiphys_controller.submit.fork import fork
from tiphys_controller.submit.resume import Resumed, resume
from tiphys_controller.submit.submission import place
from tiphys_controller.submit.submitter import ClusterSubmitter, Submitter


def intend(store: Store, seen: Observed, decision: Decision, alert: str = "") -> None:
    """Record that the next submission is about to be made; whoever finds the record goes on."""
    record = AutomaticResume(
        run=seen.run,
        submission=seen.next_submission,
        reason=decision.message,
        cause=seen.cause,
        alert=alert,
        advance=seen.advance,
    )
    claim(store, RunLayout(seen.run).automatic(seen.next_submission), record)
    failpoint("automatic.after_intent")


def resume_by_itself(
    store: Store, submitter: Submitter, seen: Observed, decision: Decision, alert: str = ""
) -> Resumed:
    """Resume a run as `decision` says, at most once whoever else does.

    Raises:
        ConflictError: somebody else has, or it runs after all.
        UsageError: it cannot be pruned.
    """
    if not seen.intended:
        intend(store, seen, decision, alert)
    return resume(store, submitter, seen.run)


def stop_workflow(store: Store, submitter: ClusterSubmitter, run: str) -> None:
    """Have the Workflow of the last submission end, so that its programs save."""
    last = submissions(store, run)[-1]
    live = submitter.find(*place(last))
    if live is not None and live.running and (last.bound is None or live.uid == last.bound.uid):
        submitter.stop(live)


def fork_by_itself(store: Store, submitter: Submitter, run: str, name: str) -> None:
    """Begin the run ``name`` from what ``run`` has, or finish what somebody has begun who died.

    Raises:
        ConflictError: something has changed that may not.
    """
    if find_record(store, RunLayout(name).record, RunRecord) is None:
        fork(store, submitter, run, name)
        return
    sent = submissions(store, name)
    if not sent or sent[-1].bound is None:
        resume(store, submitter, name)


_NONE: Mapping[str, str] = MappingProxyType({})


class Attended(NamedTuple):
    """What came of attending to a run. ``resumed`` is set if something was submitted."""

    decision: Decision
    seen: Observed
    resumed: Resumed | None = None


@dataclass(frozen=True)
class Surroundings:
    """What an attendant is given."""

    stores: Callable[[str], Store]
    submitter: Callable[[], ClusterSubmitter]
    """Asked at each use: which cluster it is may not be known at first."""
    may_write: Callable[[], bool]
    """Whether this controller leads, asked right before it acts."""
    health: Callable[[str], Health]
    """What can be believed now, of runs of a namespace."""
    monotonic: Callable[[], float]


class Attendant:
    """Decides and acts for single runs. Thread-safe; calls about one run come one after the other."""

    def __init__(self, given: Surroundings, limits: Limits) -> None:
        self._given = given
        self._limits = limits
        self._bucket = TokenBucket(limits.per_minute / 60, limits.burst, given.monotonic)
        self._since: dict[RunKey, tuple[int, Standing, float]] = {}
        self._policies: dict[RunKey, AutoResumePolicy | None] = {}
        self._busy: dict[RunKey, threading.Lock] = {}
        self._lock = threading.Lock()

    @property
    def mode(self) -> Mode:
        """Whether what is decided is done."""
        return self._limits.mode

    def attend(self, key: RunKey, shutdowns: Mapping[str, str] = _NONE, *, alert: str = "") -> Attended:
        """Look at a run, and resume it if that is due.

        Args:
            key: The run.
            shutdowns: By uid, ``spec.shutdown`` of its Workflows for which that was seen.
            alert: Id of the alert that asks for it; empty where nobody does.

        Raises:
            StoreError: storage or API server is out of reach; nothing was concluded.
            FencedError: another controller leads by now.
            ConflictError: somebody else goes on with it.
            UsageError: what its author asked for cannot be read.
            IntegrityError: a record is damaged.
        """
        with self._lock:
            busy = self._busy.setdefault(key, threading.Lock())
        with busy:
            return self._attend(key, shutdowns, alert)

    def examine(self, key: RunKey, shutdowns: Mapping[str, str] = _NONE) -> Observed:
        """All that is known of a run, also of one that goes on; raises as `attend` does."""
        store = self._given.stores(key[0])
        return look(store, self._given.submitter(), key[1], self.policy(key), shutdowns, thorough=True)

    def restart(self, key: RunKey, alert: str) -> Decision:
        """Have the Workflow of a run that goes on end, after it was noted that the next one follows.

        All brakes hold; what was decided is answered, and was done only for `Action.RESUME` in `Mode.ON`. Raises as
        `attend` does.
        """
        seen = self.examine(key)
        waited = self._waited(key, seen)
        ended = replace(seen, standing=Standing.FAILED, failures=(), ended_by="", told=f"alert {alert}")
        decision = decide(ended, waited, self._limits, demanded=True)
        if decision.action is not Action.RESUME:
            return decision
        if (put_off := self._put_off(key[0], ended)) is not None:
            return put_off
        if self._limits.mode is Mode.ON:
            self._must_lead()
            if not seen.intended:
                intend(self._given.stores(key[0]), ended, decision, alert)
            stop_workflow(self._given.stores(key[0]), self._given.submitter(), key[1])
        return decision

    def fork(self, key: RunKey, name: str) -> Decision:
        """Have another run go on from this one, once under this name; answers as `restart` does."""
        held = Observed(key[1], 0, Standing.RUNS)
        if (put_off := self._put_off(key[0], held)) is not None:
            return put_off
        forked = Decision(Action.RESUME, "Forked", f"run {name} goes on from it")
        if self._limits.mode is not Mode.ON:
            return forked
        self._must_lead()
        try:
            fork_by_itself(self._given.stores(key[0]), self._given.submitter(), key[1], name)
        except ConflictError as error:
            return Decision(Action.LEAVE, "Refused", str(error))
        return forked

    def policy(self, key: RunKey) -> AutoResumePolicy | None:
        """What the author of a run asked for; it never changes, so it is read once."""
        if key not in self._policies:
            self._policies[key] = auto_resume_of(read_run(self._given.stores(key[0]), key[1]).workflow)
        return self._policies[key]

    def forget(self, key: RunKey) -> None:
        """Nobody will ask about this run again soon."""
        with self._lock:
            self._since.pop(key, None)
            self._busy.pop(key, None)

    def _attend(self, key: RunKey, shutdowns: Mapping[str, str], alert: str) -> Attended:
        store, submitter = self._given.stores(key[0]), self._given.submitter()
        seen = look(store, submitter, key[1], self.policy(key), shutdowns)
        decision = decide(seen, self._waited(key, seen), self._limits, demanded=bool(alert))
        if decision.reason == "EndedByPerson":
            self._note_person(store, seen)
        if decision.action is not Action.RESUME:
            return Attended(decision, seen)
        if (put_off := self._put_off(key[0], seen)) is not None:
            return Attended(put_off, seen)
        if self._limits.mode is not Mode.ON:
            return Attended(decision, seen)
        self._must_lead()
        try:
            resumed = resume_by_itself(store, submitter, seen, decision, alert)
        except UsageError as error:
            return Attended(Decision(Action.LEAVE, "Refused", str(error)), seen)
        if resumed.submission is None:
            return Attended(Decision(Action.LEAVE, "NothingMissing", "all its steps are finished"), seen)
        return Attended(decision, seen, resumed)

    def _must_lead(self) -> None:
        if not self._given.may_write():
            raise FencedError("this controller does not lead any more; whoever does goes on from the same storage")

    def _put_off(self, namespace: str, seen: Observed) -> Decision | None:
        """Wait although the run itself is ready: sight is bad, or others go first."""
        health = self._given.health(namespace)
        if doubt := distrust(health, self._limits, vanished=seen.standing is Standing.GONE):
            return Decision(Action.WAIT, "HealthUnknown", doubt, self._limits.calm_seconds)
        if not seen.intended and self._limits.mode is Mode.ON and (seconds := self._bucket.take()):
            told = f"more than {self._limits.per_minute:g} runs a minute would be resumed"
            return Decision(Action.WAIT, "RateLimited", told, seconds)
        return None

    def _waited(self, key: RunKey, seen: Observed) -> float:
        """Seconds since the run was first seen like this; not since it was recorded: clocks differ and jump."""
        now = self._given.monotonic()
        held = self._since.get(key)
        if held is None or held[:2] != (seen.submission, seen.standing):
            held = self._since[key] = (seen.submission, seen.standing, now)
        return now - held[2]

    def _note_person(self, store: Store, seen: Observed) -> None:
        """The Workflow, which says so, may be deleted."""
        if self._limits.mode is Mode.ON and seen.policy is not None and seen.submission and self._given.may_write():
            left = LeftAlone(run=seen.run, submission=seen.submission, reason=seen.ended_by)
            claim(store, RunLayout(seen.run).left_alone(seen.submission), left)
