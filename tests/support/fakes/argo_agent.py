"""Argo's agent, reduced to its rules for executor plugins.

Source: Argo Workflows v4.1, ``workflow/util/plugin`` and ``workflow/executor/agent.go``:
30 s for a call; up to 5 tries with growing pauses on a time-out, a refused
connection or 503; 404 switches the method off for the life of the agent; any
other error fails the node at once; a reply without a node is "not mine"; a reply
with ``requeue`` is called again unless it is Succeeded; a restarted agent calls
every task again. Pauses are shortened, the order of things is kept.
"""

import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from support.servers import http

TRIES = 5
LARGEST_TURNS = 400


@dataclass
class Agent:
    """``pause`` is the first back-off and the length of a requeue, in seconds."""

    url: str
    token: str
    pause: float = 0.01
    timeout: float = 30.0
    disabled: bool = False
    messages: list[str] = field(default_factory=list)
    """What a person saw, without repetitions."""

    def call(self, document: dict[str, Any]) -> dict[str, Any]:
        """One call with its retries; the node result, as the agent would patch it, or a reply to wait for."""
        if self.disabled:
            return _failed("no plugin executed the template")
        for attempt in range(TRIES):
            response = self._post(document)
            if response is not None and response.status_code != 503:
                return self._read(response)
            time.sleep(self.pause * 2**attempt)
        return _failed("the plugin did not answer" if response is None else f"503: {response.text}")

    def run(self, document: dict[str, Any]) -> dict[str, Any]:
        """Call, and call again as long as the reply asks for it; the final node result."""
        for _ in range(LARGEST_TURNS):
            reply = self.call(document)
            node = reply.get("node")
            if node is None:
                return _failed("no plugin executed the template")["node"]
            if not self.messages or self.messages[-1] != node.get("message", ""):
                self.messages.append(node.get("message", ""))
            if node["phase"] == "Succeeded" or not reply.get("requeue"):
                assert node["phase"] != "Pending", "Pending without requeue is never asked again"
                return dict(node)
            assert node["phase"] == "Pending", "requeue with a final phase flips the node later"
            time.sleep(self.pause)
        raise AssertionError(f"still pending after {LARGEST_TURNS} calls: {self.messages[-1]}")

    def _post(self, document: dict[str, Any]) -> httpx.Response | None:
        try:
            return http.post(
                f"{self.url}/api/v1/template.execute",
                json=document,
                headers={"Authorization": f"Bearer {self.token}"},
                timeout=self.timeout,
            )
        except httpx.TransportError:
            return None

    def _read(self, response: httpx.Response) -> dict[str, Any]:
        if response.status_code == 404:
            self.disabled = True
        if response.status_code != 200:
            return _failed(f"{response.status_code}: {response.text}")
        reply: dict[str, Any] = response.json()
        return reply


def _failed(message: str) -> dict[str, Any]:
    return {"node": {"phase": "Failed", "message": message}}
