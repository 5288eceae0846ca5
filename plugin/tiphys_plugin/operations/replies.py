"""Builds the replies of admit: output parameters for the compiled step, and a message that Argo shows on the node."""

import json
from typing import Any

from tiphys.errors import ConflictError, IntegrityError, NotFoundError, StoreError, UsageError
from tiphys.protocol.execute_api import (
    ExecuteReply,
    NodeOutputs,
    ParameterValue,
    failed_reply,
    succeeded_reply,
)
from tiphys.protocol.gang import GangSpec
from tiphys.protocol.operations import ADMIT_OUTPUTS
from tiphys.protocol.step_spec import StepKind, StepSpec
from tiphys.records import AttemptClaim, SkippedCheckpoint
from tiphys.records.tracking import TRACKING_ID_OUTPUT, tracking_id
from tiphys.store import LineageLayout, Store, read_run
from tiphys_plugin.attempts import gangs
from tiphys_plugin.operations import pod_patch
from tiphys_plugin.quota.flavors import Flavor
from tiphys_plugin.quota.queues import Queues, format_gpus
from tiphys_plugin.runtime.context import StepCall

REFUSED_ERRORS = (UsageError, NotFoundError, ConflictError, IntegrityError)
"""Errors that a person has to fix; a repeated call would meet them again."""


def skip_step(message: str) -> ExecuteReply:
    """Reply that the step does not run; a later call says what becomes of it."""
    return _admit_reply(message, {"run": "false"})


def refused_reply(error: Exception) -> ExecuteReply:
    """Report an error that a person has to fix, in the phase that Argo does not retry."""
    return failed_reply(f"Refused: {error}")


def keep_declared(reply: ExecuteReply, template: dict[str, Any]) -> ExecuteReply:
    """``reply`` with only those outputs that the template of its node declares: Argo stores all that it gets."""
    if reply.node is None or reply.node.outputs is None:
        return reply
    declared = template.get("outputs") or {}
    parameters = {entry.get("name") for entry in declared.get("parameters") or []}
    artifacts = {entry.get("name") for entry in declared.get("artifacts") or []}
    kept = NodeOutputs(
        parameters=[entry for entry in reply.node.outputs.parameters if entry.name in parameters],
        artifacts=[entry for entry in reply.node.outputs.artifacts if entry.name in artifacts],
    )
    return reply.model_copy(update={"node": reply.node.model_copy(update={"outputs": kept})})


def run_step(call: StepCall, claim: AttemptClaim, note: str = "", granted: Flavor | None = None) -> ExecuteReply:
    """Reply that the step runs as the attempt of ``claim``.

    Args:
        call: The call of the step.
        claim: The attempt.
        note: Added to the message.
        granted: The flavor that the ledger has just granted; None: that of the claim is looked up.

    Raises:
        StoreError: the ledger did not answer, or its queues no longer declare the flavor of the attempt.
    """
    start = claim.starts_from
    flavor = granted if granted is not None and granted.name == claim.flavor else _find_flavor(call, claim)
    patch = pod_patch.build_pod_patch(call, claim, flavor)
    values = {
        "run": "true",
        "run-id": claim.run,
        "step": claim.step,
        "attempt": str(claim.attempt),
        "lineage": claim.lineage,
        "resume-from": start.relative_to(claim.lineage) if start else "",
        "checkpoint-uri": checkpoint_uri(call.store, call.spec, claim),
        "outputs": call.store.artifact_key(call.layout.outputs(claim.step, claim.attempt).rstrip("/")),
        "pod-patch": json.dumps(patch, sort_keys=True) if patch else "",
        **_tracking_parameters(call, claim),
        **(_gang_parameters(call, claim, call.spec.gang, flavor) if call.spec.gang else {}),
    }
    message = ". ".join(part for part in (_describe_attempt(call, claim), _describe_escalation(claim), note) if part)
    return _admit_reply(message, values)


