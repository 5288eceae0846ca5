"""How patient the plugin is. One place, so that a test or the local engine can be less so.

When a waiting step asks again: soon at the head of a line, seldom at its end, never all at once.
"""

from dataclasses import dataclass

from tiphys.failures import bad_checkpoints as suspects
from tiphys.records import digest


@dataclass(frozen=True)
class Settings:
    """Times in seconds. The defaults suit a cluster, where Argo asks again about once a second at best."""

    requeue_min_seconds: float = 5.0
    requeue_max_seconds: float = 30.0
    """A waiting step is asked again after a time between these two, the longer the further back it stands."""
    pods_gone_seconds: float = 600.0
    """An attempt whose pods do not go away is ended by force after this time; each such case is counted."""
    verify_inline_seconds: float = 2.0
    """Hashing that takes longer goes on in the background, and the step says how far it is."""
    verify_workers: int = 4
    parameter_max_bytes: int = 64 << 10
    """Output parameters live in the Workflow object (about 1.5 MB for all of them); larger values are artifacts."""
    lock_seconds: float = 15.0
    """How long a call waits for another one about the same step; Argo gives up on a call after 30 s."""
    suspect_deaths: int = suspects.DEATHS
    """As many attempts that loaded one checkpoint have to die alike before it is quarantined."""
    suspect_steps: int = suspects.STEPS
    """So many steps after the load a death may still be that checkpoint's doing."""
    preemption_seconds: float = 5.0
    """How often it is looked whether trainings have to go for others."""
    outage_calls: int = 3
    """Calls in a row that storage may fail with 503, which Argo repeats in silence; then the step says so and waits."""


LOCAL = Settings(requeue_min_seconds=0.2, requeue_max_seconds=2.0, pods_gone_seconds=60.0, preemption_seconds=0.5)
"""For a service on the same machine as the pods: nothing is gained by asking seldom."""


_SPREAD = 0.4


def requeue_seconds(settings: Settings, node: str, position: int) -> float:
    """Seconds until the next call.

    The spread comes from the node's name, so that a hundred steps that began to
    wait together do not ask together, and yet the same call gives the same answer.
    """
    fraction = int(digest(node)[:8], 16) / 0xFFFFFFFF
    wait = settings.requeue_min_seconds * position * (1 + _SPREAD * fraction)
    return round(min(wait, settings.requeue_max_seconds), 2)
