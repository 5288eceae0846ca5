"""The step key: one hash of everything that determines the outputs of a step.

A finished result is reused only if its inputs are unchanged: the program, the
parameter values, the content of the input artifacts, the versions of data
that no step made, the fan-out item. An
artifact that a step of Tiphys made is identified by its content hash, so an
input that was made again with the same bytes does not change the key.

Parameters and data also have a hash each, so that a resume can report which of
them has changed.
"""

from typing import Any, NamedTuple

from tiphys.protocol.execute_api import find_artifact_place
from tiphys.protocol.operations import AdmitOperation
from tiphys.protocol.step_spec import StepSpec
from tiphys.records import AttemptEnd, AttemptEndOutcome, item_hash, json_digest
from tiphys.store import Store, find_attempt_end
from tiphys.store.layout import parse_output

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


def compute_step_key(store: Store, spec: StepSpec, operation: AdmitOperation, template: dict[str, Any]) -> StepKey:
    """Compute the key of the step of ``operation``; costs one read for each artifact that a step of Tiphys made."""
    inputs = (template.get("inputs") or {}).get("artifacts") or []
    artifacts = {artifact["name"]: _artifact_identity(store, artifact) for artifact in inputs}
    # Left out where there is none, so that the keys of other steps stay as earlier versions computed them.
    data = {"data": sorted(one.identity for one in spec.data)} if spec.data else {}
    key = json_digest(
        {
            "template": spec.template,
            "outputs": [sorted(spec.output_parameters), sorted(spec.artifacts)],
            "parameters": operation.inputs,
            "artifacts": artifacts,
            "item": item_hash(operation.item) if spec.fan_out else None,
            **data,
        }
    )
    dataset = json_digest({"artifacts": artifacts, **data}) if data else json_digest(artifacts) if artifacts else ""
    return StepKey(key, json_digest(operation.inputs), dataset)


def _artifact_identity(store: Store, artifact: dict[str, Any]) -> Any:
    """Identity of an input artifact: its content hashes if they are recorded, else its location."""
    location = {key: value for key, value in artifact.items() if key not in _NON_CONTENT_FIELDS}
    place = find_artifact_place(location)
    key = store.from_artifact_key(place.key) if place else None
    output = parse_output(key) if key else None
    if key is None or output is None:
        return location
    run, step, attempt, _ = output
    end = find_attempt_end(store, run, step, attempt)
    return _content_hashes(end, key.rstrip("/")) or location


def _content_hashes(end: AttemptEnd | None, key: str) -> list[list[str]] | None:
    """Relative keys and hashes of the objects below ``key``; None unless a finished attempt recorded them."""
    if end is None or end.outcome is not AttemptEndOutcome.DONE:
        return None
    objects = [o for output in end.outputs for o in output.objects if o.key == key or o.key.startswith(f"{key}/")]
    return sorted([o.key.removeprefix(key), o.sha256] for o in objects) or None
