"""Patches the status of a task set, and decides how to continue after a refused patch.

Every patch contains the resourceVersion that it was decided on. So a leader that
was paused between decision and write cannot overwrite what the next leader, or
Argo's controller, has written since, and an answer is never stored under a node
id that is no longer a task.

A patch that the API server refuses is first split into smaller ones. A single
answer that is still refused is replaced by a failure that says why.
"""

import json
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

from tiphys.errors import ConflictError, NotFoundError, StoreError, TiphysError, UsageError
from tiphys.kube import KubeApi
from tiphys.kube.resources import WORKFLOW_TASK_SETS, WORKFLOWS
from tiphys_plugin.agent.task_sets import NodeEntry, TaskSet, TaskSetState, is_final, parse_task_set

_TOO_LARGE = ("too large", "larger than max")
"""Texts of an API server's status 500 if etcd refuses the size of an object (Argo ``util/k8s``)."""


class PatchOutcome(StrEnum):
    WRITTEN = "written"
    CONFLICT = "conflict"
    """The task set was changed or deleted since the decision; it was read again."""
    REFUSED = "refused"
    """The API server rejects this patch, so repeating it is useless."""
    UNREACHABLE = "unreachable"
    NOT_LEADING = "not_leading"


class PatchResult(NamedTuple):
    """Result of a patch; ``task_set`` is its current version, or None if it is unknown or deleted."""

    outcome: PatchOutcome
    task_set: TaskSet | None = None
    error: str = ""


def patch_task_set(
    api: KubeApi, task_set: TaskSet, changes: dict[str, NodeEntry | None], is_leading: Callable[[], bool]
) -> PatchResult:
    """Patch ``status.nodes``; ``is_leading`` is called right before the write."""
    body = {"metadata": {"resourceVersion": str(task_set.version)}, "status": {"nodes": changes}}
    namespace, name = task_set.key
    if not is_leading():
        return PatchResult(PatchOutcome.NOT_LEADING)
    try:
        document = api.patch(WORKFLOW_TASK_SETS, namespace, name, body, subresource="status")
        return PatchResult(PatchOutcome.WRITTEN, parse_task_set(document))
    except (ConflictError, NotFoundError) as error:
        return _reread_task_set(api, task_set, error)
    except UsageError as error:
        return PatchResult(PatchOutcome.REFUSED, error=str(error))
    except StoreError as error:
        is_refused = any(text in str(error) for text in _TOO_LARGE)
        return PatchResult(PatchOutcome.REFUSED if is_refused else PatchOutcome.UNREACHABLE, error=str(error))


def workflow_awaits_node(api: KubeApi, task_set: TaskSet, node_id: str) -> bool:
    """Whether the workflow still waits for a node; true if its nodes cannot be read here. Raises `StoreError`."""
    workflow = api.get(WORKFLOWS, task_set.namespace, task_set.name)
    if workflow is None:
        return False
    status = workflow.get("status") or {}
    if status.get("compressedNodes") or status.get("offloadNodeStatusVersion"):
        return True  # the nodes are stored in a form that is not read here; a superfluous answer does less harm
    node = (status.get("nodes") or {}).get(node_id) or {}
    return node.get("phase") in ("Pending", "Running")


def _reread_task_set(api: KubeApi, task_set: TaskSet, cause: TiphysError) -> PatchResult:
    try:
        document = api.get(WORKFLOW_TASK_SETS, *task_set.key)
        current = None if document is None else parse_task_set(document)
    except (StoreError, UsageError) as error:
        return PatchResult(PatchOutcome.UNREACHABLE, error=str(error))
    if current is None or current.uid != task_set.uid:
        return PatchResult(PatchOutcome.CONFLICT)
    if isinstance(cause, NotFoundError):
        return PatchResult(
            PatchOutcome.UNREACHABLE,
            error=f"{cause}; the task set exists, so its kind has no status subresource in this cluster: "
            "install the CustomResourceDefinitions of Argo Workflows 4.1",
        )
    if current.version == task_set.version:
        return PatchResult(PatchOutcome.UNREACHABLE, error=str(cause))
    return PatchResult(PatchOutcome.CONFLICT, current)


_MAX_ERROR_CHARACTERS = 500


def limit_changes(changes: dict[str, NodeEntry | None], max_entries: int | None) -> dict[str, NodeEntry | None]:
    """All changes, or the ``max_entries`` that need the least space: removals, then the smallest entries."""
    if max_entries is None or len(changes) <= max_entries:
        return changes
    return dict(sorted(changes.items(), key=lambda change: len(json.dumps(change[1])))[:max_entries])


def shrink_refused_patch(state: TaskSetState, changes: dict[str, NodeEntry | None], error: str) -> int | None:
    """Number of changes to send next after a refused patch; None if a smaller patch does not help.

    A single answer that is refused is replaced by a failure with the reason,
    because a node that fails with a message is better than one that waits for ever.
    """
    if len(changes) > 1:
        return len(changes) // 2
    (node_id, entry), *_ = changes.items()
    node = state.nodes.get(node_id)
    if entry is None or node is None or node.desired_entry is None:
        return None
    if not is_final(entry):
        node.is_stored = True  # the message of a waiting node is dispensable, so it is not sent again
        return 1
    size = len(json.dumps(entry))
    if entry.get("phase") in ("Failed", "Error") and not entry.get("outputs"):
        return None
    node.desired_entry = {
        "phase": "Failed",
        "message": f"The answer of this step, {size} bytes, was refused: {error[:_MAX_ERROR_CHARACTERS]}. All "
        "answers of a workflow share one object of about 1.5 MB; return large values as artifacts, or run fewer "
        "steps at once",
    }
    return 1
