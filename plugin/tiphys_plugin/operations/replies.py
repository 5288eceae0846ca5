"""What admit answers: output parameters, and a sentence for the person who looks."""

from tiphys.protocol.execute_api import ExecuteReply, Outputs, ParameterValue, succeeded
from tiphys.protocol.gang import Gang
from tiphys.protocol.operations import ADMIT_OUTPUTS
from tiphys.protocol.step_spec import StepSpec
from tiphys.records import AttemptClaim, CheckpointRef, Skipped
from tiphys.store import LineageLayout, Store
from tiphys_plugin.attempts import gangs
from tiphys_plugin.operations import pod_patch as escalation
from tiphys_plugin.operations import pod_patch as memory
from tiphys_plugin.quota.queues import in_words
from tiphys_plugin.runtime.context import StepCall


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
        **(_of_gang(call, claim, call.spec.gang) if call.spec.gang else {}),
    }
    return _answer(". ".join(part for part in (_sentence(call, claim), _changed(claim), note) if part), values)


def _of_gang(call: StepCall, claim: AttemptClaim, gang: Gang) -> dict[str, str]:
    nodes = escalation.spot_requirements(call, claim)
    return {**gangs.answers(gang, claim, call.input_keys, nodes), **memory.answers(call, claim)}


def checkpoint_uri(store: Store, spec: StepSpec, claim: AttemptClaim) -> str:
    """URL of the checkpoint to start from; of the lineage, where there is none yet; empty without checkpoints."""
    if not claim.lineage or spec.checkpoints is None:
        return ""
    root = (spec.checkpoints.store or store.url).rstrip("/")
    start = claim.starts_from
    if start is None:
        return f"{root}/{LineageLayout(claim.lineage).prefix}"
    return f"{root}/{LineageLayout(start.lineage).shards(start.attempt, start.global_step)}"


def _sentence(call: StepCall, claim: AttemptClaim) -> str:
    spec = call.spec
    number = f"Attempt {claim.attempt}"
    if spec.gang is not None:
        started = gangs.as_started(spec.gang, claim).members
        of = f" of {spec.gang.members}" if started < spec.gang.members else ""
        number += f", {started}{of} pods,"
    if spec.gpu is not None and claim.lease:
        gpus = spec.gpu.gpus // spec.gpu.members * (claim.members or spec.gpu.members)
        number += f" holds {in_words(gpus, claim.flavor or spec.gpu.gpu_type)} of queue {spec.gpu.queue} and"
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


def _changed(claim: AttemptClaim) -> str:
    words = claim.escalation.words if claim.escalation else ""
    return f"After earlier failures: {words}" if words else ""


def _of(start: CheckpointRef, claim: AttemptClaim) -> str:
    return "" if start.lineage == claim.lineage else f" of {start.lineage}"


def _passed_over(skipped: Skipped) -> str:
    return f"{skipped.checkpoint.global_step} of attempt {skipped.checkpoint.attempt} was skipped: {skipped.reason}"


def _answer(message: str, values: dict[str, str]) -> ExecuteReply:
    names = dict.fromkeys((*ADMIT_OUTPUTS, *values))
    parameters = [ParameterValue(name=name, value=values.get(name, "")) for name in names]
    return succeeded(message, Outputs(parameters=parameters))
