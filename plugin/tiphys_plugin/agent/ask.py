"""One call to the core, and what it means for the node: an answer, a reason to wait, or nobody who could answer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog

from tiphys.errors import StoreError, TiphysError
from tiphys.protocol.wire import ExecuteReply
from tiphys_plugin.agent.settings import AgentSettings
from tiphys_plugin.agent.taskset import Entry, TaskSet, Template

_log = structlog.get_logger()


Execute = Callable[[str, dict[str, Any]], ExecuteReply]
"""Answers a request of a namespace; `tiphys_plugin.tenants.Tenants.execute`. Raises `StoreError` to be asked again."""


@dataclass(frozen=True)
class Answer:
    """``again_in`` None: it is final."""

    entry: Entry | None
    again_in: float | None
    failed: bool = False
    """Nobody could answer."""


def document(task_set: TaskSet, template: Template) -> dict[str, Any]:
    """The request that Argo's own agent would send (Argo Workflows ``workflow/executor/agent.go``)."""
    metadata = {"name": task_set.name, "namespace": task_set.namespace, "uid": task_set.workflow_uid}
    return {"workflow": {"metadata": metadata}, "template": template}


def ask(execute: Execute, task_set: TaskSet, template: Template, failures: int, settings: AgentSettings) -> Answer:
    """Ask for the namespace of the task set; ``failures`` calls in a row have failed before this one."""
    try:
        return _read(execute(task_set.namespace, document(task_set, template)))
    except StoreError as error:
        reason = f"Waiting: {error}"
    except TiphysError as error:
        reason = f"Waiting for somebody to put this right: {error}"
    except Exception as error:  # noqa: BLE001  the boundary: one broken call must not end the agent
        _log.exception("agent.call_crashed", workflow=task_set.name, namespace=task_set.namespace)
        reason = f"The plugin failed on this call ({type(error).__name__}); its log has the trace, and it asks again"
    _log.warning("agent.call_failed", workflow=task_set.name, namespace=task_set.namespace, reason=reason)
    pause = min(settings.retry_seconds * 2.0**failures, settings.most_retry_seconds)
    entry = {"phase": "Pending", "message": reason} if failures >= settings.silent_failures else None
    return Answer(entry, pause, failed=True)


def _read(reply: ExecuteReply) -> Answer:
    if reply.node is None:
        raise AssertionError("the core disowned a body of its own plugin")
    entry = reply.node.model_dump(mode="json", exclude_none=True)
    return Answer(entry, float(reply.requeue.rstrip("s")) if reply.requeue else None)
