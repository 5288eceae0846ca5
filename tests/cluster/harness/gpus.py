"""GPUs of paper: Kubernetes schedules an extended resource by its number alone, whatever stands behind it."""

import json

from .kubectl import kubectl
from .settings import Settings

RESOURCE = "nvidia.com/gpu"


def advertise(settings: Settings, node: str, count: int) -> None:
    """Have a node say that it has `count` GPUs."""
    amount = {RESOURCE: str(count)}
    patch = json.dumps({"status": {"capacity": amount, "allocatable": amount}})
    kubectl(settings, "patch", "node", node, "--subresource=status", "--type=merge", f"--patch={patch}")
