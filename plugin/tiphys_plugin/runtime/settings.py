"""Timeouts and limits of the plugin, and when a waiting step calls again.

They are in one place, so that tests and the local engine can shorten them.
"""

from dataclasses import dataclass

from tiphys.failures import bad_checkpoints
from tiphys.records import json_digest

IMAGE_PULL_TIMEOUT_VARIABLE = "TIPHYS_IMAGE_PULL_TIMEOUT_SECONDS"
IMAGE_PULL_TIMEOUT_SECONDS = 300.0
"""How long the pull of an image may fail before its attempt is ended."""


@dataclass(frozen=True)
class PluginSettings:
    """Times in seconds. The defaults suit a cluster, where Argo repeats a call about once a second at best."""

    requeue_min_seconds: float = 5.0
    requeue_max_seconds: float = 30.0
    """A waiting step calls again after a time between these two, which grows with its position in the queue."""
    pod_end_timeout_seconds: float = 600.0
    """An attempt whose pods do not end is ended by force after this time; each such case is counted."""
    verify_inline_seconds: float = 2.0
    """Hashing that takes longer continues in the background, and the step's message shows the progress."""
    verify_workers: int = 4
    parameter_max_bytes: int = 64 << 10
    """Output parameters live in the Workflow object (about 1.5 MB for all of them); larger values are artifacts."""
    lock_timeout_seconds: float = 15.0
    """How long a call waits for another one about the same step; Argo gives up on a call after 30 s."""
    quarantine_after_crashes: int = bad_checkpoints.MIN_CRASHES
    """Number of attempts that must crash alike after loading one checkpoint before it is quarantined."""
    quarantine_within_steps: int = bad_checkpoints.MAX_STEPS_AFTER_LOAD
    """A crash counts against the checkpoint if it comes at most this many training steps after the load."""
    preemption_interval_seconds: float = 5.0
    """Time between two checks whether trainings must be preempted."""
    speed: float = 1.0
    """Divides the back-off between the tries of a training, as in the local engine."""


LOCAL_SETTINGS = PluginSettings(
    requeue_min_seconds=0.2,
    requeue_max_seconds=2.0,
    pod_end_timeout_seconds=60.0,
    preemption_interval_seconds=0.5,
)
"""For a service on the same machine as the pods, where frequent calls cost little."""
_JITTER_FRACTION = 0.4


def requeue_seconds(settings: PluginSettings, node: str, position: int) -> float:
    """Seconds until the next call of a step at ``position``, counted from 1.

    The jitter is derived from the node's name, so that a hundred steps that began
    to wait together do not call together, and a repeated call gets the same reply.
    """
    fraction = int(json_digest(node)[:8], 16) / 0xFFFFFFFF
    wait = settings.requeue_min_seconds * position * (1 + _JITTER_FRACTION * fraction)
    return round(min(wait, settings.requeue_max_seconds), 2)
