"""The GPUs for which a template asks Kubernetes by itself, beside those of a lease.

A queue counts the GPUs of its leases. A pod with others would take them from trainings that have a lease.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.step_spec import is_gpu_resource

_PATCHED = re.compile(r"(?<![\w.-])([\w.-]+/[\w.-]+)[\"']?\s*:\s*[\"']?([^\s\"',}]+)")
_MAIN = ("container", "script")
_OTHERS = ("initContainers", "sidecars")


class GpuResource(NamedTuple):
    """One resource of one container.

    Attributes:
        container: Name of the init container or sidecar that asks for it, or ``podSpecPatch``; empty for the program.
        name: Such as ``nvidia.com/gpu`` or ``nvidia.com/mig-1g.5gb``.
        amount: As it is written: a number, or a reference that becomes one in Argo.
    """

    container: str
    name: str
    amount: str


def find_gpu_resources(template: Manifest, granted: str = "") -> Iterator[GpuResource]:
    """All GPUs in a template, those of its program first; ``granted`` is the resource of its lease, of any name."""
    containers = [("", template.get(kind) or {}) for kind in _MAIN]
    containers += [(str(other.get("name")), other) for kind in _OTHERS for other in template.get(kind) or ()]
    for container, document in containers:
        sides = [(document.get("resources") or {}).get(side) or {} for side in ("limits", "requests")]
        amounts = {name: str(amount) for side in reversed(sides) for name, amount in side.items()}
        for name, amount in amounts.items():
            if (name == granted or is_gpu_resource(name)) and amount != "0":
                yield GpuResource(container, name, amount)
    for name, amount in _PATCHED.findall(str(template.get("podSpecPatch") or "")):
        if name == granted or is_gpu_resource(name):
            yield GpuResource("podSpecPatch", name, amount)
