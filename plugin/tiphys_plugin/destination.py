"""Where the pods of an attempt have to run, so that what the ledger counted is true.

It is written down once, as a patch of a pod's spec, in the claim of the attempt.
Argo applies it to the pod of a single one; the pods of a gang get the same by
the manifest that makes them, see `tiphys_plugin.gangs`.
"""

import json
import math
from typing import Any

from tiphys.errors import UsageError
from tiphys.protocol.pipeline import template
from tiphys.protocol.policy import Kind
from tiphys_plugin.gangs import HOSTNAME_LABEL
from tiphys_plugin.ledger import Admitted
from tiphys_plugin.nodes.settings import GPU_TYPE_LABEL
from tiphys_plugin.queues import ANY_TYPE
from tiphys_plugin.services import StepCall


def pod_patch(call: StepCall, lease: Admitted | None) -> str:
    """Strategic merge patch for the pod of a training attempt; empty for other steps.

    Of the type that the step's author names, the compiled step itself has the
    label, so that it lands on such a GPU where nobody declares queues, too.

    Raises:
        UsageError: tolerations of a flavor are needed and cannot be added to those of the step.
    """
    if call.spec.kind is not Kind.TRAIN:
        return ""
    patch: dict[str, object] = {"terminationGracePeriodSeconds": math.ceil(call.spec.grace_seconds)}
    if selector := _selector(call, lease):
        patch["nodeSelector"] = selector
    if added := _tolerations(lease):
        # A merge patch has its own list take the place of the other; the manifest of a gang adds to its own.
        patch["tolerations"] = added if call.spec.gang is not None else [*_own_tolerations(call), *added]
    return json.dumps(patch, sort_keys=True)


def chosen_type(patch: str) -> str | None:
    """The GPU type that `pod_patch` sends the pod to."""
    chosen: str | None = json.loads(patch or "{}").get("nodeSelector", {}).get(GPU_TYPE_LABEL)
    return chosen


def _selector(call: StepCall, lease: Admitted | None) -> dict[str, str]:
    selector: dict[str, str] = {}
    if lease is None:
        return selector
    if lease.flavor is not None:
        selector = lease.flavor.selector
    elif call.spec.gpu is not None and call.spec.gpu.gpu_type is None and lease.pool != ANY_TYPE:
        selector = {GPU_TYPE_LABEL: lease.pool}
    return selector if len(lease.nodes) != 1 else {**selector, HOSTNAME_LABEL: lease.nodes[0]}


def _tolerations(lease: Admitted | None) -> list[dict[str, Any]]:
    return (
        [one.manifest() for one in lease.flavor.tolerations] if lease is not None and lease.flavor is not None else []
    )


def _own_tolerations(call: StepCall) -> list[dict[str, Any]]:
    """Those that Argo gives the pod (``workflow/controller/workflowpod.go``, addSchedulingConstraints)."""
    spec = call.binding.pipeline.manifest["spec"]
    places = (template(call.binding.pipeline.manifest, f"{call.spec.name}-run"), spec.get("templateDefaults"), spec)
    own: list[dict[str, Any]] = next((one["tolerations"] for one in places if one and one.get("tolerations")), [])
    if "{{" in json.dumps(own):
        raise UsageError(
            f"step {call.spec.name!r}: the tolerations of its flavor cannot be added to its own, in which Argo fills "
            "in a value; write them out, or have the flavor tolerate it"
        )
    return own
