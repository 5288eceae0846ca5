"""A person's desk: a directory with a kubeconfig, and the API server for tests that it leads to."""

import json
from pathlib import Path

import pytest
from tiphys_plugin.quota.ledger.kubernetes_ledger import KubernetesLedger

from hera_pipelines.cli import main
from support.servers.kube_server import KubeServer
from tiphys.kube.resources import GPU_LEDGERS

QUEUES = 'queues:\n  - {name: research, gpus: {A100: 8, "*": 4}}\n  - {name: nightly, gpus: {"*": 2}}\n'


class Desk:
    """A working directory with a kubeconfig, and the server that it leads to."""

    def __init__(self, server: KubeServer, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.server = server
        self.api = server.api("ml")
        self.folder = folder
        self._capsys = capsys
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "desk",
            "clusters": [{"name": "one", "cluster": {"server": server.url}}],
            "users": [{"name": "me", "user": {}}],
            "contexts": [{"name": "desk", "context": {"cluster": "one", "user": "me", "namespace": "ml"}}],
        }
        (folder / "kubeconfig").write_text(json.dumps(document))

    def queues(self, verb: str, *arguments: str, text: str = QUEUES) -> tuple[int, str, str]:
        file = self.folder / "queues.yaml"
        file.write_text(text)
        given = ["-f", str(file)] if verb == "apply" else []
        return self.tiphys("queues", verb, *given, *arguments)

    def tiphys(self, *arguments: str) -> tuple[int, str, str]:
        """Exit code and both streams of a command about this cluster."""
        code = main([*arguments, "--kubeconfig", str(self.folder / "kubeconfig")])
        return (code, *self._capsys.readouterr())

    def ledger(self, namespace: str = "ml") -> KubernetesLedger:
        return KubernetesLedger(self.api, namespace)

    def spec(self, name: str = "default") -> object:
        return (self.api.get(GPU_LEDGERS, "ml", name) or {}).get("spec")
