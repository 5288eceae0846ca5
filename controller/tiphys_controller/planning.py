"""Plans a run that lies in storage: observe, decide, read what the decision asks for, decide again."""

import time
from typing import NamedTuple

from tiphys.errors import UsageError
from tiphys.protocol.pipeline import CompiledPipeline
from tiphys.store import Store
from tiphys_controller.observe import RunState, observe, with_ends
from tiphys_controller.plan import Plan, plan


class Planned(NamedTuple):
    """A final plan and what it was made of."""

    pipeline: CompiledPipeline
    state: RunState
    plan: Plan
    seconds: float
    """How long it took, storage included."""


def planned(store: Store, run: str) -> Planned:
    """Plan a run.

    Raises:
        NotFoundError: there is no such run.
        UsageError: Tiphys did not compile its Workflow.
        IntegrityError: a record is damaged.
    """
    begin = time.monotonic()
    state = observe(store, run)
    try:
        pipeline = CompiledPipeline.from_manifest(state.record.workflow)
        decided = plan(pipeline, state)
        while decided.unread:
            state = with_ends(store, state, decided.unread)
            decided = plan(pipeline, state)
    except UsageError as error:
        raise UsageError(f"run {run} cannot be planned: {error}") from error
    return Planned(pipeline, state, decided, time.monotonic() - begin)
