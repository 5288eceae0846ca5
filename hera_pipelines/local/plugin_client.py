"""Calls the plugin as Argo's agent does.

A call times out after 30 s and is tried five times with back-off if the plugin is
unreachable, late or answers 503; any other error fails the node. A ``Pending``
answer with ``requeue`` makes the client call again after that time.

Source: Argo Workflows ``workflow/util/plugin/plugin.go``.
"""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

import httpx
import stamina
from pydantic import ValidationError
from tiphys_plugin.sidecar.forwarding import error_text

from hera_pipelines.local.nodes import NodeEnd, NodePhase, WorkflowNodeOutputs
from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.execute_api import ExecuteReply, NodeResult, WorkflowMetadata
from tiphys.protocol.execute_api import NodeOutputs as WireOutputs
from tiphys.protocol.quantities import parse_argo_duration_seconds

_TIMEOUT_SECONDS = 30.0
_MAX_TRIES = 5
_MAX_PARALLEL_CALLS = 16  # as many calls at once as Argo's agent makes


class PluginEndpoint(NamedTuple):
    """URL of the plugin, and the bearer token that it expects."""

    url: str
    token: str


class _UnavailableError(Exception):
    """The plugin answered 503; the call is retried like a refused connection."""


class PluginClient:
    """Executes the plugin nodes of one workflow. Use as an async context manager."""

    def __init__(self, endpoint: PluginEndpoint, workflow: WorkflowMetadata, speed: float) -> None:
        self._workflow = workflow
        self._speed = speed
        self._call_slots = asyncio.Semaphore(_MAX_PARALLEL_CALLS)
        self._client = httpx.AsyncClient(
            base_url=endpoint.url,
            headers={"Authorization": f"Bearer {endpoint.token}"},
            timeout=_TIMEOUT_SECONDS,
            trust_env=False,
        )

    async def __aenter__(self) -> "PluginClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def execute(self, template: Manifest, on_pending: Callable[[str], None]) -> NodeEnd:
        """Call the plugin until it returns a final phase; ``on_pending`` gets the message of each Pending answer."""
        while True:
            try:
                reply = await self._call_plugin(template)
                pause = parse_argo_duration_seconds(reply.requeue) if reply.requeue else None
            except (httpx.HTTPError, _UnavailableError) as error:
                return NodeEnd(NodePhase.FAILED, f"the plugin did not answer: {str(error) or type(error).__name__}")
            except (ValidationError, UsageError) as error:
                return NodeEnd(NodePhase.FAILED, f"the plugin's answer cannot be read: {error}")
            if reply.node is None:
                return NodeEnd(NodePhase.FAILED, "no plugin executed the template")
            if reply.node.phase != "Pending":
                outputs = _read_outputs(reply.node.outputs) if reply.node.outputs else None
                return NodeEnd(NodePhase(reply.node.phase), reply.node.message, outputs)
            on_pending(reply.node.message)
            if pause is None:
                return NodeEnd(
                    NodePhase.FAILED, "the plugin answered Pending without requeue, so the node can never finish"
                )
            await asyncio.sleep(pause / self._speed)

    async def _call_plugin(self, template: Manifest) -> ExecuteReply:
        body = {"workflow": {"metadata": self._workflow.model_dump()}, "template": template}
        async for attempt in stamina.retry_context(
            on=(httpx.TransportError, _UnavailableError),
            attempts=_MAX_TRIES,
            timeout=None,
            wait_initial=1.0 / self._speed,
            wait_max=8.0 / self._speed,
            wait_jitter=0.2 / self._speed,
        ):
            with attempt:
                async with self._call_slots:
                    response = await self._client.post("/api/v1/template.execute", json=body)
                if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
                    raise _UnavailableError(error_text(response.content))
        if response.is_error:
            return ExecuteReply(
                node=NodeResult(phase="Failed", message=f"{response.status_code}: {error_text(response.content)}")
            )
        return ExecuteReply.model_validate_json(response.content)


def _read_outputs(reply_outputs: WireOutputs) -> WorkflowNodeOutputs:
    return WorkflowNodeOutputs(
        {parameter.name: parameter.value for parameter in reply_outputs.parameters},
        {artifact.name: artifact.model_dump() for artifact in reply_outputs.artifacts},
    )
