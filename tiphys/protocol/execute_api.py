"""Request and reply of Argo's executor plugin call ``template.execute``.

A reply without ``node`` means that the plugin does not handle the template.
``requeue`` may accompany ``Pending`` only; with another phase Argo would call a
finished node again. Source: Argo Workflows ``pkg/plugins/executor``.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

Phase = Literal["Pending", "Succeeded", "Failed", "Error"]


class WorkflowMetadata(BaseModel):
    model_config = ConfigDict(extra="ignore")

    name: Annotated[str, Field(max_length=253)]
    namespace: Annotated[str, Field(max_length=63)] = "default"
    uid: Annotated[str, Field(max_length=128)]


class WorkflowObject(BaseModel):
    model_config = ConfigDict(extra="ignore")

    metadata: WorkflowMetadata


class ExecuteRequest(BaseModel):
    """Body of ``POST /api/v1/template.execute``. ``template`` is a whole Argo Template."""

    model_config = ConfigDict(extra="ignore")

    workflow: WorkflowObject
    template: dict[str, Any]


class ParameterValue(BaseModel):
    name: str
    value: str


class S3Location(BaseModel):
    """A key in the artifact repository of the Workflow, whatever its kind.

    Argo takes bucket and kind of an artifact that names a key only from the
    repository, and nothing but the key from the artifact (``ArtifactLocation.Relocate``).
    """

    key: str


class ArtifactPlace(NamedTuple):
    """Where an artifact of Argo is. ``bucket`` is empty for the artifact repository of the Workflow."""

    bucket: str
    key: str


_PLACES = {"s3": ("bucket", "key"), "gcs": ("bucket", "key"), "azure": ("container", "blob")}


def find_artifact_place(artifact: Mapping[str, Any]) -> ArtifactPlace | None:
    """Where an artifact is; None if it is in no bucket of S3, Google Cloud Storage or Azure."""
    for kind, (bucket, key) in _PLACES.items():
        if isinstance(location := artifact.get(kind), Mapping) and location:
            return ArtifactPlace(str(location.get(bucket) or ""), str(location.get(key) or ""))
    return None


class ArtifactValue(BaseModel):
    name: str
    s3: S3Location


class NodeOutputs(BaseModel):
    parameters: list[ParameterValue] = []
    artifacts: list[ArtifactValue] = []


class NodeResult(BaseModel):
    phase: Phase
    message: str = ""
    outputs: NodeOutputs | None = None


class ExecuteReply(BaseModel):
    """Body of the reply. See `pending_reply`, `succeeded_reply`, `failed_reply` and `NOT_MINE`."""

    node: NodeResult | None = None
    requeue: str | None = None

    @property
    def phase(self) -> Phase | None:
        """Phase of the node; None where the plugin does not handle the template."""
        return self.node.phase if self.node else None

    @property
    def message(self) -> str:
        return self.node.message if self.node else ""

    def to_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude_none=True)


NOT_MINE = ExecuteReply()


def pending_reply(message: str, requeue_seconds: float) -> ExecuteReply:
    """Request another call after ``requeue_seconds``. Argo shows ``message`` at the waiting node."""
    return ExecuteReply(node=NodeResult(phase="Pending", message=message), requeue=f"{requeue_seconds:g}s")


def succeeded_reply(message: str = "", outputs: NodeOutputs | None = None) -> ExecuteReply:
    return ExecuteReply(node=NodeResult(phase="Succeeded", message=message, outputs=outputs))


def failed_reply(message: str, outputs: NodeOutputs | None = None) -> ExecuteReply:
    return ExecuteReply(node=NodeResult(phase="Failed", message=message, outputs=outputs))


def retry_reply(message: str) -> ExecuteReply:
    """End the try of a training in the phase Error, after which Argo begins the next; Failed ends the training."""
    return ExecuteReply(node=NodeResult(phase="Error", message=message))
