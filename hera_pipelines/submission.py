"""Sending a compiled document to the Argo server.

Hera's own calls take Hera's models, which would drop the plugin bodies on the
way. These use the same service, address, headers and errors with the document
as it is.
"""

from typing import Any, Literal, Protocol
from urllib.parse import urljoin

from hera.exceptions import exception_from_server_response
from hera.workflows import WorkflowsService
from hera.workflows.async_service import AsyncWorkflowsService

from tiphys.errors import UsageError
from tiphys.protocol.pipeline import Manifest

Method = Literal["post", "put"]


class Submittable(Protocol):
    """The part of a Hera workflow that says where it goes."""

    workflows_service: WorkflowsService | AsyncWorkflowsService | None
    namespace: str | None


def send(workflow: Submittable, method: Method, path: str, body: Manifest) -> Manifest:
    """Call ``api/v1/<path>`` and return the answer; ``{namespace}`` in ``path`` is filled in.

    Raises:
        UsageError: the workflow has no host, no namespace or an asynchronous service.
        hera.exceptions.HeraException: the server refused.
    """
    service = workflow.workflows_service
    if not isinstance(service, WorkflowsService):
        raise UsageError("the pipeline has an AsyncWorkflowsService; use async_create or async_lint")
    reply = service._request(  # type: ignore[no-untyped-call]
        **_call(workflow, service, method, path, body), verify=service.verify_ssl, cert=service.client_certs
    )
    return _answer(reply, reply.ok)


async def send_async(workflow: Submittable, method: Method, path: str, body: Manifest) -> Manifest:
    """Like `send`, with an `AsyncWorkflowsService`."""
    service = workflow.workflows_service
    if not isinstance(service, AsyncWorkflowsService):
        raise UsageError("the pipeline has no AsyncWorkflowsService; give workflows_service=…, or use create or lint")
    reply = await service._request(**_call(workflow, service, method, path, body))  # type: ignore[no-untyped-call]
    return _answer(reply, reply.is_success)


def _call(
    workflow: Submittable,
    service: WorkflowsService | AsyncWorkflowsService,
    method: Method,
    path: str,
    body: Manifest,
) -> dict[str, Any]:
    if not service.host or "://" not in service.host:
        raise UsageError("there is no Argo server to call; set hera.shared.global_config.host='https://…'")
    namespace = workflow.namespace or service.namespace
    if not namespace:
        raise UsageError("no namespace is given; use Pipeline(namespace=…) or global_config.namespace")
    return {
        "method": method,
        "url": urljoin(service.host, f"api/v1/{path.format(namespace=namespace)}"),
        "headers": {"Authorization": service.token or "", "Content-Type": "application/json"},
        "json": body,
    }


def _answer(reply: Any, success: bool) -> Manifest:
    if not success:
        raise exception_from_server_response(reply)
    answer: Manifest = reply.json()
    return answer
