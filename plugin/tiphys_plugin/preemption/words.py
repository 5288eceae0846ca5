"""What a training is told that had to go."""

from tiphys.records import Preemption
from tiphys_plugin.ledger.words import clock


def went(preempted: Preemption) -> str:
    """How it came that an attempt is over that was asked to go, and what is left of its work."""
    for_whom = f"{preempted.for_run}/{preempted.for_step}" if preempted.for_run else "another training"
    asked = f"it was asked at {clock(preempted.asked_at)} to save and go for {for_whom}"
    lost, gpu_seconds = preempted.seconds_lost, preempted.gpu_seconds_lost
    if lost is None or gpu_seconds is None:
        return f"{asked}; its checkpoints lie where only its pods see them, so what is lost is not known"
    if preempted.committed is None:
        return f"{asked}; it had committed no checkpoint: {lost:.0f} s ({gpu_seconds:.0f} GPU-seconds) of training lost"
    kept = f"{asked}; {preempted.committed.words} is committed"
    return f"{kept}, {lost:.0f} s ({gpu_seconds:.0f} GPU-seconds) of training lost since" if lost else f"{kept}"