def _tracking_parameters(call: StepCall, claim: AttemptClaim) -> dict[str, str]:
    """The id of the run of Weights & Biases, whose clients take one; that of MLflow is found in the pod."""
    if call.spec.tracker != "wandb":
        return {}
    return {TRACKING_ID_OUTPUT: tracking_id(read_run(call.store, claim.run), claim.step)}


def _find_flavor(call: StepCall, claim: AttemptClaim) -> Flavor | None:
    if not claim.flavor:
        return None
    ledger = call.context.ledger.snapshot()
    granted = next((lease.flavor for lease in ledger.leases if lease.id == claim.lease), None)
    if granted is not None:
        return granted
    queues = ledger.queues
    flavor = queues.flavor_set.by_name.get(claim.flavor) if isinstance(queues, Queues) else None
    if flavor is None:
        raise StoreError(
            f"attempt {claim.attempt} of {call.name} holds GPUs of flavor {claim.flavor!r}, which the queues no "
            "longer declare, so its nodes are unknown; declare the flavor again"
        )
    return flavor


def _gang_parameters(call: StepCall, claim: AttemptClaim, gang: GangSpec, flavor: Flavor | None) -> dict[str, str]:
    node_requirements = pod_patch.spot_requirements(call, claim, flavor)
    placement = pod_patch.build_placement_patch(call, claim, flavor)
    return {
        **gangs.gang_output_parameters(gang, claim, call.input_keys, placement, node_requirements),
        **pod_patch.memory_output_parameters(call, claim),
    }


def checkpoint_uri(store: Store, spec: StepSpec, claim: AttemptClaim) -> str:
    """URL of the checkpoint to start from, or of the lineage if there is none yet; empty without checkpoints."""
    if not claim.lineage or spec.checkpoints is None:
        return ""
    root = (spec.checkpoints.store or store.url).rstrip("/")
    start = claim.starts_from
    if start is None:
        return f"{root}/{LineageLayout(claim.lineage).prefix}"
    return f"{root}/{LineageLayout(start.lineage).shards(start.attempt, start.global_step)}"


def _describe_attempt(call: StepCall, claim: AttemptClaim) -> str:
    spec = call.spec
    number = f"Attempt {claim.attempt}"
    if spec.gang is not None:
        started = gangs.with_started_members(spec.gang, claim).members
        of = f" of {spec.gang.members}" if started < spec.gang.members else ""
        number += f", {started}{of} pods,"
    if spec.gpu is not None and claim.lease:
        gpus = spec.gpu.gpus_for(claim.members)
        number += f" holds {format_gpus(gpus, claim.flavor or spec.gpu.gpu_type)} of queue {spec.gpu.queue} and"
    if call.volume:
        return f"{number} looks for its checkpoint on the volume {call.volume}"
    if not claim.lineage:
        return f"{number} runs" + (", and keeps no checkpoints" if spec.kind is StepKind.TRAIN else "")
    if claim.starts_from is None:
        sentence = f"{number} starts from the beginning"
    else:
        start = claim.starts_from
        lineage = "" if start.lineage == claim.lineage else f" of {start.lineage}"
        sentence = (
            f"{number} resumes from step {start.global_step} (checkpoint of attempt "
            f"{start.attempt}{lineage}, to be verified)"
        )
    return "; ".join([sentence, *map(_describe_skipped, claim.skipped)])


def _describe_escalation(claim: AttemptClaim) -> str:
    words = claim.escalation.explanation if claim.escalation else ""
    return f"After earlier failures: {words}" if words else ""


def _describe_skipped(skipped: SkippedCheckpoint) -> str:
    return f"{skipped.checkpoint.global_step} of attempt {skipped.checkpoint.attempt} was skipped: {skipped.reason}"


def _admit_reply(message: str, values: dict[str, str]) -> ExecuteReply:
    names = dict.fromkeys((*ADMIT_OUTPUTS, *values))
    return succeeded_reply(
        message, NodeOutputs(parameters=[ParameterValue(name=name, value=values.get(name, "")) for name in names])
    )
