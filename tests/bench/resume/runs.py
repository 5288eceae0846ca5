"""Runs of many items in object storage, as plugin and Argo leave them."""

import hashlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench.checkpoint.server import BUCKET, STORE, plain_client
from hera.workflows import DAG, Parameter
from hera.workflows.models import ValueFrom

from hera_pipelines import Pipeline, Step
from tiphys.protocol.compiled_workflow import CompiledPipeline
from tiphys.protocol.fan_out import static_items
from tiphys.records import AttemptClaim, AttemptEnd, AttemptEndOutcome, Cause, Output, OutputKind, OutputObject
from tiphys.store import RunLayout, outputs_digest

WRITERS = 16
_VALUE = b"0.5"
_VERSION = hashlib.md5(_VALUE, usedforsecurity=False).hexdigest()
"""The ETag of an S3 server."""


def items_pipeline(items: int, **options: Any) -> CompiledPipeline:
    """A pipeline of one step that is fanned out into so many ``items``; ``options`` are those of `Pipeline`."""
    with Pipeline("items", entrypoint="main", store=STORE, **options) as made:
        part = Step(
            name="part",
            image="i",
            command=["python", "part.py"],
            args=["{{inputs.parameters.number}}"],
            inputs=[Parameter(name="number")],
            outputs=Parameter(name="loss", value_from=ValueFrom(path="/tmp/loss")),
        )
        with DAG(name="main"):
            part(arguments={"number": "{{item}}"}, with_items=list(range(items)))
    return CompiledPipeline.from_manifest(made.to_dict())


def items_of(pipeline: CompiledPipeline) -> list[str]:
    """Step ids of its items."""
    return [item.step_id for task in pipeline.tasks() for item in static_items(task) or ()]


def put_all(objects: Iterable[tuple[str, bytes]]) -> int:
    """Write objects by key below the store, many at a time; how many there were."""
    client = plain_client()

    def put(one: tuple[str, bytes]) -> None:
        client.put_object(Bucket=BUCKET, Key=f"store/{one[0]}", Body=one[1])

    with ThreadPoolExecutor(WRITERS) as pool:
        return len(list(pool.map(put, objects)))


def done(run: str, item: str) -> Mapping[str, bytes]:
    """What an item leaves whose first attempt is done."""
    layout = RunLayout(run)
    key = f"{layout.outputs(item, 1)}parameters/loss"
    written = OutputObject(key=key, size=len(_VALUE), sha256=hashlib.sha256(_VALUE).hexdigest(), version=_VERSION)
    output = Output(name="loss", kind=OutputKind.PARAMETER, key=key, value=_VALUE.decode(), objects=(written,))
    listed = [(key.removeprefix(layout.outputs(item, 1)), len(_VALUE), _VERSION)]
    end = {"outcome": AttemptEndOutcome.DONE, "outputs": (output,)}
    return {key: _VALUE, layout.done_marker(item, 1, outputs_digest(listed)): b"", **_attempt(run, item, end)}


def preempted(run: str, item: str) -> Mapping[str, bytes]:
    """What an item leaves whose first attempt lost its node."""
    end = {
        "outcome": AttemptEndOutcome.FAILED,
        "cause": Cause.INFRASTRUCTURE,
        "message": "its node failed, or evicted or rejected the pod (NodeLost)",
    }
    return _attempt(run, item, end)


def _attempt(run: str, item: str, end: Mapping[str, Any]) -> dict[str, bytes]:
    layout = RunLayout(run)
    common = {"run": run, "step": item, "attempt": 1, "submission": 1, "step_key": "k" * 64}
    claim = AttemptClaim(**common, uid="u", node=f"wf.{item}.admit", instance=f"wf.{item}")
    return {
        layout.attempt(item, 1): claim.to_bytes(),
        layout.attempt_end(item, 1): AttemptEnd(**common, **end).to_bytes(),
    }
