"""One patch of a task set's status, and what became of it.

Every patch names the resourceVersion that it was decided on. So a leader that
was paused between its decision and its write cannot overwrite what the next
leader, or Argo's controller, has written since, and an answer never lands
under a node id that is no longer a task.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

from tiphys.errors import ConflictError, NotFoundError, StoreError, TiphysError, UsageError
from tiphys.kube import KubeApi
from tiphys.kube.resources import WORKFLOW_TASK_SETS, WORKFLOWS
from tiphys_plugin.agent.taskset import Entry, TaskSet, read_task_set

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
