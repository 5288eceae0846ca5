"""Which jobs the service would turn away, and why: whatever is held, and whoever waits."""

from tiphys_plugin.ledger.decide import State, decide
from tiphys_plugin.ledger.model import Reason, Rejected
from tiphys_plugin.queues import Queues
from tiphys_plugin.simulation.clock import EPOCH
from tiphys_plugin.simulation.job import Job, request_of


def never(queues: Queues, job: Job) -> Reason | None:
    """Why the job is rejected even by a cluster that nobody uses; None if it is not."""
    answer = decide(State(queues), request_of(job, 0), 1, EPOCH)
    return answer.reason if isinstance(answer, Rejected) else None
