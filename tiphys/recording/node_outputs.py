"""Reads the outputs of a finished step from its node, and verifies that its artifacts are stored.

Argo names the key of each artifact in the node. A tenant may write the nodes of a Workflow,
so only keys below the uid of the same Workflow count: nothing else could be its output.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from tiphys.errors import ObjectExistsError, ObjectMissingError
from tiphys.protocol.execute_api import find_artifact_place
from tiphys.protocol.step_spec import RESULT_PARAMETER, StepSpec
from tiphys.protocol.workflow_nodes import StepNode
from tiphys.records import AttemptClaim, Cause, Output, OutputKind, OutputObject
from tiphys.records.base import MAX_RECORD_BYTES
from tiphys.store import ObjectInfo, RunLayout, Store
from tiphys.store.workflow_layout import OutputOrigin, output_origin, parse_pod_output, pod_outputs

HashObjects = Callable[[str, Sequence[ObjectInfo]], Mapping[str, str] | None]
"""SHA-256 in hex of each object, by key; None while they are being hashed. The text names the job between calls.

Raises `ObjectMissingError` if an object is gone.
"""
_RECORDED_OBJECT_BYTES = 190
"""Size of an `OutputObject` in a record, without its key."""
_MAX_RECORDED_BYTES = MAX_RECORD_BYTES - (256 << 10)
"""Room for the objects of all outputs in an end record; the rest is for its other fields."""
_MAX_LISTED_OBJECTS = _MAX_RECORDED_BYTES // _RECORDED_OBJECT_BYTES
"""More objects than a record lists. A program may have written millions, which a service must not keep in memory."""


class OutputFault(NamedTuple):
    """Why a step that Argo saw succeed has no result."""

    cause: Cause
    message: str


class VerifiedOutputs(NamedTuple):
    """The outputs of a finished step; ``prefix`` is empty for a step without artifacts."""

    outputs: tuple[Output, ...]
    prefix: str = ""


def check_recorded_size(objects: Sequence[ObjectInfo]) -> OutputFault | None:
    """The fault of outputs of so many files that no record of a result can list them."""
    if sum(len(entry.key.encode()) + _RECORDED_OBJECT_BYTES for entry in objects) <= _MAX_RECORDED_BYTES:
        return None
    return OutputFault(
        Cause.USER_ERROR,
        f"its outputs have {len(objects):,} files, more than the record of a result can list "
        f"({MAX_RECORD_BYTES:,} bytes, some 15,000 files); let the program pack them into an archive",
    )


def check_parameter_size(name: str, size_bytes: int, limit_bytes: int) -> OutputFault | None:
    """The fault of an output parameter that no Workflow can hold."""
    if size_bytes <= limit_bytes:
        return None
    return OutputFault(
        Cause.USER_ERROR,
        f"output parameter {name!r} has {size_bytes} bytes, at most {limit_bytes} fit in a Workflow; "
        "declare it as an artifact",
    )


def verify_outputs(
    store: Store,
    spec: StepSpec,
    claim: AttemptClaim,
    node: StepNode,
    hash_objects: HashObjects,
    parameter_max_bytes: int,
) -> VerifiedOutputs | OutputFault | None:
    """Verify the outputs of a step that has succeeded.

    Returns:
        The outputs; the fault if one is missing or cannot be kept; None while they are being hashed.

    Raises:
        StoreError: storage did not answer.
    """
    values = node.output_values()
    own = RunLayout(claim.run).outputs(claim.step, claim.attempt)
    located = _locate_artifacts(store, spec, claim.uid, node)
    if isinstance(located, OutputFault):
        return located
    prefix, keys = located
    parameters = []
    for name in spec.parameters:
        if (value := values.get(name)) is None:
            return OutputFault(Cause.OUTPUT_MISSING, f"declared output parameter {name!r} is missing in Argo's node")
        if fault := check_parameter_size(name, len(value.encode()), parameter_max_bytes):
            return fault
        parameters.append(_parameter(prefix or own, name, value))
    result = node.outputs.get("result")
    if isinstance(result, str) and len(result.encode()) <= parameter_max_bytes:
        parameters.append(_parameter(prefix or own, RESULT_PARAMETER, result))
    rows = store.list(prefix) if prefix else iter(())
    declared = (row for row in rows if any(_is_at(row.key, key) for key in keys.values()))
    listing = list(islice(declared, _MAX_LISTED_OBJECTS))
    found = {name: _objects_of(key, listing) for name, key in keys.items()}
    if missing := next((name for name, objects in found.items() if not objects), None):
        return OutputFault(
            Cause.OUTPUT_MISSING,
            f"declared output artifact {missing!r} is missing: the program ended well, but there is nothing at "
            f"{store.artifact_key(keys[missing])}; let it write to the declared path",
        )
    objects = [entry for entries in found.values() for entry in entries]
    if fault := check_recorded_size(objects):
        return fault
    try:
        hashes = hash_objects(prefix, objects) if objects else {}
    except ObjectMissingError as error:
        return OutputFault(Cause.OUTPUT_MISSING, str(error))
    if hashes is None:
        return None
    artifacts = [_artifact(name, keys[name], entries, hashes) for name, entries in found.items()]
    return VerifiedOutputs((*parameters, *artifacts), prefix)


def write_output_origin(store: Store, claim: AttemptClaim, prefix: str) -> None:
    """Record which attempt the pod with the outputs below ``prefix`` was, so that readers of a key find its hashes."""
    parsed = parse_pod_output(f"{prefix}-")
    assert parsed is not None
    origin = OutputOrigin(parsed.pod, claim.run, claim.step, claim.attempt)
    with contextlib.suppress(ObjectExistsError):
        store.create(output_origin(claim.uid, origin), b"")


def _locate_artifacts(
    store: Store, spec: StepSpec, uid: str, node: StepNode
) -> tuple[str, dict[str, str]] | OutputFault:
    """The folder of the pod and the key of each artifact, without a final slash."""
    artifacts = {artifact["name"]: artifact for artifact in node.output_artifacts()}
    prefix, keys = "", dict[str, str]()
    for name in spec.artifacts:
        place = find_artifact_place(artifacts.get(name) or {})
        if place is None:
            return OutputFault(Cause.OUTPUT_MISSING, f"declared output artifact {name!r} is missing in Argo's node")
        key = store.from_artifact_key(place.key.rstrip("/"))
        parsed = parse_pod_output(key or "")
        if key is None or parsed is None or parsed.uid != uid or place.bucket:
            return OutputFault(
                Cause.OUTPUT_MISSING,
                f"output artifact {name!r} is at {place.key}, which is no place for outputs of this Workflow in "
                f"{store.url}; compile the pipeline with --store {store.url}",
            )
        keys[name], folder = key, pod_outputs(parsed.uid, parsed.pod)
        if prefix not in ("", folder):
            return OutputFault(Cause.OUTPUT_MISSING, f"output artifact {name!r} is of another pod than the others")
        prefix = folder
    return prefix, keys


def _objects_of(key: str, listing: Sequence[ObjectInfo]) -> list[ObjectInfo]:
    single = [row for row in listing if row.key == key]
    return single or [row for row in listing if _is_at(row.key, key)]


def _is_at(object_key: str, key: str) -> bool:
    return object_key == key or object_key.startswith(f"{key}/")


def _parameter(prefix: str, name: str, value: str) -> Output:
    """An output without an object: the record holds its only copy."""
    return Output(name=name, kind=OutputKind.PARAMETER, key=f"{prefix}parameters/{name}", value=value)


def _artifact(name: str, key: str, entries: Sequence[ObjectInfo], hashes: Mapping[str, str]) -> Output:
    objects = tuple(
        OutputObject(key=entry.key, size=entry.size, sha256=hashes[entry.key], version=entry.version)
        for entry in entries
    )
    directory = objects[0].key != key
    return Output(name=name, kind=OutputKind.ARTIFACT, key=key, directory=directory, objects=objects)
