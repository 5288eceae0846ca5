"""How much memory the container of a training declares, and what it becomes for the next attempt.

Of a single pod the template of its container says it, and a patch of the pod
changes it. Of several pods admit answers it, into the manifest that makes them;
what was declared is the default of that answer.
"""

from collections.abc import Mapping
from typing import Any

from tiphys.protocol.operations import MEMORY_OUTPUTS
from tiphys.protocol.pipeline import Manifest, template
from tiphys.protocol.quantity import memory_bytes, memory_quantity
from tiphys.records import AttemptClaim
from tiphys_plugin.services import StepCall

Resources = Mapping[str, Mapping[str, Any]]
"""``requests`` and ``limits`` of a container."""


def declared(call: StepCall) -> Resources:
    """Resources of the step's container, or of that of each of its members: of these the memory alone."""
    manifest = call.binding.pipeline.manifest
    if call.spec.gang is None:
        run = template(manifest, f"{call.spec.name}-run")
        container: Manifest = run.get("container") or run.get("script") or {}
        return container.get("resources") or {}
    outputs = (template(manifest, f"{call.spec.name}-admit").get("outputs") or {}).get("parameters") or []
    defaults = {one["name"]: (one.get("valueFrom") or {}).get("default") for one in outputs}
    return {side: {"memory": defaults[name]} for side, name in MEMORY_OUTPUTS.items() if defaults.get(name)}


def most_bytes(resources: Resources) -> int | None:
    """What a container may use; None where nothing limits it."""
    for side in ("limits", "requests"):
        if (memory := (resources.get(side) or {}).get("memory")) is not None:
            return memory_bytes(memory, f"resources.{side}.memory")
    return None


def grown(resources: Resources, wanted_bytes: int | None) -> dict[str, dict[str, str]]:
    """Request and limit of memory, both grown alike; empty where they suffice."""
    base = most_bytes(resources)
    if wanted_bytes is None or base is None or wanted_bytes <= base:
        return {}
    more = {}
    for side in ("requests", "limits"):
        if (memory := (resources.get(side) or {}).get("memory")) is not None:
            share = memory_bytes(memory, "resources") / base
            more[side] = {"memory": memory_quantity(round(wanted_bytes * share))}
    return more


def answers(call: StepCall, claim: AttemptClaim) -> dict[str, str]:
    """What admit answers of memory for several pods, under the names that the compiled step asks for."""
    if call.spec.gang is None or call.spec.retry.memory_ceiling_bytes is None:
        return {}
    resources = declared(call)
    wanted = claim.escalation.memory_bytes if claim.escalation else None
    given = {**resources, **grown(resources, wanted)}
    return {name: str(given[side]["memory"]) for side, name in MEMORY_OUTPUTS.items() if side in given}
