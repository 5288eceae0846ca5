"""Publishes a finished result of a gated step: verifies the declared outputs, and writes the end record.

`locate_outputs` is a pure function, because a wrong match publishes wrong bytes.
An attempt of a training has one try of its container. A `Step` has several tries
in one attempt, each with its own folder, and only the outputs of the last try
count. A failed try may have left outputs, so the number of the last try comes
from the pods if they are known, and is never below the highest folder listed.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from tiphys.errors import ObjectMissingError
from tiphys.faults import failpoint
from tiphys.protocol.execute_api import (
    ArtifactValue,
    ExecuteReply,
    NodeOutputs,
    ParameterValue,
    S3Location,
    pending_reply,
)
from tiphys.protocol.step_spec import RESULT_PARAMETER, StepKind, StepSpec
from tiphys.recording.node_outputs import check_parameter_size, check_recorded_size
from tiphys.records import (
    AttemptClaim,
    AttemptEnd,
    AttemptEndOutcome,
    Cause,
    Output,
    OutputKind,
    OutputObject,
)
from tiphys.store import ObjectInfo
from tiphys_plugin.cluster.interface import PodStatus
from tiphys_plugin.operations import end_attempt
from tiphys_plugin.runtime.background import HashingProgress
from tiphys_plugin.runtime.context import StepCall

_TRY = re.compile(r"(\d+)/")


class LocatedOutput(NamedTuple):
    """One declared output and its objects in storage; ``objects`` is empty if the output is missing."""

    output: Output
    objects: tuple[ObjectInfo, ...]


def locate_outputs(spec: StepSpec, prefix: str, listing: Sequence[ObjectInfo], min_try: int = 0) -> list[LocatedOutput]:
    """Find each declared output of ``spec``; ``listing`` has the objects below ``prefix``, which ends with a slash."""
    root = f"{prefix}{_last_try(prefix, listing, min_try)}/" if spec.kind is StepKind.STEP else prefix
    parameters = [
        _locate_output(name, OutputKind.PARAMETER, f"{root}parameters/{name}", listing) for name in spec.parameters
    ]
    artifacts = [
        _locate_output(name, OutputKind.ARTIFACT, f"{root}artifacts/{spec.artifact_file(name)}", listing)
        for name in spec.artifacts
    ]
    return parameters + artifacts


def _last_try(prefix: str, listing: Sequence[ObjectInfo], at_least: int) -> int:
    tries = (_TRY.match(row.key.removeprefix(prefix)) for row in listing)
    return max([at_least, *(int(match[1]) for match in tries if match)])


def _locate_output(name: str, kind: OutputKind, key: str, listing: Sequence[ObjectInfo]) -> LocatedOutput:
    single = tuple(row for row in listing if row.key == key)
    if single or kind is OutputKind.PARAMETER:
        return LocatedOutput(Output(name=name, kind=kind, key=key), single)
    below = tuple(row for row in listing if row.key.startswith(f"{key}/"))
    return LocatedOutput(Output(name=name, kind=kind, key=key, directory=bool(below)), below)


def verify_and_end(
    call: StepCall, attempt: AttemptClaim, last_try: int, result: str = "", note: str = ""
) -> AttemptEnd | ExecuteReply:
    """Verify the outputs of a successful attempt, and record it as done, or as failed with the reason.

    Args:
        call: A call about its step.
        attempt: The attempt.
        last_try: Number of the last try of its program, from the pods.
        result: Its standard output, which becomes an output of the record if the step has it as one.
        note: What its record says beside that it is done.

    Returns a Pending reply while the outputs are still being hashed.
    """
    prefix, located = call.layout.outputs(attempt.step, attempt.attempt), _locate_stored(call, attempt, last_try)
    fail = partial(end_attempt.record_end, call, attempt, AttemptEndOutcome.FAILED, exit_code=0)
    crash = end_attempt.find_last_crash(call, attempt)
    if crash is not None and _lacks_output(located):
        return end_attempt.end_hidden_crash(call, attempt, crash)
    printed = _printed_outputs(call.spec, prefix, result)
    if fault := _find_output_error(call, located) or _find_result_error(call, printed):
        cause, message = fault
        return fail(cause=cause, message=message)
    try:
        hashes = _hash_outputs(call, prefix, [object_info for output in located for object_info in output.objects])
        if isinstance(hashes, ExecuteReply):
            return hashes
        outputs = (*(_build_output(call, output, hashes) for output in located), *printed)
    except ObjectMissingError as error:
        return fail(cause=Cause.OUTPUT_MISSING, message=str(error))
    except UnicodeDecodeError:
        message = "an output parameter is not UTF-8 text; declare it as an artifact"
        return fail(cause=Cause.USER_ERROR, message=message)
    failpoint("conclude.before_end")
    hidden = f"its program reported {crash.error}, ended with 0 and wrote all its outputs" if crash is not None else ""
    said = "; ".join(filter(None, [note, hidden]))
    end = end_attempt.record_end(call, attempt, AttemptEndOutcome.DONE, message=said, exit_code=0, outputs=outputs)
    failpoint("conclude.after_end")
    return end


def has_finished(call: StepCall, attempt: AttemptClaim, pod_statuses: Sequence[PodStatus]) -> bool:
    """Whether the program of a training has done its work, also if Argo did not learn of it.

    Argo's container ``wait`` fails if the API server does not answer when the program has ended, and an agent may be
    lost with its node. Then the end of the program counts, once its outputs are stored. A folder may be stored in part.
    """
    if call.spec.gang is not None:
        return end_attempt.is_gang_succeeded(call, attempt, pod_statuses)
    if pod_statuses and pod_statuses[-1].phase == "Succeeded":
        return True
    return find_doubt_of_success(call, attempt, pod_statuses) == ""


def find_doubt_of_success(call: StepCall, attempt: AttemptClaim, pod_statuses: Sequence[PodStatus]) -> str | None:
    """What is missing for the success of a single pod whose program exited with 0, and another container did not.

    Empty if nothing is missing. None if the program did not exit with 0, or was asked to end.
    """
    last = pod_statuses[-1] if pod_statuses else None
    if call.spec.gang is not None or last is None or last.exit_code != 0 or not last.finished:
        return None
    if last.reason or last.ending:
        return None
    for output, objects in _locate_stored(call, attempt):
        if not objects:
            return f"output {output.name!r} is not stored"
        if output.directory:
            return f"output {output.name!r} is a folder, of which files may be missing"
    return "its standard output is lost" if call.spec.has_result else ""


def _locate_stored(call: StepCall, attempt: AttemptClaim, min_try: int = 0) -> list[LocatedOutput]:
    prefix = call.layout.outputs(attempt.step, attempt.attempt)
    return locate_outputs(call.spec, prefix, list(call.store.list(prefix)), min_try)


def _lacks_output(located: Sequence[LocatedOutput]) -> bool:
    return not located or any(not candidate.objects for candidate in located)


def build_outputs(call: StepCall, outputs: Sequence[Output]) -> NodeOutputs:
    """Convert recorded outputs to the outputs of the conclude node."""
    return NodeOutputs(
        parameters=[
            ParameterValue(name=o.name, value=o.value or "") for o in outputs if o.kind is OutputKind.PARAMETER
        ],
        artifacts=[
            ArtifactValue(name=o.name, s3=S3Location(key=call.store.artifact_key(o.key)))
            for o in outputs
            if o.kind is OutputKind.ARTIFACT
        ],
    )


def _find_output_error(call: StepCall, located: Sequence[LocatedOutput]) -> tuple[Cause, str] | None:
    if fault := check_recorded_size([entry for candidate in located for entry in candidate.objects]):
        return fault
    limit = call.context.settings.parameter_max_bytes
    for candidate in located:
        output = candidate.output
        if not candidate.objects:
            return Cause.OUTPUT_MISSING, (
                f"declared output {output.kind} {output.name!r} is missing: the program ended well, but there is "
                f"nothing at {call.store.artifact_key(output.key)}; let it write to the declared path"
            )
        is_parameter = output.kind is OutputKind.PARAMETER
        if is_parameter and (fault := check_parameter_size(output.name, candidate.objects[0].size, limit)):
            return fault
    return None


def _printed_outputs(spec: StepSpec, prefix: str, result: str) -> tuple[Output, ...]:
    """The standard output as an output without an object: the record holds its only copy."""
    if not spec.has_result:
        return ()
    key = f"{prefix}parameters/{RESULT_PARAMETER}"
    return (Output(name=RESULT_PARAMETER, kind=OutputKind.PARAMETER, key=key, value=result),)


def _find_result_error(call: StepCall, printed: Sequence[Output]) -> tuple[Cause, str] | None:
    limit = call.context.settings.parameter_max_bytes
    size = max((len((output.value or "").encode()) for output in printed), default=0)
    if size <= limit:
        return None
    return Cause.USER_ERROR, (
        f"its standard output, which another task reads as outputs.result, has {size} bytes, at most {limit} fit in a "
        "Workflow; declare an artifact instead"
    )


def _hash_outputs(call: StepCall, job_key: str, objects: Sequence[ObjectInfo]) -> Mapping[str, str] | ExecuteReply:
    settings = call.context.settings
    hashes = call.context.hasher.hash_objects(job_key, objects, settings.verify_inline_seconds)
    if isinstance(hashes, HashingProgress):
        return pending_reply(
            f"Verifying outputs: {hashes.done} of {hashes.total} objects", settings.requeue_min_seconds
        )
    return hashes


def _build_output(call: StepCall, candidate: LocatedOutput, hashes: Mapping[str, str]) -> Output:
    objects = tuple(
        OutputObject(key=entry.key, size=entry.size, sha256=hashes[entry.key], version=entry.version)
        for entry in candidate.objects
    )
    value = None
    if candidate.output.kind is OutputKind.PARAMETER:
        # As Argo reads a parameter from a file: without one final newline.
        data = call.store.read(candidate.output.key)
        value = data.decode().removesuffix("\n")
        # The record holds the hash of the bytes that it passes on: the object may have changed since it was hashed.
        objects = (objects[0].model_copy(update={"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}),)
    return candidate.output.model_copy(update={"objects": objects, "value": value})
