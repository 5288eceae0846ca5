"""Calls the plugin as Argo's agent does.

Source: Argo Workflows ``workflow/util/plugin/plugin.go``: 30 s for a call, five
tries with back-off when the plugin is out of reach, late or answers 503; any
other error fails the node. ``Pending`` with ``requeue`` means: ask me again.
"""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

import httpx
import stamina
from pydantic import ValidationError

from hera_pipelines.local.nodes import NodePhase, Outputs, Verdict
from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.execute_api import ExecuteReply, NodeResult
from tiphys.protocol.execute_api import Outputs as WireOutputs
from tiphys.protocol.quantities import seconds

_TIMEOUT_SECONDS = 30.0
_ATTEMPTS = 5
_WORKERS = 16  # as many calls at once as Argo's agent makes


class PluginEndpoint(NamedTuple):
    """Where the plugin listens, and the token it expects."""

    url: str
    token: str


class WorkflowIdentity(NamedTuple):
    """All that a plugin is told about the workflow."""

    name: str
    namespace: str
    uid: str


class _UnavailableError(Exception):
    """503: try again, as after a refused connection."""


class Agent:
    """Answers plugin nodes for one workflow. Use as an async context manager."""

    def __init__(self, endpoint: PluginEndpoint, workflow: WorkflowIdentity, speed: float) -> None:
        self._workflow = workflow
        self._speed = speed
        self._workers = asyncio.Semaphore(_WORKERS)
        self._client = httpx.AsyncClient(
            base_url=endpoint.url,
            headers={"Authorization": f"Bearer {endpoint.token}"},
            timeout=_TIMEOUT_SECONDS,
            trust_env=False,
        )

    async def __aenter__(self) -> "Agent":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def execute(self, template: Manifest, waiting: Callable[[str], None]) -> Verdict:
        """Ask the plugin until it decides; ``waiting`` is told why it does not yet."""
        while True:
            try:
                reply = await self._ask(template)
                pause = seconds(reply.requeue) if reply.requeue else None
            except (httpx.HTTPError, _UnavailableError) as error:
                return Verdict(NodePhase.FAILED, f"the plugin did not answer: {str(error) or type(error).__name__}")
            except (ValidationError, UsageError) as error:
                return Verdict(NodePhase.FAILED, f"the plugin's answer cannot be read: {error}")
            if reply.node is None:
                return Verdict(NodePhase.FAILED, "no plugin executed the template")
            if reply.node.phase != "Pending":
                return _verdict(reply.node)
            waiting(reply.node.message)
            if pause is None:
                return Verdict(
                    NodePhase.FAILED, "the plugin answered Pending without requeue, so it is never asked again"
                )
            await asyncio.sleep(pause / self._speed)

    async def _ask(self, template: Manifest) -> ExecuteReply:
        body = {"workflow": {"metadata": self._workflow._asdict()}, "template": template}
        async for attempt in stamina.retry_context(
            on=(httpx.TransportError, _UnavailableError),
            attempts=_ATTEMPTS,
            timeout=None,
            wait_initial=1.0 / self._speed,
            wait_max=8.0 / self._speed,
            wait_jitter=0.2 / self._speed,
        ):
            with attempt:
                async with self._workers:
                    response = await self._client.post("/api/v1/template.execute", json=body)
                if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
                    raise _UnavailableError(f"503: {response.text}")
        if response.is_error:
            return ExecuteReply(node=NodeResult(phase="Failed", message=f"{response.status_code}: {response.text}"))
        return ExecuteReply.model_validate_json(response.content)


def _verdict(node: NodeResult) -> Verdict:
    outputs = _outputs(node.outputs) if node.outputs else None
    return Verdict(NodePhase(node.phase), node.message, outputs)


def _outputs(answered: WireOutputs) -> Outputs:
    return Outputs(
        {parameter.name: parameter.value for parameter in answered.parameters},
        {artifact.name: artifact.model_dump() for artifact in answered.artifacts},
    )
