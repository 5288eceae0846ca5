"""Checks what a program passes to a session before it is saved: the numbers of its steps, and its states.

A checkpoint is found by the number of its step, so one number names one state.
A program that counts epochs and passes its state after every batch would lose
what it did since the first batch. Its second or third call is refused, rather
than the first save after ten minutes.
"""

import hashlib
import operator
from collections.abc import Callable, Sequence
from typing import Any

from tiphys.checkpoint.save.data_position import warn_of_lost_position
from tiphys.checkpoint.save.saver import Saver
from tiphys.checkpoint.state.serialization import Classes, flatten_state
from tiphys.checkpoint.state.shards import ShardPlan, plan_shards
from tiphys.checkpoint.telemetry.events import log_once
from tiphys.errors import UsageError
from tiphys.store.layout import MAX_GLOBAL_STEP
from tiphys.threads import map_parallel

_THREADS = 4


def check_step_number(global_step: Any) -> int:
    """Return the number of completed steps as Python's int; raises `UsageError` if no checkpoint can have it."""
    try:
        number = -1 if isinstance(global_step, bool) else operator.index(global_step)
    except TypeError:
        number = -1
    if not 0 <= number <= MAX_GLOBAL_STEP:
        raise UsageError(
            f"global_step {global_step!r} is not a whole number from 0 to {MAX_GLOBAL_STEP}; "
            "pass the number of completed optimizer steps"
        )
    return number


class PassedStates:
    """The states that one process passes to its session, in order."""

    def __init__(self, has_state: Callable[[], bool], saver: Saver) -> None:
        self._has_state = has_state
        self._saver = saver
        self._last_step: int | None = None
        self._digests: list[str] = []
        self.known: Classes = {}
        """Classes of the program's default."""
        self.is_restored = False
        """Whether the program has called ``restore``."""

    def plan(self, state: Any) -> list[ShardPlan]:
        """Return the shards of a state, or of what a function returns; none if this process saves no state."""
        if not self._has_state():
            return []
        is_function = callable(state) and not hasattr(state, "load_state_dict")  # as a module of PyTorch
        return plan_shards(flatten_state(state() if is_function else state, self.known))

    def check(self, global_step: Any, state: Any, newest_step: int, *, has_position: bool = False) -> int:
        """Return the number of a step that is passed with ``state``.

        The first state is looked at in any case, and a state is compared if its number was passed before.

        Without ``has_position`` the first call looks at the program's loaders.

        Raises:
            UsageError: it is no number of a step, is lower than ``newest_step``, or was passed with another state.
                Or the first state cannot be saved.
        """
        number = check_step_number(global_step)
        first, repeated = self._last_step is None, number == self._last_step
        if number < newest_step:
            if first:
                raise UsageError(
                    f"global_step {number} was given after restore() had returned the state of step {newest_step}; "
                    "go on with the state that it returns, and count on from its step"
                )
            raise UsageError(f"global_step {number} was given after {newest_step}; pass the number of completed steps")
        self._last_step = number
        if first and not has_position:
            warn_of_lost_position()
        if first and not self.is_restored and self._has_state():
            log_once(
                "the program has not called restore(), so the next attempt would begin from the beginning; call "
                "session.restore() before the first step, and begin with what it returns"
            )
        if first or repeated:
            plans = self.plan(state)
        if not repeated:
            self._digests = []
        elif plans:
            self._compare(number, plans)
        return number

    def _compare(self, number: int, plans: Sequence[ShardPlan]) -> None:
        saved = self._saver.shard_digests(number)
        digests = map_parallel(lambda _, plan: hashlib.sha256(plan.data()).hexdigest(), plans, _THREADS)
        if (saved or self._digests or digests) != digests:
            lost = "of which the first is saved, and the others would be lost" if saved else "and only one can be saved"
            raise UsageError(
                f"global_step {number} was given for several states, {lost}; pass the number of completed optimizer "
                "steps, which is another one whenever the state has changed"
            )
        self._digests = digests
