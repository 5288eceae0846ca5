"""Which checkpoint an attempt starts from, and that it stays where it lies in another run.

On a volume that the plugin does not see, the training program chooses by itself.
"""

from collections.abc import Sequence

from tiphys.errors import ConflictError, NotFoundError, StoreError
from tiphys.lineage.fork_history import where_to_start
from tiphys.lineage.retention.policy import pin
from tiphys.lineage.select import BEGINNING, Choice
from tiphys.store import Attempt, lineage_of
from tiphys_plugin.runtime.context import StepCall

_TRIES = 3


def foresee(call: StepCall, attempts: Sequence[Attempt]) -> Choice:
    """Where the attempt after ``attempts`` would start."""
    if call.spec.checkpoints is None or call.volume:
        return BEGINNING
    return where_to_start(call.store, call.run, call.step, attempts, fresh_since=call.fresh_since, family=call.family)


def choose(call: StepCall, attempts: Sequence[Attempt]) -> Choice:
    """Like `foresee`, for an attempt that is about to be opened: a checkpoint of another run gets a pin.

    Raises:
        StoreError: the checkpoints of that run go faster than they can be pinned; ask again.
    """
    for _ in range(_TRIES):
        choice = foresee(call, attempts)
        if _stays(call, choice):
            call.services.metrics.skipped_checkpoints.inc(len(choice.skipped))
            return choice
    raise StoreError(f"the checkpoints that {call.step} could start from are being removed one after the other")


def _stays(call: StepCall, choice: Choice) -> bool:
    """Whether the checkpoint is there to stay. That of the run itself is kept by the claim that names it."""
    ref = choice.checkpoint
    if ref is None or ref.lineage == lineage_of(call.run, call.step):
        return True
    try:
        pin(call.store, ref, f"fork-{call.run}", by="admit")
    except (ConflictError, NotFoundError):
        return False
    return True
