"""The parts of Argo's documents that adoption reads, as models; all else is left to Argo.

Hera's models would refuse what Argo accepts, such as a number where it wants a
quantity, and older forms.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict, StrictInt, ValidationError

from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.validation import describe_mistake


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow")


class _Metadata(_Part):
    name: str | None = None
    generateName: str | None = None  # noqa: N815  Argo's names
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class _Named(_Part):
    name: str


class _Located(_Part):
    path: str | None = None


class _Parameter(_Named):
    valueFrom: _Located | None = None  # noqa: N815
    enum: list[Any] | None = None


class _Artifact(_Named, _Located):
    pass


class _Values(_Part):
    parameters: list[_Parameter] | None = None
    artifacts: list[_Artifact] | None = None


class _Resources(_Part):
    limits: dict[str, Any] | None = None
    requests: dict[str, Any] | None = None


class _Hook(_Part):
    template: str | None = None


class _Container(_Part):
    image: str | None = None
    command: list[str] | None = None
    args: list[str] | None = None
    env: list[_Named] | None = None
    source: str | None = None
    resources: _Resources | None = None
    volumeMounts: list[_Named] | None = None  # noqa: N815


class _Task(_Part):
    name: str
    template: str | None = None
    arguments: _Values | None = None
    inline: "_Template | None" = None
    dependencies: list[str] | None = None
    depends: str | None = None
    withItems: list[Any] | None = None  # noqa: N815
    withParam: str | None = None  # noqa: N815
    withSequence: dict[str, Any] | None = None  # noqa: N815
    hooks: dict[str, _Hook] | None = None
    onExit: str | None = None  # noqa: N815


class _Dag(_Part):
    tasks: list[_Task] | None = None
    target: str | None = None


class _Template(_Part):
    name: str | None = None
    metadata: _Metadata | None = None
    inputs: _Values | None = None
    outputs: _Values | None = None
    container: _Container | None = None
    script: _Container | None = None
    steps: list[_Task | list[_Task]] | None = None
    dag: _Dag | None = None
    parallelism: StrictInt | None = None
    retryStrategy: dict[str, Any] | None = None  # noqa: N815
    sidecars: list[_Container] | None = None
    initContainers: list[_Container] | None = None  # noqa: N815


class _NamedTemplate(_Template):
    name: str


class _Claim(_Part):
    metadata: _Named


class _WorkflowSpec(_Part):
    entrypoint: str | None = None
    templates: list[_NamedTemplate] | None = None
    arguments: _Values | None = None
    parallelism: StrictInt | None = None
    templateDefaults: dict[str, Any] | None = None  # noqa: N815
    artifactGC: dict[str, Any] | None = None  # noqa: N815
    workflowTemplateRef: _Named | None = None  # noqa: N815
    workflowMetadata: _Metadata | None = None  # noqa: N815
    volumeClaimTemplates: list[_Claim] | None = None  # noqa: N815
    hooks: dict[str, _Hook] | None = None
    onExit: str | None = None  # noqa: N815


class _Workflow(_Part):
    metadata: _Metadata | None = None
    spec: _WorkflowSpec


class _CronSpec(_Part):
    workflowSpec: _WorkflowSpec  # noqa: N815
    workflowMetadata: _Metadata | None = None  # noqa: N815


class _CronWorkflow(_Part):
    metadata: _Metadata | None = None
    spec: _CronSpec


KINDS: dict[str, type[BaseModel]] = {
    "Workflow": _Workflow,
    "WorkflowTemplate": _Workflow,
    "ClusterWorkflowTemplate": _Workflow,
    "CronWorkflow": _CronWorkflow,
}


def check_shape(document: Manifest) -> None:
    """Check that ``document``, whose kind is one of `KINDS`, has the parts of its kind where they belong.

    Raises:
        UsageError: it has not; the message names the first such part.
    """
    model = KINDS[document["kind"]]
    try:
        model.model_validate(document)
    except ValidationError as error:
        raise UsageError(f"this is no {document['kind']}: {describe_mistake(error, model, 'the document')}") from error
    except RecursionError:
        raise UsageError("its parts refer to each other without end") from None
