"""Is it the checkpoint that keeps killing the program?

A checkpoint can hold every byte that was written and still be poison: weights
that turned to NaN, a position in the data that the loader cannot take. Each
attempt then dies alike, soon after the load, for as long as anybody pays for
it. So attempts that loaded the same checkpoint and died the same death within a
few steps make it a suspect, and the one before it gets its try.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tiphys.records import AttemptClaim, AttemptEnd, Cause, CheckpointRef, CrashRecord, Death, Outcome
from tiphys.store import Attempt, RunLayout, Store, find_record

DEATHS = 2
"""As many attempts have to die alike. One is an accident; a third would only cost more."""
STEPS = 10
"""So many steps after the load a death may still be the checkpoint's doing, such as a loss that is NaN at the third."""

_OWN_CAUSES = (Cause.USER_ERROR, Cause.UNKNOWN)
"""Ends that can be the program's doing. Neither lost nodes, nor evictions, nor too little memory are."""
_OWN_SIGNALS = {132: "SIGILL", 134: "SIGABRT", 135: "SIGBUS", 136: "SIGFPE", 139: "SIGSEGV"}
"""Exit codes of a program that the kernel stopped for what it did itself (128 and the signal)."""


class Suspicion(NamedTuple):
    """``checkpoint`` is to be barred; ``reason`` says why, for a person."""

    checkpoint: CheckpointRef
    reason: str


def crash_of(store: Store, run: str, step: str, attempt: int) -> CrashRecord | None:
    """What the program of an attempt left about its end; None if it left nothing. Raises `IntegrityError`."""
    return find_record(store, RunLayout(run).attempt_crash(step, attempt), CrashRecord)


def death_of(
    claim: AttemptClaim, cause: Cause | None, exit_code: int | None, crash: CrashRecord | None, *, progress: bool
) -> Death | None:
    """What a failed end says about the checkpoint that its attempt had loaded; None if it says nothing.

    The program's own account goes first. Without one only a signal tells that
    it died of what it was doing; an exit code can come from before the load.
    """
    if cause not in _OWN_CAUSES:
        return None
    if crash is not None:
        loaded = crash.restored or claim.starts_from
        if loaded is None or not crash.fingerprint:
            return None
        steps = None if crash.global_step is None else max(0, crash.global_step - loaded.global_step)
        return Death(loaded=loaded, fingerprint=crash.fingerprint, steps=steps)
    if claim.starts_from is None or progress or exit_code not in _OWN_SIGNALS:
        return None
    return Death(loaded=claim.starts_from, fingerprint=_OWN_SIGNALS[exit_code])


def suspect(
    earlier: Sequence[Attempt], newest: AttemptEnd, deaths: int = DEATHS, within_steps: int = STEPS
) -> Suspicion | None:
    """The checkpoint that ``newest`` makes suspect, after the attempts before it; None if none.

    Counted are failed ends that loaded what ``newest`` had loaded and died like
    it within ``within_steps`` of the load. An attempt that loaded it and got
    further, or committed a checkpoint, shows that it can be trained from: what
    died before that does not count. Ends by other causes count neither way. Pure.
    """
    death = newest.death
    if death is None or not _early(newest, within_steps):
        return None
    alike = 1
    for claim, end in sorted(earlier, key=lambda attempt: -attempt.claim.attempt):
        if end is None or (end.death.loaded if end.death else claim.starts_from) != death.loaded:
            continue
        if end.progress or (end.death and not _early(end, within_steps)):
            break
        alike += end.death is not None and end.death.fingerprint == death.fingerprint
    if alike < deaths:
        return None
    return Suspicion(death.loaded, f"{alike} attempts that loaded it died alike{_when(death)}: {death.fingerprint}")


def suspects(attempts: Iterable[Attempt]) -> set[CheckpointRef]:
    """Checkpoints that the ends of attempts have made suspect, for whoever cannot see their quarantine."""
    return {attempt.end.suspect for attempt in attempts if attempt.end is not None and attempt.end.suspect is not None}


def _early(end: AttemptEnd, within_steps: int) -> bool:
    """Whether an attempt died of its death before it had got anywhere."""
    if end.outcome is not Outcome.FAILED or end.death is None or end.progress:
        return False
    return end.death.steps is None or end.death.steps <= within_steps


def _when(death: Death) -> str:
    if death.steps is None:
        return " before they had saved anything"
    return " before their first step" if death.steps == 0 else f", the last one {death.steps} steps after the load"
