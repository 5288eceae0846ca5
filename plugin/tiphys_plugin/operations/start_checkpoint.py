"""Chooses the checkpoint that an attempt starts from.

A fork may start from a checkpoint of another run. A pin then keeps that run's
retention from deleting it. For checkpoints on a volume, which the plugin cannot
read, the training program chooses.
"""

from collections.abc import Sequence

from tiphys.errors import ConflictError, NotFoundError, StoreError
from tiphys.lineage.fork_history import choose_start_checkpoint
from tiphys.lineage.retention.policy import pin_checkpoint
from tiphys.lineage.select import START_FROM_BEGINNING, CheckpointChoice
from tiphys.store import Attempt, lineage_name
from tiphys_plugin.runtime.context import StepCall

_MAX_PIN_TRIES = 3


def find_start_checkpoint(call: StepCall, attempts: Sequence[Attempt]) -> CheckpointChoice:
    """The checkpoint that the attempt after ``attempts`` would start from; pins nothing."""
    if call.spec.checkpoints is None or call.volume:
        return START_FROM_BEGINNING
    return choose_start_checkpoint(
        call.store, call.run, call.step, attempts, rerun_since=call.rerun_since, ancestors=call.fork_ancestors
    )


def pin_start_checkpoint(call: StepCall, attempts: Sequence[Attempt]) -> CheckpointChoice:
    """Like `find_start_checkpoint`, for an attempt that is about to open: pins a checkpoint of another run.

    Raises:
        StoreError: each chosen checkpoint was removed before it could be pinned; repeat the call.
    """
    for _ in range(_MAX_PIN_TRIES):
        choice = find_start_checkpoint(call, attempts)
        if _pin_if_needed(call, choice):
            call.context.metrics.skipped_checkpoints.inc(len(choice.skipped))
            return choice
    raise StoreError(
        f"each of {_MAX_PIN_TRIES} checkpoints that {call.name} could start from was removed before it could be pinned"
    )


def _pin_if_needed(call: StepCall, choice: CheckpointChoice) -> bool:
    """Whether the checkpoint is protected. In the run itself, the claim that names it protects it."""
    ref = choice.checkpoint
    if ref is None or ref.lineage == lineage_name(call.run, call.step):
        return True
    try:
        pin_checkpoint(call.store, ref, f"fork-{call.run}", by="admit")
    except (ConflictError, NotFoundError):
        return False
    return True
