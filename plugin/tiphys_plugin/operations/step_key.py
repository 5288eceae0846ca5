"""The step key: one hash of everything that decides what a step makes.

A finished result may stand for a step only while nothing that went into it has
changed: the program, the values of its parameters, the content of its input
artifacts, the fan-out item. Content is known by hash where a step of Tiphys
made it, so an input that was made again with the same bytes changes nothing.

Beside the one hash of all, parameters and data are known by a hash each, so that
whoever resumes can say which of them has changed.
"""

from typing import Any, NamedTuple

from tiphys.protocol.operations import Admit
from tiphys.protocol.step_spec import StepSpec
from tiphys.records import AttemptEnd, Outcome, digest, item_hash
from tiphys.store import RunLayout, Store, find_record
from tiphys.store.layout import parse_output

# How an input artifact gets into the container; none of it says which bytes they are.
_NOT_CONTENT = ("name", "path", "mode", "recurseMode", "optional", "archive", "description", "from", "fromExpression")


class StepKey(NamedTuple):
    """``key`` is equal for two attempts that must make the same outputs; all are SHA-256 in hex."""

    key: str
    parameters: str
    """Of the values of the step's input parameters, and of the workflow parameters that its program uses."""
    dataset: str
    """Of what its input artifacts are known by; empty for a step without any."""


def step_key(store: Store, spec: StepSpec, operation: Admit, template: dict[str, Any]) -> StepKey:
    """What the step of ``operation`` is made from; costs a read for each artifact that a step of Tiphys made."""
    given = (template.get("inputs") or {}).get("artifacts") or []
    artifacts = {artifact["name"]: _identity(store, artifact) for artifact in given}
    key = digest(
        {
            "template": spec.template,
            "outputs": [sorted(spec.parameters), sorted(spec.artifacts)],
            "parameters": operation.inputs,
            "artifacts": artifacts,
            "item": item_hash(operation.item) if spec.fan_out else None,
        }
    )
    return StepKey(key, digest(operation.inputs), digest(artifacts) if artifacts else "")


def _identity(store: Store, artifact: dict[str, Any]) -> Any:
    """What the bytes of an input artifact are known by: their hashes, else where they lie."""
    location = {key: value for key, value in artifact.items() if key not in _NOT_CONTENT}
    key = store.from_artifact_key((location.get("s3") or {}).get("key") or "")
    place = parse_output(key) if key else None
    if key is None or place is None:
        return location
    run, step, attempt, _ = place
    end = find_record(store, RunLayout(run).attempt_end(step, attempt), AttemptEnd)
    return _content(end, key.rstrip("/")) or location


def _content(end: AttemptEnd | None, key: str) -> list[list[str]] | None:
    """Relative keys and hashes below ``key``; None unless the record of a finished attempt vouches for them."""
    if end is None or end.outcome is not Outcome.DONE:
        return None
    objects = [o for output in end.outputs for o in output.objects if o.key == key or o.key.startswith(f"{key}/")]
    return sorted([o.key.removeprefix(key), o.sha256] for o in objects) or None
