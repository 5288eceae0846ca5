"""Decides whether a node is lost, and which trainings end with it: pure functions of what was observed, and when.

The kubelet of each node renews a Lease every ten seconds. Kubernetes evicts the
pods of a node five minutes after it has lost it, and then waits for the node to
confirm that. A training need not wait, because its attempt has a fence: a commit
of an attempt with an end is refused.

Two signs count, and an attempt ends only if both are missing: the Lease of the
node, and the reports and output that the program keeps storing. A node without
its Lease whose program goes on is only cut off from the API server, and killing
the program would lose work.

Only changes count, as in Kubernetes (``pkg/controller/nodelifecycle``): the times
in a Lease and in a key are those of other clocks. Between two observations at
most `MAX_GAP_SECONDS` pass, so that neither an observer that was paused nor an
API server that did not answer makes anything look lost. If more than half of the
nodes miss their renewals at once, the API server is the more likely fault, and
their silence starts anew. Nodes that stay silent for five minutes, in which others
renew, are lost all the same: by then Kubernetes gives them up, too.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tiphys_plugin.cluster.interface import PodStatus
from tiphys_plugin.eviction.evict import can_lose_members

OVERDUE_SECONDS = 20.0
"""Two renewals are missing; from here on the programs on the node are observed, too."""
LOST_SECONDS = 50.0
"""As ``--node-monitor-grace-period`` of Kubernetes 1.32. A kubelet that restarts for 30 s needs up to 45."""
SILENT_PROGRAM_SECONDS = 25.0
"""A program stores a report, or what it prints, every ten seconds, unless a step takes longer."""
MAX_GAP_SECONDS = 10.0
_MAX_RESTARTS = 15
"""The silence of a node starts anew at most so often, each time after `OVERDUE_SECONDS`."""


class Silence(NamedTuple):
    """A sign of life, and for how long it was observed not to change."""

    sign: str
    observed_at: float
    """Time of the last observation, on the monotonic clock of the observer."""
    seconds: float = 0.0
    has_changed: bool = False
    """Whether this observer has seen it change, and has not taken its source for lost since."""
    restarts: int = 0
    """How often ``seconds`` was set to zero without a change, because most others were silent, too."""

    def observe(self, sign: str, now: float) -> "Silence":
        """The silence after another observation."""
        if sign != self.sign:
            return Silence(sign, now, has_changed=True)
        gap = min(max(now - self.observed_at, 0.0), MAX_GAP_SECONDS)
        return self._replace(observed_at=now, seconds=self.seconds + gap)


@dataclass(frozen=True)
class NodeLeases:
    """The Leases of all nodes by name of the node, as one observer has seen them."""

    silences: Mapping[str, Silence]

    @property
    def is_outage(self) -> bool:
        """Whether most nodes have missed their renewals at once, and have not renewed since."""
        return any(silence.has_changed and silence.restarts for silence in self.silences.values())

    def silent_for(self, seconds: float) -> dict[str, float]:
        """How long each node has been silent that was so for at least ``seconds``."""
        return {node: silence.seconds for node, silence in self.silences.items() if silence.seconds >= seconds}


def observe_leases(before: NodeLeases, renewals: Mapping[str, str], now: float) -> NodeLeases:
    """The Leases after another list of them.

    A node counts in the census once it was seen to renew, and no more once it is lost: neither nodes that were
    switched off long ago nor those that were lost one by one make the others look like an outage.

    ``renewals`` has for each node whatever changes with a renewal; the list was requested at ``now``, a monotonic time.
    """
    known = before.silences
    after = {
        node: known[node].observe(sign, now) if node in known else Silence(sign, now) for node, sign in renewals.items()
    }
    census = [silence for silence in after.values() if silence.has_changed]
    overdue = [silence for silence in census if silence.seconds >= OVERDUE_SECONDS]
    if not census or 2 * len(overdue) > len(census):
        return NodeLeases({node: _restart(silence) for node, silence in after.items()})
    return NodeLeases(
        {
            node: silence._replace(has_changed=silence.has_changed and silence.seconds < LOST_SECONDS)
            for node, silence in after.items()
        }
    )


def _restart(silence: Silence) -> Silence:
    restarts = silence.restarts + (silence.seconds >= OVERDUE_SECONDS)
    return silence._replace(
        seconds=0.0, restarts=restarts, has_changed=silence.has_changed and restarts < _MAX_RESTARTS
    )


class TrainingLoss(NamedTuple):
    """What the loss of nodes does to a training."""

    pods: tuple[PodStatus, ...]
    """The pods on lost nodes."""
    ends_attempt: bool
    """False if the training is an elastic gang that can spare these members."""


def decide_training_loss(
    members: Sequence[PodStatus],
    lost_nodes: Collection[str],
    program_silent_seconds: float,
    min_members: int | None = None,
    *,
    is_over: bool = False,
) -> TrainingLoss | None:
    """What a training loses with its nodes; None if it loses nothing, or may only be cut off.

    Args:
        members: Its unfinished pods, without the one in which Argo watches a gang.
        lost_nodes: The nodes without a Lease for `LOST_SECONDS`.
        program_silent_seconds: For how long its program has stored nothing. One rank stores for all: in a synchronous
            training its reports prove that every rank works.
        min_members: Members with which an elastic gang continues; None for any other training.
        is_over: Whether the attempt has an end, so that nothing of it counts any more.
    """
    lost = tuple(pod for pod in members if pod.host in lost_nodes)
    ends_attempt = not can_lose_members(min_members, members, lost)
    may_be_alive = not is_over and ends_attempt and program_silent_seconds < SILENT_PROGRAM_SECONDS
    return TrainingLoss(lost, ends_attempt) if lost and not may_be_alive else None
