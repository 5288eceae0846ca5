"""The files of one sidecar, and the sidecar as a process."""

import json
from pathlib import Path

import httpx
from tiphys_plugin.sidecar.forwarding import EXECUTE_PATH

from support.processes.process import Process
from support.servers import http

TOKEN, ACCOUNT = "argo-made-this-token", "account-token-of-ml"
OURS = {"workflow": {"metadata": {"name": "w", "namespace": "ml", "uid": "u"}}, "template": {"plugin": {"tiphys": {}}}}


class SidecarPod:
    """One sidecar, its files, and the service behind it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("token", TOKEN)
        self.write("account", ACCOUNT)

    def write(self, name: str, content: str) -> None:
        (self.root / name).write_text(f"{content}\n")

    def process(self, service: str, **environment: str) -> Process:
        files = {"TIPHYS_TOKEN_FILE": str(self.root / "token"), "TIPHYS_ACCOUNT_TOKEN_FILE": str(self.root / "account")}
        place = {"TIPHYS_SIDECAR_PORT": "0", "TIPHYS_SERVICE_URL": service}
        return Process("tiphys_plugin.sidecar", **{**files, **place, **environment})


def sidecar_url(running: Process) -> str:
    return f"http://127.0.0.1:{running.started['port']}"


def post(running: Process, content: bytes | None = None, token: str = TOKEN) -> httpx.Response:
    return http.post(
        f"{sidecar_url(running)}{EXECUTE_PATH}",
        content=json.dumps(OURS).encode() if content is None else content,
        headers={"Authorization": f"Bearer {token}"},
    )
