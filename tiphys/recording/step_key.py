"""The step key: one hash of everything that determines the outputs of a step.

A finished result is reused only if its inputs are unchanged: the program, the
parameter values, the content of the input artifacts, the versions of data
that no step made, the fan-out item. An
artifact that a step of Tiphys made is identified by its content hash, so an
input that was made again with the same bytes does not change the key.

Parameters and data also have a hash each, so that a resume can report which of
them has changed.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tiphys.protocol.execute_api import find_artifact_place
from tiphys.protocol.step_spec import RUN_PARAMETER, SUBMISSION_PARAMETER, StepSpec
from tiphys.protocol.variables import find_variables
from tiphys.records import AttemptEnd, AttemptEndOutcome, item_hash, json_digest
from tiphys.store import Store, find_attempt_end
from tiphys.store.layout import parse_output
from tiphys.store.workflow_layout import output_origins, parse_output_origin, parse_pod_output

# How an input artifact gets into the container; none of these fields identifies its content.
_NON_CONTENT_FIELDS = (
    "name",
    "path",
    "mode",
    "recurseMode",
    "optional",
    "archive",
    "description",
    "from",
    "fromExpression",
)


class StepKey(NamedTuple):
    """``key`` is equal for two attempts with the same inputs; all fields are SHA-256 in hex."""

    key: str
    parameters: str
    """Hash of the step's input parameters, and of the workflow parameters that its program uses."""
    dataset: str
    """Hash of the identities of the input artifacts and data; empty for a step without any."""


class StepInputs(NamedTuple):
    """What a step is given."""

    parameters: Mapping[str, str]
    """Values of its input parameters, and as ``workflow.parameters.…`` those that its program uses, by name."""
    artifacts: Sequence[Mapping[str, Any]]
    """Its input artifacts, with their locations."""
    item: str = ""
    """Value of the fan-out item; empty for a step that is not fanned out."""


def compute_step_key(store: Store, spec: StepSpec, inputs: StepInputs) -> StepKey:
    """Compute the key of a step; costs a read or two for each artifact that a step of Tiphys made."""
    artifacts = {artifact["name"]: _artifact_identity(store, artifact) for artifact in inputs.artifacts}
    data = sorted(source.identity for source in spec.data)
    key = json_digest(
        {
            "template": spec.template,
            "outputs": [sorted(spec.output_parameters), sorted(spec.artifacts)],
            "parameters": dict(inputs.parameters),
            "artifacts": artifacts,
            "item": item_hash(inputs.item) if spec.fan_out else None,
            "data": data,
        }
    )
    dataset = json_digest({"artifacts": artifacts, "data": data}) if data or artifacts else ""
    return StepKey(key, json_digest(dict(inputs.parameters)), dataset)


def workflow_parameters_used(part: Any) -> list[str]:
    """Names of the workflow parameters of the author that ``part`` uses directly, sorted."""
    names = [variable.names for variable in find_variables(part)]
    used = {found[2] for found in names if found[:2] == ("workflow", "parameters") and len(found) > 2}
    return sorted(used - {RUN_PARAMETER, SUBMISSION_PARAMETER})


def _artifact_identity(store: Store, artifact: Mapping[str, Any]) -> Any:
    """Identity of an input artifact: its content hashes if they are recorded, else its location."""
    location = {key: value for key, value in artifact.items() if key not in _NON_CONTENT_FIELDS}
    place = find_artifact_place(location)
    # An artifact that names a bucket may be in another, where the same key is another object.
    key = store.from_artifact_key(place.key.rstrip("/")) if place and not place.bucket else None
    end = find_end_of_output(store, key) if key else None
    return location if end is None or key is None else _content_hashes(end, key) or location


def find_end_of_output(store: Store, key: str) -> AttemptEnd | None:
    """The end of the attempt that wrote an output; None if ``key`` is none of an ended attempt."""
    if (output := parse_output(key)) is not None:
        return find_attempt_end(store, output.run, output.step, output.attempt)
    if (in_pod := parse_pod_output(key)) is None:
        return None
    listed = next(store.list(output_origins(in_pod.uid, in_pod.pod)), None)
    origin = parse_output_origin(listed.key) if listed is not None else None
    return find_attempt_end(store, origin.run, origin.step, origin.attempt) if origin is not None else None


def _content_hashes(end: AttemptEnd, key: str) -> list[list[str]] | None:
    """Relative keys and hashes of the objects below ``key``; None unless a finished attempt recorded them."""
    if end.outcome is not AttemptEndOutcome.DONE:
        return None
    objects = [o for output in end.outputs for o in output.objects if o.key == key or o.key.startswith(f"{key}/")]
    return sorted([o.key.removeprefix(key), o.sha256] for o in objects) or None
