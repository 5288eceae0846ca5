"""Detection of checkpoints that crash the program that loads them.

A checkpoint can be complete and still be unusable: weights that turned to NaN,
or a data position that the loader cannot handle. Each attempt then crashes in
the same way, soon after the load, until its retry budget is used up. If several
attempts load the same checkpoint and crash with the same fingerprint within a
few steps, `find_suspect` names that checkpoint. The plugin quarantines it, and
the next attempt starts from an older one.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tiphys.protocol.environment import EX_NEW_POD
from tiphys.records import (
    AttemptClaim,
    AttemptEnd,
    AttemptEndOutcome,
    Cause,
    CheckpointCrash,
    CheckpointRef,
    CrashRecord,
)
from tiphys.store import Attempt

MIN_CRASHES = 2
"""Crashes with the same fingerprint that make a checkpoint suspect. One can be an accident; a third costs GPU time."""
MAX_STEPS_AFTER_LOAD = 10
"""Up to this many steps after the load the checkpoint may cause a crash, such as a NaN loss at the third step."""

_PROGRAM_CAUSES = (Cause.USER_ERROR, Cause.UNKNOWN)
"""Causes that the program itself can have. Lost nodes, evictions and out of memory are none of them."""
_PROGRAM_SIGNALS = {132: "SIGILL", 134: "SIGABRT", 135: "SIGBUS", 136: "SIGFPE", 139: "SIGSEGV"}
"""Exit codes (128 plus the signal) of a program that the kernel ended because of the program's own fault."""


class SuspectCheckpoint(NamedTuple):
    """A checkpoint to quarantine, and the reason as a sentence."""

    checkpoint: CheckpointRef
    reason: str


def derive_checkpoint_crash(
    claim: AttemptClaim, cause: Cause | None, exit_code: int | None, crash: CrashRecord | None, *, progress: bool
) -> CheckpointCrash | None:
    """The crash of a failed attempt after the load of a checkpoint; None if the end says nothing about a checkpoint.

    The program's crash report has precedence. Without a report only a signal
    counts, because an exit code may come from before the load. Pure.

    With the exit code `EX_NEW_POD` the report tells of the program's last process. ``progress`` says whether the
    attempt committed a checkpoint.
    """
    if cause not in _PROGRAM_CAUSES and exit_code != EX_NEW_POD:
        return None
    if crash is not None:
        loaded = crash.restored or claim.starts_from
        if loaded is None or not crash.fingerprint:
            return None
        steps = None if crash.global_step is None else max(0, crash.global_step - loaded.global_step)
        return CheckpointCrash(loaded=loaded, fingerprint=crash.fingerprint, steps=steps)
    if claim.starts_from is None or progress or exit_code not in _PROGRAM_SIGNALS:
        return None
    return CheckpointCrash(loaded=claim.starts_from, fingerprint=_PROGRAM_SIGNALS[exit_code])


def find_suspect(
    earlier: Sequence[Attempt],
    newest: AttemptEnd,
    min_crashes: int = MIN_CRASHES,
    within_steps: int = MAX_STEPS_AFTER_LOAD,
) -> SuspectCheckpoint | None:
    """The checkpoint that the end ``newest`` makes suspect; None if there is none.

    Counts failed ends with the loaded checkpoint and fingerprint of ``newest``
    that crashed within ``within_steps`` of the load. An attempt that loaded the
    checkpoint and ran longer, or committed, proves it usable, so crashes before
    that attempt do not count. Other causes count neither way. Pure.
    """
    crash = newest.checkpoint_crash
    if crash is None or not _is_early_crash(newest, within_steps):
        return None
    same_crashes = 1
    for claim, end in sorted(earlier, key=lambda attempt: -attempt.claim.attempt):
        if end is None or (end.checkpoint_crash.loaded if end.checkpoint_crash else claim.starts_from) != crash.loaded:
            continue
        if _has_got_further(end) or (end.checkpoint_crash and not _is_early_crash(end, within_steps)):
            break
        same_crashes += end.checkpoint_crash is not None and end.checkpoint_crash.fingerprint == crash.fingerprint
    if same_crashes < min_crashes:
        return None
    return SuspectCheckpoint(
        crash.loaded,
        f"{same_crashes} attempts that loaded it crashed in the same way{_describe_crash_time(crash)}: "
        f"{crash.fingerprint}",
    )


def list_suspects(attempts: Iterable[Attempt]) -> set[CheckpointRef]:
    """Checkpoints that the ends of ``attempts`` made suspect, for callers that cannot read the quarantine records."""
    return {attempt.end.suspect for attempt in attempts if attempt.end is not None and attempt.end.suspect is not None}


def _is_early_crash(end: AttemptEnd, within_steps: int) -> bool:
    """Whether an attempt crashed within ``within_steps`` of its load, without a commit."""
    if end.outcome is not AttemptEndOutcome.FAILED or end.checkpoint_crash is None or _has_got_further(end):
        return False
    return end.checkpoint_crash.steps is None or end.checkpoint_crash.steps <= within_steps


def _has_got_further(end: AttemptEnd) -> bool:
    """Whether an attempt committed after its last load: what it committed before a restart in its pod may be that."""
    loaded = end.checkpoint_crash.loaded if end.checkpoint_crash else None
    return end.progress and (end.last_checkpoint is None or end.last_checkpoint.checkpoint != loaded)


def _describe_crash_time(crash: CheckpointCrash) -> str:
    if crash.steps is None:
        return " before they saved a checkpoint"
    return " before their first step" if crash.steps == 0 else f", the last one {crash.steps} steps after the load"
