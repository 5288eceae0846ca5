"""When a waiting step asks again: soon at the head of a line, seldom at its end, never all at once."""

from tiphys.records import digest
from tiphys_plugin.settings import Settings

_SPREAD = 0.4


def requeue_seconds(settings: Settings, node: str, position: int) -> float:
    """Seconds until the next call.

    The spread comes from the node's name, so that a hundred steps that began to
    wait together do not ask together, and yet the same call gives the same answer.
    """
    fraction = int(digest(node)[:8], 16) / 0xFFFFFFFF
    wait = settings.requeue_min_seconds * position * (1 + _SPREAD * fraction)
    return round(min(wait, settings.requeue_max_seconds), 2)
