"""A rehearsal: what a trace of training jobs would meet under given queues, decided by the service's own rules.

Nothing here decides. Time is virtual, jobs are numbers, and the rest is the
book and the line that the service uses, so what is rehearsed is what happens.
"""

from tiphys_plugin.simulation.costs import Costs
from tiphys_plugin.simulation.job import Job, Trace
from tiphys_plugin.simulation.outcome import Outcome, QueueOutcome, Spread, outcome
from tiphys_plugin.simulation.policies import POLICIES, Policy
from tiphys_plugin.simulation.preparing import declared, given_to, shared_out, spread
from tiphys_plugin.simulation.replay import replay
from tiphys_plugin.simulation.runs import Attempt, Replay, Run
from tiphys_plugin.simulation.timeline import Span, spans
from tiphys_plugin.simulation.trace import read_trace

__all__ = [
    "POLICIES",
    "Attempt",
    "Costs",
    "Job",
    "Outcome",
    "Policy",
    "QueueOutcome",
    "Replay",
    "Run",
    "Span",
    "Spread",
    "Trace",
    "declared",
    "given_to",
    "outcome",
    "read_trace",
    "replay",
    "shared_out",
    "spans",
    "spread",
]
