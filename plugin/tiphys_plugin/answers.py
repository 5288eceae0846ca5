"""What admit answers: output parameters, and a sentence for the person who looks."""

import json
import math

from tiphys.protocol.operations import ADMIT_OUTPUTS
from tiphys.protocol.policy import Kind, StepSpec
from tiphys.protocol.wire import ExecuteReply, Outputs, ParameterValue, succeeded
from tiphys.records import AttemptClaim, CheckpointRef, Skipped
from tiphys.store import LineageLayout, Store
from tiphys_plugin import gangs
from tiphys_plugin.nodes.settings import GPU_TYPE_LABEL
from tiphys_plugin.queues import in_words
from tiphys_plugin.services import StepCall


def skip(message: str) -> ExecuteReply:
    """The step does not run."""
    return _answer(message, {"run": "false"})


def go(call: StepCall, claim: AttemptClaim, note: str = "") -> ExecuteReply:
    """The step runs as the attempt that ``claim`` holds."""
    start = claim.starts_from
    values = {
        "run": "true",
        "run-id": claim.run,
        "step": claim.step,
        "attempt": str(claim.attempt),
        "lineage": claim.lineage,
        "resume-from": start.within(claim.lineage) if start else "",
        "checkpoint-uri": checkpoint_uri(call.store, call.spec, claim),
        "outputs": call.store.artifact_key(call.layout.outputs(claim.step, claim.attempt).rstrip("/")),
        "pod-patch": claim.pod_patch,
        **(gangs.answers(claim, call.input_keys) if call.spec.gang else {}),
    }
    return _answer(". ".join(part for part in (_sentence(call, claim), note) if part), values)


def checkpoint_uri(store: Store, spec: StepSpec, claim: AttemptClaim) -> str:
    """URL of the checkpoint to start from; of the lineage, where there is none yet; empty without checkpoints."""
    if not claim.lineage or spec.checkpoints is None:
        return ""
    root = (spec.checkpoints.store or store.url).rstrip("/")
    start = claim.starts_from
    if start is None:
        return f"{root}/{LineageLayout(claim.lineage).prefix}"
    return f"{root}/{LineageLayout(start.lineage).shards(start.attempt, start.global_step)}"


def pod_patch(spec: StepSpec, chosen_type: str | None, node: str | None = None) -> str:
    """Strategic merge patch for the pod of a training attempt.

    ``chosen_type`` is the GPU type that the ledger counted a request without a
    type against, ``node`` the one whose GPUs it took, where nodes are declared;
    the pod has to land there for the count to be true.
    """
    if spec.kind is not Kind.TRAIN:
        return ""
    patch: dict[str, object] = {"terminationGracePeriodSeconds": math.ceil(spec.grace_seconds)}
    wanted = {GPU_TYPE_LABEL: chosen_type, gangs.HOSTNAME_LABEL: node}
    if selector := {label: value for label, value in wanted.items() if value is not None}:
        patch["nodeSelector"] = selector
    return json.dumps(patch, sort_keys=True)


def chosen_type(patch: str) -> str | None:
    """The GPU type that `pod_patch` was made with."""
    chosen: str | None = json.loads(patch or "{}").get("nodeSelector", {}).get(GPU_TYPE_LABEL)
    return chosen


def _sentence(call: StepCall, claim: AttemptClaim) -> str:
    spec = call.spec
    number = f"Attempt {claim.attempt}" if spec.gang is None else f"Attempt {claim.attempt}, {spec.gang.members} pods,"
    if spec.gpu is not None and claim.lease:
        number += f" holds {in_words(spec.gpu.gpus, spec.gpu.gpu_type)} of queue {spec.gpu.queue} and"
    if call.volume:
        return f"{number} looks for its checkpoint on the volume {call.volume}"
    if not claim.lineage:
        return f"{number} runs"
    if claim.starts_from is None:
        sentence = f"{number} starts from the beginning"
    else:
        start = claim.starts_from
        sentence = (
            f"{number} resumes from step {start.global_step} (checkpoint of attempt {start.attempt}{_of(start, claim)})"
        )
    return "; ".join([sentence, *map(_passed_over, claim.skipped)])


def _of(start: CheckpointRef, claim: AttemptClaim) -> str:
    return "" if start.lineage == claim.lineage else f" of {start.lineage}"


def _passed_over(skipped: Skipped) -> str:
    return f"{skipped.checkpoint.global_step} of attempt {skipped.checkpoint.attempt} was skipped: {skipped.reason}"


def _answer(message: str, values: dict[str, str]) -> ExecuteReply:
    names = dict.fromkeys((*ADMIT_OUTPUTS, *values))
    parameters = [ParameterValue(name=name, value=values.get(name, "")) for name in names]
    return succeeded(message, Outputs(parameters=parameters))
