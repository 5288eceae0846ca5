"""Make a finished result known: verify what was declared, write the end, then what is derived from it.

The end record decides. Projection and memo are written after it and can be
written again from it, so a crash between them loses nothing.

Find the declared outputs of an attempt in a listing. Pure, because a wrong match publishes wrong bytes.

A training attempt has one try of its container, a `Step` several below one
attempt, each with a folder of its own; only the last try's outputs count. A
failed try may have left outputs, so "last" comes from the pods where they are
known, and is never below the highest folder listed.
"""

import contextlib
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tiphys.errors import ObjectExistsError, ObjectMissingError
from tiphys.faults import failpoint
from tiphys.protocol.execute_api import ArtifactValue, ExecuteReply, Outputs, ParameterValue, S3Location, pending
from tiphys.protocol.step_spec import Kind, StepSpec
from tiphys.records import AttemptClaim, AttemptEnd, Cause, MemoRecord, Outcome, Output, OutputKind, OutputObject
from tiphys.store import ObjectInfo, claim, listing_digest, memo_key, output_fault
from tiphys_plugin.operations import end_attempt as ending
from tiphys_plugin.runtime.background import Progress
from tiphys_plugin.runtime.context import StepCall

_KINDS = {OutputKind.PARAMETER: "parameters", OutputKind.ARTIFACT: "artifacts"}
_TRY = re.compile(r"(\d+)/")


class Located(NamedTuple):
    """Where one declared output lies. ``objects`` is empty if it is missing."""

    output: Output
    objects: tuple[ObjectInfo, ...]


def locate(spec: StepSpec, prefix: str, rows: Sequence[ObjectInfo], last_try: int = 0) -> list[Located]:
    """Each declared output of ``spec`` in ``rows``, the listing below ``prefix`` (with a final slash)."""
    root = f"{prefix}{_last_try(prefix, rows, last_try)}/" if spec.kind is Kind.STEP else prefix
    wanted = [(name, OutputKind.PARAMETER) for name in spec.parameters]
    wanted += [(name, OutputKind.ARTIFACT) for name in spec.artifacts]
    return [_locate(name, kind, f"{root}{_KINDS[kind]}/{name}", rows) for name, kind in wanted]


def _last_try(prefix: str, rows: Sequence[ObjectInfo], at_least: int) -> int:
    tries = (_TRY.match(row.key.removeprefix(prefix)) for row in rows)
    return max([at_least, *(int(match[1]) for match in tries if match)])


def _locate(name: str, kind: OutputKind, key: str, rows: Sequence[ObjectInfo]) -> Located:
    single = tuple(row for row in rows if row.key == key)
    if single or kind is OutputKind.PARAMETER:
        return Located(Output(name=name, kind=kind, key=key), single)
    below = tuple(row for row in rows if row.key.startswith(f"{key}/"))
    return Located(Output(name=name, kind=kind, key=key, directory=bool(below)), below)


def finish(call: StepCall, attempt: AttemptClaim, last_try: int) -> AttemptEnd | ExecuteReply:
    """Verify the outputs of an attempt that ran to its end, and record it as done, or why it is not.

    A reply is Pending: the hashing goes on.
    """
    prefix = call.layout.outputs(attempt.step, attempt.attempt)
    located = locate(call.spec, prefix, list(call.store.list(prefix)), last_try)
    if fault := _fault(call, located):
        cause, message = fault
        return ending.end(call, attempt, Outcome.FAILED, cause=cause, message=message, exit_code=0)
    try:
        hashes = _hash(call, prefix, [info for found in located for info in found.objects])
        if isinstance(hashes, ExecuteReply):
            return hashes
        outputs = tuple(_output(call, found, hashes) for found in located)
    except ObjectMissingError as error:
        return ending.end(call, attempt, Outcome.FAILED, cause=Cause.OUTPUT_MISSING, message=str(error), exit_code=0)
    except UnicodeDecodeError:
        message = "an output parameter is not UTF-8 text; declare it as an artifact"
        return ending.end(call, attempt, Outcome.FAILED, cause=Cause.USER_ERROR, message=message, exit_code=0)
    failpoint("conclude.before_end")
    done = ending.end(call, attempt, Outcome.DONE, exit_code=0, outputs=outputs)
    failpoint("conclude.after_end")
    return done


def derive(call: StepCall, end: AttemptEnd) -> None:
    """Write what follows from a done end, as far as it is not there: the projection, and the memo if shared.

    A projection vouches for what is listed. Where something has vanished since
    the end was written, there is nothing to vouch for, and the end decides.
    """
    if next(call.store.list(_projection(call, end, "")), None) is None:
        below = call.layout.outputs(end.step, end.attempt)
        sizes = {info.key: info.size for info in call.store.list(below)}
        if output_fault(end, sizes) is None:
            rows = [(key.removeprefix(below), size) for key, size in sizes.items()]
            with contextlib.suppress(ObjectExistsError):  # another process derived it at the same time
                call.store.create(_projection(call, end, listing_digest(rows)), b"")
    failpoint("conclude.after_projection")
    if call.spec.share:
        claim(call.store, memo_key(end.step_key), MemoRecord(run=end.run, step=end.step, attempt=end.attempt))


def answer(call: StepCall, outputs: Sequence[Output]) -> Outputs:
    """Recorded outputs as the outputs of the conclude node."""
    return Outputs(
        parameters=[
            ParameterValue(name=o.name, value=o.value or "") for o in outputs if o.kind is OutputKind.PARAMETER
        ],
        artifacts=[
            ArtifactValue(name=o.name, s3=S3Location(key=call.store.artifact_key(o.key)))
            for o in outputs
            if o.kind is OutputKind.ARTIFACT
        ],
    )


def _fault(call: StepCall, located: Sequence[Located]) -> tuple[Cause, str] | None:
    limit = call.services.settings.parameter_max_bytes
    for found in located:
        output = found.output
        if not found.objects:
            return Cause.OUTPUT_MISSING, (
                f"declared output {output.kind} {output.name!r} is missing: the program ended well, but there is "
                f"nothing at {call.store.artifact_key(output.key)}; let it write to the declared path"
            )
        size = found.objects[0].size
        if output.kind is OutputKind.PARAMETER and size > limit:
            return Cause.USER_ERROR, (
                f"output parameter {output.name!r} has {size} bytes, at most {limit} fit in a Workflow; "
                "declare it as an artifact"
            )
    return None


def _hash(call: StepCall, job: str, objects: Sequence[ObjectInfo]) -> Mapping[str, str] | ExecuteReply:
    settings = call.services.settings
    found = call.services.hasher.hashes(job, objects, settings.verify_inline_seconds)
    if isinstance(found, Progress):
        return pending(f"Verifying outputs: {found.done} of {found.total} objects", settings.requeue_min_seconds)
    return found


def _output(call: StepCall, found: Located, hashes: Mapping[str, str]) -> Output:
    objects = tuple(OutputObject(key=o.key, size=o.size, sha256=hashes[o.key]) for o in found.objects)
    value = None
    if found.output.kind is OutputKind.PARAMETER:
        # As Argo reads a parameter from a file: without one final newline.
        value = call.store.read(found.output.key).decode().removesuffix("\n")
    return found.output.model_copy(update={"objects": objects, "value": value})


def _projection(call: StepCall, end: AttemptEnd, listing: str) -> str:
    return call.layout.done_projection(end.step, end.attempt, listing)
