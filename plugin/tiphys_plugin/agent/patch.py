"""One patch of a task set's status, and what became of it.

Every patch names the resourceVersion that it was decided on. So a leader that
was paused between its decision and its write cannot overwrite what the next
leader, or Argo's controller, has written since, and an answer never lands
under a node id that is no longer a task.

What to do about a patch that the API server does not take: less at once, and at last less to say.
"""

import json
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

from tiphys.errors import ConflictError, NotFoundError, StoreError, TiphysError, UsageError
from tiphys.kube import KubeApi
from tiphys.kube.resources import WORKFLOW_TASK_SETS, WORKFLOWS
from tiphys_plugin.agent.task_sets import Entry, Memory, TaskSet, is_final, read_task_set

_TOO_LARGE = ("too large", "larger than max")
"""What an API server says with status 500 when its database refuses the size (Argo ``util/k8s``, etcd)."""


class Outcome(StrEnum):
    WRITTEN = "written"
    CONFLICT = "conflict"
    """Somebody has written since, or the task set is gone: it was read again."""
    REFUSED = "refused"
    """The API server takes no such patch."""
    UNREACHABLE = "unreachable"
    NOT_LEADING = "not_leading"


class Written(NamedTuple):
    """``task_set``: as it is now; None if it was not told, or is gone."""

    outcome: Outcome
    task_set: TaskSet | None = None
    error: str = ""


def write(api: KubeApi, task_set: TaskSet, changes: dict[str, Entry | None], leads: Callable[[], bool]) -> Written:
    """Patch ``status.nodes``. ``leads`` is asked at the last moment."""
    body = {"metadata": {"resourceVersion": str(task_set.version)}, "status": {"nodes": changes}}
    namespace, name = task_set.key
    if not leads():
        return Written(Outcome.NOT_LEADING)
    try:
        found = api.patch(WORKFLOW_TASK_SETS, namespace, name, body, subresource="status")
    except (ConflictError, NotFoundError) as error:
        return _read_again(api, task_set, error)
    except UsageError as error:
        return Written(Outcome.REFUSED, error=str(error))
    except StoreError as error:
        refused = any(words in str(error) for words in _TOO_LARGE)
        return Written(Outcome.REFUSED if refused else Outcome.UNREACHABLE, error=str(error))
    return Written(Outcome.WRITTEN, read_task_set(found))


def still_waits(api: KubeApi, task_set: TaskSet, node_id: str) -> bool:
    """Whether the workflow still waits for a node, as far as can be told. Raises `StoreError`."""
    workflow = api.get(WORKFLOWS, task_set.namespace, task_set.name)
    if workflow is None:
        return False
    status = workflow.get("status") or {}
    if status.get("compressedNodes") or status.get("offloadNodeStatusVersion"):
        return True  # its nodes cannot be read here; an answer too many is the smaller harm
    node = (status.get("nodes") or {}).get(node_id) or {}
    return node.get("phase") in ("Pending", "Running")


def _read_again(api: KubeApi, task_set: TaskSet, why: TiphysError) -> Written:
    try:
        found = api.get(WORKFLOW_TASK_SETS, *task_set.key)
    except StoreError as error:
        return Written(Outcome.UNREACHABLE, error=str(error))
    if found is None or found["metadata"].get("uid") != task_set.uid:
        return Written(Outcome.CONFLICT)
    if isinstance(why, NotFoundError):
        return Written(
            Outcome.UNREACHABLE,
            error=f"{why}; the task set is there, so its kind has no status subresource in this cluster: "
            "install the CustomResourceDefinitions of Argo Workflows 4.1",
        )
    now = read_task_set(found)
    if now.version == task_set.version:
        return Written(Outcome.UNREACHABLE, error=str(why))
    return Written(Outcome.CONFLICT, now)


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
