"""The request and reply of Argo's ``template.execute``.

Source: Argo Workflows ``pkg/plugins/executor``. A reply without ``node`` means
"not mine". ``requeue`` goes with ``Pending`` only: Argo would call a finished
node again.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Phase = Literal["Pending", "Succeeded", "Failed"]


class WorkflowMetadata(BaseModel):
    """The three facts that Argo tells about the workflow."""

    model_config = ConfigDict(extra="ignore")

    name: str
    namespace: str = "default"
    uid: str


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
    key: str


class ArtifactValue(BaseModel):
    name: str
    s3: S3Location


class Outputs(BaseModel):
    parameters: list[ParameterValue] = []
    artifacts: list[ArtifactValue] = []


class NodeResult(BaseModel):
    phase: Phase
    message: str = ""
    outputs: Outputs | None = None


class ExecuteReply(BaseModel):
    """What Argo reads. Build it with `pending`, `succeeded`, `failed` or `NOT_MINE`."""

    node: NodeResult | None = None
    requeue: str | None = None

    def to_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude_none=True)


NOT_MINE = ExecuteReply()


def pending(message: str, requeue_seconds: float) -> ExecuteReply:
    """Ask to be called again. ``message`` is what people see while they wait."""
    return ExecuteReply(node=NodeResult(phase="Pending", message=message), requeue=f"{requeue_seconds:g}s")


def succeeded(message: str = "", outputs: Outputs | None = None) -> ExecuteReply:
    return ExecuteReply(node=NodeResult(phase="Succeeded", message=message, outputs=outputs))


def failed(message: str) -> ExecuteReply:
    return ExecuteReply(node=NodeResult(phase="Failed", message=message))
