"""The controller as a process on this machine, against an API server."""

import http.client
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from support.processes.agent import AgentProcess
from support.servers.kube_server import KubeServer, write_kubeconfig


class ControllerProcess(AgentProcess):
    """``python -m tiphys_controller`` between ``__enter__`` and ``__exit__``."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        super().__init__((), environment)
        self._command = [sys.executable, "-m", "tiphys_controller", "--host=127.0.0.1", "--port=0", *arguments]

    @property
    def url(self) -> str:
        ports = [entry["port"] for entry in self.log if entry.get("event") == "controller.started"]
        return f"http://127.0.0.1:{ports[0]}" if ports else ""

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of one of its pages."""
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=60)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()


def kubeconfig(server: KubeServer, folder: Path) -> Path:
    """A file in ``folder`` that leads to ``server``, with the namespace of the controller."""
    return write_kubeconfig(folder, server.url, "tiphys")
