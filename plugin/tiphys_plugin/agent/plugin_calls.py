"""One call to the core, and what it means for the node: an answer, a reason to wait, or nobody who could answer.

Count what the agent and the core ask of the API server: it is shared by the whole cluster.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import structlog

from tiphys.errors import StoreError, TiphysError
from tiphys.kube import KubeApi, Listing, Object, Patch, Resource
from tiphys.kube.api import Body, Keep
from tiphys.protocol.execute_api import ExecuteReply
from tiphys_plugin.agent.settings import AgentSettings
from tiphys_plugin.agent.task_sets import Entry, TaskSet, Template

_log = structlog.get_logger()


Execute = Callable[[str, dict[str, Any]], ExecuteReply]
"""Answers a request of a namespace; as `Tenants.execute` does. Raises `StoreError` to be asked again."""


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


class CountedApi(KubeApi):
    """The API server of ``api``; ``count`` is told verb and plural of each request."""

    def __init__(self, api: KubeApi, count: Callable[[str, str], object]) -> None:
        self._transport = api._transport
        self.namespace, self.server = api.namespace, api.server
        self._count = count

    def get(self, resource: Resource, namespace: str | None, name: str) -> Object | None:
        self._count("get", resource.plural)
        return super().get(resource, namespace, name)

    def list(
        self,
        resource: Resource,
        namespace: str | None = None,
        labels: str = "",
        fields: str = "",
        limit: int = 500,
        keep: Keep = lambda found: found,
    ) -> Listing:
        self._count("list", resource.plural)
        return super().list(resource, namespace, labels, fields, limit, keep)

    def create(self, resource: Resource, namespace: str | None, body: Object) -> Object:
        self._count("create", resource.plural)
        return super().create(resource, namespace, body)

    def replace(self, resource: Resource, namespace: str | None, body: Object, subresource: str = "") -> Object:
        self._count("update", resource.plural)
        return super().replace(resource, namespace, body, subresource)

    def patch(
        self,
        resource: Resource,
        namespace: str | None,
        name: str,
        body: Body,
        how: Patch = Patch.MERGE,
        subresource: str = "",
    ) -> Object:
        self._count("patch", resource.plural)
        return super().patch(resource, namespace, name, body, how, subresource)

    def watch(
        self,
        resource: Resource,
        namespace: str | None,
        resource_version: str,
        labels: str = "",
        fields: str = "",
        timeout_seconds: int = 300,
    ) -> Generator[Object, None, None]:
        self._count("watch", resource.plural)
        return super().watch(resource, namespace, resource_version, labels, fields, timeout_seconds)
