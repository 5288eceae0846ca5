"""Calls the core for a node, and converts its reply or its error to an entry for the node.

`CountingApi` counts the requests of agent and core to the API server, which the
whole cluster shares.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog

from tiphys.errors import TiphysError
from tiphys.kube import KubeApi, Resource
from tiphys.protocol.execute_api import ExecuteReply
from tiphys_plugin.agent.settings import AgentSettings
from tiphys_plugin.agent.task_sets import NodeEntry, TaskSet, Template
from tiphys_plugin.sidecar.outages import OutageClock

_log = structlog.get_logger()
ExecuteFunction = Callable[[str, dict[str, Any]], ExecuteReply]
"""Answers a request of a namespace, like `Tenants.execute`. Raises `StoreError` if the call should be repeated."""


@dataclass(frozen=True)
class CallResult:
    """The result of one call to the core."""

    entry: NodeEntry | None
    """Entry for the node; None if the task set stays as it is."""
    repeat_in_seconds: float | None
    """When to call again; None if the entry is final."""
    failed: bool = False
    """The core raised an error instead of replying."""


def build_request(task_set: TaskSet, template: Template) -> dict[str, Any]:
    """The request that Argo's own agent would send (Argo Workflows ``workflow/executor/agent.go``)."""
    metadata = {"name": task_set.name, "namespace": task_set.namespace, "uid": task_set.workflow_uid}
    return {"workflow": {"metadata": metadata}, "template": template}


def call_core(
    execute: ExecuteFunction,
    task_set: TaskSet,
    template: Template,
    failures: int,
    settings: AgentSettings,
    outages: OutageClock,
) -> CallResult:
    """Call the core for a node of ``task_set``; ``failures`` consecutive calls have failed before this one."""
    request = build_request(task_set, template)
    try:
        result = _read_reply(execute(task_set.namespace, request))
    except TiphysError as error:
        reason = str(error)
    except Exception as error:  # noqa: BLE001  the boundary: one broken call must not end the agent
        _log.exception("agent.call_crashed", workflow=task_set.name, namespace=task_set.namespace)
        reason = f"the plugin failed on this call ({type(error).__name__}); its log has the trace"
    else:
        outages.end(request)
        return result
    _log.warning("agent.call_failed", workflow=task_set.name, namespace=task_set.namespace, reason=reason)
    answer = outages.answer(request, reason)
    return CallResult(
        answer["node"], settings.retry_delay_seconds(failures) if "requeue" in answer else None, failed=True
    )


def _read_reply(reply: ExecuteReply) -> CallResult:
    if reply.node is None:
        raise AssertionError("the core replied NOT_MINE to a template of its own plugin")
    entry = reply.node.model_dump(mode="json", exclude_none=True)
    return CallResult(entry, float(reply.requeue.rstrip("s")) if reply.requeue else None)


_VERBS = {"get": "get", "list": "list", "create": "create", "replace": "update", "patch": "patch", "watch": "watch"}
"""Verbs of Kubernetes by method of `KubeApi`."""


class CountingApi(KubeApi):
    """A `KubeApi` with the connection of ``api`` that calls ``count`` with verb and plural of each request."""

    def __init__(self, api: KubeApi, count: Callable[[str, str], object]) -> None:
        self._transport = api._transport
        self.namespace, self.server, self.unreadable = api.namespace, api.server, api.unreadable
        self._count = count
        for method, verb in _VERBS.items():
            setattr(self, method, self._count_calls(verb, getattr(self, method)))

    def _count_calls(self, verb: str, request: Callable[..., Any]) -> Callable[..., Any]:
        def counted(resource: Resource, *arguments: Any, **options: Any) -> Any:
            self._count(verb, resource.plural)
            return request(resource, *arguments, **options)

        return counted
