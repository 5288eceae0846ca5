"""What to do about a patch that the API server does not take: less at once, and at last less to say."""

import json

from tiphys_plugin.agent.nodes import Memory
from tiphys_plugin.agent.taskset import Entry, is_final

_LONGEST_ERROR = 500


def some_of(changes: dict[str, Entry | None], most: int | None) -> dict[str, Entry | None]:
    """All changes, or the ``most`` that are likeliest to find room: removals, then the smallest."""
    if most is None or len(changes) <= most:
        return changes
    return dict(sorted(changes.items(), key=lambda change: len(json.dumps(change[1])))[:most])


def give_way(memory: Memory, refused: dict[str, Entry | None], error: str) -> int | None:
    """How many changes to send next; None if sending less does not help, and only time can.

    One answer that is refused for itself is replaced by the reason. A node that
    fails with a sentence is better than one that waits for ever.
    """
    if len(refused) > 1:
        return len(refused) // 2
    (node_id, entry), *_ = refused.items()
    node = memory.nodes.get(node_id)
    if entry is None or node is None or node.wanted is None:
        return None
    if not is_final(entry):
        node.shown = True  # people do without this reason
        return 1
    size = len(json.dumps(entry))
    if entry.get("phase") == "Failed" and not entry.get("outputs"):
        return None
    node.wanted = {
        "phase": "Failed",
        "message": f"The answer of this step, {size} bytes, was refused: {error[:_LONGEST_ERROR]}. All answers of a "
        "workflow share one object of about 1.5 MB; return large values as artifacts, or run fewer steps at once",
    }
    return 1
