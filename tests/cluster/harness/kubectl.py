"""The harness asks the API server by kubectl, which it brings along, rather than by a client library."""

import json
import subprocess
from typing import Any

from .machine import run
from .settings import Settings


def command(settings: Settings, *arguments: str) -> list[str]:
    return [f"{settings.bin}/kubectl", f"--kubeconfig={settings.kubeconfig}", *arguments]


def kubectl(settings: Settings, *arguments: str, text: str = "") -> str:
    return run(*command(settings, *arguments), env={"HOME": str(settings.folder)}, text=text)


def apply(settings: Settings, manifest: dict[str, Any]) -> None:
    kubectl(settings, "apply", "--validate=false", "-f", "-", text=json.dumps(manifest))


def answers(settings: Settings, path: str) -> bool:
    """Whether a GET of `path` succeeds."""
    asked = subprocess.run(
        command(settings, "get", "--raw", path, "--request-timeout=10s"),
        env={"HOME": str(settings.folder)},
        capture_output=True,
        check=False,
    )
    return asked.returncode == 0
