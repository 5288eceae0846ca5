"""How people name steps and times, and what a step is told that waits for others to save and to go."""

from collections.abc import Sequence
from datetime import datetime

from tiphys_plugin.ledger.model import Because, Lease, LeaseRequest, Reason


def waiting_for(leaving: Sequence[Lease]) -> Because:
    """Why a request waits for which all of ``leaving``, one at least, were asked to leave."""
    asked = [(lease.leaving, lease) for lease in leaving if lease.leaving is not None]
    last, lease = max(asked, key=lambda one: one[0].deadline)
    who = called(lease.request)
    if len(asked) > 1:
        who += f" and {len(asked) - 1} other{'s' if len(asked) > 2 else ''} were"
    else:
        who += " was"
    first = min(leaving.asked_at for leaving, _ in asked)
    return Because(
        Reason.WAITING_FOR_PREEMPTED_CHECKPOINT,
        f"{who} asked to save and go at {clock(first)}, by {clock(last.deadline)} at the latest",
    )


def called(request: LeaseRequest) -> str:
    """A step as people name it."""
    return f"{request.run}/{request.step}"


def clock(moment: datetime) -> str:
    """The time of day, which is enough for what happens within minutes."""
    return f"{moment:%H:%M:%S}"
