"""Which jobs the service would turn away, and why: whatever is held, and whoever waits."""

from datetime import UTC, datetime

from tiphys_plugin.ledger.decide import State, decide
from tiphys_plugin.ledger.model import Reason, Rejected
from tiphys_plugin.queues import Queues
from tiphys_plugin.simulation.job import Job, request_of

EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
"""Second zero of a trace."""


def never(queues: Queues, job: Job) -> Reason | None:
    """Why the job is rejected even by a cluster that nobody uses; None if it is not."""
    answer = decide(State(queues), request_of(job, 0), 1, EPOCH)
    return answer.reason if isinstance(answer, Rejected) else None
