"""podSpecPatch: the parts of a pod that mean something for a process on this machine."""

import json
from dataclasses import dataclass, field
from typing import Any

import yaml

from tiphys.errors import UsageError

DEFAULT_GRACE_SECONDS = 30.0
"""Kubernetes' own default."""

_PLACEMENT = (
    "nodeSelector",
    "tolerations",
    "affinity",
    "priorityClassName",
    "schedulerName",
    "runtimeClassName",
    "topologySpreadConstraints",
    "serviceAccountName",
    "securityContext",
    "imagePullSecrets",
)
_CONTAINER = ("name", "resources", "image", "imagePullPolicy", "env")


@dataclass(frozen=True)
class PodPatch:
    """What a patch changes here."""

    grace_seconds: float = DEFAULT_GRACE_SECONDS
    environment: dict[str, str] = field(default_factory=dict)


def read_patch(text: str) -> PodPatch:
    """Read a podSpecPatch, JSON or YAML; where a pod is placed and what it may use is ignored.

    Raises:
        UsageError: it is not a document, or holds a field that would change the program.
    """
    patch = _parse(text)
    unknown = [key for key in patch if key not in (*_PLACEMENT, "terminationGracePeriodSeconds", "containers")]
    environment: dict[str, str] = {}
    for container in patch.get("containers") or []:
        if container.get("name") != "main":
            unknown.append(f"containers[{container.get('name')}]")
            continue
        unknown += [f"containers[main].{key}" for key in container if key not in _CONTAINER]
        environment |= {entry["name"]: str(entry.get("value", "")) for entry in container.get("env") or []}
    if unknown:
        raise UsageError(f"podSpecPatch: the local engine cannot honour {', '.join(unknown)}")
    return PodPatch(float(patch.get("terminationGracePeriodSeconds", DEFAULT_GRACE_SECONDS)), environment)


def _parse(text: str) -> dict[str, Any]:
    if not text.strip():
        return {}
    try:
        patch = json.loads(text) if text.lstrip().startswith("{") else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise UsageError(f"podSpecPatch is neither JSON nor YAML: {text[:200]!r}") from error
    if not isinstance(patch, dict):
        raise UsageError(f"podSpecPatch is not a map: {text[:200]!r}")
    return patch
